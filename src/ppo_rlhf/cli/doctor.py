"""`kedro doctor`: what would stop a run, found before it costs anything, by the checks of the run itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import mlflow
from kedro.framework.cli.utils import split_string
from kedro.pipeline import Pipeline
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ppo_rlhf.cli.errors import one_line_each, project_here
from ppo_rlhf.cli.params import split_params
from ppo_rlhf.cli.plan_memory import gib, plan
from ppo_rlhf.core.errors import ConfigError, PPORLHFError
from ppo_rlhf.hooks.checks import judge_settings
from ppo_rlhf.hooks.resume import find_named, resume_entry
from ppo_rlhf.hooks.tracking_store import check_answers, store_in_plain_words, without_password
from ppo_rlhf.names import LATEST
from ppo_rlhf.runner import LoopSession, PreparedRun, plan_loop

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext

PACKAGE = "ppo_rlhf"
COLOURS = {"ok": "green", "advice": "yellow", "problem": "red"}

Finding = tuple[Literal["ok", "advice", "problem"], str, str]
"""How it stands with a part of the run, the part, and one line."""


@click.command()
@click.option("--pipelines", callback=split_string, default="", help="As `kedro run` takes them.")
@click.option("--params", callback=split_params, default="", help="Settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def doctor(**options: Any) -> None:
    """Say what would stop or spoil a run with these options: versions, device, tracking store, settings, files, memory
    and disk. Nothing is written. The exit code is 0 if the run would start and fit, else 1.
    """
    problems = 0
    for level, part, line in diagnose(project_here(), **options):
        click.echo(f"{click.style(f'{level:<8}', fg=COLOURS[level])} {part:<9} {line}")
        problems += level == "problem"
    if problems:
        raise click.ClickException(f"{problems} {'problem' if problems == 1 else 'problems'}: such a run would fail.")
    click.echo("The run would start.")


def diagnose(project_path: Path, pipelines: list[str], params: dict[str, Any], env: str | None) -> Iterator[Finding]:
    """Yield what is found of each part of a run; nothing is run or written.

    Args:
        project_path: The project's directory.
        pipelines: Their names; none is the whole chain, or `align` where that would write a person's own SFT model.
        params: The run's own settings.
        env: Kedro's environment.
    """
    yield from _versions(project_path)
    yield from _devices()
    from ppo_rlhf.models.quiet import errors_only  # heavy: other commands do not wait for it

    with errors_only("kedro"), LoopSession.create(project_path, env=env, runtime_params=params) as session:
        assert isinstance(session, LoopSession)  # Kedro types it as an abstract one
        try:
            context = session.load_context()
            if not pipelines and _has_own_sft_model(context):
                pipelines, start = ["align"], "start with `kedro run --pipelines align`, which is checked here"
                yield "advice", "Settings", f"sft_model_path is a model of your own: {start}"
        except Exception as error:
            yield from _refusals("Settings", error)
            return
        yield from _store(context, pipelines)
        try:
            run = session.prepare(pipeline_names=pipelines or None)
            found = list(_settings(context, run))
        except Exception as error:
            found = list(_refusals("Settings", error))
        yield from found
        if all(level != "problem" for level, *_ in found) and plan_loop(run.pipeline) is not None:
            yield from _memory(context, run)


def _has_own_sft_model(context: KedroContext) -> bool:
    from ppo_rlhf.preflight.request import RunRequest

    data_root = context.config_loader["globals"].get("data_root", "data")
    request = RunRequest(Pipeline([]), context.catalog, context.project_path, data_root)
    source = request.source("sft_policy")
    return source is not None and not request.is_ours(source)


def _refusals(part: str, error: Exception) -> Iterator[Finding]:
    lines = one_line_each(error)
    if lines is None:
        raise error
    for line in lines:
        yield "problem", part, line


def _versions(project_path: Path) -> Iterator[Finding]:
    """Compare what is installed with what pyproject.toml asks for now: an installed package remembers an older one."""
    project = tomllib.loads((project_path / "pyproject.toml").read_text()).get("project", {})
    if project.get("name") == PACKAGE:
        python, needed = project["requires-python"], project["dependencies"]
    else:
        python, needed = importlib.metadata.metadata(PACKAGE)["Requires-Python"], importlib.metadata.requires(PACKAGE)
    mend = f"`pip install {'-e .' if project.get('name') == PACKAGE else f'--upgrade {PACKAGE}'}` mends it"
    problems = []
    if platform.python_version() not in SpecifierSet(python):
        problems.append(f"Python {platform.python_version()} runs, and {python} is needed: make a new environment.")
    shown = []
    for each in map(Requirement, needed or ()):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{each.name}{each.specifier} is needed and not installed: {mend}.")
            continue
        if not each.specifier.contains(version, prereleases=True):
            problems.append(f"{each.name} {version} is installed, and {each.specifier} is needed: {mend}.")
        if each.name in ("kedro", "mlflow", "torch", "transformers", "trl"):
            shown.append(f"{each.name} {version}")
    for line in problems:
        yield "problem", "Versions", line
    if not problems:
        yield "ok", "Versions", f"Python {platform.python_version()}, {', '.join(shown)}"


def _devices() -> Iterator[Finding]:
    import torch

    from ppo_rlhf.ppo.precision import has_bfloat16

    def bfloat16(device: torch.device) -> str:
        return f"bfloat16 {'by instructions' if has_bfloat16(device) else 'slow'}"

    cpu = torch.device("cpu")
    yield "ok", "Device", f"CPU: cores {os.cpu_count()}, threads of torch {torch.get_num_threads()}, {bfloat16(cpu)}"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, memory = torch.cuda.get_device_name(index), f"{gib(free)} of {gib(total)} free"
        yield "ok", "Device", f"cuda:{index}: {name}, {memory}, {bfloat16(torch.device('cuda', index))}"
    if not torch.cuda.is_available():
        yield "ok", "Device", "no CUDA device: ppo.device=auto takes the CPU"


def _store(context: KedroContext, pipelines: list[str]) -> Iterator[Finding]:
    settings: Any = context.mlflow  # type: ignore[attr-defined]  # from the tracking hook
    uri = settings.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
    disabled = settings.tracking.disable_tracking.pipelines
    if all(name in disabled for name in pipelines or ["__default__"]):
        yield "ok", "MLflow", "tracking is disabled for these pipelines (disable_tracking in mlflow.yml)"
        return
    try:
        with store_in_plain_words(f"server.mlflow_tracking_uri={without_password(uri)} in mlflow.yml cannot be used"):
            check_answers(uri)
    except ConfigError as error:
        yield from _refusals("MLflow", error)
    else:
        yield "ok", "MLflow", without_password(uri)


def _settings(context: KedroContext, run: PreparedRun) -> Iterator[Finding]:
    from ppo_rlhf.preflight import describe_parts

    loader: Any = context.config_loader
    entry = resume_entry(run.pipeline, run.catalog)
    if entry is not None and entry.requested not in (None, LATEST):
        find_named(str(entry.requested), entry.root, context.project_path)
    problems, advice = judge_settings(loader, run.pipeline, run.catalog, context.project_path)
    for line in problems:
        yield "problem", "Settings", line
    for line in advice:
        yield "advice", "Settings", line
    if not problems:
        names = ", ".join(run.run_params["pipeline_names"] or ["the whole chain"])
        parts = describe_parts(run.pipeline, run.catalog, context.project_path)
        yield "ok", "Settings", f"{names}, {len(run.pipeline.nodes)} nodes.{f' {parts}' if parts else ''}"


def _memory(context: KedroContext, run: PreparedRun) -> Iterator[Finding]:
    from ppo_rlhf.datasets.checkpoints import most_checkpoints
    from ppo_rlhf.preflight.request import RunRequest

    request = RunRequest(run.pipeline, run.catalog, context.project_path, "")
    start = request.source(request.start)
    if start is None:
        yield "ok", "Memory", "not estimated, nor the disk: this run trains its SFT policy from random weights first"
        return
    try:
        planned = plan(context, model=start if request.start == "base_model" else None)
    except PPORLHFError as error:
        yield from _refusals("Memory", error)
        return
    line = f"{gib(planned.needed)} needed of {gib(planned.share)} free on {planned.device} (phase: {planned.plan.peak})"
    if planned.needed > planned.share:
        yield "problem", "Memory", f"{line}: `kedro plan-memory` says what to change first."
    else:
        yield "ok", "Memory", line
    root = context.project_path / context.config_loader["globals"].get("data_root", "data")
    place = next(path for path in (root, *root.parents) if path.exists())
    free, exported = shutil.disk_usage(place).free, planned.plan.exported
    copies = most_checkpoints(planned.config, planned.config.num_total_batches)
    needed = copies * planned.plan.checkpoint + exported
    line = f"{gib(needed)} for checkpoints and export of {gib(free)} free in {root}"
    if needed > free:
        yield "problem", "Disk", f"{line}: free space, lower ppo.save_total_limit, or set data_root to a larger disk."
    else:
        yield "ok", "Disk", line
