"""Alarms on the KL from the reference policy while a run trains: one line for each time that it crosses a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.kl_rules import KL_RULES, KLSituation, allowed

WINDOW = 10  # iterations in a mean
History = Sequence[Mapping[str, float]]


def kl_alarms(config: PPOConfig, history: History) -> list[str]:
    """Return a line for each limit that the last iteration of a run crossed: what it means, what to change first."""
    before, lines = _standing(config, history[:-1]), []
    for name, situation in _standing(config, history).items():
        if name in before or (name == "warning" and "alarm" in before):  # on the way down nothing is new
            continue
        rule = KL_RULES[name]
        change = allowed(rule.change(situation), config)
        first = f" {change}" if change else ""
        lines.append(f"KL {name}: {rule.seen.format(s=situation)}; {rule.meaning}.{first}")
    return lines


def _standing(config: PPOConfig, history: History) -> dict[str, KLSituation]:
    """Return the rules that hold after the last iteration: of limits on its KL, of others on the mean of a window."""
    if not history:
        return {}
    kl, kl_coef = np.array([row["objective/kl"] for row in history]), history[-1]["objective/kl_coef"]
    situations = dict.fromkeys(("alarm", "warning"), KLSituation(config, kl[-1], math.nan, math.nan, kl_coef))
    if len(kl) >= WINDOW:
        means = np.lib.stride_tricks.sliding_window_view(kl, WINDOW).mean(axis=1)
        error = kl[-WINDOW:].std(ddof=1) / math.sqrt(WINDOW)
        lately = KLSituation(config, means[-1], error, np.nanmax([0.0, *means]), kl_coef)
        situations |= dict.fromkeys(("collapsed", "negative"), lately)
    return {name: situation for name, situation in situations.items() if KL_RULES[name].holds(situation)}
