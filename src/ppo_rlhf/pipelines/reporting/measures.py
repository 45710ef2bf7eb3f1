"""How a measured number is called and written, the same on the page, in the plots and in the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A row of the table before and after."""

    label: str
    unit: str = ""
    decimals: int = 2
    is_share: bool = False
    """Shares are written in per cent."""


_KNOWN = {
    "judge_score": Measure("Judge score"),
    "reward": Measure("Reward"),
    "kl": Measure("KL from SFT", "nats per response", 1),
    "response_length": Measure("Response length", "tokens", 1),
    "truncated_fraction": Measure("Cut off before a stop token", is_share=True, decimals=1),
    "distinct_1": Measure("Distinct words", "distinct-1", 3),
    "distinct_2": Measure("Distinct word pairs", "distinct-2", 3),
}


def measure(name: str) -> Measure:
    """Return how the measure `name` is shown; an unknown name is a rate that a person defined."""
    label = name.removesuffix("_rate").replace("_", " ")
    return _KNOWN.get(name) or Measure(label[:1].upper() + label[1:], is_share=True, decimals=1)


def write_value(name: str, value: float) -> str:
    """Return the value as text with the decimals and unit sign of its measure."""
    shown = measure(name)
    return write_share(value, shown.decimals) if shown.is_share else write_number(value, shown.decimals)


def write_change(name: str, before: float, after: float) -> str:
    """Return the difference with its sign; of a share in percentage points."""
    shown = measure(name)
    factor, unit = (100.0, " points") if shown.is_share else (1.0, "")
    text = write_number((after - before) * factor, shown.decimals)
    is_zero = not any(digit in text for digit in "123456789")
    return ("±0" if is_zero else text if text.startswith("−") else f"+{text}") + unit


def write_share(value: float, decimals: int = 1) -> str:
    """Return a share in [0, 1] in per cent."""
    return f"{write_number(100.0 * value, decimals)}%"


def write_number(value: float, decimals: int) -> str:
    """Return a number with a true minus sign; `–` if it is not a number."""
    return f"{value:.{decimals}f}".replace("-", "−") if math.isfinite(value) else "–"
