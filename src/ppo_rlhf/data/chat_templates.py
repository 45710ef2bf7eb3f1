"""What a chat template leaves out: templates skip roles, tool calls and tools that they do not know without a word."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys in which an assistant's message holds its reasoning beside the content."""
# one for each part, and not CONTENT_MARK: in plain letters, since a template may quote, trim, escape or capitalise
_MARK = "qzmark{}qz"
_MARK_OF_TOOLS = "qzmarktoolqz"


class Hidden(NamedTuple):
    """The parts of a chat of which a template shows nothing."""

    messages: tuple[int, ...]
    tools: bool
    reasoning: tuple[str, ...] = ()  # keys of messages of which something else is shown


def find_hidden(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, text: str
) -> Hidden:
    """Return what the tokenizer's chat template left out of a chat of which it made `text`.

    A chat of each kind (`kind_of`) is rendered once with marks as contents, reasoning and names of tools. A message
    with tool calls must show each call, not its content: some templates drop what is said beside a call. One that has
    only a reasoning must show that.
    """
    known = _found.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), kind_of(messages, tools))  # a text's hash is made once
    if key not in known:
        if len(known) >= _MOST_KINDS:
            known.clear()
        known[key] = _find_marks(messages, tools, tokenizer)
    if (hidden := known[key]) is not None:
        return hidden
    # the template takes the chat, but no marks
    calls = [[str(call.get("name", "")) for call in _calls(message)] for message in messages]
    thoughts = [[(key, message[key].strip()) for key in _reasoning(message)] for message in messages]
    said = [[] if _is_blank(message) else [message["content"].strip()] for message in messages]
    return _hidden(calls, said, thoughts, [_function(tool)["name"] for tool in tools or []], text)


def is_known(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's chat template has rendered a chat before."""
    return tokenizer in _found


def kind_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> Hashable:
    """Return what a template's choice of the parts to show depends on: roles, keys, blank texts, calls, tools."""
    shapes = ((m["role"], *sorted(m), _is_blank(m), len(_calls(m)), *_reasoning(m)) for m in messages)
    return tuple(shapes), bool(tools)


def is_new(kind: Hashable, tried: set[Hashable]) -> bool:
    """Add a kind of chat to those tried, and return whether it was not among them."""
    if kind in tried:
        return False
    if len(tried) >= _MOST_KINDS:
        tried.clear()
    tried.add(kind)
    return True


_MOST_KINDS = 4096  # of very many all are forgotten, and tried again, to save memory
_found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Hashable, Hidden | None]] = WeakKeyDictionary()


def _find_marks(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase
) -> Hidden | None:
    """Return what leaves no mark; None if the template refuses the marks."""
    marked, marked_tools = _copy(messages), _copy(tools)
    calls: list[list[str]] = []  # marks of each message
    said: list[list[str]] = []
    thoughts: list[list[tuple[str, str]]] = []
    for number, message in enumerate(marked):
        own = _calls(message)
        calls.append([_MARK.format(f"{number}call{place}") for place in range(len(own))])
        said.append([] if _is_blank(message) else [_MARK.format(number)])
        thoughts.append([(key, _MARK.format(f"{number}why{place}")) for place, key in enumerate(_reasoning(message))])
        for call, mark in zip(own, calls[-1], strict=True):
            call["name"] = mark
        message.update(thoughts[-1], **({"content": said[-1][0]} if said[-1] else {}))
    for tool in marked_tools or []:
        _function(tool)["name"] = _MARK_OF_TOOLS
    try:
        text = str(tokenizer.apply_chat_template(marked, tools=marked_tools, tokenize=False)).lower()
    except Exception:  # a template is a program: it can raise anything
        return None
    return _hidden(calls, said, thoughts, [_MARK_OF_TOOLS for _ in tools or []], text)


def _hidden(
    calls: list[list[str]], said: list[list[str]], thoughts: list[list[tuple[str, str]]], tools: list[str], text: str
) -> Hidden:
    """Return what is not in a text: a message's calls; if it has none its content; if it has neither its reasoning."""
    reasons = [[thought for _, thought in own] for own in thoughts]
    wanted = [first or second or third for first, second, third in zip(calls, said, reasons, strict=True)]
    messages = [number for number, parts in enumerate(wanted) if not all(part in text for part in parts)]
    beside = [
        key
        for why, parts in zip(thoughts, wanted, strict=True)
        for key, thought in why
        if thought not in parts and thought not in text
    ]
    return Hidden(tuple(messages), not all(tool in text for tool in tools), tuple(dict.fromkeys(beside)))


def _copy(value: Any) -> Any:
    """Return a copy in which nothing is shared: one message may stand twice in a chat."""
    if isinstance(value, dict):
        return {key: _copy(held) for key, held in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _reasoning(message: dict[str, Any]) -> list[str]:
    """Return the keys in which a message holds a reasoning."""
    return [key for key in REASONING if isinstance(message.get(key), str) and message[key].strip()]


def _is_blank(message: dict[str, Any]) -> bool:
    return not (message.get("content") or "").strip()


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what has the names of the tools that a message calls."""
    calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
    return [_function(call) for call in calls if isinstance(call, dict)]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"] if isinstance(tool.get("function"), dict) else tool
