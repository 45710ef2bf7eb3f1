"""The checks and warnings before a run. A run that the checks refuse has written nothing but caches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import ConfigError, PPORLHFError
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.hooks.policy_settings import use_policy_settings
from ppo_rlhf.hooks.process import prepare_process
from ppo_rlhf.hooks.resume import can_resume
from ppo_rlhf.hooks.viz_status import write_status_of
from ppo_rlhf.runner import LoopRunner, plan_loop
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import RESUME_CHECKPOINT
from ppo_rlhf.runtime.paths import path_of

if TYPE_CHECKING:
    from ppo_rlhf.preflight import RunRequest

logger = logging.getLogger(__name__)


class ChecksHook:
    """Checks the launch and the settings of a run, before every other hook."""

    _loader: OmegaConfigLoader

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Refuse a launch whose processes would each train a run of their own, and settings that cannot be merged.

        The hook warns if conf/local has files that the run does not read.
        """
        prepare_process()
        processes.check_launch()
        # OmegaConfigLoader is Kedro's default config loader, which settings.py does not replace
        loader = cast(OmegaConfigLoader, context.config_loader)
        self._loader = loader
        write_status_of(context.env)
        try:
            loader["parameters"]
        # omegaconf's TypeError names neither the file nor the setting, so raise an error that names both
        except TypeError as error:
            raise ConfigError(
                f"conf/{context.env or 'local'}: a setting is a list (`- ` before each entry) where conf/base has a "
                f"mapping (`name: value`), or the reverse ({error})."
            ) from error
        local = Path(loader.conf_source, "local")
        if context.env not in (None, "local") and (unread := sorted(file.name for file in local.rglob("*.y*ml"))):
            logger.warning(
                "Environment %s is used instead of conf/local, whose files are not read: %s.",
                context.env,
                ", ".join(unread),
            )

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Refuse a runner that cannot repeat PPO's loop, unread settings, and each problem that the preflight finds."""
        from ppo_rlhf.judge.llm_judge import in_use
        from ppo_rlhf.preflight import RunRequest
        from ppo_rlhf.runtime.log_lines import said

        said.clear()
        in_use.clear()
        check_runner(run_params, pipeline)
        check_load_versions(run_params, pipeline, catalog)
        forget_other_training(run_params, pipeline, catalog)
        data_root = self._loader["globals"].get("data_root", "data")
        run = RunRequest(pipeline, catalog, Path(run_params["project_path"]), data_root, run_params["env"])
        # Only the main process runs the checks: the other processes wait in `agree_on_run`, so collectives are
        # forbidden
        with processes.alone():
            problems, advice, parts = judge_settings(self._loader, run)
        for line in advice:
            logger.warning("%s", line)
        if problems:
            raise ConfigError("\n".join(problems))
        if parts:
            logger.info("%s", parts)


def judge_settings(loader: OmegaConfigLoader, run: RunRequest) -> tuple[list[str], list[str], str]:
    """Return the problems that stop the run, the warnings about the run, and a line that describes the run's parts.

    The line about the run's parts is empty if there are problems. The function writes only caches. If the
    run reads a trained policy, the `ppo` group in the run's catalog is replaced by the settings that the policy was
    trained with.
    """
    from ppo_rlhf.preflight import describe_audit, describe_parts, find_problems

    settings, policy_lines = OwnSettings(loader), []
    read = run.pipeline.datasets() | ({RESUME_CHECKPOINT} if can_resume(run.pipeline) else set())
    problems = missing_paths(loader, run.catalog, run.pipeline.inputs())
    if not problems:
        try:
            policy_lines = use_policy_settings(run.pipeline, run.catalog, settings, run.is_ours)
        except PPORLHFError as error:
            problems = str(error).splitlines()
        problems += find_problems(run)
    problems = [*settings.unread(read, pipelines, run.unused), *problems]
    if problems:
        # Report also the settings taken from the policy's record, because one of them may have caused a problem
        return problems, policy_lines, ""
    parts = " ".join(filter(None, [describe_parts(run), describe_audit(run)]))
    return [], [*policy_lines, *settings.unusual_values(run)], parts


def refuse_unread(loader: OmegaConfigLoader, datasets: set[str]) -> OwnSettings:
    """Return the user's settings for a command that reads only `datasets` (catalog entries and `params:<group>`).

    Raises:
        ConfigError: The user gave a setting that the command does not read.
    """
    settings = OwnSettings(loader)
    if problems := settings.unread(datasets, pipelines):
        raise ConfigError("\n".join(problems))
    return settings


def missing_paths(loader: OmegaConfigLoader, catalog: CatalogProtocol, names: Set[str]) -> list[str]:
    """Return one line for each catalog entry in `names` whose path begins with a dot and does not exist.

    Kedro drops `./` when it makes a path absolute. If a path that began with `./` does not exist, the path without `./`
    could be taken for a model's name on the hub.
    """
    entries, lines = loader["catalog"], []
    settings = {**loader["globals"], **(loader.runtime_params or {})}
    for name in sorted(names & entries.keys()):
        given = entries[name].get("filepath") if isinstance(entries[name], dict) else None
        is_dotted = isinstance(given, str) and given.startswith(".")
        if is_dotted and not Path(str(path_of(catalog.get(name)))).is_absolute():
            setting = next((setting for setting, value in settings.items() if value == given), f"the path of {name}")
            lines.append(f"{given}: nothing is there. Correct {setting}, or leave out ./ if it is a name on the hub.")
    return lines


def check_runner(run_params: Mapping[str, Any], pipeline: Pipeline) -> None:
    """Raise ConfigError if the runner is ParallelRunner, or if the pipeline has PPO's loop and the runner would not
    repeat it.
    """
    if "ParallelRunner" in run_params["runner"]:
        raise ConfigError(
            "ParallelRunner sends the catalog to other processes, which catalog entries that MLflow records do not "
            "allow: drop --runner, or use --runner ThreadRunner for stages without PPO's loop."
        )
    if not plan_loop(pipeline):
        return
    if run_params.get("only_missing_outputs"):
        raise ConfigError(
            "--only-missing-outputs would train but not export the policy, because the policy of an earlier run is "
            "there: drop the option. `--params resume=latest` continues a run without repeating finished stages."
        )
    if run_params["runner"] != str(LoopRunner()):
        raise ConfigError(
            "Only ppo_rlhf.runner.LoopRunner repeats PPO's loop until training is finished; another runner would run "
            'one iteration. Drop --runner; in requests to `kedro server` give "runner": "ppo_rlhf.runner.LoopRunner"; '
            "in Python call session.run(runner=LoopRunner())."
        )


def check_load_versions(run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Raise ConfigError if --load-versions names an entry that is no versioned input of the run, because Kedro ignores
    such entries.
    """
    given = run_params["load_versions"] or {}
    versioned = [name for name in sorted(pipeline.inputs()) if given and getattr(catalog.get(name), "_version", None)]
    if unversioned := sorted(given.keys() - versioned):
        raise ConfigError(
            f"--load-versions {unversioned[0]}: this is not a versioned input of the run; versioned inputs: "
            f"{', '.join(versioned) or None}"
        )


def forget_other_training(run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Empty the tables of the newest training if --load-versions names an older policy, which it did not make."""
    policy: Any = catalog.get("ppo_policy") if "ppo_policy" in (run_params["load_versions"] or {}) else None
    if policy is not None and not policy.is_newest:
        for name in pipeline.inputs() & {"training_history", "training_prompts"}:
            of_newest_run: Any = catalog.get(name)
            of_newest_run.is_of_policy = False
