"""The reward of a run, built as its configuration asks: a reward model, Python functions, or a weighted sum of both."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import processes
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.offloading import to_host
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.functions import RewardFunction, call_token_reward_function, load_function
from ppo_rlhf.rewards.model_scorer import ModelScorer
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer, Scoring

NOTHING_TO_OFFLOAD = (
    "ppo.offload_reward_model=true, but this run loads no reward model: leave it out, or give a "
    "component of type model (in PPOTrainer: the model, or its directory)"
)


def build_reward_scorer(
    config: RewardConfig,
    reward_model: PretrainedHandle | None,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int | None = 64,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
) -> RewardScorer:
    """Import every function, and load the reward model if a component asks for it.

    Args:
        config: The components.
        reward_model: Read only if a component is of type model.
        policy_tokenizer: Tokenizer of the responses to be scored.
        batch_size: Sequences in one forward of the reward model; None: what memory allows.
        device: Device of the reward model.
        dtype: Precision of the reward model.
        offload: Whether the reward model stays in the host's memory and is on the device only while it scores.

    Raises:
        ConfigError: No component is the reward model, and it is to be offloaded; or one is, and there is none.
        RewardError: A function cannot be found.
        ModelError: The reward model cannot be loaded.
    """
    scorings: dict[str, Scoring] = {
        c.title: partial(score_by_function, load_function(c.function), c.title)
        for c in config.components
        if c.function is not None
    }
    model: PreTrainedModel | None = None
    if config.needs_model:
        if reward_model is None:
            raise ConfigError("reward.components asks for a reward model, but there is none: set reward_model_path.")
        model = reward_model.reward_model(dtype)
        if offload:
            to_host(model)
        else:
            nn.Module.to(model, device)
        scorer = ModelScorer(model, reward_model.tokenizer(), policy_tokenizer, batch_size, torch.device(device))
        scorings |= {c.title: scorer for c in config.components if c.function is None}
    elif offload:
        raise ConfigError(NOTHING_TO_OFFLOAD)
    return RewardScorer([(c.title, c.weight, scorings[c.title]) for c in config.components], model)


def check_room(
    scorer: RewardScorer, prompt_lengths: Sequence[int], response_length: int, stop_token_ids: Sequence[int]
) -> None:
    """Raise `ModelError` if a response to one of the prompts could be longer than the reward model reads.

    This is checked only if the two share a vocabulary: other lengths are unknown before training.
    """
    longest = max(prompt_lengths, default=0)
    for model in (scoring for _, _, scoring in scorer.components if isinstance(scoring, ModelScorer)):
        closes = not model.rendering.special_ids.issuperset(stop_token_ids)  # then an end of text comes on top
        needed = longest + response_length + closes
        if model.rendering.reads_policy_ids and model.context is not None and needed > model.context:
            end = " and an end of text after its stop token" if closes else ""
            raise ModelError(
                f"the longest prompt has {longest} tokens: with a response of {response_length}{end} it would have "
                f"{needed}, the reward model reads {model.context}. Shorten the prompts or ppo.response_length, "
                "or use a reward model with a longer context"
            )


def check_chats(scorer: RewardScorer, prompts: PromptDataset) -> None:
    """Raise `DataError` if a prompt is a chat that the reward model's chat template does not take."""
    for model in (scoring for _, _, scoring in scorer.components if isinstance(scoring, ModelScorer)):
        model.rendering.check(prompts.chats, "prompts")


def functions_of(scorer: RewardScorer) -> list[Scoring]:
    """Return the components that are not a reward model."""
    return [scoring for _, _, scoring in scorer.components if not isinstance(scoring, ModelScorer)]


def score_by_function(function: RewardFunction, name: str, batch: ResponseBatch) -> Tensor:
    """Return a function's scores [N], or its numbers for each token [N, longest response]; float64, in every process.

    Raises:
        RewardError: As `call_token_reward_function`.
    """

    def call() -> list[float] | list[list[float]]:
        given = (batch.prompts, list(batch.completions), batch.response_ids, batch.all_columns)
        return call_token_reward_function(function, name, *given)

    values = processes.on_main(call)
    rows = [torch.tensor(value, dtype=torch.float64) for value in values]
    return pad_sequence(rows, batch_first=True) if rows and rows[0].dim() else torch.tensor(values, dtype=torch.float64)


def reward_model_accuracy(reward_model: PretrainedHandle | None, reward: RewardConfig) -> float | None:
    """Return the accuracy on held-out pairs from the reward model's own configuration; None if it is not there.

    Reward training writes it there, so it is never the accuracy of another model.
    """
    if reward_model is None or not reward.needs_model:
        return None
    accuracy = getattr(reward_model.config(), "held_out_accuracy", None)
    return None if accuracy is None else float(accuracy)
