"""Texts and chats: a chat is a list of messages, rendered as text by a tokenizer's chat template."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError, in_one_line

CHAT = 'a list of {"role": …, "content": …}'
"""The form of a chat, for errors."""
ASSISTANT = "assistant"
CALLS = ("tool_calls", "function_call")  # a message with one of these keys may have no content

CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations, the second as ShareGPT names it."""
_SHAREGPT = {"human": "user", "gpt": ASSISTANT}

Chat = list[dict[str, Any]]


def is_text(value: Any) -> bool:
    """Return whether a value is text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def read_chat(value: Any, where: str, expected: str = CHAT) -> Chat:
    """Return the messages of a chat, the content of each as text, or None beside a tool call.

    Parts of text are joined. Keys that hold None are left out, also within a tool call: Arrow's tables give each
    message the keys of all.

    Raises:
        DataError: The value is not a list of messages, or a message cannot be read; the error shows it.
    """
    given = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: expected {expected}, got {str(value)[:60]!r}")
    return [_read_message(message, f"{where}: message {number}") for number, message in enumerate(given)]


def read_text_or_chat(value: Any, where: str) -> str | Chat:
    """Return text as it is, and a chat as `read_chat` does; raise `DataError` if the value is neither."""
    return str(value) if is_text(value) else read_chat(value, where, f"text or {CHAT}")


def render_chat(messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, to_answer: bool = False) -> str:
    """Return the text of a chat (`read_chat`), rendered by the tokenizer's template.

    With `to_answer` the text ends where the assistant continues: in its last message, or in a new one.

    Raises:
        DataError: The tokenizer has no template, or its template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"{where}: chat messages need a tokenizer with a chat template; this one has none")
    is_begun = messages[-1]["role"] == ASSISTANT
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=to_answer and not is_begun,
            continue_final_message=to_answer and is_begun,
        )
    except Exception as error:  # a template is a program: it can raise anything
        raise DataError(f"{where}: the chat template refuses these messages: {in_one_line(error)}") from error
    return str(text)


def join_chats(prompt: Chat, answer: Chat) -> Chat:
    """Return a prompt and its answer as one chat; the answer continues an assistant's message that ends the prompt."""
    if not prompt or not prompt[-1]["role"] == answer[0]["role"] == ASSISTANT or prompt[-1]["content"] is None:
        return [*prompt, *answer]
    whole = {**prompt[-1], **answer[0], "content": prompt[-1]["content"] + (answer[0]["content"] or "")}
    return [*prompt[:-1], whole, *answer[1:]]


def answered(prompt: Chat, text: str) -> Chat:
    """Return a prompt with a text as the assistant's answer."""
    return join_chats(prompt, [{"role": ASSISTANT, "content": text}])


def _read_message(given: Any, where: str) -> dict[str, Any]:
    message = _without_nulls(given)
    if isinstance(message, dict) and message.keys() >= {"from", "value"}:  # as ShareGPT writes it
        role, content = message.pop("from"), message.pop("value")
        message |= {"role": _SHAREGPT.get(str(role), role), "content": content}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} is {str(given)[:60]}; give it a role, and content: {{"role": …, "content": …}}')
    content = message.get("content")
    if content is None and not any(map(message.get, CALLS)):
        raise DataError(f"{where} is {str(given)[:60]}; it has neither content nor a tool call")
    if content is not None and not isinstance(content, str):
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where} is {str(given)[:60]}; its content has a part of type {kind!r}, give text")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold None, at any depth, and with NumPy's arrays as lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
