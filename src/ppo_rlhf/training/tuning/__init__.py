"""Tuning advice: which setting to move first, from a run's settings and curves, in the order of the tuning guide.

The rules are a table (`RULES`): stage, metrics, threshold with its source, meaning, and the setting to move. Pure
functions of a `PPOConfig` and a list of metrics; docs/tuning.md has the table for readers.
"""

from ppo_rlhf.training.tuning.advice import CURVE_RULES, RULES, SHOWN, Advice, advise, in_words
from ppo_rlhf.training.tuning.rule import Change, Rule, Stage

__all__ = ["CURVE_RULES", "RULES", "SHOWN", "Advice", "Change", "Rule", "Stage", "advise", "in_words"]
