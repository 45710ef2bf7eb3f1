"""The verdict of a comparison of two policies: a value, which `reporting.wording` puts into words."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.evaluation.win_rate import CONFIDENCE, WinRate, sign_test, win_rate

MIN_PROMPTS = 10


class Verdict(StrEnum):
    """Result of a comparison of two policies, seen from ours. Summaries and tags store the enum's value."""

    BETTER = "better"
    WORSE = "worse"
    REWARD_ROSE = "reward_rose"
    """The trained reward was the judge, so the higher reward does not show that the policy is better."""
    REWARD_FELL = "reward_fell"
    NO_CLEAR_DIFFERENCE = "no_clear_difference"
    TOO_FEW_PROMPTS = "too_few_prompts"


LEVELS = {
    Verdict.BETTER: 1.0,
    Verdict.REWARD_ROSE: 0.5,
    Verdict.NO_CLEAR_DIFFERENCE: 0.0,
    Verdict.TOO_FEW_PROMPTS: 0.0,
    Verdict.REWARD_FELL: -0.5,
    Verdict.WORSE: -1.0,
}
"""Value of the metric eval/verdict for each verdict."""


def read_verdict(stored: str) -> Verdict:
    """Return the verdict of a stored summary.

    Raises:
        DataError: `stored` is no value of `Verdict`.
    """
    try:
        return Verdict(stored)
    except ValueError as error:
        raise DataError(f"evaluation_summary: verdict is {stored!r}; it must be one of {', '.join(Verdict)}") from error


def conclude_outcomes(
    decisions: NDArray[np.float64], *, by_trained_reward: bool, corrected: WinRate | None = None
) -> dict[str, Any]:
    """Return the result of `conclude` for outcomes [N, n], without `samples_per_prompt`.

    `corrected` is the win rate as a judge's outcomes of more prompts make it, which no sign test of these can check.
    """
    rate, margins_N = corrected or win_rate(decisions), (decisions - 0.5).sum(axis=1)
    prompts, wins, losses = len(margins_N), int((margins_N > 0).sum()), int((margins_N < 0).sum())
    if prompts < MIN_PROMPTS:
        verdict = Verdict.TOO_FEW_PROMPTS
    elif rate.low <= 0.5 <= rate.high:
        verdict = Verdict.NO_CLEAR_DIFFERENCE
    elif corrected is None and sign_test(wins, losses) > 1.0 - CONFIDENCE:
        verdict = Verdict.TOO_FEW_PROMPTS
    elif rate.low > 0.5:
        verdict = Verdict.REWARD_ROSE if by_trained_reward else Verdict.BETTER
    else:
        verdict = Verdict.REWARD_FELL if by_trained_reward else Verdict.WORSE
    counts = {"prompts": prompts, "wins": wins, "losses": losses, "eval/verdict": LEVELS[verdict]}
    return {"verdict": verdict, "by_trained_reward": by_trained_reward, **counts}
