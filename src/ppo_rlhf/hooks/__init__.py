"""Hooks around a run: it is checked before anything is written, and tracked in MLflow."""

from ppo_rlhf.hooks.checks import ChecksHook
from ppo_rlhf.hooks.follower import FollowerHook
from ppo_rlhf.hooks.mlflow_hook import TrackingHook
from ppo_rlhf.hooks.tracking_store import end_active_run

__all__ = ["ChecksHook", "FollowerHook", "TrackingHook", "end_active_run"]
