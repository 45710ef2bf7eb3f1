"""Hooks around a run: it is checked before anything is written, and tracked in MLflow."""

from ppo_rlhf.hooks.checks import ChecksHook
from ppo_rlhf.hooks.follower import FollowerHook
from ppo_rlhf.hooks.mlflow_hook import TrackingHook

__all__ = ["ChecksHook", "FollowerHook", "TrackingHook"]
