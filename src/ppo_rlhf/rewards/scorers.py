"""Build the reward of a run from its configuration: reward models, Python functions, or a combination of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.core.errors import ConfigError, ModelError, RewardError
from ppo_rlhf.data.chats import TOOLS
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.judge.llm_judge import load_judge
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import REWARD
from ppo_rlhf.models.reward_model import reads_end, scores_packed, sequence_scores
from ppo_rlhf.passes.halvings import ROLLOUTS, Halving
from ppo_rlhf.passes.rows import table_by_rows
from ppo_rlhf.passes.transfers import to_host
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.rendering import Rendering
from ppo_rlhf.rewards.scoring import ModelScoring, ResponseBatch, RewardScorer, Scoring
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.log_lines import say_once
from ppo_rlhf.runtime.paths import below_project
from ppo_rlhf.runtime.user_functions import RewardFunction

NOTHING_TO_OFFLOAD = (
    "ppo.offload_reward_model=true, but this run loads no reward model: leave the setting out, or add a component of "
    "type model to reward.components (in PPOTrainer: pass a reward model or its directory)"
)


class ModelScorer(ModelScoring):
    """Scores prompts with their responses by a reward model, rendered as in reward training (`Rendering`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        batch_size: int | None = 64,
        device: torch.device | None = None,
        *,
        name: str = "the reward model",
        setting: str = ROLLOUTS,
    ) -> None:
        """Take the reward model with its tokenizer, and the policy's tokenizer, which encoded the responses.

        Each call scores on `device`; None uses the reward model's current device. Between calls the reward model may be
        in host memory. One forward pass takes `batch_size` sequences; None takes as many sequences as fit into memory.
        Errors call the reward model `name`, and `setting` is what gave `batch_size`.
        """
        self.model = model
        self.name = name
        self._tokenizer = tokenizer
        self.rendering = Rendering(tokenizer, policy_tokenizer)
        self._batch_size = batch_size
        self._device = device or model.device
        self._halving = Halving(f"scoring by {name}", setting)
        self.context = context_length(model.config)
        if model.device.type != "meta" and not reads_end(model, tokenizer.eos_token_id):
            say_once(
                f"The reward model ({type(model).__name__}) never reads the end of a text: its pad token is also its "
                "end-of-text token, and it scores at the last token that is not the pad token."
            )

    def __call__(self, batch: ResponseBatch, halving: Halving | None = None) -> Tensor:
        """Return the scores [N] on the CPU.

        When memory runs out, `halving` halves the sequences of a pass; None: the scorer's own, which lasts as long as
        the scorer.

        Raises:
            DataError: The reward model's chat template refuses a prompt.
            ModelError: A prompt with its response is longer than the reward model's context.
            RewardError: A score is NaN or infinite.
        """
        sequences = self.rendering.sequences(batch)
        longest = max((len(ids) for ids in sequences), default=0)
        if self.context is not None and longest > self.context:
            raise ModelError(
                f"a prompt with its response has {longest} tokens, {self.name}'s context is {self.context}. "
                "Shorten the prompts or ppo.response_length, or use a reward model with a longer context."
            )
        scores = score_sequences(
            self.model,
            sequences,
            self._tokenizer.pad_token_id,
            self._batch_size,
            device=self._device,
            halving=halving or self._halving,
        )
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            raise RewardError(
                f"{self.name} gave response {row} the score {scores[row].item()}. Check its weights, or set "
                "ppo.dtype to bfloat16 or float32 if it overflows in float16."
            )
        return scores


def score_sequences(
    model: PreTrainedModel,
    sequences: list[list[int]],
    pad_id: int,
    batch_size: int | None,
    *,
    device: torch.device | None = None,
    halving: Halving | None = None,
) -> Tensor:
    """Return the reward model's scores [N] of token sequences on the CPU, in float32 or wider.

    Each process scores one shard of the sequences and returns all scores (`table_by_rows`). Batches are padded only if
    the architecture needs padding. `device` None is the model's.
    """

    def scores(groups: list[list[int]]) -> Iterator[Tensor]:
        for rows in groups:
            yield sequence_scores(model, [sequences[row] for row in rows], pad_id)[:, None]

    dtype = torch.promote_types(model.dtype, torch.float32)
    how: dict[str, Any] = {"device": device or model.device, "batch_size": batch_size, "halving": halving}
    how["shared"] = lambda: sequences if scores_packed(model) else None
    return table_by_rows(model, [len(ids) for ids in sequences], 1, dtype, scores, **how)[:, 0]


def handles_of(config: RewardConfig, catalogued: PretrainedHandle | None) -> dict[str | None, PretrainedHandle]:
    """Return a handle on each reward model, by the `path` of its component, in the order of the components.

    The path None stands for `catalogued`, the model of `reward_model_path`; without one it is left out. Other reward
    models are read without Python code of their own.
    """
    handles = {}
    for path in config.model_paths:
        handle = catalogued if path is None else PretrainedHandle(below_project(path))
        if handle is not None:
            handles[path] = handle
    return handles


def build_reward_scorer(
    config: RewardConfig,
    reward_model: PretrainedHandle | None,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int | None = 64,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
    setting: str = ROLLOUTS,
) -> RewardScorer:
    """Import every reward function, and load each reward model that a component uses on `device` in `dtype`.

    `reward_model` is the reward model of components without a `path`. The critic of `ppo.value_model=reward_init` is
    copied from the first reward model. One forward pass of a reward model takes `batch_size` sequences, which `setting`
    gave; None takes as many sequences as fit into memory. With `offload` each reward model stays in host memory and
    moves to the device only while it scores. On the device `meta` no weights are read: such a scorer serves the checks
    before a run.

    Raises:
        ConfigError: `offload` is set without a component of type model, or a component of type model has no model.
        RewardError: A reward function cannot be imported.
        ModelError: A reward model cannot be loaded.
    """
    handles, device = handles_of(config, reward_model), torch.device(device)
    if config.needs_catalogued_model and reward_model is None:
        raise ConfigError("reward.components uses a reward model, but there is none: set reward_model_path.")
    if offload and not handles:
        raise ConfigError(NOTHING_TO_OFFLOAD)
    scorings: dict[str, Scoring] = {
        c.title: partial(score_by_function, load_judge(judge, f"reward.{c.title}"), c.title)
        for c in config.components
        if (judge := c.function or c.llm) is not None
    }
    models: list[PreTrainedModel] = []
    for path, handle in handles.items():
        model = handle.empty_reward_model() if device.type == "meta" else handle.reward_model(dtype)
        model.requires_grad_(False)
        if offload and device.type != "meta":
            to_host(model)
        else:
            nn.Module.to(model, device)
        models.append(model)
        name = "the reward model" if path is None else f"the reward model {path}"
        tokenizers = handle.tokenizer(), policy_tokenizer
        scorer = ModelScorer(model, *tokenizers, batch_size, device, name=name, setting=setting)
        scorings |= {c.title: scorer for c in config.components if c.type == "model" and c.path == path}
    return RewardScorer(
        [(c.title, c.weight, scorings[c.title]) for c in config.components],
        models[0] if models else None,
        normalise=config.normalise,
        combine=config.combine,
        made_from=tuple(handle.origin(REWARD) for handle in handles.values()),
    )


def models_of(scorer: RewardScorer) -> list[PreTrainedModel]:
    """Return the reward models of a reward, each once, in the order of the components."""
    models = [scoring.model for _, _, scoring in scorer.components if isinstance(scoring, ModelScorer)]
    return list({id(model): model for model in models}.values())


def check_scorable(
    scorer: RewardScorer, prompt_lengths: Sequence[int], response_length: int, stop_token_ids: Sequence[int]
) -> None:
    """Raise `ModelError` if a prompt with its response could be longer than a reward model's context.

    Nothing is checked if the policy and the reward model have different vocabularies, because the number of the reward
    model's tokens in a response is unknown before training.
    """
    longest = max(prompt_lengths, default=0)
    for model in (scoring for _, _, scoring in scorer.components if isinstance(scoring, ModelScorer)):
        check_context(model.rendering, model.model.config, longest, response_length, stop_token_ids, model.name)


def check_context(
    rendering: Rendering,
    config: PretrainedConfig,
    longest: int,
    response_length: int,
    stop_token_ids: Sequence[int],
    name: str = "the reward model",
) -> None:
    """Raise `ModelError` if a prompt of `longest` tokens with its response could exceed the reward model's context.

    Raise `ModelError`, too, if the reward model, whose configuration is `config`, has no embedding for an id that the
    policy can sample: a token of its tokenizer, or a stop token id without a token. `name` is the reward model's name
    in errors.
    """
    context, rows = context_length(config), config.get_text_config().vocab_size
    highest = max(*rendering.policy_tokenizer.get_vocab().values(), *stop_token_ids)
    if rendering.reads_policy_ids and highest >= rows:
        stop = ", a stop token," if highest in stop_token_ids else ""
        raise ModelError(
            f"the policy can sample the token id {highest}{stop} but {name}'s embedding has {rows} rows. Use "
            "a reward model with as many rows as the policy, or set ppo.stop_token_id to a token of the tokenizer"
        )
    # An end-of-text token follows a stop token that is not one of the rendering's `special_ids`
    closes = not rendering.special_ids.issuperset(stop_token_ids)
    needed = longest + response_length + closes
    if rendering.reads_policy_ids and context is not None and needed > context:
        end = " and an end-of-text token after its stop token" if closes else ""
        raise ModelError(
            f"the longest prompt has {longest} tokens: with a response of {response_length}{end} the sequence would "
            f"have {needed}, {name}'s context is {context}. Shorten the prompts or ppo.response_length, "
            "or use a reward model with a longer context"
        )


def check_chats(scorer: RewardScorer, prompts: PromptDataset, name: str = "prompts") -> None:
    """Raise `DataError` if a reward model's chat template refuses a prompt; `name` names the prompts in errors."""
    for model in (scoring for _, _, scoring in scorer.components if isinstance(scoring, ModelScorer)):
        model.rendering.check(prompts.chats, name, prompts.columns.get(TOOLS))


def functions_of(scorer: RewardScorer) -> list[Scoring]:
    """Return the reward components that are Python functions."""
    return [scoring for _, _, scoring in scorer.components if not isinstance(scoring, ModelScorer)]


def score_by_function(function: RewardFunction, name: str, batch: ResponseBatch) -> Tensor:
    """Return a reward function's scores [N], or its per-token rewards [N, longest response], in float64.

    The main process calls the function; every process returns the result.

    Raises:
        RewardError: As `call_reward_function`.
    """

    def call() -> list[Any]:
        inputs = (batch.prompts, list(batch.completions), batch.all_columns, batch.response_ids)
        return call_reward_function(function, name, *inputs)

    values = processes.on_main(call)
    rows = [torch.tensor(value, dtype=torch.float64) for value in values]
    return pad_sequence(rows, batch_first=True) if rows and rows[0].dim() else torch.tensor(values, dtype=torch.float64)


def reward_model_accuracy(
    reward_model: PretrainedHandle | None, reward: RewardConfig
) -> tuple[float, float, float] | None:
    """Return the reward model's accuracy on held-out pairs and the ends of its 95 % interval, of several the lowest.

    Reward training writes the accuracy into the model's config.json, so the accuracy always belongs to the loaded
    reward model. The result is None if no accuracy is known.
    """
    configs = [handle.config() for handle in handles_of(reward, reward_model).values()]
    known = [(c.held_out_accuracy, *c.held_out_interval) for c in configs if hasattr(c, "held_out_interval")]
    return min(known, default=None)
