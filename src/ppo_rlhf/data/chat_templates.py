"""What a chat template leaves out: templates skip roles, tool calls and tools that they do not know without a word."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_MARK = "qzmark{}qz"  # plain letters: a template may quote, trim, escape or capitalise what it shows
_MARK_OF_TOOLS = "qzmarktoolqz"


class Hidden(NamedTuple):
    """The parts of a chat of which a template shows nothing."""

    messages: tuple[int, ...]
    tools: bool


def find_hidden(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, text: str
) -> Hidden:
    """Return what the tokenizer's chat template left out of a chat of which it made `text`.

    A chat of each kind (`kind_of`) is rendered once with marks as contents and as names of tools. A message with tool
    calls must show each call, not its content: some templates drop what is said beside a call.
    """
    known = _found.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), kind_of(messages, tools))  # a text's hash is made once
    if key not in known:
        known[key] = _find_marks(messages, tools, tokenizer)
    if (hidden := known[key]) is not None:
        return hidden
    # the template takes the chat, but no marks
    parts = [[str(call.get("name", "")) for call in _calls(m)] or [(m.get("content") or "").strip()] for m in messages]
    unseen = tuple(number for number, said in enumerate(parts) if not all(part in text for part in said))
    return Hidden(unseen, any(_function(tool)["name"] not in text for tool in tools or []))


def is_known(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's chat template has rendered a chat before."""
    return tokenizer in _found


def kind_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> Hashable:
    """Return what a template's choice of the parts to show depends on: roles, keys, blank contents, calls, tools."""
    shapes = ((m["role"], *sorted(m), _is_blank(m), len(_calls(m))) for m in messages)
    return tuple(shapes), bool(tools)


_found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Hashable, Hidden | None]] = WeakKeyDictionary()


def _find_marks(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase
) -> Hidden | None:
    """Return what leaves no mark; None if the template refuses the marks."""
    marked, marked_tools = _copy(messages), _copy(tools)
    marks: list[list[str]] = []  # of each message
    for number, message in enumerate(marked):
        calls = _calls(message)
        marks.append([_MARK.format(f"{number}call{place}") for place in range(len(calls))])
        for call, mark in zip(calls, marks[-1], strict=True):
            call["name"] = mark
        if not _is_blank(message):
            message["content"] = _MARK.format(number)
            marks[-1] += [] if calls else [message["content"]]
    for tool in marked_tools or []:
        _function(tool)["name"] = _MARK_OF_TOOLS
    try:
        text = str(tokenizer.apply_chat_template(marked, tools=marked_tools, tokenize=False)).lower()
    except Exception:  # a template is a program: it can raise anything
        return None
    hidden = [number for number, wanted in enumerate(marks) if not all(mark in text for mark in wanted)]
    return Hidden(tuple(hidden), bool(tools) and _MARK_OF_TOOLS not in text)


def _copy(value: Any) -> Any:
    """Return a copy in which nothing is shared: one message may stand twice in a chat."""
    if isinstance(value, dict):
        return {key: _copy(held) for key, held in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _is_blank(message: dict[str, Any]) -> bool:
    return not (message.get("content") or "").strip()


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what has the names of the tools that a message calls."""
    calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
    return [_function(call) for call in calls if isinstance(call, dict)]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"] if isinstance(tool.get("function"), dict) else tool
