"""A command that is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import Result


def refusal(kedro: Callable[..., Result], project: Path, *arguments: str) -> str:
    """Run a command that must fail without a traceback; return the one line of its error."""
    result = kedro(project, *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    return line
