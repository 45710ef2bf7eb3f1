"""Kedro reads these names. To add a hook of your own, write HOOKS = (*HOOKS, MyHook())."""

from ppo_rlhf.settings import (
    CONFIG_LOADER_ARGS,
    DISABLE_HOOKS_FOR_PLUGINS,
    HOOKS,
    RUNNER_MODULE_ALLOWLIST,
    SESSION_CLASS,
)

__all__ = ["CONFIG_LOADER_ARGS", "DISABLE_HOOKS_FOR_PLUGINS", "HOOKS", "RUNNER_MODULE_ALLOWLIST", "SESSION_CLASS"]
