"""Preferences: pairs of responses, one chosen over the other, as a person gave them or sampled from the SFT policy.

Either way a pair ends up as text, to be read, and as the token sequences that reward training sees. They close in the
end of text if and only if the response stopped by itself, exactly as rewards are scored later.
"""

from typing import Any

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms
from ppo_rlhf.data.chats import is_chat, render_chat
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.demo.judge import noisy_preference
from ppo_rlhf.models.tokenizers import append_end, end_of_turn_id, special_ids
from ppo_rlhf.ppo.sampling import GeneratedResponses, SamplingSettings, generate_responses
from ppo_rlhf.rewards.functions import RewardFunction, call_reward_function
from ppo_rlhf.rewards.scorers import close_response

COLUMNS = ("prompt", "chosen", "rejected", "chosen_ids", "rejected_ids")
_STREAM = "preferences"


def check_preferences(
    frame: pd.DataFrame, prompt_column: str, chosen_column: str, rejected_column: str
) -> pd.DataFrame:
    """Return the columns `chosen`, `rejected` and, if the table has one, `prompt`, in its order.

    Values are texts, or lists of chat messages (in TRL's formats, with the prompt apart or inside).

    Raises:
        DataError: A column is missing, or a value is empty or neither text nor chat.
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
        for row, value in enumerate(table[standard].tolist()):
            if not _is_text(value) and not is_chat(value):
                raise DataError(f"preferences: row {row}, column `{given}`: expected text or chat, got {value!r:.60}")
    for row, record in enumerate(table.to_dict("records")):
        chats = [given for given, standard in wanted.items() if not _is_text(record[standard])]
        if 0 < len(chats) < len(wanted):
            texts = [given for given in wanted if given not in chats]
            raise DataError(
                f"preferences: row {row} has text in {_named(texts)} and a chat in {_named(chats)}; all must be of one "
                f"kind. {_remedy(prompt_column, texts)}"
            )
    return table


def _named(columns: list[str]) -> str:
    return " and ".join(f"`{column}`" for column in columns)


def _remedy(prompt_column: str, texts: list[str]) -> str:
    if texts == [prompt_column]:
        return "Where the chats hold the prompt, too, set reward_modelling.prompt_column to a name that is no column."
    return "Write texts as chats, or chats as texts."


def tokenise_preferences(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """Return a checked table of pairs with their token sequences (`COLUMNS`).

    Given texts are taken to be whole: the end of text closes each of them, as in TRL. A prompt is joined to its
    response without a space between.
    """
    rows, end, special = [], end_of_turn_id(tokenizer), special_ids(tokenizer)
    for record in frame.to_dict("records"):
        prompt = record.get("prompt", "")
        rows.append(
            {
                "prompt": _readable(prompt),
                **{side: _readable(record[side]) for side in ("chosen", "rejected")},
                **{
                    f"{side}_ids": _encode(prompt, record[side], tokenizer, end, special)
                    for side in ("chosen", "rejected")
                },
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def sample_preferences(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    sampling: SamplingSettings,
    labeller: tuple[str, RewardFunction],
    *,
    pairs: int,
    beta: float,
    seed: int,
    batch_size: int = 256,
) -> pd.DataFrame:
    """Sample two responses to each of `pairs` prompts and label them by noisy Bradley–Terry preferences.

    The first of a pair is chosen with probability sigmoid(beta x (score of the first - score of the second)). Pairs of
    two equal responses say nothing and are left out, so the table may be a little shorter than `pairs`.

    Args:
        policy: Samples the responses.
        tokenizer: Its tokenizer.
        prompts: Training prompts, used in turn: none twice before each was used once.
        sampling: How tokens are drawn.
        labeller: Name and function of the score; it stays hidden from the table.
        pairs: Pairs to sample.
        beta: How reliable the labels are, per unit of the score.
        seed: Of prompts' order, noise and labels.
        batch_size: Responses sampled at a time.

    Returns:
        A table of `COLUMNS`.
    """
    batch = prompts.select(episode_prompts(seed, 1, pairs, len(prompts)))
    sides = [_sample(policy, batch, sampling, seed, number, batch_size) for number in (0, 1)]
    token_lists = [side.token_lists() for side in sides]
    texts = [tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in token_lists]
    name, function = labeller
    scores = [call_reward_function(function, name, batch.texts, side, batch.columns) for side in texts]
    special = special_ids(tokenizer)
    rows = []
    for row, first_is_chosen in enumerate(noisy_preference(scores[0], scores[1], beta, seed)):
        if token_lists[0][row] == token_lists[1][row]:
            continue
        record: dict[str, Any] = {"prompt": batch.texts[row]}
        for side, number in (("chosen", 1 - first_is_chosen), ("rejected", int(first_is_chosen))):
            stopped = bool(sides[number].terminated[row])
            record[side] = texts[number][row]
            record[f"{side}_ids"] = batch.prompt_ids[row] + close_response(
                token_lists[number][row], stopped, tokenizer.eos_token_id, special
            )
        rows.append(record)
    if not rows:
        raise DataError(
            f"preferences: the policy gave two equal responses in all {pairs} pairs. Raise the temperature."
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _sample(
    policy: PreTrainedModel, batch: PromptDataset, sampling: SamplingSettings, seed: int, number: int, batch_size: int
) -> GeneratedResponses:
    # shortest prompts first: a left-padded batch costs what its longest prompt costs
    order = sorted(range(len(batch)), key=lambda row: len(batch.prompt_ids[row]))
    uniforms = episode_uniforms(seed, _STREAM, number, len(batch), sampling.response_length)
    generated = generate_responses(
        policy, [batch.prompt_ids[row] for row in order], uniforms[order], sampling, batch_size=batch_size
    )
    back = sorted(range(len(order)), key=order.__getitem__)
    return GeneratedResponses(
        generated.response_ids[back],
        generated.lengths[back],
        generated.terminated[back],
        generated.sampler_logprobs[back],
    )


def _encode(
    prompt: Any, response: Any, tokenizer: PreTrainedTokenizerBase, end: int | None, special: frozenset[int]
) -> list[int]:
    if _is_text(response):
        return append_end(list(tokenizer((prompt or "") + response)["input_ids"]), tokenizer.eos_token_id)
    text = render_chat([*(prompt or []), *response], tokenizer, "preferences")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if end in ids:  # what the template puts behind the turn is not there when PPO's responses are scored
        ids = ids[: len(ids) - ids[::-1].index(end)]
    return close_response(ids, True, tokenizer.eos_token_id, special)


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
