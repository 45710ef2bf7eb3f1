"""Fixtures that run PPO on tiny models. They stand here because importing them takes seconds."""

from tests.ppo_runs import make_model, make_prompts, make_rollouts, make_run, make_tokenizer, same_tensors, snapshot

__all__ = ["make_model", "make_prompts", "make_rollouts", "make_run", "make_tokenizer", "same_tensors", "snapshot"]
