"""`run`, as Kedro has it, with this project's runner and errors."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

import click
import rich
from kedro.framework.cli.catalog import catalog
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import CONTEXT_SETTINGS
from kedro.framework.project import pipelines

from ppo_rlhf.cli.advise import advise
from ppo_rlhf.cli.clean import clean
from ppo_rlhf.cli.convert_config import convert_config
from ppo_rlhf.cli.doctor import doctor
from ppo_rlhf.cli.errors import one_line_each, project_here
from ppo_rlhf.cli.generate import generate
from ppo_rlhf.cli.params import split_params
from ppo_rlhf.config.settings_group import closest
from ppo_rlhf.core.visible import visible
from ppo_rlhf.processes import check_launch, is_main_process
from ppo_rlhf.signals import RunInterruptedError, TerminationSignal, raising_on_signals

T = TypeVar("T")

RUNNER = "ppo_rlhf.runner.LoopRunner"
NODE_OPTIONS = ("from_nodes", "to_nodes", "node_names")
LOG_WIDTH = 160
MAIN_PROCESS_FAILS_WITHIN_S = 15.0


@click.group(name="ppo_rlhf", context_settings=CONTEXT_SETTINGS)
def cli() -> None:
    """Align language models by PPO-RLHF."""


class RunCommand(click.Command):
    """Kedro's `run` with the runner that repeats PPO's iteration, and with one line for each mistake of a user."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options."""
        return _with_one_line_errors(super().make_context, *args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run."""
        return _with_one_line_errors(super().invoke, ctx)


def _run(**options: Any) -> Any:
    check_launch()
    if not options["conf_source"]:
        project_here()
    for option in NODE_OPTIONS:
        if options[option]:
            options[option] = _full_names(options[option], options["pipelines"] or [options["pipeline"]])
    if not rich.get_console().is_terminal and "COLUMNS" not in os.environ:
        rich.reconfigure(width=LOG_WIDTH)  # in a file or a pipe rich would wrap every log line at 80 columns
    assert kedro_run.callback is not None
    return kedro_run.callback(**options)


def _run_options() -> list[click.Parameter]:
    options = [copy.copy(option) for option in kedro_run.params]
    for option in options:
        if option.name == "runner" and isinstance(option, click.Option):
            option.default = RUNNER
            option.help = f"The runner, by default {RUNNER}. Another one cannot repeat PPO's iterations."
        if option.name == "params":
            option.callback = split_params
    return options


def _with_one_line_errors(action: Callable[..., T], *args: Any, **options: Any) -> T:
    """Show errors that a user can mend as lines without a traceback, and turn signals into exit codes."""
    try:
        # another process has nothing to clean up, and may wait for the main one where Python handles no signal
        with raising_on_signals() if is_main_process() else nullcontext():
            return action(*args, **options)
    except RunInterruptedError as stopped:
        _stop(stopped)
    except TerminationSignal as stop:  # outside the session
        _stop(RunInterruptedError(stop.signum))
    except Exception as error:
        lines = one_line_each(error)
        if not is_main_process():
            lines = _lines_of_this_process_alone(lines)
        if lines is None:
            raise
        raise click.ClickException(visible("\nError: ".join(lines))) from None


def _stop(stopped: RunInterruptedError) -> NoReturn:
    if is_main_process():
        click.echo(str(stopped), err=True)
    sys.exit(stopped.exit_code)


def _lines_of_this_process_alone(lines: list[str] | None) -> list[str] | None:
    """Return the lines with the number of this process, after the main process had time to show the same error.

    If the main process fails, too, the launcher ends this one while it waits, and the error is shown once.
    """
    time.sleep(MAIN_PROCESS_FAILS_WITHIN_S)
    process = f"process {os.environ['RANK']}"
    if lines is None:
        click.echo(f"Error in {process}:", err=True)
        return None
    return [f"{process}: {line}" for line in lines]


def _full_names(given: list[str], pipeline_names: list[str | None]) -> list[str]:
    """Return node names with their namespace; a bare name will do if only one node of the run has it."""
    names = [name or "__default__" for name in pipeline_names]
    if any(name not in pipelines for name in names):
        return given  # Kedro says so better
    nodes = {node.name for name in names for node in pipelines[name].nodes}
    return [name if name in nodes else _only_node(name, nodes) for name in given]


def _only_node(name: str, nodes: set[str]) -> str:
    bare_names = {node: node.rpartition(".")[2] for node in nodes}
    alike = sorted(node for node, bare in bare_names.items() if bare == name)
    if len(alike) > 1:
        raise click.ClickException(f"Several nodes are called {name}: {', '.join(alike)}. Give the full name.")
    if not alike:
        hint = closest(name.rpartition(".")[2], sorted(set(bare_names.values())))
        raise click.ClickException(f"No node of this run is called {name}.{hint}")
    return alike[0]


run = RunCommand("run", callback=_run, params=_run_options(), help="Run pipelines, by default the whole chain.")
for command in (run, advise, clean, convert_config, doctor, generate):
    cli.add_command(command)
for command in catalog.commands.values():  # Kedro's own, which read the parameters, too
    command.callback = partial(_with_one_line_errors, command.callback)  # type: ignore[arg-type]
