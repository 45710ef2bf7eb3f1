"""The token view as self-contained HTML. One quantity sets each token's colour; a tooltip has all numbers.

Jinja escapes all text from models and data files. The token view's script gets only numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.reporting.token_view.samples import TokenSample, TokenSamples


class Quantity(NamedTuple):
    """A quantity that the token view shows for each token."""

    name: str  # the quantity's key in `numbers` of TokenSample
    label: str
    # Explains the quantity's colours; a quantity without an explanation cannot be chosen for colouring
    meaning: str = ""


QUANTITIES = (
    Quantity(
        "advantage",
        "Advantage",
        "Blue: the token was better than the critic expected, so PPO makes the token more probable. Orange: worse.",
    ),
    Quantity("reward", "Reward", "Input of GAE: the KL penalty at each token, plus the score at the last token."),
    Quantity("kl", "KL", "log π − log π_ref, in nats. Blue: the token is more probable than under SFT; orange: less."),
    Quantity("value", "Value", "The critic's prediction of all remaining rewards, made before the token."),
    Quantity("return", "Return"),
    Quantity("entropy", "Entropy"),
    Quantity("logprob", "log π"),
    Quantity("reference_logprob", "log π_ref"),
)
LEAST_SCALE = 1e-3
"""Smallest value at which a colour scale may end, so that rounding errors (as in the KL before the first update) get no
colour."""
MAX_PROMPT = 600
"""The token view shows this number of characters from the end of a prompt."""
_VISIBLE = {code: chr(0x2400 + code) for code in range(32)} | {9: "⇥\t", 10: "⏎", 13: "␍", 127: "␡"}
PART_OF_A_CHARACTER = "◌"


def render_view(iterations: Sequence[TokenSamples]) -> Markup:
    """Return the samples of one or several iterations as an HTML fragment with one colour scale for all iterations."""
    return Markup(_render("view.html", iterations))


def render_page(iterations: Sequence[TokenSamples]) -> str:
    """Return the samples of one or several iterations as a whole HTML page."""
    return _render("page.html", iterations)


def _render(template: str, iterations: Sequence[TokenSamples]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ppo_rlhf.reporting.token_view", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"tokens": _tokens, "number": _number, "end": _end}
    scale = {quantity.name: _largest(iterations, quantity.name) for quantity in QUANTITIES}
    return environment.get_template(template).render(iterations=iterations, quantities=QUANTITIES, scale=scale)


def _largest(iterations: Sequence[TokenSamples], name: str) -> float:
    """Return the largest finite absolute value of a quantity, but at least LEAST_SCALE."""
    numbers = (x for shown in iterations for sample in shown["samples"] for x in sample["numbers"][name])
    return max([LEAST_SCALE, *(abs(x) for x in numbers if math.isfinite(x))])


def _tokens(sample: TokenSample) -> Iterator[tuple[str, str]]:
    """Yield each token's text and its numbers, joined by spaces in the order of QUANTITIES.

    A token that an environment wrote has an empty text instead of numbers.
    """
    columns = [sample["numbers"][quantity.name] for quantity in QUANTITIES]
    for text, is_policy, *numbers in zip(sample["tokens"], sample["is_policy"], *columns, strict=True):
        yield _visible(text), " ".join(f"{number:.4g}" for number in numbers) if is_policy else ""


def _visible(text: str) -> str:
    """Return a token's text with signs for control characters and other characters that are not visible as themselves,
    and for spaces if the text has only spaces.
    """
    if not text:
        return PART_OF_A_CHARACTER
    if text.isspace():
        text = text.replace(" ", "␣")
    return escaped(text.translate(_VISIBLE))


def _number(number: float) -> str:
    return f"{number:z.3g}".replace("-", "−")


def _end(text: str) -> str:
    return escaped(text) if len(text) <= MAX_PROMPT else f"… {escaped(text[-MAX_PROMPT:])}"
