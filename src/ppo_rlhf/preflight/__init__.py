"""Checks of a person's input before a run writes anything: all problems at once, one line each."""

from ppo_rlhf.preflight.checks import find_problems

__all__ = ["find_problems"]
