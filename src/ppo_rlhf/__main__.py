"""`ppo_rlhf NAME` and `python -m ppo_rlhf NAME`: the project's commands without `kedro`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.runtime.paths import SHIPPED_CONF
from ppo_rlhf.runtime.terminal import prepare_terminal

prepare_terminal()  # the terminal is prepared before the slow imports below, which take seconds
# Outside a project, Kedro uses the logging.yml of this package. Kedro reads the path when Kedro is imported.
if not Path("conf/logging.yml").is_file():
    os.environ.setdefault("KEDRO_LOGGING_CONFIG", str(SHIPPED_CONF / "logging.yml"))

# ruff: noqa: E402
from kedro.framework.project import configure_project
from kedro.framework.startup import bootstrap_project
from kedro.utils import find_kedro_project


def main(args: Sequence[str] | None = None, *, package: str = "ppo_rlhf", **options: Any) -> Any:
    """Run a command of the project that the working directory is in.

    If the first word is an option, the command is `run`, as in the `main` of a project that Kedro creates:
    `main(["--env", "test"])`.

    Args:
        args: The words of the command. None: the words of `sys.argv`.
        package: The package whose pipelines and settings are used outside a project.
        **options: Options of click's `main`. Unless `standalone_mode` is given, an interactive Python gets the run's
            result and its errors, and any other process ends with an exit code.

    Raises:
        SystemExit: The command has ended, and Python is not interactive.
    """
    words = list(sys.argv[1:] if args is None else args)
    begins_with_option = bool(words) and words[0].startswith("-") and words[0] not in ("-h", "--help")
    if begins_with_option or (args is not None and not words):
        words.insert(0, "run")
    project_path = find_kedro_project(Path.cwd())
    if project_path is None:
        configure_project(package)
    else:
        bootstrap_project(project_path)
    # Import the CLI last, because Kedro's plugins and the pipelines look up the project when they are imported
    from ppo_rlhf.cli import cli

    return cli(words, prog_name=package, **{"standalone_mode": not hasattr(sys, "ps1"), **options})


if __name__ == "__main__":
    main()
