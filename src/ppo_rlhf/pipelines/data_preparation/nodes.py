"""Nodes of the data preparation pipeline."""

import pandas as pd

from ppo_rlhf.supervised import demonstrations as preparation
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig


def split_demonstrations(
    raw_demonstrations: pd.DataFrame, data_preparation: DataPreparationConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Check the demonstrations, give their columns standard names, and hold a part out for evaluation."""
    return preparation.split_demonstrations(raw_demonstrations, data_preparation)
