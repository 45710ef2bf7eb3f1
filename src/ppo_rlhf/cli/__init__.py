"""The project's commands, reachable as `kedro NAME` in the project and as `ppo_rlhf NAME`."""

from ppo_rlhf.cli.commands import cli, run

__all__ = ["cli", "run"]
