"""Nodes of the data preparation pipeline."""

import pandas as pd
from datasets import Dataset

from ppo_rlhf.data.tables import frame_of, origins_of, with_origins
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.supervised import demonstrations as preparation
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig


def split_demonstrations(
    raw_demonstrations: Dataset, base_model: PretrainedHandle | None, data_preparation: DataPreparationConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Check the demonstrations, rename their columns to the standard names, and hold out a part for evaluation.

    The chat template of the base model, if there is one, renders one chat of each kind as a check.
    """
    tokenizer = None if base_model is None else base_model.tokenizer()
    trained, held_out = preparation.split_demonstrations(frame_of(raw_demonstrations), data_preparation, tokenizer)
    made_from = origins_of(raw_demonstrations, "demonstrations")
    return with_origins(trained, made_from), with_origins(held_out, made_from)
