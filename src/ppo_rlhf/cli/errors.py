"""Shows errors that a user can fix as one line each, without a traceback."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import click
from kedro.config import BadConfigException, MissingConfigException
from kedro.io import DatasetError
from kedro.utils import find_kedro_project
from kedro.validation import ParameterValidationError
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from safetensors import SafetensorError
from yaml import MarkedYAMLError, YAMLError

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import ConfigError, causes, in_one_line, project_error
from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.runtime.signals import RunInterruptedError, raising_on_signals
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal

T = TypeVar("T")

MAIN_PROCESS_FAILS_WITHIN_S = 15.0

CONFIGURATION = (OmegaConfBaseException, YAMLError, MissingConfigException, BadConfigException)
CATALOG_ENTRY = ("An exception occurred when parsing config for dataset", "'load_versions' keys")
KEDRO_END = ".\n"
"""The separator between Kedro's words and the message of the error that a dataset raised."""
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
_KEDRO_PREFIX = re.compile(r"^- (Parameter '[^']*': Failed to instantiate \w+ for parameter '[^']*': )?")


class Command(click.Command):
    """A command that shows errors as one line each, and prints the lines that its function yields."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **options: Any) -> click.Context:
        with_one_line_errors(check_letters, os.getcwd(), *args)
        return with_one_line_errors(super().make_context, info_name, args, *others, **options)

    def invoke(self, ctx: click.Context) -> Any:
        return with_one_line_errors(self._invoke_and_print, ctx)

    def _invoke_and_print(self, ctx: click.Context) -> Any:
        result = super().invoke(ctx)
        if not isinstance(result, Iterator):
            return result
        for line in result:
            click.echo(line)


def check_letters(*texts: str) -> None:
    """Raise `ConfigError` if a typed text or a path has letters that the locale's encoding cannot decode.

    Python decodes each byte of an undecodable letter as half of a surrogate pair, which no file and no database
    accepts.
    """
    for text in texts:
        if _HALF_OF_A_PAIR.search(text):
            given, encoding = (
                text.encode(errors="surrogateescape").decode(errors="replace"),
                sys.getfilesystemencoding(),
            )
            raise ConfigError(
                f"{given}: the locale's encoding, {encoding}, does not have these letters. Set PYTHONUTF8=1."
            )


def with_one_line_errors(action: Callable[..., T], *args: Any, **options: Any) -> T:
    """Show errors that a user can fix as lines without a traceback, and turn signals into exit codes."""
    try:
        # Only the main process turns signals into exceptions: the other processes have nothing to clean up.
        # A process that waits in a collective runs no Python signal handlers.
        with raising_on_signals() if is_main_process() else nullcontext():
            return action(*args, **options)
    # TerminationSignal is raised by a signal that arrives while no Kedro session is running
    except (RunInterruptedError, TerminationSignal) as stop:
        stopped = stop if isinstance(stop, RunInterruptedError) else RunInterruptedError(stop.signum)
        if is_main_process():
            click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    except Exception as error:
        lines = one_line_each(error)
        if not is_main_process():
            lines = _lines_of_this_process(lines)
        if lines is None:
            raise
        raise click.ClickException(without_secrets(escaped("\nError: ".join(lines)))) from None


def _lines_of_this_process(lines: list[str] | None) -> list[str] | None:
    """Wait, then return the error's lines prefixed by the process's rank.

    If the main process fails with the same error, the launcher ends this process during the wait, so that the error is
    shown once.
    """
    time.sleep(MAIN_PROCESS_FAILS_WITHIN_S)
    process = f"process {os.environ['RANK']}"
    if lines is None:
        click.echo(f"Error in {process}:", err=True)
        return None
    return [f"{process}: {line}" for line in lines]


def one_line_each(error: Exception) -> list[str] | None:
    """Return the lines to show for an error; None if the error is unexpected, so that its traceback is shown."""
    if isinstance(error, ParameterValidationError):
        _, *lines = str(error).splitlines()
        return _once_for_all_groups([_KEDRO_PREFIX.sub("", line) for line in lines if line])
    ours = project_error(error)
    if ours is not None:
        return str(ours).splitlines()
    if isinstance(error, YAMLError) and isinstance(error.__cause__, MarkedYAMLError):
        # Leave out the line number of Kedro's message, because Kedro counts lines from 0
        file = str(error).partition(", unable to read")[0]
        return [f"{file}: {in_one_line(error.__cause__)}"]
    if isinstance(error, DatasetError):
        system_error = next((c for c in causes(error) if isinstance(c, OSError | SafetensorError)), None)
        if system_error is not None:  # an OSError, for example a full disk or a folder without write permission
            return [f"{str(error).partition(KEDRO_END)[0]}: {in_one_line(system_error)}"]
        return [in_one_line(error)] if str(error).startswith(CATALOG_ENTRY) else None
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return [_unresolved(error)]
    return [in_one_line(error)] if isinstance(error, CONFIGURATION) or _is_refusal_of_kedro(error) else None


def _unresolved(error: InterpolationResolutionError) -> str:
    """Return the error of a setting such as `${oc.env:NAME}` with its places, which OmegaConf's error does not have."""
    key, reason = str(error.full_key), str(error).splitlines()[0]
    name = re.escape(key.rpartition(".")[2])
    setting = re.compile(rf"""(?:^|[\s{{,"'])({name}["']?\s*:[^#]*\$\{{.*\}}["']?)""")
    project, places = find_kedro_project(Path.cwd()), []
    for file in sorted((project / "conf").rglob("*.y*ml")) if project is not None else ():
        lines = enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        found = [(number, match[1]) for number, line in lines if (match := setting.search(line))]
        places += [f"{file.relative_to(project)}, line {number}: {text}" for number, text in found]
    if reason.endswith(" oc.env"):
        places = [place for place in places if "oc.env" in place]
        reason = (
            "Kedro reads environment variables only in credentials.yml. Write the value, or give a parameter's value "
            "with --params"
        )
    return ": ".join([" and ".join(places) or key, f"{reason}."])


def _once_for_all_groups(lines: list[str]) -> list[str]:
    """Merge lines `group.name=value: rule` that differ only in the group; a wrong `seed` gives one line per group."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        group, dot, problem = line.partition(".") if re.match(r"\w+\.\w+=", line) else ("", "", line)
        groups.setdefault(f"{dot}{problem}", []).append(group)
    return [
        f"{names[0]}{problem}" if len(names) == 1 else f"{problem[1:]} (of {', '.join(names)})"
        for problem, names in groups.items()
    ]


def _is_refusal_of_kedro(error: Exception) -> bool:
    """Return whether Kedro itself raised a ValueError or KeyError because a command names something that does not
    exist.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return isinstance(error, ValueError | KeyError) and raised_in.startswith("kedro.")
