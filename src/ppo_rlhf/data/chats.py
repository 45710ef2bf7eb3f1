"""Texts and chats: a chat is a list of messages, rendered as text by a tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError

CHAT = 'a list of {"role": …, "content": …}'
"""The form of a chat, for errors."""


def is_text(value: Any) -> bool:
    """Return whether a value is text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, each with its role and its content."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in value)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return the text of a chat, rendered by the tokenizer's template.

    Args:
        messages: The chat.
        tokenizer: Its template is used.
        where: Where the chat comes from, for errors.
        add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.

    Raises:
        DataError: The tokenizer has no template, or its template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"{where}: chat messages need a tokenizer with a chat template; this one has none")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template is a program: it can raise anything
        raise DataError(f"{where}: the chat template refuses these messages: {' '.join(str(error).split())}") from error
    return str(text)
