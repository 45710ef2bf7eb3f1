"""What must be right before a run does anything; errors here leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.caution import advice_on_own_settings, demo_settings_in_use
from ppo_rlhf.hooks.own_settings import misshapen_settings, unread_settings
from ppo_rlhf.hooks.run_parameters import unknown_names
from ppo_rlhf.runner import CARRY_IN, LoopRunner, plan_loop

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
NO_RUNNER = "None"  # how Kedro's session records that it was given none


class ChecksHook:
    """Runs before every other hook, so that what it refuses has not been started."""

    def __init__(self) -> None:
        """Start without a context."""
        self._context: KedroContext | None = None

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Refuse unknown names in --params and settings that cannot be merged; say if conf/local is not read."""
        self._context = context
        loader = _loader_of(context)
        problems = unknown_names(loader) + misshapen_settings(loader)
        if problems:
            raise ConfigError("\n".join(problems))
        unread = unread_local_files(Path(loader.conf_source), context.env)
        if unread:
            logger.warning("Environment %s is used instead of conf/local: %s not read.", context.env, _listed(unread))

    @hook_impl
    def after_node_run(self, catalog: CatalogProtocol, outputs: dict[str, Any]) -> None:
        """Refuse to train if the disk has no room for the checkpoints: known as soon as there is a state to save."""
        if CARRY_IN in outputs:
            check_space = getattr(catalog.get(CHECKPOINT), "check_space", None)
            if check_space is not None:
                check_space(outputs[CARRY_IN])

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Refuse another runner for the loop, and whatever the preflight finds; warn of settings of the demo."""
        from ppo_rlhf.preflight import find_problems  # heavy: only a run pays for it

        check_runner(run_params, pipeline)
        assert self._context is not None
        loader = _loader_of(self._context)
        data_root = loader["globals"].get("data_root", "data")
        problems = unread_settings(loader, pipelines.values())
        problems += find_problems(pipeline, catalog, Path(run_params["project_path"]), data_root)
        if problems:
            raise ConfigError("\n".join(problems))
        caution = demo_settings_in_use(loader, pipeline, catalog)
        for line in [*([caution] if caution else []), *advice_on_own_settings(loader, pipeline, catalog)]:
            logger.warning("%s", line)


def check_runner(run_params: Mapping[str, Any], pipeline: Pipeline) -> None:
    """Raise ConfigError if a pipeline with the closed loop would not be run as one, from its start to its end.

    Args:
        run_params: As Kedro's session records them.
        pipeline: What runs.
    """
    if plan_loop(pipeline) is None:
        return
    if run_params.get("only_missing_outputs"):
        raise ConfigError(
            "--only-missing-outputs would train and leave out what exports the policy, since files of an earlier run "
            "are there: drop it. `--params resume=latest` goes on with a run, and does no finished stage again."
        )
    runner = run_params["runner"]
    if runner == str(LoopRunner()):
        return
    name = "SequentialRunner" if runner == NO_RUNNER else runner.removeprefix("<").split(" ")[0].rpartition(".")[2]
    raise ConfigError(
        f"{name} would run PPO's loop once instead of until training is finished: drop --runner, or in Python give "
        "session.run(runner=LoopRunner()) from ppo_rlhf.runner."
    )


def _loader_of(context: KedroContext) -> OmegaConfigLoader:
    return cast(OmegaConfigLoader, context.config_loader)  # settings.py keeps to Kedro's own


def unread_local_files(conf_source: Path, env: str | None) -> list[str]:
    """Return the files of conf/local, a person's own settings, that a run in another environment does not read."""
    local = conf_source / "local"
    if env in (None, "local") or not local.is_dir():
        return []
    return sorted(str(path.relative_to(local)) for path in local.rglob("*") if path.is_file() and path.name[0] != ".")


def _listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more} {'is' if len(names) == 1 else 'are'}"
