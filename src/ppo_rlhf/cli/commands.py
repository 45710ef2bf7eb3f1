"""The group of commands, and `run`: Kedro's own command with this project's runner and one-line errors."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import click
import rich
from kedro.framework.cli.catalog import catalog
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import CONTEXT_SETTINGS
from kedro.framework.project import pipelines
from kedro.utils import load_obj

from ppo_rlhf.cli.advise import advise
from ppo_rlhf.cli.clean import clean
from ppo_rlhf.cli.convert_config import convert_config
from ppo_rlhf.cli.doctor import doctor
from ppo_rlhf.cli.errors import Command, with_one_line_errors
from ppo_rlhf.cli.generate import generate
from ppo_rlhf.cli.init import init
from ppo_rlhf.cli.project import project_here, split_params
from ppo_rlhf.cli.push import push
from ppo_rlhf.cli.servers import adapt_servers
from ppo_rlhf.config.parameter_groups import closest
from ppo_rlhf.runtime.own_process import name_what_keeps_it
from ppo_rlhf.runtime.processes import check_launch
from ppo_rlhf.runtime.terminal import WithoutPadding

RUNNER = "ppo_rlhf.runner.LoopRunner"
NODE_OPTIONS = ("from_nodes", "to_nodes", "node_names")
LOG_WIDTH = 1000
"""Width in characters of the lines that a run writes to a file or a pipe; rich breaks longer lines."""


@click.group(name="ppo_rlhf", context_settings=CONTEXT_SETTINGS)
def cli() -> None:
    """Align language models by PPO-RLHF."""


def _run(**options: Any) -> Any:
    check_launch()
    if not options["conf_source"]:
        project_here()
    for option in NODE_OPTIONS:
        if options[option]:
            options[option] = _full_names(options[option], options["pipelines"] or [options["pipeline"]])
    try:
        load_obj(options["runner"], "kedro.runner")
    except (ImportError, AttributeError) as error:
        raise click.ClickException(f"--runner {options['runner']}: {error}. The default is {RUNNER}.") from None
    if not rich.get_console().is_terminal:
        # rich would break log lines at 80 columns and fill them with spaces when the output goes to a file or a pipe
        width = None if "COLUMNS" in os.environ else LOG_WIDTH
        rich.reconfigure(width=width, file=WithoutPadding())
    assert kedro_run.callback is not None
    try:
        return kedro_run.callback(**options)
    finally:
        name_what_keeps_it()


def _run_options() -> list[click.Parameter]:
    options = [copy.copy(option) for option in kedro_run.params]
    for option in options:
        if option.name == "runner" and isinstance(option, click.Option):
            option.default = RUNNER
            option.help = f"The runner, by default {RUNNER}. No other runner can repeat PPO's iterations."
        if option.name == "params":
            option.callback = split_params
    return options


def _full_names(given: list[str], pipeline_names: list[str | None]) -> list[str]:
    """Return the names of nodes, each completed by the node's namespace.

    Raises:
        click.ClickException: No node has a given name. The message suggests the nearest name.
    """
    names = [name or "__default__" for name in pipeline_names]
    if any(name not in pipelines for name in names):
        return given  # the user named an unknown pipeline: Kedro refuses the name with a better message
    nodes = {node.name.rpartition(".")[2]: node.name for name in names for node in pipelines[name].nodes}
    for name in given:
        if name not in {*nodes, *nodes.values()}:
            hint = closest(name.rpartition(".")[2], sorted(nodes))
            raise click.ClickException(f"No node of this run is called {name}.{hint}")
    return [nodes.get(name, name) for name in given]


run = Command("run", callback=_run, params=_run_options(), help="Run pipelines, by default `__default__`.")
kedro_run.hidden = True  # `kedro --help` lists Kedro's commands beside the project's, and this `run` replaces Kedro's
for command in (run, advise, clean, convert_config, doctor, generate, init, push):
    cli.add_command(command)
# Kedro's catalog commands read the parameters too, so they raise the same errors for wrong settings
for catalog_command in catalog.commands.values():
    catalog_command.callback = partial(with_one_line_errors, catalog_command.callback)  # type: ignore[arg-type]
adapt_servers()
