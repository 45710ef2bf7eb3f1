"""Rewards: their sources (models and functions), and the shaping of their scores."""
