"""Preferences: pairs of responses, one chosen over the other, given by the user or sampled from the SFT policy.

A pair has its texts and the token sequences of reward training, which are those that the reward model is shown when
rewards are scored later (`rewards.rendering`).
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
    is_text,
    join_chats,
    read_text_or_chat,
    read_tools,
    try_chats,
    with_system,
)
from ppo_rlhf.data.columns import name_unused
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.quiet import say_once
from ppo_rlhf.models.tokenizers import append_end, encode_texts
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.ppo.engines import SamplingSettings
from ppo_rlhf.rewards.functions import RewardFunction, call_reward_function
from ppo_rlhf.rewards.rendering import Rendering, conversation_ids
from ppo_rlhf.runtime.processes import on_main
from ppo_rlhf.supervised.answers import KEPT, TRACE

SIDES = ("prompt", "chosen", "rejected")
COLUMNS = (*SIDES, "chosen_ids", "rejected_ids")


def check_preferences(
    frame: pd.DataFrame,
    prompt_column: str,
    chosen_column: str,
    rejected_column: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> pd.DataFrame:
    """Return the columns `prompt` (empty without one), `chosen` and `rejected`, and `tools` if there are; in order.

    Values are texts, or lists of chat messages with the prompt apart, inside both, or both. Of chats it is then apart.
    The index has the numbers of the rows: pairs of equal responses are left out. With a tokenizer its chat template is
    tried.

    Raises:
        DataError: A column is missing, a value is empty or neither text nor chat, all pairs are of equal responses, or
            the template does not take or show a chat.
    """
    wanted = {chosen_column: "chosen", rejected_column: "rejected"}
    for column in wanted:
        if column not in frame.columns:
            raise DataError(
                f"preferences: no column `{column}`; the columns are {', '.join(map(str, frame.columns))}. Name yours "
                "in reward_modelling.chosen_column and reward_modelling.rejected_column."
            )
    if prompt_column in frame.columns:
        wanted = {prompt_column: "prompt", **wanted}
    table = frame[list(wanted)].rename(columns=wanted).reset_index(drop=True)
    for given, standard in wanted.items():
        values = enumerate(table[standard].tolist())
        table[standard] = [
            read_text_or_chat(value, f"preferences: row {row}, column `{given}`") for row, value in values
        ]
    records = [_prompt_apart(record, row) for row, record in enumerate(table.to_dict("records"))]
    checked = pd.DataFrame(records, columns=list(SIDES))
    are_chats = [isinstance(chosen, list) for chosen in checked["chosen"]]
    used = [*wanted, *(KEPT if TRACE in frame else ())]  # of people's answers these are kept beside the model
    name_unused("preferences", frame.columns, used, of_chats=any(are_chats))
    for row in np.flatnonzero(are_chats) if SYSTEM in frame else ():
        where = f"preferences: row {row}"
        checked.at[row, "prompt"] = with_system(checked.at[row, "prompt"], frame[SYSTEM].iloc[row], where)
    if TOOLS in frame and any(are_chats):
        checked[TOOLS] = [read_tools(value, f"preferences: row {row}") for row, value in enumerate(frame[TOOLS])]
    checked = _without_equals(checked, "chosen", "rejected")
    if tokenizer is not None:
        try_chats(_chats_of(checked), tokenizer)
    return checked


def _chats_of(checked: pd.DataFrame) -> Iterator[tuple[str, Chat, Tools]]:
    """Yield each conversation of a checked table: where it is, its messages, its tools."""
    tools = checked.get(TOOLS, repeat(None))
    for row, prompt, *responses, own in zip(checked.index, *map(checked.get, SIDES), tools, strict=False):
        chats = (join_chats(prompt, response) for response in responses if isinstance(response, list))
        yield from ((f"preferences: row {row}", chat, own) for chat in chats)


def _without_equals(table: pd.DataFrame, chosen: str, rejected: str) -> pd.DataFrame:
    """Return a table without the pairs of equal responses, which teach nothing and count half in the accuracy."""
    differ = [first != second for first, second in zip(table[chosen], table[rejected], strict=True)]
    if not any(differ):
        raise DataError(f"preferences: the responses are equal in all {len(differ)} pairs. Give pairs that differ")
    if not all(differ):
        say_once(f"preferences: {differ.count(False)} of {len(differ)} pairs are of equal responses and left out.")
    return table[differ]


def _prompt_apart(record: dict[str, str | Chat], row: int) -> dict[str, str | Chat]:
    """Return a pair of chats with their prompt apart, and a pair of texts as it is."""
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        return {"prompt": "", **record}
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"preferences: row {row} has both texts and chats. Give chosen and rejected both as texts, with a prompt "
            "that is text, or both as chats, with the prompt inside or apart."
        )
    if isinstance(prompt, list):
        is_inside = chosen[: len(prompt)] == rejected[: len(prompt)] == prompt
        start = len(prompt) if is_inside and len(prompt) < min(len(chosen), len(rejected)) else 0
        return {"prompt": prompt, "chosen": chosen[start:], "rejected": rejected[start:]}
    from trl.data_utils import extract_prompt  # heavy: only chats pay for it

    found = extract_prompt({"chosen": chosen, "rejected": rejected})
    pair: dict[str, str | Chat] = {name: list(value) for name, value in found.items()}
    asked = {(message["content"] or "").strip() for message in [*chosen, *rejected] if message["role"] == "user"}
    if isinstance(prompt, str) and not asked:
        pair["prompt"] = [*pair["prompt"], {"role": "user", "content": prompt}]
    elif isinstance(prompt, str) and prompt.strip() not in asked:
        raise DataError(
            f"preferences: row {row}: the prompt {prompt[:60]!r} is no user's message of the chats beside it. Give it "
            "as a chat; or to leave it out, set reward_modelling.prompt_column to a name that no column has"
        )
    return pair


def tokenise_preferences(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """Return a checked table of pairs with their token sequences (`COLUMNS`).

    The end of text closes each given text, as in TRL. A prompt is joined to its response without a space. A chat is
    all that the tokenizer's chat template makes of it. Pairs whose tokens are equal are left out.
    """
    rows = []
    tools = frame.get(TOOLS, repeat(None))
    for row, prompt, *responses, own in zip(frame.index, *map(frame.get, SIDES), tools, strict=False):
        ids = [_encode(prompt, response, own, tokenizer, f"preferences: row {row}") for response in responses]
        rows.append([*map(_readable, [prompt, *responses]), *ids])
    # a template may leave out what is all their difference, such as white space
    return _without_equals(pd.DataFrame(rows, columns=list(COLUMNS), index=frame.index), "chosen_ids", "rejected_ids")


def noisy_preference(
    first_scores: Sequence[float], second_scores: Sequence[float], beta: float, seed: int
) -> list[bool]:
    """Return Bradley–Terry labels: the first of a pair is preferred (True) with probability σ(beta (first - second)).

    A beta of 0 draws at random, infinity is always right (and draws between equals). The labels have a random stream of
    their own: the one of pair i depends only on the seed, i and the scores.
    """
    rng = random.Random(seed)
    labels = []
    for first, second in zip(first_scores, second_scores, strict=True):
        logit = 0.0 if first == second else beta * (first - second)
        # σ(x) = (1 + tanh(x / 2)) / 2 does not overflow.
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
    """Sample two responses to each of `pairs` prompts, label them by noisy Bradley–Terry preferences; return `COLUMNS`.

    The first of a pair is chosen with probability sigmoid(beta x (score of the first - score of the second)). Pairs of
    equal responses are left out, so the table may be a little shorter than `pairs`. Each prompt is used once before any
    is used again. Engine and precision are those of PPO's own rollouts, `config`'s. The main process calls the
    labeller, given with its name. The seed is that of the prompts' order, the noise and the labels.

    Raises:
        DataError: All pairs are of equal responses.
        RewardError: The labeller failed.
    """
    batch = prompts.select(episode_prompts(seed, 1, pairs, len(prompts)))
    batches = []
    for number in (0, 1):
        noise = episode_uniforms(seed, "preferences", number, pairs, sampling.response_length)
        responses = sample_responses(policy, batch, noise, sampling, config, batch_size=batch_size)
        batches.append(response_batch(batch, responses, tokenizer))
    name, function = labeller
    scores = on_main(
        lambda: [call_reward_function(function, name, b.prompts, list(b.completions), b.all_columns) for b in batches]
    )
    sequences = [Rendering(tokenizer, tokenizer).sequences(each) for each in batches]
    rows = []
    for row, first_is_chosen in enumerate(noisy_preference(scores[0], scores[1], beta, seed)):
        if batches[0].response_ids[row] == batches[1].response_ids[row]:
            continue
        sides = (0, 1) if first_is_chosen else (1, 0)
        ids = [sequences[side][row] for side in sides]
        rows.append([batch.texts[row], *(batches[side].completions[row] for side in sides), *ids])
    if not rows:
        raise DataError(f"preferences: the two responses are equal in all {pairs} pairs. Raise ppo.temperature.")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _encode(prompt: Any, response: Any, tools: Tools, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if is_text(response):
        return append_end(encode_texts([(prompt or "") + response], tokenizer)[0], tokenizer.eos_token_id)
    return conversation_ids(join_chats(prompt or [], response), tokenizer, where, tools=tools)


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in value)
