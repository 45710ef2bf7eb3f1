"""Project settings, read by Kedro."""

import logging
import os
import warnings

from ppo_rlhf.imports import collector_paused

with collector_paused():
    import mlflow.telemetry

    from ppo_rlhf.hooks import ChecksHook, TrackingHook, start_up_hook
    from ppo_rlhf.hooks.advice import AdviceHook
    from ppo_rlhf.runner import LoopSession

# Kedro's own, four times a command; conf/logging.yml holds back what comes before this line.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").setLevel(logging.WARNING)

# Nothing reports to anyone unless a person asks for it: the .telemetry file says so to Kedro's, which would write an id
# into pyproject.toml; the environment variable to MLflow's, which was imported (by kedro-mlflow) before this line.
os.environ.setdefault("DO_NOT_TRACK", "true")
mlflow.telemetry.set_telemetry_client()
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one bar is enough: the loop's

SESSION_CLASS = LoopSession  # with LoopRunner by default

_IS_MAIN_RANK = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun or accelerate started

# kedro-mlflow's hook is replaced by one that inherits from it; plugins are named as their distributions are.
HOOKS = (start_up_hook, ChecksHook(), TrackingHook(), AdviceHook()) if _IS_MAIN_RANK else (start_up_hook, ChecksHook())
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-telemetry", *(() if _IS_MAIN_RANK else ("kedro-viz",)))

CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    # Kedro's default drops a group's other keys when conf/local sets one of them
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
}
