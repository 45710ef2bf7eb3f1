"""`kedro doctor`: finds problems that would stop a run, with the checks that the run itself makes before its first
node.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import mlflow
from kedro.framework.cli.utils import split_string
from kedro.framework.project import pipelines as registered
from kedro.pipeline import Pipeline
from packaging.requirements import Requirement

from ppo_rlhf.cli.errors import Command, one_line_each
from ppo_rlhf.cli.project import context_here, project_here, split_params
from ppo_rlhf.config.parameter_groups import closest
from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.before_run import judge_settings, refuse_unread
from ppo_rlhf.hooks.resume import find_named, resume_entry
from ppo_rlhf.hooks.tracking_store import check_answers, store_errors_as_config_errors
from ppo_rlhf.runner import plan_loop
from ppo_rlhf.runtime.names import env_option

if TYPE_CHECKING:
    from ppo_rlhf.preflight.memory_plan import Planned
    from ppo_rlhf.preflight.request import RunRequest

PACKAGE = "ppo_rlhf"
COLOURS = {"ok": "green", "advice": "yellow", "problem": "red"}

Finding = tuple[Literal["ok", "advice", "problem"], str, str]
"""A finding of the doctor: (severity, topic, message)."""

SETTINGS = {"batch": "per_device_train_batch_size", "response_length": "response_length", "dtype": "dtype"}


@click.command(cls=Command)
@click.option(
    "--model", metavar="PATH", help="Plan for this SFT model, not the project's: directory, hub id or config.json."
)
@click.option("--batch", type=click.IntRange(min=1), help="ppo.per_device_train_batch_size.")
@click.option("--prompt-length", type=click.IntRange(min=1), help="Tokens of the longest prompt; by default counted.")
@click.option("--response-length", type=click.IntRange(min=1), help="ppo.response_length.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float64"]), help="ppo.dtype.")
@click.option("--processes", type=click.IntRange(min=1), help="World size; by default the launcher's, or 1.")
@click.option("--memory", type=click.FloatRange(0, min_open=True), help="GiB of the device; by default what is free.")
@click.option("--probe", is_flag=True, help="Train on problems with a known answer, with these settings.")
@click.option("--pipelines", callback=split_string, default="", help="As `kedro run` takes them.")
@click.option("--params", callback=split_params, default="", help="Settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def doctor(**options: Any) -> None:
    """Say what would stop or spoil a run with these options.

    Versions, device, tracking store, settings, files, memory, disk and time are checked. A table shows how much memory
    PPO needs in each phase. No weights are read, and only caches are written. The exit code is 0 if the run would start
    and fit into memory, else 1. docs/memory.md says what is counted, and what --probe trains.
    """
    problems = 0
    for finding in diagnose(project_here(), **options):
        if isinstance(finding, str):
            click.echo(finding)
            continue
        level, part, line = finding
        click.echo(f"{click.style(f'{level:<8}', fg=COLOURS[level])} {part:<9} {line}")
        problems += level == "problem"
    if problems:
        raise click.ClickException(f"{problems} {'problem' if problems == 1 else 'problems'}: such a run would fail.")
    click.echo("No problem found.")


def diagnose(
    project_path: Path, pipelines: list[str], params: dict[str, Any], env: str | None, probe: bool, **options: Any
) -> Iterator[Finding | str]:
    """Yield findings on each part of a run, and the lines of the run's memory plan.

    No node runs, and only caches are written.

    If `pipelines` is empty, `__default__` is checked, or the other stages if `__default__` would overwrite a user's
    own SFT or reward model.
    """
    yield from _versions(project_path)
    yield from _devices()
    from ppo_rlhf.runtime.log_lines import errors_only

    given = {name: options[option] for option, name in SETTINGS.items() if options[option] is not None}
    ppo = params.get("ppo", {})
    # If `ppo` is not a group of settings but a single word, the settings' check reports the mistake
    if given and isinstance(ppo, dict):
        params = params | {"ppo": ppo | given}
    with errors_only("kedro"):
        yield from _refusals_found("Settings", _run(project_path, pipelines, params, env, probe, options))


def _refusals_found(part: str, findings: Iterable[Finding | str]) -> Iterator[Finding | str]:
    """Yield the findings of one part of the doctor. A user's error becomes a finding and ends the part."""
    try:
        yield from findings
    except Exception as error:
        lines = one_line_each(error)
        if lines is None:
            raise
        yield from (("problem", part, line) for line in lines)


def _run(
    project_path: Path,
    pipelines: list[str],
    params: dict[str, Any],
    env: str | None,
    probe: bool,
    options: dict[str, Any],
) -> Iterator[Finding | str]:
    from ppo_rlhf.preflight import RunRequest

    context = context_here(env, params)
    data_root = context.config_loader["globals"].get("data_root", "data")
    request = RunRequest(Pipeline([]), context.catalog, project_path, data_root, context.env)
    trains = "sft_policy" in registered["__default__"].all_outputs()
    own, stages = _stages_beside_own(request, context.config_loader["parameters"])
    # In a project of an own model `kedro run` is `align`
    if not pipelines and stages and (trains or stages != ["align"]) and registered.keys() >= set(stages):
        pipelines = stages
        start = f"`kedro run{env_option(context.env)} --pipelines {','.join(pipelines)}`"
        yield "advice", "Settings", f"{own} is a model of your own: run {start}; that command is checked here"
    yield from _refusals_found("MLflow", _store(context))
    request.pipeline = _requested(pipelines)
    findings: list[Finding] = []
    if options["model"]:  # with --model, the doctor checks only that model, not the settings of the project
        refuse_unread(context.config_loader, request.pipeline.datasets())
    else:
        findings = list(_settings(context, request, pipelines))
    yield from findings
    is_asked = any(value is not None for value in options.values())
    if is_asked or all(level != "problem" for level, *_ in findings):
        if not options["model"]:
            yield from _refusals_found("Memory", _supervised(request))
        yield from _refusals_found("Memory", _memory(request, options))
    if probe:
        yield from _refusals_found("Probe", _probes(request, options["model"]))


def _requested(pipelines: list[str]) -> Pipeline:
    """Return the sum of the named pipelines, as `kedro run` runs it; without a name, `__default__`."""
    for name in pipelines:
        if name not in registered:
            raise ConfigError(f"--pipelines={name}: there is no such pipeline.{closest(name, registered)}")
    return Pipeline([registered[name] for name in pipelines or ["__default__"]])


def _stages_beside_own(request: RunRequest, params: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the setting that names a model of the user, and the pipelines that train the rest; [] is the whole chain.

    A model is trained if its data are given: an SFT policy by demonstrations, a reward model by preferences.
    """

    def is_own(name: str) -> bool:
        source = request.source(name)
        return source is not None and not request.is_ours(source)

    if is_own("sft_policy"):
        reward = params.get("reward")
        components = reward.get("components") if isinstance(reward, dict) else None
        models = [each for each in components or () if isinstance(each, dict) and each.get("type") == "model"]
        needs_model = any(each.get("path") is None for each in models)
        trains = needs_model and not is_own("reward_model") and request.source("raw_preferences") is not None
        return "sft_model_path", ["reward_modelling", "align"] if trains else ["align"]
    if is_own("reward_model") and request.source("raw_demonstrations") is not None:
        return "reward_model_path", ["data_preparation", "supervised_finetuning", "align"]
    return "", []


def _versions(project_path: Path) -> Iterator[Finding]:
    """Compare the installed packages with the project's requirements.

    In this repository pyproject.toml is read, because the metadata of an editable install may be older.
    """
    project = tomllib.loads((project_path / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    is_ours = project.get("name") == PACKAGE
    fix = f"`pip install {'-e . -c constraints.txt' if is_ours else f'--upgrade {PACKAGE}'}` fixes it"
    shown, is_well = [f"Python {platform.python_version()}"], True
    for needed in map(Requirement, project["dependencies"] if is_ours else importlib.metadata.requires(PACKAGE) or ()):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or not needed.specifier.contains(version, prereleases=True):
            is_well = False
            installed = f"{needed.name} {version} is installed" if version else f"{needed.name} is not installed"
            yield "problem", "Versions", f"{installed}, and {needed.specifier} is needed: {fix}."
        if needed.name in ("kedro", "mlflow", "torch", "transformers", "trl"):
            shown.append(f"{needed.name} {version}")
    if is_well:
        yield "ok", "Versions", ", ".join(shown)


def _devices() -> Iterator[Finding]:
    import torch

    from ppo_rlhf.ppo.precision import has_bfloat16

    devices = {torch.device("cpu"): f"cores {os.cpu_count()}, threads of torch {torch.get_num_threads()}"}
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        devices[torch.device("cuda", index)] = f"{name}, {free:.1f} of {total:.1f} GiB free"
    for device, what in devices.items():
        yield "ok", "Device", f"{device}: {what}, bfloat16 {'by instructions' if has_bfloat16(device) else 'slow'}"


def _store(context: Any) -> Iterator[Finding]:
    uri = context.mlflow.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
    shown = without_secrets(uri)
    with store_errors_as_config_errors(f"server.mlflow_tracking_uri={shown} in mlflow.yml cannot be used"):
        check_answers(uri)
    yield "ok", "MLflow", shown


def _settings(context: Any, request: RunRequest, pipelines: list[str]) -> Iterator[Finding]:
    entry = resume_entry(request.pipeline, request.catalog)
    if entry is not None:
        find_named(entry.requested, entry.root, context.project_path)
    problems, advice, parts = judge_settings(context.config_loader, request)
    yield from (("problem", "Settings", line) for line in problems)
    yield from (("advice", "Settings", line) for line in advice)
    if not problems:
        names = ", ".join(pipelines or [f"`kedro run{env_option(context.env)}`"])
        yield "ok", "Settings", f"{names}, {len(request.pipeline.nodes)} nodes.{f' {parts}' if parts else ''}"


def _supervised(run: RunRequest) -> Iterator[Finding]:
    """Yield a line of memory and time for SFT and for the training of a reward model."""
    from ppo_rlhf.preflight.supervised_plan import describe

    yield from ((level, "Memory", f"{group}: {line}") for level, group, line in describe(run))


def _memory(run: RunRequest, options: dict[str, Any]) -> Iterator[Finding | str]:
    from ppo_rlhf.datasets.checkpoints import most_checkpoints
    from ppo_rlhf.evaluation.policy import EvaluationConfig
    from ppo_rlhf.preflight.memory_plan import changes, gib, plan, table

    if plan_loop(run.pipeline) is None:
        yield "ok", "Memory", "memory and disk are not planned: these pipelines do not train by PPO"
        return
    planned = plan(run, options["model"], options["prompt_length"], options["processes"], options["memory"])
    if planned is None:
        yield "ok", "Memory", "memory and disk are not planned: there is no model yet; give --model to plan for one"
        return
    yield from table(planned)
    line = f"{gib(planned.needed)} needed of {gib(planned.share)} free on {planned.device} (phase: {planned.plan.peak})"
    if planned.needed <= planned.share:
        yield "ok", "Memory", line
    else:
        yield "problem", "Memory", f"{line}: the run does not fit."
        yield from changes(planned)
    if planned.waiting > planned.on_host:
        line = f"processes and offloaded models need {gib(planned.waiting)}, and {gib(planned.on_host)} is free"
        yield "problem", "Memory", f"in the host's memory {line}."
    root = run.project_path / run.data_root
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    evaluation = run.group("evaluation", EvaluationConfig)
    keeps_best = evaluation is not None and evaluation.on_exploitation == "stop"
    copies = most_checkpoints(planned.config, planned.config.num_total_batches, keeps_best)
    needed = copies * planned.plan.checkpoint + planned.plan.exported
    line = f"{gib(needed)} for checkpoints and export of {gib(free)} free in {root}"
    if needed > free:
        yield "problem", "Disk", f"{line}: free space, lower ppo.save_total_limit, or set data_root to a larger disk."
    else:
        yield "ok", "Disk", line
    if planned.needed <= planned.share:
        yield from _time(planned)


def _time(planned: Planned) -> Iterator[Finding]:
    from ppo_rlhf.preflight.run_time import Work, describe

    if not planned.is_here or planned.shape.processes > 1:
        yield "ok", "Time", f"not timed: planned for {'several processes' if planned.is_here else 'another machine'}"
        return
    shape = planned.shape
    lengths = planned.mean_prompt_length, planned.plan.rollout_rows, planned.plan.shared_length
    work = Work(shape.policy, *lengths, shape.trust_remote_code)
    yield from ((level, "Time", line) for level, line in describe(planned.config, work, planned.device))


def _probes(run: RunRequest, model: str | None) -> Iterator[Finding]:
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.preflight.memory_plan import policy_config
    from ppo_rlhf.preflight.probes import describe, run_probes, tiny_model

    config = run.group("ppo", PPOConfig)
    if config is None:
        yield "ok", "Probe", "no probe: these pipelines do not train by PPO"
        return
    tiny, architecture = tiny_model(policy_config(run, model))
    yield from (("ok", "Probe", line) for line in (f"a tiny random model: {architecture}", *describe(config)))
    for outcome in run_probes(config, tiny):
        level: Literal["ok", "problem"] = "problem" if outcome.broken else "ok"
        yield level, "Probe", outcome.line
