"""The checks and warnings before a run; a run that is refused here has written cached tables at most."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import ConfigError, PPORLHFError
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.hooks.policy_settings import use_policy_settings
from ppo_rlhf.hooks.resume import can_resume
from ppo_rlhf.runner import LoopRunner, plan_loop
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import HUMAN_EVALUATION, RESUME_CHECKPOINT
from ppo_rlhf.runtime.paths import path_of

if TYPE_CHECKING:
    from ppo_rlhf.preflight import RunRequest

logger = logging.getLogger(__name__)


class ChecksHook:
    """Runs before every other hook."""

    _loader: OmegaConfigLoader

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Refuse a launch whose processes would train one run each, and settings that cannot be merged.

        Warn if conf/local is not read.
        """
        processes.check_launch()
        loader = cast(OmegaConfigLoader, context.config_loader)  # settings.py keeps Kedro's own
        self._loader = loader
        try:
            loader["parameters"]
        except TypeError as error:  # omegaconf names neither file nor setting
            raise ConfigError(
                f"conf/{context.env or 'local'}: a setting is a list (`- ` before each entry) where conf/base has a "
                f"mapping (`name: value`), or the reverse ({error})."
            ) from error
        local = Path(loader.conf_source, "local")
        if context.env not in (None, "local") and (unread := sorted(file.name for file in local.rglob("*.y*ml"))):
            logger.warning(
                "Environment %s is used instead of conf/local: %s not read there.", context.env, ", ".join(unread)
            )

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Refuse another runner for the loop, settings that nothing reads, and problems that the preflight finds."""
        from ppo_rlhf.models.quiet import said  # heavy: only a run pays for them
        from ppo_rlhf.preflight import RunRequest
        from ppo_rlhf.rewards.llm_judge import in_use

        said.clear()
        in_use.clear()
        check_runner(run_params, pipeline)
        check_load_versions(run_params, pipeline, catalog)
        data_root = self._loader["globals"].get("data_root", "data")
        run = RunRequest(pipeline, catalog, Path(run_params["project_path"]), data_root, run_params["env"])
        with processes.alone():  # the others wait for the run to be opened
            problems, advice, parts = judge_settings(self._loader, run)
        for line in advice:
            logger.warning("%s", line)
        if problems:
            raise ConfigError("\n".join(problems))
        if parts:
            logger.info("%s", parts)


def judge_settings(loader: OmegaConfigLoader, run: RunRequest) -> tuple[list[str], list[str], str]:
    """Return why a run must not start, what is unusual about it, and its parts if it may. Writes only a cache.

    From now on the run's catalog has the settings of the policy that it reads.
    """
    from ppo_rlhf.preflight import describe_parts, find_problems  # heavy: only a run pays for it

    if run.lacks(HUMAN_EVALUATION) and HUMAN_EVALUATION in run.pipeline.inputs():
        run.catalog[HUMAN_EVALUATION] = MemoryDataset({})  # a project of an earlier version: a report is made without
    settings, of_policy = OwnSettings(loader), []
    read = run.pipeline.datasets() | ({RESUME_CHECKPOINT} if can_resume(run.pipeline) else set())
    problems = missing_paths(loader, run.catalog, run.pipeline.inputs())
    if not problems:
        try:
            of_policy = use_policy_settings(run.pipeline, run.catalog, settings, run.is_ours)
        except PPORLHFError as error:
            problems = str(error).splitlines()
        problems += find_problems(run)
    problems = [*settings.unread(read, pipelines, run.unused), *problems]
    if problems:
        return problems, of_policy, ""  # a problem may be of one of the policy's settings
    return [], [*of_policy, *settings.unusual_values(run)], describe_parts(run)


def refuse_unread(loader: OmegaConfigLoader, datasets: set[str]) -> OwnSettings:
    """Return a user's settings; raise ConfigError if they gave what a command does not read.

    The command reads these entries and `params:<group>`.
    """
    settings = OwnSettings(loader)
    if problems := settings.unread(datasets, pipelines):
        raise ConfigError("\n".join(problems))
    return settings


def missing_paths(loader: OmegaConfigLoader, catalog: CatalogProtocol, names: Set[str]) -> list[str]:
    """Return one line for each of these entries whose path begins with a dot and leads nowhere.

    Kedro drops `./` where it puts the project in front, and what is left may be taken for a name on the hub.
    """
    entries, lines = loader["catalog"], []
    settings = {**loader["globals"], **(loader.runtime_params or {})}
    for name in sorted(names & entries.keys()):
        given = entries[name].get("filepath") if isinstance(entries[name], dict) else None
        is_dotted = isinstance(given, str) and given.startswith(".")
        if is_dotted and not Path(str(path_of(catalog.get(name)))).is_absolute():
            of = next((setting for setting, value in settings.items() if value == given), f"the path of {name}")
            lines.append(f"{given}: nothing is there. Correct {of}, or leave out ./ of a name on the hub.")
    return lines


def check_runner(run_params: Mapping[str, Any], pipeline: Pipeline) -> None:
    """Raise ConfigError if a pipeline with the closed loop would not be run as one, or this runner can run none."""
    if "ParallelRunner" in run_params["runner"]:
        raise ConfigError(
            "ParallelRunner hands the catalog to other processes, and entries that MLflow records cannot be: drop "
            "--runner, or take --runner ThreadRunner for stages without PPO's loop."
        )
    if not plan_loop(pipeline):
        return
    if run_params.get("only_missing_outputs"):
        raise ConfigError(
            "--only-missing-outputs would train and leave out the export of the policy, as files of an earlier run "
            "are there: drop it. `--params resume=latest` continues a run without repeating finished stages."
        )
    if run_params["runner"] != str(LoopRunner()):
        raise ConfigError(
            "Another runner than ppo_rlhf.runner.LoopRunner would run PPO's loop once instead of until training is "
            'finished: drop --runner, give `kedro server` "runner": "ppo_rlhf.runner.LoopRunner", and Python '
            "session.run(runner=LoopRunner())."
        )


def check_load_versions(run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Raise ConfigError if a version is named of what the run does not read, or has no versions: Kedro ignores that."""
    given = run_params["load_versions"] or {}
    found = [name for name in sorted(pipeline.inputs()) if given and getattr(catalog.get(name), "_version", None)]
    if others := sorted(given.keys() - found):
        raise ConfigError(
            f"--load-versions {others[0]}: of what the run reads, versions have {', '.join(found) or None}"
        )
