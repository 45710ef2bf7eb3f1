"""Train a reward model on preferences: Bradley–Terry loss, the SFT policy's backbone, TRL's RewardTrainer."""

import logging
import math
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.checkpoints.model_card import OWN_FORM, render_reward_card
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.core.errors import ModelError, TrainingError
from ppo_rlhf.data.tables import hold_out, origins_of_frame
from ppo_rlhf.evaluation.win_rate import WinRate, win_rate
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import START
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.tokenizers import check_vocabulary
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.rewards.config import Reference
from ppo_rlhf.rewards.scorers import score_sequences
from ppo_rlhf.runtime.paths import place
from ppo_rlhf.supervised.optimisation import History, OptimisationConfig, Watch, advice

TRAINED_FROM = "trained_from"
"""Name in a reward model's config.json of the fingerprint of the SFT policy that its training started from."""

logger = logging.getLogger(__name__)

RELIABLE_ACCURACY = 0.65
"""A run and its report warn if the reward model's held-out accuracy is below `RELIABLE_ACCURACY` for certain, by the
upper end of its 95 % interval, because PPO would mostly learn the reward model's errors."""


@parameter_group("reward_modelling")
@dataclass(frozen=True, kw_only=True)
class RewardModellingConfig(OptimisationConfig):
    """Settings for the preferences and for training the reward model."""

    num_train_epochs: Annotated[float, Field(gt=0.0)] = 1.0
    """Number of passes over the pairs. TRL's default is 3 passes; more than one pass overfits quickly (Ouyang et al.
    2022, appendix C.2)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-4
    """Peak learning rate of AdamW (TRL's default for reward models)."""
    prompt_column: str = "prompt"
    """Column of prompts in given preferences. If the column is missing, the responses are whole texts."""
    chosen_column: str = "chosen"
    """Column of the preferred responses."""
    rejected_column: str = "rejected"
    """Column of the rejected responses."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the prompts, or of pairs without prompts, held out to measure the accuracy."""
    max_held_out: Annotated[int, Field(ge=1)] = 1000
    """Largest number of held-out prompts."""
    preferences_path: str | None = None
    """Path of given preferences, for the model card."""
    minimum_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The run stops if the accuracy on held-out pairs is lower. PPO would learn nothing from such a model."""
    normalise: bool = True
    """Normalise scores over the training responses. They get mean 0 and standard deviation 1. The saved weights do so.
    If the training responses are samples of the SFT policy, PPO starts at a mean score of 0."""

    labeller: Reference | None = None
    """`module:name` of a function `score(prompts, completions, **columns)` that labels pairs sampled from the SFT
    policy. It is used only if no preferences are given."""
    pairs: Annotated[int, Field(ge=2)] = 8000
    """Pairs to sample if no preferences are given."""
    label_beta: Annotated[float, Field(ge=0.0)] = 1.0
    """Reliability of the sampled labels: P(first is chosen) = sigmoid(beta x difference of scores). 1 takes the
    labeller's scores as log-odds (Bradley and Terry); 0 makes the labels coin flips."""
    sampling_batch_size: Annotated[int, Field(ge=1)] = 256
    """Responses sampled at a time."""

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns of prompts, preferred and rejected responses."""
        return self.prompt_column, self.chosen_column, self.rejected_column


def train_reward_model(
    sft_policy: PretrainedHandle, preferences: pd.DataFrame, config: RewardModellingConfig, watch: Watch | None = None
) -> tuple[TrainedModel, History]:
    """Train a score head and the SFT policy's backbone so that chosen responses score higher than rejected responses.

    The loss is -log sigmoid(score of the chosen - score of the rejected response) (Bradley–Terry; Ouyang et al. 2022,
    eq. 1). `preferences` has the columns `preferences.COLUMNS`.

    Returns:
        The reward model with its tokenizer and model card, and its metrics by optimiser step: `reward_model/loss` (mean
        over the steps since the last logged loss), `reward_model/learning_rate`, and once per epoch
        `reward_model/eval_accuracy` (share of all held-out pairs in the right order; ties count half). The reward model
        is a transformers classifier if a transformers classifier computes the same scores up to a constant
        (`score_mean` in the model's config.json).

    Raises:
        TrainingError: The reward model's final accuracy is below `minimum_accuracy`.
    """
    tokenizer, made_from = sft_policy.tokenizer(), (sft_policy.origin(START), *origins_of_frame(preferences))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = CausalLMRewardModel.from_causal_lm(sft_policy.causal_lm())
    check_vocabulary(tokenizer, model.config, sft_policy.source)
    pairs = short_enough(preferences, config.longest_sequence(context_length(model.config)))
    trained, held_out = split_pairs(pairs, config)
    pad_id, batch_size = int(tokenizer.pad_token_id), config.per_device_train_batch_size

    def evaluate(model: PreTrainedModel) -> dict[str, float]:
        return {"eval_accuracy": pair_accuracy(*_score_pairs(model, held_out, pad_id, 2 * batch_size))}

    for line in advice("reward_modelling", config, model.num_parameters()):
        logger.warning("%s", line)
    from ppo_rlhf.supervised import trl_support

    chosen, rejected = (_token_lists(trained, name) for name in ("chosen_ids", "rejected_ids"))
    history = trl_support.run_reward_trainer(model, tokenizer, chosen, rejected, config, evaluate=evaluate, watch=watch)
    accuracy = [entry["reward_model/eval_accuracy"] for entry in history if "reward_model/eval_accuracy" in entry][-1]
    rate = accuracy_interval(accuracy, len(held_out))
    _check_accuracy(rate, len(held_out), config.minimum_accuracy)
    if config.normalise:
        logger.info("Scoring %d training responses, to normalise the reward model's scores …", 2 * len(trained))
        normalise_scores(model, torch.cat(_score_pairs(model, trained, pad_id, 2 * batch_size)))
    saved, own_form = cast(PreTrainedModel, nn.Module.to(model, "cpu")), None
    try:
        saved = model.to_classifier(pad_id, tokenizer.eos_token_id)
    except ModelError as error:
        own_form = str(error)
        logger.info(
            "The reward model is saved as a class of this package; other programs load it after `import %s`: %s.",
            OWN_FORM,
            error,
        )
    # Reports read the reward model's held-out accuracy from its configuration, and checks read what it came from
    saved.config.held_out_accuracy, saved.config.held_out_interval = accuracy, [rate.low, rate.high]
    setattr(saved.config, TRAINED_FROM, sft_policy.fingerprint())
    facts = _facts(config, len(trained), rate, len(held_out))
    has_template = tokenizer.chat_template is not None
    card = render_reward_card(
        sft_policy.source, facts, config.preferences_path, own_form, made_from, has_template=has_template
    )
    # Pad on the right, because some classifiers, such as GPT-2's, count positions wrongly with left padding
    tokenizer.padding_side = "right"
    return TrainedModel(saved, tokenizer, card=card, made_from=made_from), history


def split_pairs(pairs: pd.DataFrame, config: RewardModellingConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (training pairs, held-out pairs); the pairs of one prompt are all training pairs or all held-out pairs.

    Without prompts, no pair is both a training pair and a held-out pair, and of several copies of a held-out pair only
    one copy is kept.

    Raises:
        DataError: There are fewer than two distinct prompts, or without prompts fewer than two distinct pairs.
    """
    has_prompts = bool(pairs["prompt"].astype(bool).any())
    # Compare chats as text, because lists of messages have no hash
    sides = zip(pairs["chosen"].map(str), pairs["rejected"].map(str), strict=True)
    keys = pairs["prompt"].tolist() if has_prompts else list(sides)
    share, most = config.held_out_share, config.max_held_out
    advice = "Give pairs of more prompts." if has_prompts else "Give more pairs."
    rows = hold_out(
        keys, share, most, config.seed, "held_out_pairs", name="preferences", advice=advice, copies=has_prompts
    )
    trained, held_out = (pairs.iloc[part].reset_index(drop=True) for part in rows)
    return trained, held_out


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> float:
    """Return the share of pairs [N] whose chosen response scores higher; ties count half."""
    return float(((chosen > rejected).double() + 0.5 * (chosen == rejected).double()).mean())


def accuracy_interval(accuracy: float, pairs: int) -> WinRate:
    """Return the accuracy on some pairs with its 95 % interval, which takes the pairs as independent."""
    right, ties = divmod(round(2 * accuracy * pairs), 2)
    return win_rate(np.array([[1.0]] * right + [[0.5]] * ties + [[0.0]] * (pairs - right - ties)))


def say_accuracy(rate: WinRate) -> str:
    """Return an accuracy with its interval in words."""
    return f"{rate.rate:.1%} (95 % interval {rate.low:.1%} to {rate.high:.1%})"


def _facts(config: RewardModellingConfig, pairs: int, rate: WinRate, held_out: int) -> dict[str, str]:
    """Return the model card's entries for data, training and accuracy; the accuracy has a confidence interval."""
    source = f"sampled from the model it started from, labelled by `{config.labeller}`"
    if config.preferences_path is not None or config.labeller is None:
        source = f"of `{place(config.preferences_path or 'preferences')}`"
    return {
        "Data": f"{pairs:,} pairs {source}",
        "Training": f"Bradley–Terry loss, {config.in_words('pairs')}",
        "Accuracy": f"{rate.rate:.1%} of {held_out} held-out pairs are in the right order "
        f"(95 % interval {rate.low:.1%} to {rate.high:.1%})",
    }


@torch.no_grad()
def normalise_scores(model: CausalLMRewardModel, scores: Tensor) -> None:
    """Rescale the score head so that the `scores` [N], computed before the call, get mean 0 and standard deviation 1.

    Raises:
        TrainingError: All scores are equal, or a score is not finite.
    """
    mean, deviation = float(scores.double().mean()), float(scores.double().std())
    if not deviation > 0.0:  # `not >` is also True for a deviation of NaN
        raise TrainingError(
            f"reward_modelling: the scores of all responses have mean {mean} and standard deviation {deviation}, so "
            "they cannot be normalised."
        )
    model.score.weight.div_(deviation)
    model.score.bias.sub_(mean).div_(deviation)


def _score_pairs(model: PreTrainedModel, pairs: pd.DataFrame, pad_id: int, batch_size: int) -> tuple[Tensor, Tensor]:
    halving = Halving("scoring of pairs", "reward_modelling.per_device_train_batch_size")
    chosen, rejected = (
        score_sequences(model, _token_lists(pairs, name), pad_id, batch_size, halving=halving)
        for name in ("chosen_ids", "rejected_ids")
    )
    return chosen, rejected


def _token_lists(pairs: pd.DataFrame, column: str) -> list[list[int]]:
    # Convert NumPy arrays, which pandas reads from a Parquet file, to lists
    return [[int(i) for i in ids] for ids in pairs[column]]


def short_enough(preferences: pd.DataFrame, limit: int | None) -> pd.DataFrame:
    """Return the pairs whose token sequences have at most `limit` tokens, and warn of longer pairs; None: no limit."""
    fits = preferences[["chosen_ids", "rejected_ids"]].map(len).max(axis=1) <= (math.inf if limit is None else limit)
    if not fits.all():
        logger.warning("%d of %d pairs are longer than %d tokens and are left out", (~fits).sum(), len(fits), limit)
    return preferences[fits]


def _check_accuracy(rate: WinRate, pairs: int, minimum: float) -> None:
    text = f"the reward model puts {say_accuracy(rate)} of {pairs} held-out pairs in the right order"
    if rate.rate < minimum:
        raise TrainingError(
            f"reward_modelling: {text}, below minimum_accuracy={minimum}. Give more pairs, change learning_rate or "
            "raise num_train_epochs."
        )
    reliable = f"{100 * RELIABLE_ACCURACY:.0f} %"
    if rate.high < RELIABLE_ACCURACY:
        logger.warning(
            "%s. Below %s PPO tends to learn the reward model's errors: give more pairs or epochs.", text, reliable
        )
    elif rate.low < RELIABLE_ACCURACY:
        logger.info("%s: too few pairs to tell whether that is above %s.", text, reliable)
