"""Tuning advice: the setting to change first, from a run's settings and metrics.

`rules` holds the rules as one table (those on KL are `ppo.kl_rules`), `curves` smooths a run's metrics, and `advise`
applies the rules and writes the lines. docs/tuning.md explains every rule.
"""

from ppo_rlhf.advice.advise import SHOWN, Advice, advise, in_words
from ppo_rlhf.advice.rules import RULES, Rule, Stage
from ppo_rlhf.ppo.kl_rules import Change

__all__ = ["RULES", "SHOWN", "Advice", "Change", "Rule", "Stage", "advise", "in_words"]
