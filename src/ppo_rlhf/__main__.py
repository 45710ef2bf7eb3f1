"""`ppo_rlhf NAME`, and `python -m ppo_rlhf NAME`: the project's commands without `kedro` in front."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.runtime.paths import SHIPPED_CONF
from ppo_rlhf.runtime.terminal import prepare_terminal

prepare_terminal()  # before the imports that take seconds
if not Path("conf/logging.yml").is_file():  # which Kedro reads as it is imported; outside of a project there is none
    os.environ.setdefault("KEDRO_LOGGING_CONFIG", str(SHIPPED_CONF / "logging.yml"))

# ruff: noqa: E402
from kedro.framework.project import configure_project
from kedro.framework.startup import bootstrap_project
from kedro.utils import find_kedro_project


def main(args: Sequence[str] | None = None, *, package: str = "ppo_rlhf", **options: Any) -> Any:
    """Run a command of the project that the working directory is in.

    What begins with an option is for `run`, as with the `main` of a project that Kedro made: `main(["--env", "test"])`.

    Without `args` the words are those that the process was started with. `package` is whose pipelines and settings
    count outside of a project. The options are of click's `main`: unless `standalone_mode` is given, an interactive
    Python gets the run's result and its errors, and any other process ends with an exit code.

    Raises:
        SystemExit: The command has ended, outside of an interactive Python.
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
    from ppo_rlhf.cli import cli  # after the project is known: plugins and pipelines look it up when imported

    return cli(words, prog_name=package, **{"standalone_mode": not hasattr(sys, "ps1"), **options})


if __name__ == "__main__":
    main()
