"""What happens around a run: it starts fast, is checked before anything is written, and tracked in MLflow."""

from ppo_rlhf.hooks.checks import ChecksHook
from ppo_rlhf.hooks.start_up import start_up_hook
from ppo_rlhf.hooks.tracking import TrackingHook
from ppo_rlhf.hooks.tracking_store import end_active_run

__all__ = ["ChecksHook", "TrackingHook", "end_active_run", "start_up_hook"]
