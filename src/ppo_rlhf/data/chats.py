"""Texts and chats: a chat is a list of messages, which a tokenizer's chat template renders as text."""

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.chat_templates import find_hidden, is_known, is_new, kind_of
from ppo_rlhf.models.tokenizers import name_slow_template
from ppo_rlhf.runtime.log_lines import say_once

CHAT = 'a list of {"role": …, "content": …}'
"""The form of a chat, as errors describe it."""
ASSISTANT = "assistant"
# A message with one of these keys calls tools, so a message with such a key may have no content
CALLS = ("tool_calls", "function_call")

LEARNT = ("weight", "loss", "train", "trainable", "loss_mask")
"""Keys with which OpenAI, Mistral, ms-swift, axolotl and verl say whether SFT learns a message."""
CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations; `conversations` is ShareGPT's name."""
TOOLS, SYSTEM = "tools", "system"
SHOWN_IN_CHATS = (TOOLS, SYSTEM)
"""Columns of a row with which the chat template renders the row's chat."""
_ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "observation": "tool", "tool_response": "tool"}
"""Maps the roles of ShareGPT, Google and ms-swift to OpenAI's roles, which chat templates know."""
# ShareGPT and ms-swift use these roles for messages whose content is the JSON of tool calls
_CALLING_ROLES = ("function_call", "tool_call")
_LIKE_CHAT = re.compile(  # A text that starts like this is a chat; accept Python's repr of a list as well as JSON
    r"""\s*\[\s*\{(?=.*["']role["']\s*:)(?=.*["']content["']\s*:)|"""
    r"""\s*\[\s*\{(?=.*["']from["']\s*:)(?=.*["']value["']\s*:)""",
    re.DOTALL,
)

Chat = list[dict[str, Any]]
Tools = list[Any] | None
"""Descriptions in OpenAI's format of the functions that the assistant may call; None: the chat has no tools."""


def is_text(value: Any) -> bool:
    """Return whether a value is a non-blank text."""
    return isinstance(value, str) and bool(value.strip())


def read_chat(value: Any, where: str, expected: str = CHAT) -> Chat:
    """Return the messages of a chat; the content of a message is text, or None beside a tool call.

    `value` may be JSON, as in a CSV table. The text parts of one message's content are joined. Messages in ShareGPT's
    format are converted to OpenAI's format. Keys with the value None are dropped at any depth: an Arrow table gives
    every message the keys of all messages.

    Raises:
        DataError: The value is not a list of messages, or a message cannot be read; the error quotes the value.
    """
    messages = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(messages, str):
        with suppress(ValueError):
            messages = json.loads(messages)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected {expected}, got {str(value)[:60]!r}")
    chat: Chat = []
    for number, message in enumerate(messages):
        read = _read_message(message, f"{where}: message {number}")
        if read["role"] in _CALLING_ROLES:
            calls = _read_calls(read["content"], f"{where}: message {number}")
            others = {key: item for key, item in read.items() if key not in ("role", "content")}
            # Add the tool calls to the chat's last message if the last message is the assistant's
            if not chat or chat[-1]["role"] != ASSISTANT:
                chat.append({"role": ASSISTANT, "content": None, **others})
            elif differ := [key for key in LEARNT if chat[-1].get(key, 1) != others.get(key, 1)]:
                raise DataError(
                    f"{where}: message {number} and the message before it are one turn of the assistant, but differ in "
                    f"`{differ[0]}`. Give both the same value."
                )
            chat[-1]["tool_calls"] = [*chat[-1].get("tool_calls", []), *calls]
        else:
            chat.append(read)
    return chat


def read_text_or_chat(value: Any, where: str) -> str | Chat:
    """Return a text unchanged, and a chat, plain or as JSON, as `read_chat` returns it.

    A JSON list is a chat if each item is an object with `role` or `from` and at least one item is a complete message.
    A JSON list such as `[{"name": "Ann", "role": "CEO"}]`, in which no item is a complete message, is text. A chat with
    a message that lacks its content is refused.

    Raises:
        DataError: The value is neither text nor a chat, or a text that looks like a chat is not valid JSON.
    """
    if not is_text(value):
        return read_chat(value, where, f"text or {CHAT}")
    if not (value.lstrip().startswith("[") and value.rstrip().endswith("]")):
        return str(value)
    try:
        items = json.loads(value)
    except ValueError as error:
        if not _LIKE_CHAT.match(value):
            return str(value)
        raise DataError(
            f"{where}: {value[:60]!r} looks like a chat, but is not valid JSON ({error}). Write the chat with "
            "json.dumps"
        ) from error
    have_roles = all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items)
    return read_chat(items, where) if have_roles and any(map(_is_message, items)) else str(value)


def read_tools(value: Any, where: str) -> Tools:
    """Return the tools of a row as a list of OpenAI's descriptions; None for an empty cell.

    `value` is one description or a list, plain or as JSON. The description of a function alone is wrapped into
    `{"type": "function", "function": …}`.

    Raises:
        DataError: The value is not a description of tools.
    """
    cell = value.strip() if isinstance(value, str) else value
    if isinstance(cell, str):
        with suppress(ValueError):
            cell = json.loads(cell)
    cell = _without_nulls(cell)
    # pandas represents an empty cell by NaN, and only NaN differs from itself
    if cell is None or cell is pd.NA or cell != cell or cell in ("", []):
        return None
    tools = []
    for tool in cell if isinstance(cell, list) else [cell]:
        is_plain = isinstance(tool, dict) and "name" in tool
        tools.append({"type": "function", "function": tool} if is_plain else tool)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{where}, column `tools`: expected a list of {{"type": "function", "function": {{"name": …}}}}, plain '
                f"or as JSON, got {str(value)[:60]!r}"
            )
    return tools


def with_system(chat: Chat, system: Any, where: str) -> Chat:
    """Return a chat with `system`, the cell of the column `system`, as the first message.

    The chat is unchanged if the cell is blank or the chat already has this system message.

    Raises:
        DataError: The chat has another system message.
    """
    if not is_text(system):
        return chat
    contents = [message["content"] for message in chat if message["role"] == "system"]
    if contents and contents != [system]:
        raise DataError(f"{where}: the column `system` and a system message of the chat differ. Keep one of the two.")
    return chat if contents else [{"role": "system", "content": str(system)}, *chat]


def render_chat(
    messages: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    to_answer: bool = False,
    tools: Tools = None,
) -> str:
    """Return the text of a chat (`read_chat`), rendered by the tokenizer's chat template.

    With `to_answer` the text ends where the assistant goes on: inside the last message if the last message is the
    assistant's, else after the generation prompt.

    Raises:
        DataError: As `apply_template`, or the template leaves out a message, a tool call or the tools.
    """
    text = apply_template(messages, tokenizer, where, to_answer=to_answer, tools=tools)
    check_shown(messages, tokenizer, where, text, tools=tools)
    return text


def chat_ids(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, to_answer: bool = False, tools: Tools = None
) -> list[int]:
    """Return the token ids of a chat; arguments and errors are the same as in `render_chat`."""
    text = render_chat(messages, tokenizer, where, to_answer=to_answer, tools=tools)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def apply_template(
    messages: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    to_answer: bool = False,
    tools: Tools = None,
) -> str:
    """Return the text of a chat as `render_chat`, without the check for parts that the template leaves out.

    Raises:
        DataError: The tokenizer has no chat template, or the chat template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"{where}: chat messages need a tokenizer with a chat template; this one has none")
    is_begun = messages[-1]["role"] == ASSISTANT
    options: dict[str, Any] = {
        "tools": tools,
        "tokenize": False,
        "add_generation_prompt": to_answer and not is_begun,
        "continue_final_message": to_answer and is_begun,
    }
    try:
        with nullcontext() if is_known(tokenizer) else name_slow_template(tokenizer):
            return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a chat template is a program, so rendering can raise any exception
        raise DataError(f"{where}: the chat template refuses these messages: {in_one_line(error)}") from error


def check_shown(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, text: str, *, tools: Tools = None
) -> None:
    """Raise `DataError` if `text`, the rendered chat, lacks a message, a tool call or the tools.

    One log line names reasoning that `text` lacks although `text` has the content of the same message.
    """
    hidden = find_hidden(messages, tools, tokenizer, text)
    for number in hidden.messages:
        role, (what, fix) = messages[number]["role"], _left_out(messages[number])
        raise DataError(
            f"{where}: message {number} has the role `{role}`, and the chat template leaves {what} out. {fix}"
        )
    for key in hidden.reasoning:
        say_once(
            f"The chat template of {tokenizer.name_or_path or 'a tokenizer'} leaves `{key}` out of some messages: the "
            "model is shown their content without it."
        )
    if hidden.tools:
        raise DataError(
            f"{where}: the chat template leaves the column `tools` out. Give the tokenizer a template that shows it, "
            "or write the tools into a message and remove the column"
        )


def _left_out(message: dict[str, Any]) -> tuple[str, str]:
    """Return (part of a message that the chat template leaves out, advice) in the words of the error."""
    if any(map(message.get, CALLS)):
        return "its tool call", (
            "Give the tokenizer a template that renders tool calls, or write the call into the content"
        )
    if not is_text(message["content"]):
        return "its reasoning", (
            "The message has no other part: give the tokenizer a template that renders reasoning, or write the "
            "reasoning into the content"
        )
    return "the message", (
        "Give the message a role that the template has (often `system` for `developer`), or give the tokenizer a "
        "template that renders the role"
    )


def try_chats(chats: Iterable[tuple[str, Chat, Tools]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Render one chat of each kind; raise `DataError` as `render_chat` does.

    `chats` are tuples (row as errors name it, messages, tools).
    """
    tried: set[Hashable] = set()
    for where, messages, tools in chats:
        if is_new(kind_of(messages, tools), tried):
            render_chat(messages, tokenizer, where, tools=tools)


def join_chats(prompt: Chat, answer: Chat) -> Chat:
    """Return a prompt and its answer as one chat.

    If the prompt ends in an assistant's message, the answer's first message is appended to that message.
    """
    if not prompt or not prompt[-1]["role"] == answer[0]["role"] == ASSISTANT or prompt[-1]["content"] is None:
        return [*prompt, *answer]
    whole = {**prompt[-1], **answer[0], "content": prompt[-1]["content"] + (answer[0]["content"] or "")}
    return [*prompt[:-1], whole, *answer[1:]]


def answered(prompt: Chat, text: str) -> Chat:
    """Return a prompt followed by `text` as the assistant's answer."""
    return join_chats(prompt, [{"role": ASSISTANT, "content": text}])


def _is_message(item: dict[str, Any]) -> bool:
    """Return whether an object is a message in OpenAI's or ShareGPT's format."""
    if isinstance(item.get("role"), str):
        return isinstance(item.get("content"), str | list) or any(map(item.get, CALLS))
    return isinstance(item.get("from"), str) and isinstance(item.get("value"), str)


def _read_message(given: Any, where: str) -> dict[str, Any]:
    message = _without_nulls(given)
    # ShareGPT's format names role and content `from` and `value`
    if isinstance(message, dict) and message.keys() >= {"from", "value"}:
        message |= {"role": message.pop("from"), "content": message.pop("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f'{where} is {str(given)[:60]}; give the message a role and content: {{"role": …, "content": …}}'
        )
    content = message.get("content")
    if content is None and not any(map(message.get, CALLS)):
        raise DataError(f"{where} is {str(given)[:60]}; the message has neither content nor a tool call")
    if content is not None and not isinstance(content, str):
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where} is {str(given)[:60]}; its content has a part of type {kind!r}, only text is supported"
                )
        content = "".join(part["text"] for part in content)
    if message.get("tool_calls"):
        message["tool_calls"] = _read_calls(message["tool_calls"], where)
    if message.get("function_call"):
        (call,) = _read_calls([message["function_call"]], where)
        message["function_call"] = call.get("function", call)
    return {**message, "role": _ROLES.get(message["role"], message["role"]), "content": content}


def _read_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's format.

    `given` is one tool call or a list of tool calls, plain or as JSON. The arguments of a tool call may be JSON, too. A
    tool call from JSON without OpenAI's `{"type": "function", "function": …}`, as in ShareGPT and ms-swift, is wrapped
    into this mapping.
    """
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        calls = json.loads(given) if isinstance(given, str) else given
        return [_read_call(call, framed=calls is not given) for call in (calls if isinstance(calls, list) else [calls])]
    raise DataError(f'{where} is not a tool call: {str(given)[:60]!r}. Write {{"name": …, "arguments": {{…}}}}')


def _read_call(given: Any, *, framed: bool) -> dict[str, Any]:
    call = json.loads(given) if isinstance(given, str) else given
    function = dict(call.get("function", call))
    if not isinstance(function["name"], str) or not function["name"]:
        raise ValueError("a call needs a name")
    # Llama names the arguments of a tool call `parameters`
    arguments = function.get("arguments", function.pop("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    function["arguments"] = arguments
    if "function" in call:
        return {**call, "function": function}
    return {"type": "function", "function": function} if framed else function


def _without_nulls(value: Any) -> Any:
    """Return a value without keys whose value is None, at any depth, and with NumPy arrays as lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
