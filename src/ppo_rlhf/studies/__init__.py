"""Studies beside a run: the audit of a reward, the KL under several settings, a critic trained before PPO."""
