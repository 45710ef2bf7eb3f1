"""Prompts: read, split and tokenised as the run will do it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pandas as pd
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompts import PromptDataset, PromptsConfig, split_held_out, tokenise_prompts
from ppo_rlhf.models.loading import PretrainedHandle, context_length, steady_context
from ppo_rlhf.models.tokenizers import same_vocabulary, special_ids, stop_token_ids, train_word_tokenizer
from ppo_rlhf.preflight.request import PROMPT_TABLES, RunRequest
from ppo_rlhf.rewards.scorers import check_room_to_score
from ppo_rlhf.training.supervised.demonstrations import corpus_texts
from ppo_rlhf.training.supervised.sft import SupervisedFinetuningConfig

_ROW = "row of the file"  # a column of numbers, by which a part's prompts are found among those that fit


@dataclass(frozen=True)
class FuturePolicy:
    """What is known of the SFT policy before the run: how it cuts text into tokens, how many it can read, its ends."""

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    ppo_context: tuple[int | None, str]
    """How many of them PPO may give it, and why no more (`steady_context`)."""
    generation_config: GenerationConfig | None = None
    vocabulary: int | None = None
    """Number of its token ids; None: those of the tokenizer."""

    def stop_token_ids(self, ppo: PPOConfig) -> tuple[int, ...]:
        """Return the ids that will end a response.

        Raises:
            ConfigError, ModelError: There is none, or not the one that is set.
        """
        return stop_token_ids(
            self.tokenizer,
            self.generation_config,
            stop_token=ppo.stop_token,
            stop_token_id=ppo.stop_token_id,
            vocabulary=self.vocabulary,
        )


def future_policy(
    run: RunRequest, models: dict[str, PretrainedHandle], demonstrations: pd.DataFrame | None
) -> FuturePolicy | None:
    """Return the SFT policy's tokenizer and context: its own, the base model's, or those of a model from scratch."""
    handle = models.get("base_model" if run.writes("sft_policy") else "sft_policy")
    if handle is not None:
        config = handle.config()
        return FuturePolicy(
            handle.tokenizer(),
            context_length(config),
            steady_context(config),
            handle.generation_config(),
            config.get_text_config().vocab_size,
        )
    settings = run.group("supervised_finetuning")
    if demonstrations is None or not isinstance(settings, SupervisedFinetuningConfig):
        return None
    if "messages" in demonstrations.columns or run.source("base_model") is not None:
        return None  # already refused
    context = settings.max_position_embeddings
    return FuturePolicy(train_word_tokenizer(corpus_texts(demonstrations), context), context, (context, ""))


def check_stop_tokens(run: RunRequest, policy: FuturePolicy | None) -> None:
    """Note a token that is to end responses and that the policy does not have."""
    ppo = run.group("ppo")
    if policy is not None and isinstance(ppo, PPOConfig):
        with run.noting():
            policy.stop_token_ids(ppo)


def check_prompts(
    run: RunRequest,
    tables: dict[str, pd.DataFrame],
    policy: FuturePolicy | None,
    reward_model: PretrainedHandle | None = None,
) -> None:
    """Note prompts that cannot be used: a missing column, rows that are no prompts, too long ones, a part without."""
    settings, ppo = run.group("prompts"), run.group("ppo")
    if not isinstance(settings, PromptsConfig) or "raw_prompts" not in tables:
        return
    given = {name: tables[name] for name in PROMPT_TABLES if name in tables}
    with run.noting():
        for name, frame in given.items():
            check_column(frame, settings.column, str(run.source(name)), "prompts.column")
        if policy is not None and isinstance(ppo, PPOConfig):
            _check_tokens(run, given, settings, policy, ppo, reward_model)
        else:
            _parts(given, settings)


def _check_tokens(
    run: RunRequest,
    given: dict[str, pd.DataFrame],
    settings: PromptsConfig,
    policy: FuturePolicy,
    ppo: PPOConfig,
    reward_model: PretrainedHandle | None,
) -> None:
    """Raise an error of ours if prompts cannot be tokenised, are too long, or all of a part would be dropped."""
    context, why = policy.ppo_context
    tokenise = partial(
        tokenise_prompts,
        tokenizer=policy.tokenizer,
        column=settings.column,
        response_length=ppo.response_length,
        context=context,
        overlong=ppo.overlong_prompts,
        why=why,
    )
    numbered = {name: frame.assign(**{_ROW: range(len(frame))}) for name, frame in given.items()}
    fitting = {}
    for name, frame in numbered.items():
        # the whole file, not its parts as the run will split it: a row's number is the person's own
        prompts = tokenise(frame, name=str(run.source(name)))
        fitting[name] = set(prompts.columns[_ROW])
        if reward_model is not None:
            _check_room_to_score(prompts, policy, ppo, reward_model)
    for name, source, part in _parts(numbered, settings):
        if fitting[source].isdisjoint(part[_ROW]):
            tokenise(part, name=name)  # raises what the run would


def _parts(given: dict[str, pd.DataFrame], settings: PromptsConfig) -> list[tuple[str, str, pd.DataFrame]]:
    """Return what the run will train on and hold out: what it calls the part, whose rows it has, and the part."""
    trained, held_out = split_held_out(
        given["raw_prompts"],
        given.get("raw_evaluation_prompts"),
        settings.held_out_share,
        settings.max_held_out,
        settings.seed,
        settings.column,
    )
    return [("training prompts", "raw_prompts", trained), ("evaluation prompts", [*given][-1], held_out)]


def _check_room_to_score(
    prompts: PromptDataset, policy: FuturePolicy, ppo: PPOConfig, reward_model: PretrainedHandle
) -> None:
    """Raise ModelError if the reward model reads the policy's ids, and fewer of them than a response can have."""
    if not same_vocabulary(reward_model.tokenizer(), policy.tokenizer):
        return
    closes = not special_ids(policy.tokenizer).issuperset(policy.stop_token_ids(ppo))
    context = context_length(reward_model.config())
    check_room_to_score(context, prompts.prompt_ids, ppo.response_length, closes=closes)


def check_column(frame: pd.DataFrame, column: str, where: str, parameter: str) -> None:
    """Raise DataError unless the table has the column that a parameter names."""
    if column not in frame.columns:
        raise DataError(
            f"{where}: there is no column `{column}` ({parameter}); it has {', '.join(map(str, frame.columns))}. "
            f"Name the right one in {parameter}."
        )
