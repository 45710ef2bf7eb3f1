"""The rule on growing disagreement of reward models: its condition, its meaning, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.rules import Rule
from ppo_rlhf.ppo.kl_alarms import averaged_iterations
from ppo_rlhf.rewards.combination import DISAGREEMENT

GROWN, STANDARD_ERRORS = 1.25, 5.0
"""Disagreement has grown if its mean is above `GROWN` times the mean of the first iterations and more than
`STANDARD_ERRORS` standard errors above it. In simulated runs of 600 iterations whose rewards disagree as much as at the
start, at most 3.5 % give a false alarm with 8 responses an iteration, and none with 64."""


@dataclass(frozen=True)
class DisagreementSituation:
    """The mean disagreement of a run's first and of its last iterations, and the standard error of the difference."""

    first: float
    last: float
    error: float


METRIC = f"reward/{DISAGREEMENT}"
DISAGREEMENT_GROWS: Rule[DisagreementSituation] = Rule(
    reads=(METRIC,),
    holds=lambda s: s.last > GROWN * s.first and s.last - s.first > STANDARD_ERRORS * s.error,
    seen=lambda s: f"the reward models' disagreement rose from {s.first:.3g} to {s.last:.3g} standard deviations",
    meaning="the policy writes responses on which their training does not agree, most likely to exploit one of them; "
    "read the samples with the highest `disagreement`, and use reward.combine=min or a higher ppo.kl_coef",
)


def disagreement_alarms(config: PPOConfig, history: Sequence[Mapping[str, float]]) -> list[str]:
    """Return one line if disagreement began to have grown in a run's last iteration, else nothing."""
    if not history or METRIC not in history[-1] or _grown(config, history[:-1]) is not None:
        return []
    situation = _grown(config, history)
    rule = DISAGREEMENT_GROWS
    return [] if situation is None else [f"Disagreement: {rule.seen(situation)}; {rule.meaning}."]


def _grown(config: PPOConfig, history: Sequence[Mapping[str, float]]) -> DisagreementSituation | None:
    """Return the situation after the last iteration if the rule holds, else None.

    Compare the means of the first and of the last `averaged_iterations`.
    """
    measured = np.array([row[METRIC] for row in history if METRIC in row])
    window = averaged_iterations(config)
    if len(measured) < 2 * window:
        return None
    first, last = measured[:window], measured[-window:]
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / window)
    situation = DisagreementSituation(first.mean(), last.mean(), error)
    return situation if DISAGREEMENT_GROWS.holds(situation) else None
