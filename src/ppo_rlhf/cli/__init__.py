"""The project's commands: `kedro NAME` inside a project, or `ppo_rlhf NAME`."""

from ppo_rlhf.cli.commands import cli, run

__all__ = ["cli", "run"]
