"""Tuning advice: which setting to change first, derived from a run's settings and metrics.

`rules` is the table of all rules (the KL rules come from `ppo.kl_alarms`), `curves` smooths a run's metrics, and
`advise` applies the rules and writes the advice. docs/tuning.md explains every rule.
"""

from ppo_rlhf.advice.advise import SHOWN, Advice, advise, in_words
from ppo_rlhf.advice.rules import RULES, Stage, TuningRule
from ppo_rlhf.config.rules import Change

__all__ = ["RULES", "SHOWN", "Advice", "Change", "Stage", "TuningRule", "advise", "in_words"]
