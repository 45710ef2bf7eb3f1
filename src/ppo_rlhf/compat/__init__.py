"""Configurations of TRL, converted to this project's parameters."""

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.trl import from_trl

__all__ = ["Conversion", "from_trl"]
