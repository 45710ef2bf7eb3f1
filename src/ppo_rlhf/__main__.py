"""`ppo_rlhf NAME`, and `python -m ppo_rlhf NAME`: the project's commands without `kedro` in front."""

from pathlib import Path

from ppo_rlhf.terminal import prepare_terminal

prepare_terminal()  # before the imports that take seconds

# ruff: noqa: E402
from kedro.framework.project import configure_project
from kedro.framework.startup import bootstrap_project
from kedro.utils import find_kedro_project


def main() -> None:
    """Run a command of the project that the working directory is in."""
    project_path = find_kedro_project(Path.cwd())
    if project_path is None:
        configure_project("ppo_rlhf")
    else:
        bootstrap_project(project_path)
    from ppo_rlhf.cli import cli  # after the project is known: plugins and pipelines look it up when imported

    cli(prog_name="ppo_rlhf")


if __name__ == "__main__":
    main()
