"""The commands of this project, such as `kedro run` and `kedro doctor`, come from ppo_rlhf."""

from ppo_rlhf.cli import cli, run

__all__ = ["cli", "run"]
