"""A command without a terminal: closed or full output, and Ctrl-C while Python imports.

MLflow is the first slow import. A fake module in its place prints and raises, so no test waits for MLflow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.padding import Padding

from ppo_rlhf.runtime.terminal import WithoutPadding
from tests.conftest import REPOSITORY

PRINTS = """
import contextlib, logging, os, rich, sys
print("a" * 100_000)
for number in range(3):
    logging.getLogger("ppo_rlhf").warning("line %d", number)
rich.get_console().print("a table")
with open("another file", "w"), contextlib.suppress(OSError):  # the file takes the lowest number that is free
    os.write(1, b"written by a library in C")
print("…")  # which ASCII has not
print("heard", file=sys.stderr)
raise SystemExit
"""
WITHOUT_STDOUT = "stdout cannot be written to ({}): its output is lost, the command continues."


def start(project: Path, in_place_of_mlflow: str, redirected: str = "") -> subprocess.CompletedProcess[str]:
    """Run `kedro run` in a shell until it imports MLflow."""
    (project / "mlflow.py").write_text(in_place_of_mlflow)
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    logs = str(REPOSITORY / "conf" / "logging.yml")
    return subprocess.run(
        f"exec {sys.executable} -m kedro run {redirected}",
        shell=True,
        cwd=project,
        env=os.environ | {"PYTHONPATH": path, "KEDRO_LOGGING_CONFIG": logs, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("redirected", "lines"),
    [
        ("> /dev/full", [WITHOUT_STDOUT.format("No space left on device"), "heard"]),
        (">&-", [WITHOUT_STDOUT.format("it is closed"), "heard"]),
        ("2> /dev/full", []),
        (">&- 2>&-", []),
    ],
)
def test_what_cannot_be_printed_costs_one_line_and_fails_nothing(
    toy_project: Path, redirected: str, lines: list[str]
) -> None:
    ended = start(toy_project, PRINTS, redirected)
    assert (ended.returncode, ended.stderr.splitlines()) == (0, lines)
    assert (toy_project / "another file").read_text() == ""


def test_ctrl_c_while_modules_are_imported_is_one_line(toy_project: Path) -> None:
    stopped = start(toy_project, "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)")
    assert (stopped.stdout, stopped.stderr) == ("", "Stopped by SIGINT.\n")
    assert stopped.returncode == -signal.SIGINT  # a shell reports this as exit code 130


def test_what_rich_prints_to_a_file_has_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=WithoutPadding(), width=60)
    console.print(Padding("a line", (0, 0, 1, 2)), "[bold]another", sep="\n")
    assert capsys.readouterr().out == "  a line\n\nanother\n"
    assert not console.is_terminal
