"""Everything about a person's input that can be known before a run starts, checked before it writes anything.

What is found wrong is collected, one line each, so that a person mends it in one go. Inputs that the run makes itself
are not looked at: a run of the whole chain needs no SFT policy on disk.
"""

from ppo_rlhf.preflight.checks import find_problems

__all__ = ["find_problems"]
