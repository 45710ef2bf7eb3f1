"""Project settings, read by Kedro."""

import logging
import os
import warnings

from ppo_rlhf.runtime.terminal import prepare_terminal

prepare_terminal()  # the terminal is prepared before the slow imports below, which take seconds

# ruff: noqa: E402
import mlflow.telemetry

from ppo_rlhf.core.visible import VisibleRecord
from ppo_rlhf.hooks import ChecksHook, TrackingHook, WorkerHook
from ppo_rlhf.runner import LoopSession
from ppo_rlhf.runtime.processes import is_main_process

# Hide omegaconf's warning about register_new_resolver, which Kedro's own code causes four times a command.
# Until this line runs, conf/logging.yml hides the warning.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").setLevel(logging.WARNING)

# The log record class is set here, because Kedro's logging.yml cannot name a class of the project
logging.setLogRecordFactory(VisibleRecord)

os.environ.setdefault("DO_NOT_TRACK", "true")
# Make MLflow read DO_NOT_TRACK again, because MLflow was imported before the variable was set
mlflow.telemetry.set_telemetry_client()
# Hide MLflow's progress bars, because the training loop shows its own
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Hide the tracking URI, because MLflow would print the password in the URI
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# A tracking server that is down delays the run by seconds, not minutes
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
# Together with the retries, a tracking server that hangs delays the run by a minute and a half
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

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
