"""Rewards: a reward model, a user's Python functions, or a weighted sum of both."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import processes
from ppo_rlhf.config.settings_group import settings_group
from ppo_rlhf.core.errors import ConfigError, ModelError, RewardError
from ppo_rlhf.models.loading import PretrainedHandle, context_length
from ppo_rlhf.models.offloading import on_device, to_host
from ppo_rlhf.models.sequence_scores import reads_end, sequence_scores
from ppo_rlhf.models.tokenizers import append_end, encode_texts, same_vocabulary, special_ids
from ppo_rlhf.rewards.functions import (
    TURNS,
    RewardFunction,
    call_token_reward_function,
    load_function,
    split_reference,
)

_warn_once = cache(logging.getLogger(__name__).warning)

NOTHING_TO_OFFLOAD = (
    "ppo.offload_reward_model=true, and there is no reward model of this run's own loading: leave it out, or give a "
    "component of type model (in PPOTrainer: the model, or its directory)"
)


LONGEST_METRIC_NAME = 250
"""The most characters of a metric's key in MLflow."""


def check_metric_name(name: str, what: str, key: str, *, taken: bool = False, snake_case: bool = False) -> None:
    """Raise `ConfigError` if a user's name for `what` does not make a metric `key` that is new and that MLflow takes.

    A key that breaks MLflow's rules loses all metrics that are logged with it.
    """
    pattern, allowed = r"\w[\w.\- ]*", "letters, digits, underscores, dashes, periods and spaces"
    if snake_case:
        pattern, allowed = r"[a-z][a-z0-9_]*", "lower-case letters, digits and underscores, not end in _sft or _se"
    if taken or not re.fullmatch(pattern, name) or len(key) > LONGEST_METRIC_NAME:
        raise ConfigError(
            f"{name!r} cannot name {what}: it makes the metric {key}, of at most {LONGEST_METRIC_NAME} characters, so "
            f"it must be {allowed}, and not be, or begin or end like, a metric that exists"
        )


@settings_group("reward.components")
class RewardComponentConfig:
    """One term of the reward."""

    type: Literal["model", "function"]
    """`model`: the catalog's `reward_model`. `function`: Python, `reward(prompts, completions, **columns)`; see
    docs/rewards.md."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor in the sum; negative for a penalty."""
    function: str | None = None
    """`module:name`, found from the project's directory, its `src`, and the Python path; for type `function`."""
    name: str | None = None
    """What its metric is called (`reward/<name>`); by default `model` or the function's name."""

    def __post_init__(self) -> None:
        if self.type == "function" and not self.function:
            raise ConfigError("a component of type function needs function: module:name.")
        if self.type == "model" and self.function:
            raise ConfigError(f"function={self.function} belongs to type function, not model.")
        if self.function is not None:
            split_reference(self.function)
        title = self.title if self.name is None else self.name
        check_metric_name(title, "a component of reward", f"reward/{title}")

    @property
    def title(self) -> str:
        """The component's name in metrics and errors."""
        return self.name or (split_reference(self.function)[1] if self.function else self.type)


@settings_group("reward")
class RewardConfig:
    """The reward of a response: the weighted sum of its components."""

    components: Annotated[list[RewardComponentConfig], Field(min_length=1)]
    """The terms, each a mapping with the settings of `reward.components`."""

    def __post_init__(self) -> None:
        titles = [component.title for component in self.components]
        repeated = sorted({title for title in titles if titles.count(title) > 1})
        if repeated:
            raise ConfigError(f"reward.components: two components are called {repeated[0]}. Give each its own name.")

    @property
    def needs_model(self) -> bool:
        """Whether any component is the reward model."""
        return any(component.type == "model" for component in self.components)

    def is_judge(self, judge: str | None) -> bool:
        """Return whether a judge `module:name` is this reward or a part of it; None: the reward decides."""
        return judge in {None, *(component.function for component in self.components if component.weight > 0.0)}


@dataclass(frozen=True)
class ResponseBatch:
    """N responses, as text for functions and as tokens for models.

    Attributes:
        prompts: Texts of the prompts.
        completions: Texts of the responses, special tokens left out.
        columns: The prompt table's other columns, N entries each.
        prompt_ids: Tokens of the prompts.
        response_ids: Tokens of the responses; one that stopped ends in its stop token.
        terminated: Whether each response stopped by itself (False: it was cut off at its length).
        turns: Texts of the turns of each response: the policy's, the environment's reply, the policy's, ...; empty
            where the policy writes one turn.
        policy_mask: [N, T] bool, True on the policy's tokens; None: all tokens are the policy's.
    """

    prompts: list[str]
    completions: list[str]
    columns: dict[str, list[Any]]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    terminated: list[bool]
    turns: list[list[str]] = field(default_factory=list)
    policy_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def columns_with_turns(self) -> dict[str, list[Any]]:
        """The columns and `turns`, which a function gets if it names them; a response without turns is one turn."""
        return {**self.columns, TURNS: self.turns or [[text] for text in self.completions]}


@dataclass(frozen=True)
class ScoredResponses:
    """Scores of N responses: `total` [N] is the weighted sum of `components`, each [N] and unweighted.

    The score by a component that gives one number a token is the sum of its numbers. `token_rewards` [N, longest
    response] is the weighted sum of such components by token, 0 behind a response; None if there is none.
    """

    total: Tensor
    components: dict[str, Tensor]
    token_rewards: Tensor | None = None


Scoring = Callable[[ResponseBatch], Tensor]
"""Returns one number a response, [N], or one a token, [N, longest response], 0 behind a response."""


class RewardScorer:
    """Scores responses by every component and sums them up."""

    def __init__(self, components: Sequence[tuple[str, float, Scoring]], model: PreTrainedModel | None = None) -> None:
        """Take (name, weight, scoring) of each component, and the reward model if one of them is."""
        self.names = [name for name, _, _ in components]
        self.model = model
        self.functions = [scoring for _, _, scoring in components if not isinstance(scoring, ModelScorer)]
        self._components = list(components)

    def check_room(
        self, prompt_ids: Sequence[Sequence[int]], response_length: int, stop_token_ids: Sequence[int]
    ) -> None:
        """Raise `ModelError` if a response to one of the prompts could be longer than the reward model reads.

        Only if that shares the policy's vocabulary: other lengths are not known before.
        """
        longest = max(map(len, prompt_ids), default=0)
        for scorer in (scoring for _, _, scoring in self._components if isinstance(scoring, ModelScorer)):
            closes = not scorer.special_ids.issuperset(stop_token_ids)  # then an end of text comes on top
            needed = longest + response_length + closes
            if scorer.reads_policy_ids and scorer.context is not None and needed > scorer.context:
                end = " and an end of text after its stop token" if closes else ""
                raise ModelError(
                    f"the longest prompt has {longest} tokens: with a response of {response_length}{end} it would have "
                    f"{needed}, the reward model reads {scorer.context}. Shorten the prompts or ppo.response_length, "
                    "or use a reward model with a longer context"
                )

    def score(self, batch: ResponseBatch) -> ScoredResponses:
        """Return the scores, float64 on the CPU: float32 would lose small differences of large scores.

        Of several processes each must be given the whole batch. The main process calls the functions, and each process
        scores its share by the reward model; all get all scores.

        Raises:
            RewardError: A function raised, or a score is not a finite float32 number.
        """
        scores: dict[str, Tensor] = {}
        total, token_rewards = torch.zeros(len(batch), dtype=torch.float64), None
        for name, weight, scoring in self._components:
            found = scoring(batch).to("cpu", torch.float64)
            if found.dim() == 2:
                if batch.policy_mask is not None:  # what the environment wrote is no action, and earns nothing
                    found = torch.where(batch.policy_mask[:, : found.shape[1]], found, 0.0)
                token_rewards = weight * found + (0.0 if token_rewards is None else token_rewards)
                found = found.sum(-1)
            scores[name] = found
            total = total + weight * found
        return ScoredResponses(total, scores, token_rewards)


def build_reward_scorer(
    config: RewardConfig,
    reward_model: PretrainedHandle | None,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
) -> RewardScorer:
    """Import every function, and load the reward model if a component asks for it.

    Args:
        config: The components.
        reward_model: Read only if a component is of type model.
        policy_tokenizer: Of the responses to be scored.
        batch_size: Sequences in one forward of the reward model.
        device: Of the reward model.
        dtype: Of the reward model.
        offload: Whether the reward model waits in the host's memory and lies on the device only while it scores.

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


class ModelScorer:
    """Scores prompt + response by a reward model, built as in reward training: end of text iff the response stopped."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        device: torch.device | None = None,
    ) -> None:
        """Take the reward model with its tokenizer, and the tokenizer of the responses.

        It scores on `device`, wherever it lies between its calls; None: where it lies.
        """
        self.model = model
        self._tokenizer = tokenizer
        self._policy_tokenizer = policy_tokenizer
        self.reads_policy_ids = same_vocabulary(tokenizer, policy_tokenizer)
        self.special_ids = special_ids(policy_tokenizer)
        self._batch_size = batch_size
        self._device = device or model.device
        self.context = context_length(model.config)
        if not reads_end(model, tokenizer.eos_token_id):
            _warn_once(
                f"The reward model ({type(model).__name__}) never reads the end of a text: it scores at the last token "
                "that is not its pad token, and that is its end of text, too."
            )

    def __call__(self, batch: ResponseBatch) -> Tensor:
        """Return the scores [N], on the CPU.

        Raises:
            ModelError: A sequence is longer than the model's context.
            RewardError: A score is NaN or infinite.
        """
        sequences = self._token_sequences(batch) if self.reads_policy_ids else self._text_sequences(batch)
        longest = max((len(ids) for ids in sequences), default=0)
        if self.context is not None and longest > self.context:
            raise ModelError(
                f"a prompt with its response has {longest} tokens, the reward model reads {self.context}. "
                "Shorten the prompts or ppo.response_length, or use a reward model with a longer context."
            )
        with on_device(self.model, self._device):
            scores = score_sequences(self.model, sequences, self._tokenizer.pad_token_id, self._batch_size)
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            raise RewardError(
                f"the reward model gave response {row} the score {scores[row].item()}. Check its weights, or set "
                "ppo.dtype to bfloat16 or float32 if it overflows in float16."
            )
        return scores

    def _token_sequences(self, batch: ResponseBatch) -> list[list[int]]:
        rows = zip(batch.prompt_ids, batch.response_ids, batch.terminated, strict=True)
        eos, has_turns = self._tokenizer.eos_token_id, bool(batch.turns)
        return [
            prompt + close_response(response, stopped, eos, self.special_ids, has_turns=has_turns)
            for prompt, response, stopped in rows
        ]

    def _text_sequences(self, batch: ResponseBatch) -> list[list[int]]:
        # decoded together: the policy's tokenizer knows whether a space stands between prompt and response
        rows = [prompt + response for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True)]
        texts = self._policy_tokenizer.batch_decode(rows, skip_special_tokens=True)
        eos = self._tokenizer.eos_token_id
        return [
            append_end(ids, eos) if stopped else ids
            for ids, stopped in zip(encode_texts(texts, self._tokenizer), batch.terminated, strict=True)
        ]


def close_response(
    response: list[int], stopped: bool, eos: int | None, special_ids: frozenset[int], *, has_turns: bool = False
) -> list[int]:
    """Return the response as reward training shows it: the reward model's end of text iff the response stopped.

    A special stop token is replaced by `eos`; a stop token that is text, such as a full stop, stays before it. With
    turns, an episode can be cut off behind the stop token of a turn, which is then no end of the text.
    """
    if not stopped:
        return response[:-1] if has_turns and response and response[-1] in special_ids else response
    text = response[:-1] if response and response[-1] in special_ids else response
    return append_end(text, eos)


@torch.no_grad()
def score_sequences(model: PreTrainedModel, sequences: list[list[int]], pad_id: int, batch_size: int) -> Tensor:
    """Return the reward model's scores [N] of token sequences on the CPU, float32 or wider.

    Each process scores its share and gets all scores. Sequences of similar length make a batch, without padding where
    the architecture can do without.
    """
    own = processes.own_share(len(sequences))
    by_length = sorted(own, key=lambda row: len(sequences[row]))
    scores = torch.zeros(len(own), dtype=torch.promote_types(model.dtype, torch.float32))
    for start in range(0, len(by_length), batch_size):
        rows = by_length[start : start + batch_size]
        found = sequence_scores(model, [sequences[row] for row in rows], pad_id)
        scores[[row - own.start for row in rows]] = found.to(scores)
    return processes.gather_rows(scores)


def score_by_function(function: RewardFunction, name: str, batch: ResponseBatch) -> Tensor:
    """Return a function's scores [N], or its numbers for each token [N, longest response]; float64, in every process.

    Raises:
        RewardError: As `call_token_reward_function`.
    """
    given = (batch.prompts, batch.completions, batch.response_ids, batch.columns_with_turns)
    values = processes.on_main(lambda: call_token_reward_function(function, name, *given))
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
