"""The commands of this project: `kedro run`, `kedro doctor` and the others are those of ppo_rlhf."""

from ppo_rlhf.cli import cli, run

__all__ = ["cli", "run"]
