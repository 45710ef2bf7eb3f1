from ppo_rlhf.cli import cli, run

__all__ = ["cli", "run"]
