"""Nodes of the supervised fine-tuning pipeline."""

import logging
from functools import partial

import pandas as pd

from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runtime.progress_display import watching
from ppo_rlhf.supervised import sft
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig

log = logging.getLogger(__name__)


def train_sft_policy(
    base_model: PretrainedHandle | None,
    demonstrations: pd.DataFrame,
    evaluation_demonstrations: pd.DataFrame,
    supervised_finetuning: SupervisedFinetuningConfig,
) -> tuple[TrainedModel, list[dict[str, float]]]:
    """Fine-tune the base model on the demonstrations; with `from_scratch`, train a small model."""
    start = base_model.source if base_model is not None else "random weights"
    log.info("Supervised fine-tuning of %s on %d demonstrations …", start, len(demonstrations))
    policy, history = sft.train_sft_policy(
        base_model, demonstrations, evaluation_demonstrations, supervised_finetuning, partial(watching, "SFT")
    )
    losses = [entry["sft/eval_loss"] for entry in history if "sft/eval_loss" in entry]
    log.info(
        "SFT policy: %.3g M parameters, loss on held-out demonstrations %.3f nats per token.",
        policy.model.num_parameters() / 1e6,
        losses[-1],
    )
    return policy, history
