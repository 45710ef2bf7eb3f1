"""Configurations of TRL, converted to this project's parameters."""

from ppo_rlhf.compat.conversion import Conversion, NotCarried
from ppo_rlhf.compat.trl import from_trl

__all__ = ["Conversion", "NotCarried", "from_trl"]
