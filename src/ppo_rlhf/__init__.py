"""PPO-RLHF of language models as a Kedro pipeline."""

__version__ = "0.1.0"
