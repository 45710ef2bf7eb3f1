"""Which curves of training are shown, in which order, and why a reader looks at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

KL_WARNING = 15.0
"""Nats per response above which a policy is usually found to exploit its reward."""


@dataclass(frozen=True)
class Panel:
    """One small chart over iterations: curves of one unit, by metric key."""

    name: str
    title: str
    unit: str
    curves: Sequence[tuple[str, str]]
    """Metric key and label of each curve."""
    explanation: str
    band: tuple[str, str] | None = None
    """Metric keys of the band behind the first curve."""
    level: float | None = None
    floor: float | None = None
    include: Sequence[float] = ()


PANELS = (
    Panel(
        "score",
        "Score",
        "reward before the KL penalty",
        [("objective/scores", "mean")],
        "What PPO raises (shaded: 5th to 95th percentile). It should climb, then level off; believe the samples.",
        band=("objective/scores_p05", "objective/scores_p95"),
    ),
    Panel(
        "kl",
        "KL from SFT",
        "nats per response",
        [("objective/kl", "mean over responses")],
        f"The price of the reward. Beyond {KL_WARNING:g} (dashed, once in view) a policy usually exploits its reward.",
        level=KL_WARNING,
        include=(0.0,),
    ),
    Panel(
        "judged",
        "Held-out win rate",
        "share of prompts, ties half",
        [("eval/win_rate", "win rate")],
        "Against SFT, on prompts never trained on (shaded: 95% interval). One half (dashed) is SFT's own level.",
        band=("eval/win_rate_low", "eval/win_rate_high"),
        level=0.5,
        include=(0.4, 1.0),
    ),
    Panel(
        "entropy",
        "Entropy",
        "nats per token",
        [("objective/entropy", "mean over tokens")],
        "How undecided the policy is. It falls as the policy settles; a fall to 0 means one stock answer.",
        include=(0.0,),
    ),
    Panel(
        "clip_fraction",
        "Clip fraction",
        "share of tokens",
        [("policy/clipfrac_avg", "policy"), ("val/clipfrac_avg", "value")],
        "Tokens whose update was clipped. Above about 0.3 the steps are too large.",
        include=(0.0,),
    ),
    Panel(
        "explained_variance",
        "Explained variance",
        "of the returns",
        [("val/explained_variance", "critic")],
        "How well the critic foresees the return: 1 is perfect, 0 is no better than a constant.",
        floor=-1.0,
        include=(0.0, 1.0),
    ),
    Panel(
        "policy_loss",
        "Policy loss",
        "clipped surrogate",
        [("loss/policy_avg", "mean over the iteration")],
        "Its level means little; look for jumps.",
    ),
    Panel(
        "value_loss",
        "Value loss",
        "half squared error",
        [("loss/value_avg", "mean over the iteration")],
        "It should fall as the critic learns.",
        include=(0.0,),
    ),
    Panel(
        "approx_kl",
        "Update size",
        "nats per token",
        [("policy/approxkl_avg", "one iteration's update")],
        "Approximate KL between the policy that sampled and the updated one, in one iteration.",
        include=(0.0,),
    ),
    Panel(
        "length",
        "Response length",
        "tokens",
        [("response/length", "mean over responses")],
        "A drift to one end often means that the reward pays for length.",
        include=(0.0,),
    ),
    Panel(
        "truncated",
        "Cut off",
        "share of responses",
        [("response/truncated_fraction", "no stop token")],
        "Responses that reached the length limit before they ended.",
        include=(0.0,),
    ),
    Panel(
        "gradient_norm",
        "Gradient norm",
        "before clipping",
        [("policy/grad_norm", "policy"), ("value/grad_norm", "value")],
        "Spikes point to unstable batches.",
        include=(0.0,),
    ),
)


def panels_of(history: pd.DataFrame) -> list[Panel]:
    """Return the panels that the history has at least one number for, each with only the curves that it has."""
    found = []
    for panel in PANELS:
        curves = [(key, label) for key, label in panel.curves if np.isfinite(column(history, key)).any()]
        if curves:
            found.append(Panel(**{**vars(panel), "curves": curves}))
    return found


def column(history: pd.DataFrame, key: str) -> NDArray[np.float64]:
    """Return a metric's column; NaN where it was not measured, also where it never was."""
    if key not in history:
        return np.full(len(history), np.nan)
    return pd.to_numeric(history[key], errors="coerce").to_numpy(dtype=np.float64)
