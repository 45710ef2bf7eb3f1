"""`run`, as Kedro has it, with this project's runner and errors."""

from __future__ import annotations

import copy
import difflib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click
import rich
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import CONTEXT_SETTINGS
from kedro.framework.project import pipelines
from kedro.utils import load_obj
from mlflow.entities import RunStatus

from ppo_rlhf.cli.advise import advise
from ppo_rlhf.cli.convert_config import convert_config
from ppo_rlhf.cli.errors import one_line_each, project_here
from ppo_rlhf.cli.plan_memory import plan_memory
from ppo_rlhf.hooks import end_active_run
from ppo_rlhf.runner import RunInterruptedError, TerminationSignal, raising_on_signals

T = TypeVar("T")

RUNNER = "ppo_rlhf.runner.LoopRunner"
NODE_OPTIONS = ("from_nodes", "to_nodes", "node_names")
LOG_WIDTH = 160


@click.group(name="ppo_rlhf", context_settings=CONTEXT_SETTINGS)
def cli() -> None:
    """Align language models by PPO-RLHF."""


class RunCommand(click.Command):
    """Kedro's `run` with the runner that folds PPO's loop, and with plain words where a person's input is wrong."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options."""
        return _in_plain_words(lambda: super(RunCommand, self).make_context(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        """Run."""
        return _in_plain_words(lambda: super(RunCommand, self).invoke(ctx))


def _run(**options: Any) -> Any:
    if not options["conf_source"]:
        project_here()
    _check_runner(options["runner"])
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
    return options


run = RunCommand("run", callback=_run, params=_run_options(), help="Run pipelines, by default the whole chain.")
cli.add_command(run)
cli.add_command(advise)
cli.add_command(convert_config)
cli.add_command(plan_memory)


def _in_plain_words(action: Callable[[], T]) -> T:
    """Show what a person can mend as lines without a traceback, and turn signals into exit codes."""
    try:
        with raising_on_signals():
            return action()
    except RunInterruptedError as stopped:
        _stop(stopped)
    except TerminationSignal as stop:  # before the first node or after the last, where Kedro tells no hook
        end_active_run(RunStatus.KILLED)
        _stop(RunInterruptedError(stop.signum))
    except Exception as error:
        lines = one_line_each(error)
        if lines is None:
            raise
        raise click.ClickException("\nError: ".join(lines)) from None
    except SystemExit as left:  # rich leaves so when the pipe that it writes to is closed
        if left.code:
            end_active_run(RunStatus.FAILED)
        raise


def _stop(stopped: RunInterruptedError) -> NoReturn:
    click.echo(str(stopped), err=True)
    sys.exit(stopped.exit_code)


def _check_runner(name: str) -> None:
    try:
        load_obj(name, "kedro.runner")
    except (ImportError, AttributeError, ValueError) as error:
        raise click.ClickException(f"--runner {name}: there is no such runner ({error}). Drop --runner.") from None


def _full_names(given: list[str], pipeline_names: list[str | None]) -> list[str]:
    """Return node names with their namespace; a bare name will do where only one node of the run has it."""
    names = [name or "__default__" for name in pipeline_names]
    if any(name not in pipelines for name in names):
        return given  # Kedro says so better
    by_bare_name: dict[str, set[str]] = {}
    for node in (node for name in names for node in pipelines[name].nodes):
        by_bare_name.setdefault(node.name.rpartition(".")[2], set()).add(node.name)
    full_names = {node for nodes in by_bare_name.values() for node in nodes}
    return [name if name in full_names else _only_node(name, by_bare_name) for name in given]


def _only_node(name: str, by_bare_name: dict[str, set[str]]) -> str:
    nodes = sorted(by_bare_name.get(name, ()))
    if len(nodes) > 1:
        raise click.ClickException(f"Several nodes are called {name}: {', '.join(nodes)}. Give the full name.")
    if not nodes:
        near = difflib.get_close_matches(name.rpartition(".")[2], list(by_bare_name), n=1)
        hint = f" Did you mean `{next(iter(by_bare_name[near[0]]))}`?" if near else ""
        raise click.ClickException(f"No node of this run is called {name}.{hint}")
    return nodes[0]
