"""Find the parts of a chat that a chat template leaves out: chat templates silently skip unknown roles, tool calls and
tools.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys in which an assistant's message holds its reasoning beside the content."""
# Replace each part of a chat by a distinct mark, to see which parts a chat template renders. A mark has only plain
# letters and digits, because a template may quote, trim, escape or capitalise text.
_MARK = "qzmark{}qz"
_MARK_OF_TOOLS = "qzmarktoolqz"


class Hidden(NamedTuple):
    """The parts of a chat that a template leaves out."""

    messages: tuple[int, ...]  # positions of the messages that the chat template leaves out
    tools: bool  # True if the chat template leaves out a tool's description
    # Keys of reasoning that the chat template leaves out although it renders another part of the same message
    reasoning: tuple[str, ...] = ()


def find_hidden(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, text: str
) -> Hidden:
    """Return the parts of a chat that are missing in `text`, the chat as the tokenizer's chat template rendered it.

    The chat template renders one chat of each kind (`kind_of`) with marks in place of contents, reasoning and names of
    tools. A part is left out if the rendered text lacks the part's mark. Every tool call of a message must appear in
    the rendered text. The content of a message with tool calls need not appear, because some chat templates drop the
    content beside a tool call. The reasoning of a message with nothing but reasoning must appear.
    """
    known = _hidden_parts.setdefault(tokenizer, {})
    # Hashing the template's text for this key is cheap: Python caches the hash of a str
    key = (str(tokenizer.chat_template), kind_of(messages, tools))
    if key not in known:
        if len(known) >= _MOST_KINDS:
            known.clear()
        known[key] = _find_marks(messages, tools, tokenizer)
    if (hidden := known[key]) is not None:
        return hidden
    # The chat template accepts the chat but refuses the marks, so search the rendered text for the chat's own parts
    calls = [[str(call.get("name", "")) for call in _calls(message)] for message in messages]
    thoughts = [[(key, message[key].strip()) for key in _reasoning(message)] for message in messages]
    contents = [[] if _is_blank(message) else [message["content"].strip()] for message in messages]
    return _hidden(calls, contents, thoughts, [_function(tool)["name"] for tool in tools or []], text)


def is_known(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether this module has checked the tokenizer's chat template before."""
    return tokenizer in _hidden_parts


def kind_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> Hashable:
    """Return a key of what decides which parts a chat template renders: roles, keys, blank texts, tool calls, tools."""
    shapes = ((m["role"], *sorted(m), _is_blank(m), len(_calls(m)), *_reasoning(m)) for m in messages)
    return tuple(shapes), bool(tools)


def is_new(kind: Hashable, tried: set[Hashable]) -> bool:
    """Return whether `kind` is not in `tried` yet, and add `kind` to `tried`."""
    if kind in tried:
        return False
    if len(tried) >= _MOST_KINDS:
        tried.clear()
    tried.add(kind)
    return True


_MOST_KINDS = 4096  # to save memory, the cache is cleared when it holds this many kinds of chats
_hidden_parts: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Hashable, Hidden | None]] = WeakKeyDictionary()


def _find_marks(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase
) -> Hidden | None:
    """Return the parts of a chat whose mark the rendered text lacks; None if the chat template refuses the marks."""
    marked, marked_tools = _copy(messages), _copy(tools)
    calls: list[list[str]] = []  # marks of the tool calls of each message
    contents: list[list[str]] = []
    thoughts: list[list[tuple[str, str]]] = []
    for number, message in enumerate(marked):
        functions = _calls(message)
        calls.append([_MARK.format(f"{number}call{place}") for place in range(len(functions))])
        contents.append([] if _is_blank(message) else [_MARK.format(number)])
        thoughts.append([(key, _MARK.format(f"{number}why{place}")) for place, key in enumerate(_reasoning(message))])
        for call, mark in zip(functions, calls[-1], strict=True):
            call["name"] = mark
        message.update(thoughts[-1], **({"content": contents[-1][0]} if contents[-1] else {}))
    for tool in marked_tools or []:
        _function(tool)["name"] = _MARK_OF_TOOLS
    try:
        text = str(tokenizer.apply_chat_template(marked, tools=marked_tools, tokenize=False)).lower()
    except Exception:  # a chat template is a program, so rendering can raise any exception
        return None
    return _hidden(calls, contents, thoughts, [_MARK_OF_TOOLS for _ in tools or []], text)


def _hidden(
    calls: list[list[str]],
    contents: list[list[str]],
    thoughts: list[list[tuple[str, str]]],
    tools: list[str],
    text: str,
) -> Hidden:
    """Return the parts of a chat that are not in `text`.

    A message's tool calls must appear in `text`. A message without tool calls must appear with its content, and a
    message without tool calls and content with its reasoning.
    """
    reasons = [[thought for _, thought in pairs] for pairs in thoughts]
    required = [first or second or third for first, second, third in zip(calls, contents, reasons, strict=True)]
    messages = [number for number, parts in enumerate(required) if not all(part in text for part in parts)]
    reasoning = [
        key
        for pairs, parts in zip(thoughts, required, strict=True)
        for key, thought in pairs
        if thought not in parts and thought not in text
    ]
    return Hidden(tuple(messages), not all(tool in text for tool in tools), tuple(dict.fromkeys(reasoning)))


def _copy(value: Any) -> Any:
    """Return a deep copy without shared objects: the same message object may occur twice in a chat."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _reasoning(message: dict[str, Any]) -> list[str]:
    """Return the keys of a message that hold reasoning."""
    return [key for key in REASONING if isinstance(message.get(key), str) and message[key].strip()]


def _is_blank(message: dict[str, Any]) -> bool:
    return not (message.get("content") or "").strip()


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mappings of a message's tool calls that hold the tools' names."""
    calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
    return [_function(call) for call in calls if isinstance(call, dict)]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"] if isinstance(tool.get("function"), dict) else tool
