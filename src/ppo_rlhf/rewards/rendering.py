"""The token ids that a reward model reads for a prompt with its response: one place for training and scoring.

A prompt that is text is followed by the response and, if the response stopped, by the reward model's end of text. A
prompt that is a chat is shown as the reward model's chat template shows it, with the response as the assistant's
message.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, repeat, takewhile
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chat_templates import find_hidden, is_new, kind_of
from ppo_rlhf.data.chats import (
    ASSISTANT,
    TOOLS,
    Chat,
    Tools,
    answered,
    apply_template,
    chat_ids,
    read_tools,
    render_chat,
)
from ppo_rlhf.models.quiet import said, say_once
from ppo_rlhf.models.tokenizers import (
    CONTENT_MARK,
    append_end,
    around_answer,
    continuations,
    encode_texts,
    same_vocabulary,
    shared_length,
    special_ids,
    templates_of,
    without_template_defaults,
)
from ppo_rlhf.rewards.scoring import ResponseBatch
from ppo_rlhf.runtime.processes import is_main_process

ENVIRONMENT = "environment"
"""Role of a reply that is no turn of the policy's chat template."""
_REPLY_ROLES = ("user", "tool", "system")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendering:
    """Shows prompts with responses to a reward model."""

    tokenizer: PreTrainedTokenizerBase  # the reward model's
    policy_tokenizer: PreTrainedTokenizerBase  # of the prompts and responses

    @cached_property
    def reads_policy_ids(self) -> bool:
        """Whether the reward model has the policy's vocabulary."""
        return same_vocabulary(self.tokenizer, self.policy_tokenizer)

    @cached_property
    def has_policy_template(self) -> bool:
        """Whether the reward model reads chats as the policy writes them: by its vocabulary and its template."""
        own, other = (
            {name: without_template_defaults(text) for name, text in templates_of(each).items()}
            for each in (self.tokenizer, self.policy_tokenizer)
        )
        return self.reads_policy_ids and own == other

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Special tokens of the policy's vocabulary."""
        return special_ids(self.policy_tokenizer)

    def sequences(self, batch: ResponseBatch) -> list[list[int]]:
        """Return the token ids of N prompts with their responses.

        Raises:
            DataError: The reward model's tokenizer has no chat template and a prompt is a chat, its template refuses
                the conversation, or it is another one than the policy's and a reply of the environment is no turn of
                the policy's.
        """
        chats = batch.chats or [None] * len(batch)
        texts = [row for row, chat in enumerate(chats) if chat is None and not self.reads_policy_ids]
        encoded = dict(zip(texts, self._encode(batch, texts), strict=True))
        return [
            encoded[row] if row in encoded else self._sequence(batch, row, chat, f"reward model: response {row}")
            for row, chat in enumerate(chats)
        ]

    def check(self, chats: Iterable[str | None], name: str, tools: Iterable[Any] | None = None) -> None:
        """Raise `DataError` if the reward model's chat template refuses a prompt, its messages as JSON, with a reply.

        Of prompts with the same roles and keys only the first is tried. `name` says in errors where they come from;
        `tools` are the column of that name.
        """
        tried: set[Hashable] = set()
        rows = zip(chats, repeat(None) if tools is None else tools, strict=False)
        for row, (chat, given) in enumerate(rows):
            if chat is None:
                continue
            whole, own = answered(json.loads(chat), CONTENT_MARK), read_tools(given, f"{name}: row {row}")
            if is_new(kind_of(whole, own), tried):
                where = f"{name}: row {row}, for the reward model ({self.tokenizer.name_or_path or 'its tokenizer'})"
                shown = self._shown_tools(whole, own)
                for to_answer in (False, True):
                    render_chat(whole, self.tokenizer, where, to_answer=to_answer, tools=shown)

    def _shown_tools(self, chat: Chat, tools: Tools) -> Tools:
        """Return the tools if the reward model's template has a place for them; else none, which a line says once."""
        if not tools or not self.tokenizer.chat_template:
            return tools
        with suppress(DataError):  # `render_chat` says what the template refuses
            text = apply_template(chat, self.tokenizer, "", tools=tools)
            if find_hidden(chat, tools, self.tokenizer, text).tools:
                say_once("The reward model's chat template does not show tools: it reads conversations without them.")
                return None
        return tools

    def _conversation(self, chat: Chat, tools: Tools, where: str, stopped: bool) -> list[int]:
        shown = self._shown_tools(chat, tools)
        return conversation_ids(chat, self.tokenizer, where, stopped=stopped, tools=shown)

    def _sequence(self, batch: ResponseBatch, row: int, chat: Chat | None, where: str) -> list[int]:
        stopped = batch.terminated[row]
        if chat is not None and not self.has_policy_template:
            tools = read_tools(batch.columns[TOOLS][row], where) if TOOLS in batch.columns else None
            try:
                return self._conversation(chat, tools, where, stopped)
            except DataError:
                turns = batch.turns[row] if batch.turns else [batch.completions[row]]
                if (plain := _replies_as_text(chat, turns)) == chat:
                    raise
            say_once(
                "The reward model's chat template does not take each reply as the policy's response_template reads it "
                "(tool calls, reasoning): it reads such replies as text."
            )
            return self._conversation(plain, tools, where, stopped)
        end: list[int] = []
        if chat is not None:
            end = _after_reply(chat, self.tokenizer, where)
        elif self.tokenizer.eos_token_id is not None:
            end = [self.tokenizer.eos_token_id]
        closed = close_response(batch.response_ids[row], stopped, end, self.special_ids, has_turns=bool(batch.turns))
        return batch.prompt_ids[row] + closed

    def _encode(self, batch: ResponseBatch, rows: list[int]) -> list[list[int]]:
        if not rows:  # of no texts some versions of transformers decode one
            return []
        # decoded together: the policy's tokenizer knows whether there is a space between prompt and response
        whole = [batch.prompt_ids[row] + batch.response_ids[row] for row in rows]
        found = encode_texts(self.policy_tokenizer.batch_decode(whole, skip_special_tokens=True), self.tokenizer)
        eos = self.tokenizer.eos_token_id
        return [append_end(ids, eos) if batch.terminated[row] else ids for row, ids in zip(rows, found, strict=True)]


def _replies_as_text(chat: Chat, turns: list[str]) -> Chat:
    """Return a conversation whose last messages are `turns` (`ResponseBatch`), the policy's with nothing but text."""
    before, replies = chat[: len(chat) - len(turns)], chat[len(chat) - len(turns) :]
    pairs = zip(replies, turns, strict=True)
    return before + [
        {"role": ASSISTANT, "content": text.strip()} if message.keys() - {"role", "content"} else message
        for message, text in pairs
    ]


def conversation_ids(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, stopped: bool = True, tools: Tools = None
) -> list[int]:
    """Return the ids of `tokenizer.apply_chat_template(chat, tools)`; a reply that did not stop leaves its turn open.

    Raises:
        DataError: As `render_chat`, or a reply of an environment is no turn of the policy's template.
    """
    if any(message["role"] == ENVIRONMENT for message in chat):
        raise DataError(
            f"{where}: a reply of ppo.environment is no turn of the policy's chat template, so it cannot be shown to "
            "a reward model with another one. Let the environment write the template's marks (docs/conversations.md)"
        )
    if not stopped and not (chat[-1]["content"] or "").strip():
        chat = chat[:-1]  # nothing is said yet
    return chat_ids(chat, tokenizer, where, to_answer=not stopped, tools=tools)


def close_response(
    ids: list[int], stopped: bool, end: list[int], special_ids: frozenset[int], *, has_turns: bool = False
) -> list[int]:
    """Return a response as reward training shows it: with `end` after it if and only if it stopped.

    A special stop token is replaced by `end`; a stop token that is text, such as a full stop, stays before it. With
    turns, an episode can be cut off after the stop token of a turn, which then does not end the text.
    """
    if not stopped and not has_turns:
        return ids
    if stopped and end and ids[-len(end) :] == end:
        return ids
    text = ids[:-1] if ids and ids[-1] in special_ids else ids
    return [*text, *end] if stopped else text


def conversations(
    prompts: list[Chat | None],
    prompt_ids: list[list[int]],
    response_ids: list[list[int]],
    policy_mask: Tensor | None,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Chat | None]:
    """Return N prompts with their responses as messages; None where the prompt is text.

    The policy's replies are as `_with_reply` reads them. A reply of an environment has the role that the policy's
    template gives it, or `ENVIRONMENT` if it is no turn of it.
    `prompts` are the messages of each prompt, None for text (empty: all are texts), `policy_mask` is that of
    `ResponseBatch`, and the tokenizer is the policy's.
    """
    found: list[Chat | None] = [None] * len(prompt_ids)
    own_turns: list[list[int]] = []
    for row, chat in enumerate(prompts):
        if chat is None:
            continue
        ids, before = response_ids[row], prompt_ids[row]
        is_policy = [True] * len(ids) if policy_mask is None else policy_mask[row].tolist()[: len(ids)]
        for is_own, pairs in groupby(zip(ids, is_policy, strict=True), key=lambda pair: pair[1]):
            turn = [token for token, _ in pairs]
            if is_own:
                chat = _with_reply(chat, before, turn, tokenizer)
                own_turns.append(turn)
            else:
                chat = [*chat, _reply_message(chat, str(tokenizer.decode(before[-1:] + turn)), tokenizer)]
            before = before + turn
        found[row] = chat if ids else answered(chat, "")
    if own_turns:
        _tell_of_special_tokens(own_turns, tokenizer, next(filter(None, prompts)))
    return found


@dataclass(frozen=True)
class ReplyForm:
    """What stands between the assistant's mark and the content of its message."""

    begun: str = ""  # written by the generation prompt, but part of the reply: `<think>`
    channel: str = ""  # with special tokens, left to the policy: `<|channel|>final<|message|>`

    end: str | None = None  # written after the content; None: it cannot be found

    @classmethod
    def of(cls, chat: Chat, tokenizer: PreTrainedTokenizerBase) -> ReplyForm:
        """Return the form of replies to a chat, which its template and its system message decide.

        Nothing that was sampled takes part, so no reply can make a template refuse the chat.
        """
        system = [*takewhile(lambda message: message["role"] == "system", chat)]
        return _form(tokenizer, str(tokenizer.chat_template), json.dumps(system))


@lru_cache(maxsize=256)  # each row may have a system message of its own
def _form(tokenizer: PreTrainedTokenizerBase, template: str, system: str) -> ReplyForm:
    """Return the form of replies after system messages, given as JSON; `template` tells changed ones apart.

    What an earlier message of the assistant has before its content is the mark, and the channel if there is one:
    templates write a reasoning, or an empty one, only into the last message.
    """
    question = {"role": "user", "content": "?"}
    chat = [*json.loads(system), question]
    if (last := around_answer(tokenizer, chat)) is None:
        return ReplyForm()
    end, earlier = last[1], around_answer(tokenizer, chat, [question])
    asked = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    if asked == last[0] or earlier is None:  # the template writes all of it by itself
        return ReplyForm(end=end)
    shared = shared_length(asked, earlier[0])
    if shared < len(asked):  # white space alone is no beginning of a reply
        return ReplyForm(begun=asked[shared:] if asked[shared:].strip() else "", end=end)
    channel = earlier[0][shared:]
    is_marked = special_ids(tokenizer).intersection(tokenizer(channel, add_special_tokens=False)["input_ids"])
    return ReplyForm(channel=channel if is_marked else "", end=end)


def _with_reply(chat: Chat, before: list[int], reply: list[int], tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Return a chat with the policy's reply, given the tokens of the reply and of all before it.

    A tokenizer with a response template parses the reply: reasoning and tool calls are keys of their own. Else content
    is all that follows the assistant's mark, the generation prompt's part of it included; where the policy writes into
    channels, it is what follows the template's channel of answers.
    """
    if getattr(tokenizer, "response_template", None):
        with suppress(Exception):  # sampled text can be damaged in any way; then it stays as it is
            parsed: dict[str, Any] = tokenizer.parse_response(reply, prefix=before)
            whole = chat[:-1] if chat[-1]["role"] == ASSISTANT else chat
            if isinstance(parsed.setdefault("content", ""), str):
                return [*whole, {**parsed, "role": ASSISTANT}]
    if chat[-1]["role"] == ASSISTANT:
        return answered(chat, *continuations(tokenizer, [before], [reply]))
    form = ReplyForm.of(chat, tokenizer)
    if form.channel:
        reply = _of_channel(reply, tokenizer(form.channel, add_special_tokens=False)["input_ids"], tokenizer)
    begun = tokenizer(form.begun, add_special_tokens=False)["input_ids"] if form.begun else []
    if begun and _ends_with(before, begun, tokenizer):  # an environment may write another beginning of the turn
        (text,) = continuations(tokenizer, [before], [reply])
        return answered(chat, f"{tokenizer.decode(begun, skip_special_tokens=True)}{text}")
    return answered(chat, str(tokenizer.decode(reply, skip_special_tokens=True)))


def _ends_with(ids: list[int], begun: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the text of tokens ends with that of others, which may be cut into other tokens there."""
    text = str(tokenizer.decode(begun)).strip()
    return str(tokenizer.decode(ids[-len(text.encode()) - 8 :])).rstrip().endswith(text)  # 8: for white space


def _of_channel(reply: list[int], channel: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what follows the last `channel` of a reply: nothing if there is another one, all if there is none."""
    starts = [at for at in range(len(reply)) if reply[at : at + len(channel)] == channel]
    if starts:
        return reply[starts[-1] + len(channel) :]
    return reply if special_ids(tokenizer).intersection(channel).isdisjoint(reply) else []


def _tell_of_special_tokens(replies: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
    """Warn once if special tokens stand within most of the replies, which their texts leave out; `chat` is a prompt."""
    known, told = special_ids(tokenizer), f"special tokens of {tokenizer.name_or_path}"
    if told in said or not is_main_process():
        return
    found = [{token for token in reply[:-1] if token in known} for reply in replies]
    counts = Counter(token for tokens in found for token in tokens)
    if tokens := [token for token, count in counts.items() if 2 * count > len(found)]:
        said.add(told)
        if getattr(tokenizer, "response_template", None):
            rest = "`messages` has the parts, as the tokenizer's response_template reads them"
        elif channel := ReplyForm.of(chat, tokenizer).channel:
            rest = f"`messages` and other reward models' templates get what follows the last {channel}"
        else:
            rest = "so do `messages`"
        logger.warning(
            "Special tokens stand within the policy's replies (%s). The texts of completions leave them out, and their "
            "parts run together; %s; completion_ids have everything.",
            " ".join(sorted(tokenizer.convert_ids_to_tokens(tokens))),
            rest,
        )


def _reply_message(chat: Chat, text: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the message of an environment, given the text from the policy's stop token on; special tokens included."""
    for role in _REPLY_ROLES:
        marked = [*chat[:-1], {**chat[-1], "content": CONTENT_MARK}, {"role": role, "content": CONTENT_MARK}]
        try:
            rendered = apply_template(marked, tokenizer, "", to_answer=True)
        except DataError:  # the template does not know this role
            continue
        if rendered.count(CONTENT_MARK) < 2:  # it leaves this role out
            continue
        rest, _, after = rendered.rpartition(CONTENT_MARK)
        before, after, text = rest.rpartition(CONTENT_MARK)[2].lstrip(), after.rstrip(), text.strip()
        if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
            return {"role": role, "content": text[len(before) : len(text) - len(after)]}
    return {"role": ENVIRONMENT, "content": text}


def _after_reply(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Return the tokens that the chat template puts after the reply that ends a conversation."""
    end = ReplyForm.of(chat, tokenizer).end
    if end is None:
        raise DataError(
            f"{where}: the chat template refuses a question with an answer, or does not write the answer as it is, so "
            "the end of a reply cannot be found"
        )
    return list(tokenizer(end, add_special_tokens=False)["input_ids"])
