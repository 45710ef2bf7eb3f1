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

# Kedro's own, four times a command; conf/logging.yml holds back the warnings before this line.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").setLevel(logging.WARNING)

logging.setLogRecordFactory(VisibleRecord)  # Kedro's logging.yml takes no class of a project

os.environ.setdefault("DO_NOT_TRACK", "true")
mlflow.telemetry.set_telemetry_client()  # obeys the line above; MLflow was imported before it
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # the loop's progress bar is enough
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # with the password; the hook says it without
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is gone costs seconds, not minutes,
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # and one that hangs costs a minute and a half

SESSION_CLASS = LoopSession  # with LoopRunner by default

# Plugins are named as their distributions are; TrackingHook takes the place of kedro-mlflow's hook.
HOOKS = (ChecksHook(), TrackingHook()) if is_main_process() else (WorkerHook(),)
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-telemetry", *(() if is_main_process() else ("kedro-viz",)))

RUNNER_MODULE_ALLOWLIST = ("ppo_rlhf.runner",)  # which `kedro server` may be asked for

CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    # Kedro's default drops a group's other keys when conf/local sets one of them
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
    # ${first:…,…}: the first value that is not null
    "custom_resolvers": {"first": lambda *values: next((value for value in values if value is not None), None)},
}
