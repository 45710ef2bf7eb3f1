"""Evaluating policies: responses to held-out prompts, SFT against PPO, best of n."""
