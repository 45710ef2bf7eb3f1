"""Kedro hooks that check a run before anything is written and track the run in MLflow."""

from ppo_rlhf.hooks.before_run import ChecksHook
from ppo_rlhf.hooks.tracking import TrackingHook
from ppo_rlhf.hooks.worker import WorkerHook

__all__ = ["ChecksHook", "TrackingHook", "WorkerHook"]
