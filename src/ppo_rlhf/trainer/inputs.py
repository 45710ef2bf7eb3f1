"""The inputs of PPOTrainer other than its models: prompts, rewards, queries, responses and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.restore import MENDABLE
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, DataError, ModelError, RewardError
from ppo_rlhf.core.responses import response_lengths
from ppo_rlhf.data.chats import CONVERSATIONS, answered
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.data.sources import check_texts, table_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import REWARD
from ppo_rlhf.models.reward_model import why_no_reward_model, with_mean
from ppo_rlhf.models.tokenizers import (
    check_vocabulary,
    ensure_pad_id,
    ensure_pad_token,
    printed_dates,
    same_vocabulary,
    templates_of,
)
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.passes.sampling import Responses, SamplingSettings
from ppo_rlhf.passes.transfers import to_host
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.ppo.run_setup import stops_of
from ppo_rlhf.rewards import scorers
from ppo_rlhf.rewards.combination_rules import check_whole
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.functions import check_column_names
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.rewards.shaping import check_token_rewards
from ppo_rlhf.trainer.start_models import HOST, check_same_vocabulary, model_origin, take_over

TOKENS, MASK = "input_ids", "attention_mask"


def take_prompts(
    prompts: Any, name: str, policy: TrainedModel, config: PPOConfig, context: int | None, why: str = ""
) -> PromptDataset:
    """Return prompts as a tokenised dataset.

    Args:
        prompts: Texts, chats or token ids as a list, an array or a column of a table; a table (pandas, `datasets`, a
            list of rows, a mapping of columns) with a column `prompt`, or else `input_ids`, whose other columns are
            passed to reward functions; or a PromptDataset.
        name: The name of PPOTrainer's argument, for errors.
        policy: The policy, whose tokenizer encodes the prompts.
        config: Hyperparameters.
        context: Maximum number of tokens of a prompt with its response; None sets no limit.
        why: The reason for `context`, for errors, if `context` is not the policy's own context.

    Raises:
        DataError: The type of the prompts is unknown, there is no prompt, or a prompt cannot be read or is too long.
    """
    if isinstance(prompts, PromptDataset):
        check_query_length(prompts.prompt_ids, [config.response_length] * len(prompts), context, why)
        return prompts
    columns, tokenizer = _columns(prompts, name), policy.tokenizer
    reader = PromptReader(tokenizer, context, config.response_length, config.overlong_prompts, why)
    if columns.keys() & {"prompt", *CONVERSATIONS}:
        return reader.read(prompts if isinstance(prompts, Dataset) else table_of(columns), "prompt", name)
    if TOKENS not in columns:
        names = ", ".join(map(str, columns))
        raise DataError(f"PPOTrainer: {name} has no column `prompt` or `{TOKENS}`; the columns are {names}")
    rows = list(columns[TOKENS])
    if MASK in columns:
        try:
            pairs = [zip(*row, strict=True) for row in zip(rows, columns[MASK], strict=True)]
            rows = [[token for token, is_text in row if is_text] for row in pairs]
        except (TypeError, ValueError):
            raise DataError(f"PPOTrainer: {name}: each row of `{MASK}` needs as many numbers as `{TOKENS}`") from None
        ids = token_lists(rows, "prompt", policy.model.config.get_text_config().vocab_size)
    else:
        ids = without_padding(rows, "prompt", policy.model, tokenizer, config)
    other_columns = {column: columns[column] for column in columns if column not in (TOKENS, MASK)}
    prompts = {"prompt": tokenizer.batch_decode(ids), "prompt_ids": ids, "prompt_length": [len(row) for row in ids]}
    table = table_of({**other_columns, **prompts})
    return PromptDataset.of_table(reader.fit(table, name))


def _columns(prompts: Any, argument: str) -> Mapping[str, Sequence[Any]]:
    if isinstance(prompts, pd.DataFrame):
        return {str(name): prompts[name].tolist() for name in prompts.columns}
    # tensors, NumPy arrays and pandas Series have `tolist`
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes):
        first = prompts[0] if prompts else ""
        if isinstance(first, Mapping):
            if non_mappings := [row for row in prompts if not isinstance(row, Mapping)]:
                raise DataError(f"PPOTrainer: {argument} mixes mappings with {non_mappings[0]!r:.60}; give one kind")
            names = dict.fromkeys(name for row in prompts for name in row)
            return {name: [row.get(name) for row in prompts] for name in names}
        is_text = isinstance(first, str) or (isinstance(first, list) and first and isinstance(first[0], Mapping))
        return {"prompt" if is_text else TOKENS: prompts}
    if isinstance(prompts, Dataset):
        check_texts(prompts, f"PPOTrainer: {argument}")
        return {name: prompts[name] for name in prompts.column_names}
    # A DatasetDict is also a Mapping, but has column_names
    if isinstance(prompts, Mapping) and not hasattr(prompts, "column_names"):
        if texts := [column for column, rows in prompts.items() if isinstance(rows, str)]:
            raise DataError(f"PPOTrainer: {argument}: column `{texts[0]}` is a single text; give a list of texts")
        return prompts
    raise DataError(
        f"PPOTrainer: {argument} is of the type {type(prompts).__name__}; give a list or a table (column `prompt` or "
        "`input_ids`) of texts, chats or token ids, or a PromptDataset. Of a DatasetDict give one split, and turn a "
        "stream into a table with Dataset.from_list"
    )


def take_reward(reward: Any, policy: TrainedModel, config: PPOConfig) -> RewardScorer | None:
    """Return the scorer of responses, or None without a reward.

    `reward` is one of: a function `reward(prompts, completions, **columns)`; a reward model; a tuple (reward model,
    tokenizer) if the reward model's tokenizer is not the policy's; a reward model's directory; a RewardConfig, whose
    components may name several reward models by `path`; a RewardScorer. With `reward=None` the reward model is loaded
    from `reward_model_path`, if `reward_model_path` is set.

    Raises:
        ConfigError: The type of the reward is unknown.
        ModelError: The reward model cannot be used, or the critic cannot be initialised from the reward model.
    """
    device, batch_size, dtype = policy.model.device, config.local_rollout_forward_batch_size, frozen_dtype(config)
    offload = config.offload_reward_model
    path = config.reward_model_path
    reward = path if reward is None else reward
    if isinstance(reward, str | Path):
        reward, path = RewardConfig(components=[RewardComponentConfig(type="model")]), str(reward)
    if isinstance(reward, RewardConfig):
        handle = None if path is None else PretrainedHandle(path)
        if handles := list(scorers.handles_of(reward, handle).values()):
            _check_ids_of_critic(handles[0].tokenizer(), policy, config)
        return scorers.build_reward_scorer(
            reward, handle, policy.tokenizer, batch_size=batch_size, device=device, dtype=dtype, offload=offload
        )
    model, tokenizer = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, None)
    if isinstance(model, nn.Module):
        model_tokenizer = tokenizer or policy.tokenizer
        _check_ids_of_critic(model_tokenizer, policy, config)
        model = take_over(model, "reward model", dtype, HOST if offload else device).requires_grad_(False)
        # Set num_labels to the output size of the score head, because the model's configuration may give another number
        if isinstance(score := getattr(model, "score", None), nn.Linear):
            model.config.num_labels = score.out_features
        if why := why_no_reward_model(type(model).__name__, model.config):
            raise ModelError(f"PPOTrainer: a reward model must be a sequence classifier with num_labels=1; {why}")
        origin = model_origin(model, REWARD)
        model = with_mean(model)
        if offload:
            to_host(model)
        if tokenizer is None:
            check_same_vocabulary(model, policy.model, "reward model", "; give reward=(model, tokenizer)")
        check_vocabulary(model_tokenizer, model.config, "PPOTrainer: the reward model")
        templates_of(model_tokenizer, "PPOTrainer: the reward model's tokenizer")
        ensure_pad_token(model_tokenizer, model.config)
        ensure_pad_id(model, model_tokenizer)
        scorer = scorers.ModelScorer(model, model_tokenizer, policy.tokenizer, batch_size, device)
        return RewardScorer([("model", 1.0, scorer)], model, made_from=(origin,))
    if offload:
        raise ConfigError(scorers.NOTHING_TO_OFFLOAD)
    if reward is None or isinstance(reward, RewardScorer):
        return reward
    if not callable(reward):
        raise ConfigError(
            f"PPOTrainer: reward has the unknown type {type(reward).__name__}; give a function, a reward model or its "
            "directory, (reward model, tokenizer), a RewardConfig or a RewardScorer"
        )
    name = getattr(reward, "__name__", "reward")
    name = name if name.isidentifier() else "reward"
    return RewardScorer([(name, 1.0, partial(scorers.score_by_function, reward, name))])


def origin_of(scorer: RewardScorer | None) -> dict[str, Any]:
    """Return the parts of a reward whose fingerprints a resumed run compares.

    Reward functions stand under the key `MENDABLE`, because a resumed run may use reward functions with changed code.
    """
    if scorer is None:
        return {}
    parts = {**vars(scorer), "components": [(name, weight) for name, weight, _ in scorer.components]}
    del parts["made_from"]  # a model given as an object does not know its directory
    if others := scorers.models_of(scorer)[1:]:
        parts["other_models"] = others
    return {"reward": [type(scorer), parts], MENDABLE: scorers.functions_of(scorer) or None}


def origin_of_prompts(prompts: PromptDataset | None, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the prompts, loaded into memory, whose fingerprint a resumed run compares.

    If the chat template prints the date, the unrendered chats are returned, because the rendered texts differ from day
    to day.
    """
    if prompts is None:
        return None
    loaded = prompts.select(range(len(prompts)))
    if not loaded.has_chats or not printed_dates(tokenizer):
        return loaded
    rows = zip(loaded.chats, loaded.texts, loaded.prompt_ids, strict=True)
    return [[chat or [text, ids] for chat, text, ids in rows], loaded.columns, templates_of(tokenizer)]


def try_functions(scorer: RewardScorer, prompts: PromptDataset, config: PPOConfig) -> None:
    """Call each reward function on a `probe_batch`, as the pipeline does before a run; raise the function's error."""
    if functions := scorers.functions_of(scorer):
        batch = probe_batch(prompts)
        if 2 in [function(batch).dim() for function in functions]:
            check_token_rewards(config)
            check_whole(scorer.combine, "a reward function")


def probe_batch(prompts: PromptDataset) -> ResponseBatch:
    """Return the first two prompts as a batch, with each prompt's text as its response, to try reward functions on.

    Raises:
        DataError: A column's name cannot be an argument of a reward function.
    """
    check_column_names(prompts.columns, "prompts")
    first_rows = prompts.select(range(min(2, len(prompts))))
    chats = [
        None if chat is None else answered(chat, text)
        # Use zip with strict=False, because `messages` is empty if no prompt is a chat
        for chat, text in zip(first_rows.messages, first_rows.texts, strict=False)
    ]
    return ResponseBatch(
        prompts=first_rows.texts,
        completions=first_rows.texts,
        columns=first_rows.columns,
        prompt_ids=first_rows.prompt_ids,
        response_ids=first_rows.prompt_ids,
        terminated=[True] * len(first_rows),
        chats=chats,
    )


def given_scores(scores: Any, rows: int) -> RewardScorer:
    """Return a scorer that returns the given scores for any batch.

    Raises:
        RewardError: `scores` are not `rows` numbers, or a score is not finite in float32.
    """
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: an element is a tensor with several numbers
        raise RewardError(f"step: scores must be one number for each response: {error}") from None
    if len(values) != rows:
        raise RewardError(f"step: {len(values)} scores for {rows} responses; give one score per response")
    values_B = torch.tensor(values, dtype=torch.float64)
    if not (is_finite := values_B.float().isfinite()).all():
        row = int(is_finite.int().argmin())
        raise RewardError(f"step: the score of response {row} is {values[row]}; scores must be finite in float32")
    return RewardScorer([("given", 1.0, lambda _: values_B)])


def token_lists(rows: Any, what: str, vocabulary: int) -> list[list[int]]:
    """Return rows of token ids as lists.

    Args:
        rows: 1-D tensors, tensors `[1, n]` or lists; or one tensor `[N, n]` with N rows.
        what: What a row is, such as `query`, for errors.
        vocabulary: The number of token ids.

    Raises:
        DataError: There are no rows, or a row is empty or is not token ids of this vocabulary.
    """
    result = []
    for row, ids in enumerate(rows):
        try:
            tensor = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError):
            tensor = torch.empty(0)
        tensor = tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor
        if tensor.dim() != 1 or tensor.is_floating_point() or not len(tensor):
            given = " ".join(repr(ids).split())
            raise DataError(
                f"{what} {row}: expected a 1-D tensor of token ids with at least one token, got {given:.60}"
            )
        if int(tensor.min()) < 0 or int(tensor.max()) >= vocabulary:
            raise DataError(f"{what} {row}: token ids must be between 0 and {vocabulary - 1}, the model's vocabulary")
        result.append(tensor.tolist())
    if not result:
        raise DataError(f"there is no {what}")
    return result


def without_padding(
    rows: Any, what: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PPOConfig
) -> list[list[int]]:
    """Return token ids (`token_lists`) without the pad tokens at both ends of their rows.

    A tokenizer's pad token may also be its begin-of-text, end-of-text, unknown or stop token, or occur within a row. A
    pad token with a second meaning is kept as text at an end at which every row has exactly one pad token, and at the
    end of a response.

    Raises:
        DataError: A pad token with a second meaning is at either end of a row, and may be padding or text; or
            `token_lists` refuses a row.
    """
    vocabulary = model.config.get_text_config().vocab_size
    stop_ids = stops_of(config, tokenizer, model)
    ids, pad = token_lists(rows, what, vocabulary), tokenizer.pad_token_id
    # Number of pad tokens at the right end of each row
    right = [len(list(takewhile(pad.__eq__, reversed(row)))) for row in ids]
    left = [len(list(takewhile(pad.__eq__, row[: len(row) - last]))) for row, last in zip(ids, right, strict=True)]
    texts = [row[first : len(row) - last] for row, first, last in zip(ids, left, right, strict=True)]
    meanings = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *stop_ids}
    if pad not in meanings and not any(pad in text and text != row for text, row in zip(texts, ids, strict=True)):
        return token_lists(texts, what, vocabulary)
    ends_response = what == "response" and pad in stop_ids
    for row, (first, last) in enumerate(zip(left, right, strict=True)):
        if first > min(1, *left) or last > (ends_response or min(1, *right)):
            raise DataError(
                f"{what} {row} begins or ends with {tokenizer.pad_token!r}, which may be padding or text: give rows "
                "without padding, pass the attention_mask to generate(), or set a pad token that no text has"
            )
    return ids


def check_query_length(
    queries: Sequence[Sequence[int]], lengths: Sequence[int], context: int | None, why: str = ""
) -> None:
    """Check that each query with its response fits into the context.

    Args:
        queries: Token ids of each query.
        lengths: Tokens of each response.
        context: Maximum number of tokens of a query with its response; None sets no limit.
        why: The reason for `context`, for the error, if `context` is not the policy's own context.

    Raises:
        DataError: A query with its response is longer than the context.
    """
    for query, length in zip(queries, lengths, strict=True):
        if context is not None and len(query) + length > context:
            raise DataError(
                f"a query of {len(query)} tokens leaves no room for a response of {length} in the model's context of "
                f"{context}; shorten the query or the response{why}"
            )


def check_one_turn(config: PPOConfig) -> None:
    """Raise `ConfigError` if `ppo.environment` is set: `generate` and `step` cannot mark the environment's tokens."""
    if config.environment is not None:
        raise ConfigError(
            f"ppo.environment={config.environment} is for train(); generate() and step() support only one turn"
        )


def take_responses(rows: list[list[int]], sampling: SamplingSettings) -> Responses:
    """Return the caller's responses, cut after their first stop token and padded to `response_length`.

    Raises:
        DataError: A response is longer than `response_length`.
    """
    longest, width = max(map(len, rows)), sampling.response_length
    if longest > width:
        raise DataError(
            f"step: a response has {longest} tokens, ppo.response_length is {width}; raise ppo.response_length, or "
            "give responses without their query (generate with return_prompt=False)"
        )
    row_lengths = torch.tensor([len(row) for row in rows])
    response_ids = torch.tensor([ids + [sampling.pad_token_id] * (width - len(ids)) for ids in rows])
    lengths, terminated = response_lengths(response_ids, sampling.stop_token_ids)
    # Padding that this function added does not end a response, even if the pad token is a stop token
    terminated &= lengths <= row_lengths
    lengths = lengths.minimum(row_lengths)
    is_response = torch.arange(width) < lengths[:, None]
    return Responses(torch.where(is_response, response_ids, sampling.pad_token_id), lengths, terminated)


def _check_ids_of_critic(tokenizer: PreTrainedTokenizerBase, policy: TrainedModel, config: PPOConfig) -> None:
    """Raise `ModelError` if the critic starts from a reward model whose tokenizer differs from the policy's."""
    if config.value_model == "reward_init" and not same_vocabulary(tokenizer, policy.tokenizer):
        raise ModelError(
            "PPOTrainer: ppo.value_model=reward_init: the reward model has another vocabulary than the policy; set "
            "ppo.value_model=separate"
        )
