"""Evaluation of policies: responses to held-out prompts, comparison of SFT and PPO, and best-of-n."""
