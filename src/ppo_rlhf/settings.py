"""Project settings, read by Kedro."""

import logging
import warnings

from ppo_rlhf.runtime.terminal import prepare_terminal

# Here and not in `cli`, because `kedro NAME` imports this module first: the imports below take seconds, in which Ctrl-C
# may come. The streams of a notebook stay as they are.
prepare_terminal()

# ruff: noqa: E402
from ppo_rlhf.hooks import ChecksHook, TrackingHook, WorkerHook
from ppo_rlhf.runner import LoopSession
from ppo_rlhf.runtime.processes import is_main_process

# Hide omegaconf's warning about register_new_resolver, which Kedro's own code causes four times a command, before it
# calls a hook. Until this line runs, conf/logging.yml hides the warning.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").setLevel(logging.WARNING)

SESSION_CLASS = LoopSession  # the session class whose default runner is LoopRunner

# Plugins are disabled by the names of their distributions. TrackingHook replaces kedro-mlflow's hook.
HOOKS = (ChecksHook(), TrackingHook()) if is_main_process() else (WorkerHook(),)
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-telemetry", *(() if is_main_process() else ("kedro-viz",)))

RUNNER_MODULE_ALLOWLIST = ("ppo_rlhf.runner",)  # modules whose runners a request to `kedro server` may name

CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    # Merge parameter groups key by key: by default, a group in conf/local replaces the whole group in conf/base.
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
    # In conf files, ${first:a,b} is the first of the values a and b that is not null.
    "custom_resolvers": {"first": lambda *values: next((value for value in values if value is not None), None)},
}
