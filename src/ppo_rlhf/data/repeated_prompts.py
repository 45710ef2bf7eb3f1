"""Prompts that a table has twice: in a column of their own, and at the beginning of the texts or chats beside it.

Each prompt is read once. For texts all rows decide together, because a response to a short prompt may begin with the
prompt's words.
"""

import logging
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from typing import Any

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import ASSISTANT, CALLS, Chat
from ppo_rlhf.models.tokenizers import shared_length
from ppo_rlhf.runtime.log_lines import say_once

_SYSTEM, _USER = "system", "user"


def split_texts(
    name: str, what: str, rows: Sequence[tuple[int, str, tuple[str, ...]]], fix: str
) -> dict[int, list[str]]:
    """Return by row number [prompt, *texts] with each prompt once, for rows (number, prompt, texts) of a table.

    If all texts of all rows begin with the row's prompt, the prompt is cut off from the texts, as often as they begin
    with it. If texts of at most half of the rows do, all texts stay, and one log line says so. One log line also says
    if most texts have the prompt, but behind other text. `what` are the texts, and `fix` what to do if they are whole
    texts, as messages say it.

    Raises:
        DataError: In more than half of the rows a text begins with the prompt, but not all texts of all rows do.
    """
    found: dict[int, list[str]] = {}
    rows = [row for row in rows if row[1].strip()]
    while inside := _inside(name, what if not found else f"{what} again", rows, fix):
        found, rows = inside, [(number, head, tuple(texts)) for number, (head, *texts) in inside.items()]
    return found


def _inside(name: str, what: str, rows: Sequence[tuple[int, str, tuple[str, ...]]], fix: str) -> dict[int, list[str]]:
    """Cut each prompt off once, as `split_texts`."""
    cut = {number: _cut(prompt, texts) for number, prompt, texts in rows}
    inside = {number: parts for number, parts in cut.items() if parts is not None}
    if inside and len(inside) == len(rows):
        say_once(f"{name}: {what} with their prompts, which are read once.", logging.INFO)
        return inside
    begun = [number for number, prompt, texts in rows if number in inside or any(_cut(prompt, (t,)) for t in texts)]
    counted = f"{name}: in {len(begun)} of {len(rows)} rows {what} with the prompt"
    if 2 * len(begun) > len(rows):
        other = next(number for number, parts in cut.items() if parts is None)
        raise DataError(f"{counted}, but not all of row {other}. Give all rows with the prompt inside, or none.")
    if begun:
        say_once(f"{counted} (the first is row {begun[0]}). These rows are read as they stand, behind the prompt.")
        return {}
    again = [number for number, prompt, texts in rows if _spelt(prompt.strip()) in reduce(_shared, map(_spelt, texts))]
    if 2 * len(again) > len(rows):
        say_once(
            f"{name}: in {len(again)} of {len(rows)} rows (the first is row {again[0]}) the prompt stands again within "
            f"the text beside it, so that a model reads it twice. If these are whole texts, {fix}."
        )
    return {}


def split_chat(prompt: Chat, answer: Chat, where: str) -> tuple[Chat, Chat]:
    """Return (prompt, answer) without what the answer repeats of the prompt.

    The answer may repeat the whole prompt, the prompt from a user's message on, or begin with the text of the
    assistant's message that ends the prompt. A system message may stand in one of the two or in both.

    Raises:
        DataError: The system messages differ, nothing is left of the answer, or the answer begins with another message
            of the user.
    """
    (system, asked), (repeated, rest) = _system_apart(prompt), _system_apart(answer)
    if system and repeated and _key(system[0]) != _key(repeated[0]):
        raise DataError(f"{where}: the system messages of the prompt and of the answer differ. Keep one of the two.")
    for start in range(len(asked)):
        if start == 0 or asked[start]["role"] == _USER:
            left = _behind(asked[start:], rest)
            if left is not None:
                rest = left
                break
    if asked and asked[-1]["role"] == _USER and rest and rest[0]["role"] == _USER:
        raise DataError(
            f"{where}: the prompt ends with a user's message, and the answer begins with another one. Give the "
            "answer alone, or with the whole prompt once before it."
        )
    if not rest:
        raise DataError(f"{where}: the answer has nothing behind the prompt. Give an answer, or remove the row.")
    return [*(system or repeated), *asked], rest


def _cut(prompt: str, texts: tuple[str, ...]) -> list[str] | None:
    """Return [prompt, *texts] with the prompt cut off from texts that all begin with it in one spelling."""
    head = _beginning(prompt, texts[0])
    if head is None or not all(text.startswith(head) for text in texts):
        return None
    rests = [text[len(head) :] for text in texts]
    return [head, *rests] if any(rest.strip() for rest in rests) else None


def _beginning(prompt: str, text: str) -> str | None:
    """Return the beginning of a text that is the prompt, but for spaces around it and its spelling (`_spelt`)."""
    if text.startswith(prompt):
        return prompt
    start, wanted = len(text) - len(text.lstrip()), _spelt(prompt.strip())
    if not wanted or not _spelt(text[start:]).startswith(wanted):
        return None
    lengths = range(len(text) - start + 1)
    end = start + bisect_right(lengths, len(wanted), key=lambda length: len(_spelt(text[start:][:length]))) - 1
    return text[:end] if _spelt(text[start:end]) == wanted else None


def _spelt(text: str) -> str:
    """Return a text with line ends and composed characters in one of the ways to write them."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


def _shared(first: str, second: str) -> str:
    return first[: shared_length(first, second)]


def _system_apart(chat: Chat) -> tuple[Chat, Chat]:
    """Return (the system message that begins a chat, the other messages)."""
    number = int(bool(chat) and chat[0]["role"] == _SYSTEM)
    return chat[:number], chat[number:]


def _behind(repeated: Chat, chat: Chat) -> Chat | None:
    """Return the messages of a chat behind `repeated`; None if the chat does not begin with it."""
    *first, last = repeated
    if len(chat) < len(repeated) or [*map(_key, chat[: len(first)])] != [*map(_key, first)]:
        return None
    again, rest = chat[len(first)], chat[len(repeated) :]
    if _key(again) == _key(last):
        return rest
    begun, whole = last["content"], again["content"]
    if last["role"] == again["role"] == ASSISTANT and begun and (head := _beginning(begun, whole or "")) is not None:
        return [{**again, "content": whole[len(head) :]}, *rest]
    return None


def _key(message: dict[str, Any]) -> list[Any]:
    return [message["role"], _spelt((message["content"] or "").strip()), *(message.get(key) for key in CALLS)]
