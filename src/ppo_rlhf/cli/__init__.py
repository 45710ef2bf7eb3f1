"""The project's commands: `kedro NAME` inside a project, or `ppo_rlhf NAME`."""

from ppo_rlhf.cli.commands import cli, run
from ppo_rlhf.hooks.process import prepare_process

prepare_process()

__all__ = ["cli", "run"]
