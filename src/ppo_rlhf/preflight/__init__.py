"""The checks of a user's input before a run, which write nothing but the cache of tables."""

from ppo_rlhf.preflight.audit_checks import describe_audit
from ppo_rlhf.preflight.request import RunRequest, describe_parts
from ppo_rlhf.preflight.run_checks import find_problems

__all__ = ["RunRequest", "describe_audit", "describe_parts", "find_problems"]
