"""Tuning advice: which setting to change first, derived from a run's settings and metrics.

`rules` is the table of all rules (the KL rules come from `ppo.kl_rules`), `curves` smooths a run's metrics, and
`advise` applies the rules and writes the advice. docs/tuning.md explains every rule.
"""

from ppo_rlhf.advice.advise import SHOWN, Advice, advise, in_words
from ppo_rlhf.advice.rules import RULES, Rule, Stage
from ppo_rlhf.ppo.kl_rules import Change

__all__ = ["RULES", "SHOWN", "Advice", "Change", "Rule", "Stage", "advise", "in_words"]
