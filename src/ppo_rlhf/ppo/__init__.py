"""PPO: one iteration as the calls that the nodes and PPOTrainer make."""
