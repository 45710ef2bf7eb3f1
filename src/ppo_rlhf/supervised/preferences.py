"""Preferences: pairs of a chosen and a rejected response, given by the user or sampled from the SFT policy.

A row has the texts of a pair and the pair's token sequences for reward training. In PPO the reward model reads token
sequences of the same form (`rewards.rendering`).
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms
from ppo_rlhf.data.chats import (
    SYSTEM,
    TOOLS,
    Chat,
    Tools,
    join_chats,
    read_text_or_chat,
    read_tools,
    try_chats,
    with_system,
)
from ppo_rlhf.data.columns import name_unused
from ppo_rlhf.data.plain_texts import name_plain_texts
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.repeated_prompts import split_chat, split_texts
from ppo_rlhf.models.tokenizers import append_end, encode_texts
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.people.answers import AGREEMENT
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.rendering import Rendering, conversation_ids
from ppo_rlhf.runtime.log_lines import say_once
from ppo_rlhf.runtime.processes import on_main
from ppo_rlhf.runtime.user_functions import RewardFunction

SIDES = ("prompt", "chosen", "rejected")
COLUMNS = (*SIDES, "chosen_ids", "rejected_ids")


def check_preferences(
    frame: pd.DataFrame, prompt_column: str, chosen_column: str, rejected_column: str
) -> pd.DataFrame:
    """Return the columns `prompt` (empty text without a prompt), `chosen`, `rejected` and, if given, `tools`.

    Values of `frame` are texts or lists of chat messages. The prompt may be in the prompt column, at the beginning of
    both responses, or both in the column and in the responses (`data.repeated_prompts`); the returned table has it only
    once. Pairs of equal responses are left out; the index keeps the row numbers of `frame`.

    Raises:
        DataError: A column is missing, a value is empty or neither text nor chat, or all pairs have equal responses.
    """
    renamed = {chosen_column: "chosen", rejected_column: "rejected"}
    for column in renamed:
        if column not in frame.columns:
            raise DataError(
                f"preferences: no column `{column}`; the columns are {', '.join(map(str, frame.columns))}. Set "
                "reward_modelling.chosen_column and reward_modelling.rejected_column to your columns."
            )
    if prompt_column in frame.columns:
        renamed = {prompt_column: "prompt", **renamed}
    table = frame[list(renamed)].rename(columns=renamed).reset_index(drop=True)
    for given, standard in renamed.items():
        values = enumerate(table[standard].tolist())
        table[standard] = [
            read_text_or_chat(value, f"preferences: row {row}, column `{given}`") for row, value in values
        ]
    records = [_separate_prompt(record, row) for row, record in enumerate(table.to_dict("records"))]
    texts = [
        (row, str(record["prompt"]), (record["chosen"], record["rejected"]))
        for row, record in enumerate(records)
        # Pairs that people compared have their prompt apart; a response that begins with it was sampled so
        if AGREEMENT not in frame and isinstance(record["chosen"], str) and isinstance(record["rejected"], str)
    ]
    fix = "set reward_modelling.prompt_column to a name that no column has"
    for number, parts in split_texts("preferences", "chosen and rejected begin", texts, fix).items():
        records[number] = dict(zip(SIDES, parts, strict=True))
    checked = pd.DataFrame(records, columns=list(SIDES))
    are_chats = [isinstance(chosen, list) for chosen in checked["chosen"]]
    name_unused("preferences", frame.columns, [*renamed, AGREEMENT], of_chats=any(are_chats))
    for row in np.flatnonzero(are_chats) if SYSTEM in frame else ():
        where = f"preferences: row {row}"
        checked.at[row, "prompt"] = with_system(checked.at[row, "prompt"], frame[SYSTEM].iloc[row], where)
    if TOOLS in frame and any(are_chats):
        checked[TOOLS] = [read_tools(value, f"preferences: row {row}") for row, value in enumerate(frame[TOOLS])]
    return _without_equals(checked, "chosen", "rejected")


def try_template(checked: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> None:
    """Render one chat of each kind of a checked table.

    Raises:
        DataError: The chat template refuses a chat or leaves a part of a chat out.
    """
    try_chats(_chats_of(checked), tokenizer)


def _chats_of(checked: pd.DataFrame) -> Iterator[tuple[str, Chat, Tools]]:
    """Yield (row as errors name it, messages, tools) for each conversation of a checked table."""
    tools = checked.get(TOOLS, repeat(None))
    for row, prompt, *responses, row_tools in zip(checked.index, *map(checked.get, SIDES), tools, strict=False):
        chats = (join_chats(prompt, response) for response in responses if isinstance(response, list))
        yield from ((f"preferences: row {row}", chat, row_tools) for chat in chats)


def _without_equals(table: pd.DataFrame, chosen: str, rejected: str) -> pd.DataFrame:
    """Return a table without pairs of equal responses, which teach nothing and count as half right in the accuracy."""
    differ = [first != second for first, second in zip(table[chosen], table[rejected], strict=True)]
    if not any(differ):
        raise DataError(
            f"preferences: the two responses are equal in all {len(differ)} pairs. Give pairs of different responses"
        )
    if not all(differ):
        say_once(f"preferences: {differ.count(False)} of {len(differ)} pairs have equal responses and are left out.")
    return table[differ]


def _separate_prompt(record: dict[str, str | Chat], row: int) -> dict[str, str | Chat]:
    """Return a pair of chats with the prompt separated from the responses; return a pair of texts unchanged."""
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        return {"prompt": "", **record}
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"preferences: row {row} has both texts and chats. Give chosen and rejected both as texts, with a prompt "
            "that is text, or both as chats, with the prompt in the responses or in the prompt column."
        )
    if isinstance(prompt, list):
        where = f"preferences: row {row}"
        (asked, chosen), (again, rejected) = (split_chat(prompt, side, where) for side in (chosen, rejected))
        if asked != again:
            raise DataError(f"{where}: the system messages of chosen and rejected differ. Give both the same prompt.")
        return {"prompt": asked, "chosen": chosen, "rejected": rejected}
    from trl.data_utils import extract_prompt

    extracted = extract_prompt({"chosen": chosen, "rejected": rejected})
    pair: dict[str, str | Chat] = {name: list(value) for name, value in extracted.items()}
    questions = {(message["content"] or "").strip() for message in [*chosen, *rejected] if message["role"] == "user"}
    if isinstance(prompt, str) and not questions:
        pair["prompt"] = [*pair["prompt"], {"role": "user", "content": prompt}]
    elif isinstance(prompt, str) and prompt.strip() not in questions:
        raise DataError(
            f"preferences: row {row}: the prompt {prompt[:60]!r} is not a user's message of the row's chats. Give the "
            "prompt as a chat; or to ignore the prompt, set reward_modelling.prompt_column to a name that no column has"
        )
    return pair


def tokenise_preferences(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """Return a checked table of pairs with token sequences (`COLUMNS`).

    A text is the prompt and the response, joined without a space and followed by the end-of-text token, as in TRL. The
    tokens of a chat are the tokens that the tokenizer's chat template renders. Pairs with equal tokens are left out.
    """
    rows = []
    pairs = zip(frame["prompt"], frame["chosen"], strict=True)
    name_plain_texts("preferences", (f"{prompt}{text}" for prompt, text in pairs if isinstance(text, str)), tokenizer)
    tools = frame.get(TOOLS, repeat(None))
    for row, prompt, *responses, row_tools in zip(frame.index, *map(frame.get, SIDES), tools, strict=False):
        ids = [_encode(prompt, response, row_tools, tokenizer, f"preferences: row {row}") for response in responses]
        rows.append([*map(_readable, [prompt, *responses]), *ids])
    # Leave out pairs of responses with equal tokens: a chat template may render different texts equally
    return _without_equals(pd.DataFrame(rows, columns=list(COLUMNS), index=frame.index), "chosen_ids", "rejected_ids")


def noisy_preference(
    first_scores: Sequence[float], second_scores: Sequence[float], beta: float, seed: int
) -> list[bool]:
    """Return Bradley–Terry labels: the first of a pair is preferred (True) with probability σ(beta (first - second)).

    With a beta of 0 the labels are random. With an infinite beta the higher score is always preferred, and labels of
    equal scores are random. The label of pair i depends only on the seed, i and the pair's scores.
    """
    rng = random.Random(seed)
    labels = []
    for first, second in zip(first_scores, second_scores, strict=True):
        logit = 0.0 if first == second else beta * (first - second)
        # Compute the sigmoid as σ(x) = (1 + tanh(x / 2)) / 2, which does not overflow
        labels.append(rng.random() < 0.5 * (1.0 + math.tanh(0.5 * logit)))
    return labels


def sample_preferences(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    sampling: SamplingSettings,
    config: PPOConfig,
    labeller: tuple[str, RewardFunction],
    *,
    pairs: int,
    beta: float,
    seed: int,
    batch_size: int = 256,
) -> pd.DataFrame:
    """Sample two responses to each of `pairs` prompts, and label the pairs by noisy Bradley–Terry preferences.

    With responses a and b to a prompt, a is chosen with probability sigmoid(beta x (score of a - score of b)). Pairs of
    equal responses are left out, so the returned table, with the columns `COLUMNS`, may have fewer than `pairs` rows.
    Every prompt is used once before any prompt is used again. `config` gives the rollout engine and the precision, as
    in PPO's rollouts. `labeller` is (name, function); only the main process calls the function. `seed` fixes the order
    of the prompts, the sampling noise and the labels.

    Raises:
        DataError: All pairs have equal responses.
        RewardError: The labeller raised an exception or returned wrong scores.
    """
    batch = prompts.select(episode_prompts(seed, 1, pairs, len(prompts)))
    batches, halving = [], Halving("sampling of pairs", "reward_modelling.sampling_batch_size")
    for number in (0, 1):
        noise = episode_uniforms(seed, "preferences", number, pairs, sampling.response_length)
        responses = sample_responses(policy, batch, noise, sampling, config, batch_size=batch_size, halving=halving)
        batches.append(response_batch(batch, responses, tokenizer))
    name, function = labeller
    scores = on_main(
        lambda: [call_reward_function(function, name, b.prompts, list(b.completions), b.all_columns) for b in batches]
    )
    sequences = [Rendering(tokenizer, tokenizer).sequences(responses) for responses in batches]
    rows = []
    for row, first_is_chosen in enumerate(noisy_preference(scores[0], scores[1], beta, seed)):
        if batches[0].response_ids[row] == batches[1].response_ids[row]:
            continue
        sides = (0, 1) if first_is_chosen else (1, 0)
        ids = [sequences[side][row] for side in sides]
        rows.append([batch.texts[row], *(batches[side].completions[row] for side in sides), *ids])
    if not rows:
        raise DataError(f"preferences: the two responses are equal in all {pairs} pairs. Raise ppo.temperature.")
    if len(rows) < pairs:
        say_once(f"preferences: {pairs - len(rows)} of {pairs} sampled pairs have equal responses and are left out.")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _encode(prompt: Any, response: Any, tools: Tools, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if isinstance(response, str):
        return append_end(encode_texts([(prompt or "") + response], tokenizer)[0], tokenizer.eos_token_id)
    return conversation_ids(join_chats(prompt or [], response), tokenizer, where, tools=tools)


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in value)
