"""Project settings, read by Kedro."""

import logging
import os
import warnings

from ppo_rlhf.runtime.terminal import prepare_terminal

prepare_terminal()  # before the imports that take seconds

# ruff: noqa: E402
import mlflow.telemetry

from ppo_rlhf.core.visible import VisibleRecord
from ppo_rlhf.hooks import ChecksHook, TrackingHook, WorkerHook
from ppo_rlhf.runner import LoopSession
from ppo_rlhf.runtime.processes import is_main_process

# Kedro itself causes this warning, four times a command. conf/logging.yml hides the warnings before this line.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").setLevel(logging.WARNING)

logging.setLogRecordFactory(VisibleRecord)  # set here, because Kedro's logging.yml cannot name a project's class

os.environ.setdefault("DO_NOT_TRACK", "true")
mlflow.telemetry.set_telemetry_client()  # applies DO_NOT_TRACK, because MLflow was imported before the line above
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # the loop's progress bar is enough
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # MLflow would print the password in the URL
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a dead server then costs seconds, not minutes,
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # and a server that hangs costs a minute and a half

SESSION_CLASS = LoopSession  # its default runner is LoopRunner

# Plugins are disabled by the names of their distributions. TrackingHook replaces kedro-mlflow's hook.
HOOKS = (ChecksHook(), TrackingHook()) if is_main_process() else (WorkerHook(),)
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-telemetry", *(() if is_main_process() else ("kedro-viz",)))

RUNNER_MODULE_ALLOWLIST = ("ppo_rlhf.runner",)  # modules whose runners a request to `kedro server` may name

CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    # Merge groups key by key: Kedro's default drops a group's other keys if conf/local sets one of them.
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
    # ${first:a,b} is the first value that is not null.
    "custom_resolvers": {"first": lambda *values: next((value for value in values if value is not None), None)},
}
