"""Texts and chats: a chat is a list of messages, rendered as text by a tokenizer's chat template."""

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
from ppo_rlhf.models.quiet import say_once
from ppo_rlhf.models.tokenizers import name_slow_template

CHAT = 'a list of {"role": …, "content": …}'
"""The form of a chat, for errors."""
ASSISTANT = "assistant"
CALLS = ("tool_calls", "function_call")  # a message with one of these keys may have no content

CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations, the second as ShareGPT names it."""
TOOLS, SYSTEM = "tools", "system"
SHOWN_IN_CHATS = (TOOLS, SYSTEM)
"""Columns with which a row's chat is rendered."""
_ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "observation": "tool", "tool_response": "tool"}
"""Roles of ShareGPT, Google and ms-swift, and OpenAI's, which chat templates know."""
_CALLING_ROLES = ("function_call", "tool_call")  # of ShareGPT and ms-swift: JSON of the assistant's calls
_LIKE_CHAT = re.compile(  # also as Python prints it
    r"""\s*\[\s*\{(?=.*["']role["']\s*:)(?=.*["']content["']\s*:)|"""
    r"""\s*\[\s*\{(?=.*["']from["']\s*:)(?=.*["']value["']\s*:)""",
    re.DOTALL,
)

Chat = list[dict[str, Any]]
Tools = list[Any] | None
"""Descriptions of the functions that the assistant may call, as OpenAI writes them; None: there are none."""


def is_text(value: Any) -> bool:
    """Return whether a value is text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def read_chat(value: Any, where: str, expected: str = CHAT) -> Chat:
    """Return the messages of a chat, the content of each as text, or None beside a tool call.

    A table of text, such as CSV, holds a chat as JSON. Parts of text are joined. Turns of ShareGPT become what OpenAI's
    format says. Keys that hold None are left out, also within a tool call: Arrow's tables give each message the keys of
    all.

    Raises:
        DataError: The value is not a list of messages, or a message cannot be read; the error shows it.
    """
    given = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: expected {expected}, got {str(value)[:60]!r}")
    chat: Chat = []
    for number, message in enumerate(given):
        read = _read_message(message, f"{where}: message {number}")
        if read["role"] in _CALLING_ROLES:
            calls = _read_calls(read["content"], f"{where}: message {number}")
            if not chat or chat[-1]["role"] != ASSISTANT:  # else it goes on with its turn
                chat.append({"role": ASSISTANT, "content": None})
            chat[-1]["tool_calls"] = [*chat[-1].get("tool_calls", []), *calls]
        else:
            chat.append(read)
    return chat


def read_text_or_chat(value: Any, where: str) -> str | Chat:
    """Return text as it is, and a chat as `read_chat` does, also one that is held as JSON.

    A list is a chat if each object has `role` or `from` and one of them is a whole message. Other lists are text, such
    as `[{"name": "Ann", "role": "CEO"}]`. A chat in which a message lacks its content is refused, not taken for text.

    Raises:
        DataError: The value is neither text nor a chat, or text that begins as a chat does and is no JSON.
    """
    if not is_text(value):
        return read_chat(value, where, f"text or {CHAT}")
    if not (value.lstrip().startswith("[") and value.rstrip().endswith("]")):
        return str(value)
    try:
        given = json.loads(value)
    except ValueError as error:
        if not _LIKE_CHAT.match(value):
            return str(value)
        raise DataError(
            f"{where}: {value[:60]!r} looks like a chat, but is not valid JSON ({error}). Write it with json.dumps"
        ) from error
    have_roles = all(isinstance(each, dict) and each.keys() & {"role", "from"} for each in given)
    return read_chat(given, where) if have_roles and any(map(_is_message, given)) else str(value)


def read_tools(value: Any, where: str) -> Tools:
    """Return the tools of a row: a list of OpenAI's descriptions, plain or as JSON; functions alone are wrapped.

    Raises:
        DataError: The value is something else.
    """
    given = value.strip() if isinstance(value, str) else value
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    given = _without_nulls(given)
    if given is None or given is pd.NA or given != given or given in ("", []):  # empty cells of pandas' tables are NaN
        return None
    tools = []
    for tool in given if isinstance(given, list) else [given]:
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
    """Return a chat with a row's text of the column `system` as its first message; with none as it is.

    Raises:
        DataError: The chat has another system message.
    """
    if not is_text(system):
        return chat
    own = [message["content"] for message in chat if message["role"] == "system"]
    if own and own != [system]:
        raise DataError(f"{where}: the column `system` and a system message of the chat differ. Keep one of them.")
    return chat if own else [{"role": "system", "content": str(system)}, *chat]


def render_chat(
    messages: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    to_answer: bool = False,
    tools: Tools = None,
) -> str:
    """Return the text of a chat (`read_chat`), rendered by the tokenizer's template.

    With `to_answer` the text ends where the assistant continues: in its last message, or in a new one.

    Raises:
        DataError: As `apply_template`, or the template leaves out a message, a tool call or the tools.
    """
    text = apply_template(messages, tokenizer, where, to_answer=to_answer, tools=tools)
    check_shown(messages, tokenizer, where, text, tools=tools)
    return text


def chat_ids(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, to_answer: bool = False, tools: Tools = None
) -> list[int]:
    """Return the tokens of a chat; arguments and errors are those of `render_chat`."""
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
    """Return the text of a chat as `render_chat`, whatever the template leaves out.

    Raises:
        DataError: The tokenizer has no template, or its template refuses the messages.
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
    except Exception as error:  # a template is a program: it can raise anything
        raise DataError(f"{where}: the chat template refuses these messages: {in_one_line(error)}") from error


def check_shown(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, text: str, *, tools: Tools = None
) -> None:
    """Raise `DataError` if the chat template, which made `text` of a chat, left a message, a call or the tools out.

    A reasoning that it left out beside a content is named in one line.
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
    """Return what of a message a template leaves out, and what to do."""
    if any(map(message.get, CALLS)):
        return "its tool call", (
            "Give the tokenizer a template that shows tool calls, or write the call into the content"
        )
    if not is_text(message["content"]):
        return "its reasoning", (
            "Nothing else is in it: give the tokenizer a template that shows it, or write it into the content"
        )
    return "it", (
        "Give it a role that the template has (often `system` for `developer`), or the tokenizer a template that shows "
        "it"
    )


def try_chats(chats: Iterable[tuple[str, Chat, Tools]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Render one chat of each kind (where it is, its messages, its tools); raise `DataError` as `render_chat` does."""
    tried: set[Hashable] = set()
    for where, messages, tools in chats:
        if is_new(kind_of(messages, tools), tried):
            render_chat(messages, tokenizer, where, tools=tools)


def join_chats(prompt: Chat, answer: Chat) -> Chat:
    """Return a prompt and its answer as one chat; the answer continues an assistant's message that ends the prompt."""
    if not prompt or not prompt[-1]["role"] == answer[0]["role"] == ASSISTANT or prompt[-1]["content"] is None:
        return [*prompt, *answer]
    whole = {**prompt[-1], **answer[0], "content": prompt[-1]["content"] + (answer[0]["content"] or "")}
    return [*prompt[:-1], whole, *answer[1:]]


def answered(prompt: Chat, text: str) -> Chat:
    """Return a prompt with a text as the assistant's answer."""
    return join_chats(prompt, [{"role": ASSISTANT, "content": text}])


def _is_message(given: dict[str, Any]) -> bool:
    """Return whether an object has the keys of a message, as OpenAI or ShareGPT writes it, with fitting values."""
    if isinstance(given.get("role"), str):
        return isinstance(given.get("content"), str | list) or any(map(given.get, CALLS))
    return isinstance(given.get("from"), str) and isinstance(given.get("value"), str)


def _read_message(given: Any, where: str) -> dict[str, Any]:
    message = _without_nulls(given)
    if isinstance(message, dict) and message.keys() >= {"from", "value"}:  # as ShareGPT writes it
        message |= {"role": message.pop("from"), "content": message.pop("value")}
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
    if message.get("tool_calls"):
        message["tool_calls"] = _read_calls(message["tool_calls"], where)
    if message.get("function_call"):
        (call,) = _read_calls([message["function_call"]], where)
        message["function_call"] = call.get("function", call)
    return {**message, "role": _ROLES.get(message["role"], message["role"]), "content": content}


def _read_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return OpenAI's tool calls: of one call or a list, plain or as JSON, whose arguments may be JSON, too.

    A call without OpenAI's frame, as ShareGPT and ms-swift write it, gets one if it is held as JSON.
    """
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        held = json.loads(given) if isinstance(given, str) else given
        return [_read_call(call, framed=held is not given) for call in (held if isinstance(held, list) else [held])]
    raise DataError(f'{where} is no tool call: {str(given)[:60]!r}. Give {{"name": …, "arguments": {{…}}}}')


def _read_call(given: Any, *, framed: bool) -> dict[str, Any]:
    call = json.loads(given) if isinstance(given, str) else given
    function = dict(call.get("function", call))
    if not isinstance(function["name"], str) or not function["name"]:
        raise ValueError("a call needs a name")
    arguments = function.get("arguments", function.pop("parameters", {}))  # Llama writes parameters
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    function["arguments"] = arguments
    if "function" in call:
        return {**call, "function": function}
    return {"type": "function", "function": function} if framed else function


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold None, at any depth, and with NumPy's arrays as lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
