"""The token ids that a reward model reads for a prompt with its response, in reward training and in scoring.

A plain-text prompt is followed by the response and, if a stop token ended the response, by the reward model's
end-of-text token. A chat prompt is rendered by the reward model's chat template, with the response as the assistant's
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
from ppo_rlhf.runtime.log_lines import said, say_once
from ppo_rlhf.runtime.processes import is_main_process

ENVIRONMENT = "environment"
"""Role of an environment's reply that the policy's chat template cannot write as a turn."""
_REPLY_ROLES = ("user", "tool", "system")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendering:
    """Renders prompts with responses as the token ids that a reward model reads."""

    tokenizer: PreTrainedTokenizerBase  # the reward model's tokenizer
    policy_tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer, which encoded the prompts and responses

    @cached_property
    def reads_policy_ids(self) -> bool:
        """Whether the reward model has the policy's vocabulary."""
        return same_vocabulary(self.tokenizer, self.policy_tokenizer)

    @cached_property
    def has_policy_template(self) -> bool:
        """Whether the reward model and the policy have the same vocabulary and the same chat templates."""
        reward_templates, policy_templates = (
            {name: without_template_defaults(text) for name, text in templates_of(each).items()}
            for each in (self.tokenizer, self.policy_tokenizer)
        )
        return self.reads_policy_ids and reward_templates == policy_templates

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens of the policy's vocabulary."""
        return special_ids(self.policy_tokenizer)

    def sequences(self, batch: ResponseBatch) -> list[list[int]]:
        """Return the token ids of N prompts with their responses.

        Raises:
            DataError: A prompt is a chat, and the reward model's tokenizer has no chat template. Or the reward model's
                chat template refuses the conversation. Or the chat templates of reward model and policy differ, and the
                policy's chat template cannot write a reply of the environment as a turn.
        """
        chats = batch.chats or [None] * len(batch)
        texts = [row for row, chat in enumerate(chats) if chat is None and not self.reads_policy_ids]
        encoded = dict(zip(texts, self._encode(batch, texts), strict=True))
        return [
            encoded[row] if row in encoded else self._sequence(batch, row, chat, f"reward model: response {row}")
            for row, chat in enumerate(chats)
        ]

    def check(self, chats: Iterable[str | None], name: str, tools: Iterable[Any] | None = None) -> None:
        """Raise `DataError` if the reward model's chat template refuses a prompt with a reply.

        `chats` are the prompts' messages as JSON, None for plain text. Of several prompts with the same roles and keys
        only the first prompt is rendered. `name` names the table in errors; `tools` is the table's column `tools`.
        """
        tried: set[Hashable] = set()
        rows = zip(chats, repeat(None) if tools is None else tools, strict=False)
        for row, (chat, tools_cell) in enumerate(rows):
            if chat is None:
                continue
            whole, row_tools = answered(json.loads(chat), CONTENT_MARK), read_tools(tools_cell, f"{name}: row {row}")
            if is_new(kind_of(whole, row_tools), tried):
                where = f"{name}: row {row}, for the reward model ({self.tokenizer.name_or_path or 'its tokenizer'})"
                shown = self._shown_tools(whole, row_tools)
                for to_answer in (False, True):
                    render_chat(whole, self.tokenizer, where, to_answer=to_answer, tools=shown)

    def _shown_tools(self, chat: Chat, tools: Tools) -> Tools:
        """Return the tools if the reward model's chat template renders tools; else None, with one log line."""
        if not tools or not self.tokenizer.chat_template:
            return tools
        with suppress(DataError):  # if the chat template refuses the chat, `render_chat` reports the refusal later
            text = apply_template(chat, self.tokenizer, "", tools=tools)
            if find_hidden(chat, tools, self.tokenizer, text).tools:
                say_once("The reward model's chat template renders no tools: it reads conversations without tools.")
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
                "The reward model's chat template refuses some replies as messages with tool calls or reasoning, which "
                "the policy's response_template parsed: the reward model reads these replies as plain text."
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
        if not rows:  # for an empty list some versions of transformers return one text, not an empty list
            return []
        # Decode prompt and response together, so that the policy's tokenizer decides whether a space separates the
        # response from the prompt
        whole = [batch.prompt_ids[row] + batch.response_ids[row] for row in rows]
        encoded = encode_texts(self.policy_tokenizer.batch_decode(whole, skip_special_tokens=True), self.tokenizer)
        eos = self.tokenizer.eos_token_id
        return [append_end(ids, eos) if batch.terminated[row] else ids for row, ids in zip(rows, encoded, strict=True)]


def _replies_as_text(chat: Chat, turns: list[str]) -> Chat:
    """Return the conversation with plain-text content in its last `len(turns)` messages.

    A message with more keys than role and content, such as tool calls, becomes an assistant's message with the text of
    its turn. `turns` are one row's entry of `ResponseBatch.turns`.
    """
    before, replies = chat[: len(chat) - len(turns)], chat[len(chat) - len(turns) :]
    pairs = zip(replies, turns, strict=True)
    return before + [
        {"role": ASSISTANT, "content": text.strip()} if message.keys() - {"role", "content"} else message
        for message, text in pairs
    ]


def conversation_ids(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, stopped: bool = True, tools: Tools = None
) -> list[int]:
    """Return the ids of `tokenizer.apply_chat_template(chat, tools)`.

    `stopped` is False for a truncated reply, whose turn is rendered without its end.

    Raises:
        DataError: As `render_chat`, or the policy's chat template cannot write a reply of an environment as a turn.
    """
    if any(message["role"] == ENVIRONMENT for message in chat):
        raise DataError(
            f"{where}: a reply of ppo.environment is no turn of the policy's chat template, so a reward model with "
            "another template cannot read the reply. Let the environment write the marks of the policy's template "
            "(docs/conversations.md)"
        )
    if not stopped and not (chat[-1]["content"] or "").strip():
        chat = chat[:-1]  # drop the assistant's last message, because the reply has no text yet
    return chat_ids(chat, tokenizer, where, to_answer=not stopped, tools=tools)


def close_response(
    ids: list[int], stopped: bool, end: list[int], special_ids: frozenset[int], *, has_turns: bool = False
) -> list[int]:
    """Return a response as reward training renders responses: followed by `end` if and only if a stop token ended it.

    `end` replaces a stop token that is a special token. A stop token that is text, such as a full stop, stays before
    `end`. An episode of several turns can be truncated right after the stop token of a turn; the last stop token of
    such an episode is removed.
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
    """Return N prompts with their responses as messages; None where the prompt is plain text.

    `_with_reply` parses the policy's replies. A reply of an environment has its role in the policy's template, or
    `ENVIRONMENT` if the template cannot write the reply as a turn.
    `prompts` are the messages of each prompt, None for plain text (empty list: all prompts are plain text).
    `policy_mask` is `ResponseBatch.policy_mask`, and the tokenizer is the policy's.
    """
    chats: list[Chat | None] = [None] * len(prompt_ids)
    policy_turns: list[list[int]] = []
    for row, chat in enumerate(prompts):
        if chat is None:
            continue
        ids, before = response_ids[row], prompt_ids[row]
        is_policy = [True] * len(ids) if policy_mask is None else policy_mask[row].tolist()[: len(ids)]
        for by_policy, pairs in groupby(zip(ids, is_policy, strict=True), key=lambda pair: pair[1]):
            turn = [token for token, _ in pairs]
            if by_policy:
                chat = _with_reply(chat, before, turn, tokenizer)
                policy_turns.append(turn)
            else:
                chat = [*chat, _reply_message(chat, str(tokenizer.decode(before[-1:] + turn)), tokenizer)]
            before = before + turn
        chats[row] = chat if ids else answered(chat, "")
    if policy_turns:
        _warn_of_special_tokens(policy_turns, tokenizer, next(filter(None, prompts)))
    return chats


@dataclass(frozen=True)
class ReplyForm:
    """The text that a chat template writes around the content of an assistant's message."""

    begun: str = ""  # part of the reply that the generation prompt already contains, such as `<think>`
    # Text with special tokens before the content, which the policy writes itself: `<|channel|>final<|message|>`
    channel: str = ""

    end: str | None = None  # text after the content of a reply; None: the chat template does not reveal the text

    @classmethod
    def of(cls, chat: Chat, tokenizer: PreTrainedTokenizerBase) -> ReplyForm:
        """Return the `ReplyForm` for a chat, which depends on the chat template and the chat's system messages.

        The `ReplyForm` does not depend on sampled text, so no sampled reply can make the chat template refuse the chat.
        """
        system = [*takewhile(lambda message: message["role"] == "system", chat)]
        return _form(tokenizer, str(tokenizer.chat_template), json.dumps(system))


@lru_cache(maxsize=256)  # cache many reply forms, because each row may have a system message of its own
def _form(tokenizer: PreTrainedTokenizerBase, template: str, system: str) -> ReplyForm:
    """Return the `ReplyForm` of replies after `system`, the system messages as JSON.

    `template` is a part of the cache's key, because a tokenizer's chat template can change. The channel is read from an
    assistant's message that is not the last message: chat templates write reasoning, even empty reasoning, only into
    the last message.
    """
    question = {"role": "user", "content": "?"}
    chat = [*json.loads(system), question]
    if (last := around_answer(tokenizer, chat)) is None:
        return ReplyForm()
    end, earlier = last[1], around_answer(tokenizer, chat, [question])
    asked = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    # The generation prompt contains all text that the template writes before the reply's content
    if asked == last[0] or earlier is None:
        return ReplyForm(end=end)
    shared = shared_length(asked, earlier[0])
    if shared < len(asked):  # white space alone does not count as the beginning of a reply
        return ReplyForm(begun=asked[shared:] if asked[shared:].strip() else "", end=end)
    channel = earlier[0][shared:]
    is_marked = special_ids(tokenizer).intersection(tokenizer(channel, add_special_tokens=False)["input_ids"])
    return ReplyForm(channel=channel if is_marked else "", end=end)


def _with_reply(chat: Chat, before: list[int], reply: list[int], tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Return a chat with the policy's reply; `reply` are the reply's tokens, `before` all tokens before the reply.

    A tokenizer with a response template parses the reply: reasoning and tool calls become separate keys of the message.
    Without a response template the content of the reply is everything after the assistant's mark, including the
    beginning of the reply that the generation prompt contains. If the chat template uses channels, the content of the
    reply is the text after the last mark of the answer channel.
    """
    if getattr(tokenizer, "response_template", None):
        # transformers' parser can fail on sampled text; after such a failure the reply is read without the parser
        with suppress(Exception):
            parsed: dict[str, Any] = tokenizer.parse_response(reply, prefix=before)
            whole = chat[:-1] if chat[-1]["role"] == ASSISTANT else chat
            if isinstance(parsed.setdefault("content", ""), str):
                return [*whole, {**parsed, "role": ASSISTANT}]
    if chat[-1]["role"] == ASSISTANT:
        return answered(chat, *continuations(tokenizer, [before], [reply]))
    form = ReplyForm.of(chat, tokenizer)
    if form.channel:
        reply = _answer_in_channel(reply, tokenizer(form.channel, add_special_tokens=False)["input_ids"], tokenizer)
    begun = tokenizer(form.begun, add_special_tokens=False)["input_ids"] if form.begun else []
    # An environment may have begun the assistant's turn differently from the chat template
    if begun and _ends_with(before, begun, tokenizer):
        (text,) = continuations(tokenizer, [before], [reply])
        return answered(chat, f"{tokenizer.decode(begun, skip_special_tokens=True)}{text}")
    return answered(chat, str(tokenizer.decode(reply, skip_special_tokens=True)))


def _ends_with(ids: list[int], begun: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the text of `ids` ends with the text of `begun`, even if `ids` splits it into other tokens."""
    text = str(tokenizer.decode(begun)).strip()
    # Decode 8 tokens more, which leaves room for white space at the end
    return str(tokenizer.decode(ids[-len(text.encode()) - 8 :])).rstrip().endswith(text)


def _answer_in_channel(reply: list[int], channel: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens after the last `channel` mark of a reply.

    Return no tokens if the reply has only marks of other channels, and all tokens if it has no mark.
    """
    starts = [at for at in range(len(reply)) if reply[at : at + len(channel)] == channel]
    if starts:
        return reply[starts[-1] + len(channel) :]
    return reply if special_ids(tokenizer).intersection(channel).isdisjoint(reply) else []


def _warn_of_special_tokens(replies: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
    """Warn once if most replies contain the same special token before their end: decoded texts leave out special
    tokens.

    `chat` is one of the prompts that the replies answer.
    """
    known, topic = special_ids(tokenizer), f"special tokens of {tokenizer.name_or_path}"
    if topic in said or not is_main_process():
        return
    special = [{token for token in reply[:-1] if token in known} for reply in replies]
    counts = Counter(token for tokens in special for token in tokens)
    if tokens := [token for token, count in counts.items() if 2 * count > len(special)]:
        said.add(topic)
        if getattr(tokenizer, "response_template", None):
            rest = "`messages` have the parts as the tokenizer's response_template parses them"
        elif channel := ReplyForm.of(chat, tokenizer).channel:
            rest = f"`messages` and reward models with another template get only the text after the last {channel}"
        else:
            rest = "`messages` also lack the special tokens"
        logger.warning(
            "The policy's replies contain special tokens (%s). The texts in completions lack the special tokens, so "
            "the parts of a reply run together; %s; completion_ids have all tokens.",
            " ".join(sorted(tokenizer.convert_ids_to_tokens(tokens))),
            rest,
        )


def _reply_message(chat: Chat, text: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the message of an environment; `text` begins at the policy's stop token and keeps special tokens."""
    for role in _REPLY_ROLES:
        marked = [*chat[:-1], {**chat[-1], "content": CONTENT_MARK}, {"role": role, "content": CONTENT_MARK}]
        try:
            rendered = apply_template(marked, tokenizer, "", to_answer=True)
        except DataError:  # the chat template refuses a message of this role
            continue
        if rendered.count(CONTENT_MARK) < 2:  # the chat template leaves out a message of this role
            continue
        rest, _, after = rendered.rpartition(CONTENT_MARK)
        before, after, text = rest.rpartition(CONTENT_MARK)[2].lstrip(), after.rstrip(), text.strip()
        if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
            return {"role": role, "content": text[len(before) : len(text) - len(after)]}
    return {"role": ENVIRONMENT, "content": text}


def _after_reply(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Return the tokens that the chat template writes after the last reply of a conversation."""
    end = ReplyForm.of(chat, tokenizer).end
    if end is None:
        raise DataError(
            f"{where}: the chat template refuses a question with an answer, or changes the text of the answer, so the "
            "end of a reply cannot be determined"
        )
    return list(tokenizer(end, add_special_tokens=False)["input_ids"])
