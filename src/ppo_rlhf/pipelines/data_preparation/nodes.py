"""Nodes of the data preparation pipeline."""

import pandas as pd

from ppo_rlhf.supervised import demonstrations as preparation
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig


def split_demonstrations(
    raw_demonstrations: pd.DataFrame, data_preparation: DataPreparationConfig
) -> dict[str, pd.DataFrame]:
    """Check the demonstrations, give their columns standard names, and hold a part out for evaluation."""
    trained, held_out = preparation.split_demonstrations(raw_demonstrations, data_preparation)
    return {"demonstrations": trained, "evaluation_demonstrations": held_out}
