"""Nodes of the reward modelling pipeline."""

import logging
from functools import partial

import mlflow
import pandas as pd
import torch
from datasets import Dataset

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.data.tables import frame_of, origins_of, origins_of_frame, with_origins
from ppo_rlhf.evaluation.win_rate import WinRate
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.people.answers import AGREEMENT
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.runtime.progress_display import watching
from ppo_rlhf.runtime.user_functions import load_function
from ppo_rlhf.supervised import preferences as pairs
from ppo_rlhf.supervised import reward_training
from ppo_rlhf.supervised.reward_training import RewardModellingConfig

log = logging.getLogger(__name__)


def check_preferences(raw_preferences: Dataset | None, reward_modelling: RewardModellingConfig) -> pd.DataFrame:
    """Check the user's preferences before any training; without preferences return an empty table.

    The agreement between the people who gave them is logged to MLflow.
    """
    if raw_preferences is None:
        return pd.DataFrame()
    given = frame_of(raw_preferences)
    if AGREEMENT in given and pd.notna(given[AGREEMENT].iloc[0]) and mlflow.active_run() is not None:
        mlflow.log_metric(AGREEMENT, float(given[AGREEMENT].iloc[0]))
    checked = pairs.check_preferences(given, *reward_modelling.columns)
    return with_origins(checked, origins_of(raw_preferences, "preferences"))


def collect_preferences(
    checked_preferences: pd.DataFrame,
    sft_policy: PretrainedHandle,
    raw_prompts: Dataset | None,
    raw_evaluation_prompts: Dataset | None,
    reward_modelling: RewardModellingConfig,
    ppo: PPOConfig,
    prompts: PromptsConfig,
) -> pd.DataFrame:
    """Tokenise the user's preferences; without preferences, sample pairs of responses and let the labeller choose."""
    tokenizer = sft_policy.tokenizer()
    if len(checked_preferences):
        tokenised = pairs.tokenise_preferences(checked_preferences, tokenizer).reset_index(drop=True)
        return with_origins(tokenised, origins_of_frame(checked_preferences))
    labeller = reward_modelling.labeller
    if raw_prompts is None or labeller is None:
        raise DataError(
            "preferences: none are given, and sampling needs prompts and a labeller; set preferences_path, or "
            "prompts_path and reward_modelling.labeller"
        )
    reader = PromptReader.of(sft_policy, ppo)
    # Sample the pairs of responses for the prompts that PPO trains on
    training, _ = reader.read_split(raw_prompts, raw_evaluation_prompts, prompts)
    policy = sft_policy.frozen_lm(torch.float32, resolve_device(reward_modelling.device))
    log.info("Sampling %d pairs from the SFT policy, labelled by %s …", reward_modelling.pairs, labeller)
    sampled = pairs.sample_preferences(
        policy,
        tokenizer,
        training,
        sampling_settings(ppo, tokenizer, policy),
        ppo,
        (labeller, load_function(labeller)),
        pairs=reward_modelling.pairs,
        beta=reward_modelling.label_beta,
        seed=reward_modelling.seed,
        batch_size=reward_modelling.sampling_batch_size,
    )
    role, of = "pairs of its responses, labelled by", origins_of(raw_prompts, "prompts")
    return with_origins(sampled, [Origin("table", role, labeller, made_from=of)])


def train_reward_model(
    sft_policy: PretrainedHandle, preferences: pd.DataFrame, reward_modelling: RewardModellingConfig
) -> tuple[TrainedModel, list[dict[str, float]]]:
    """Train a reward model on the preferences, starting from the SFT policy; raise an error if it learns nothing."""
    log.info("Training the reward model on %d pairs …", len(preferences))
    reward_model, history = reward_training.train_reward_model(
        sft_policy, preferences, reward_modelling, partial(watching, "Reward model")
    )
    config = reward_model.model.config
    accuracy = reward_training.say_accuracy(WinRate(config.held_out_accuracy, *config.held_out_interval))
    log.info("Reward model: %s of the held-out pairs are in the right order.", accuracy)
    return reward_model, history
