"""Runs of PPO on tiny models, for the tests of this room alone: what makes them takes seconds to load."""

from tests.ppo_runs import make_model, make_prompts, make_rollouts, make_run, make_tokenizer, same_tensors, snapshot

__all__ = ["make_model", "make_prompts", "make_rollouts", "make_run", "make_tokenizer", "same_tensors", "snapshot"]
