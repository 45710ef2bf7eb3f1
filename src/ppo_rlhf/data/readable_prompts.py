"""Prompts as people read them: a chat as its turns, each the role and then the text, without a template's tokens."""

from __future__ import annotations

import json
from typing import Any

from ppo_rlhf.data.chats import ASSISTANT, CALLS, TOOLS, Chat, Tools, read_tools
from ppo_rlhf.data.prompt_dataset import PromptDataset, as_json


def turns(chat: Chat, tools: Tools = None) -> list[tuple[str, str]]:
    """Return (name, text) of the tools and of each message of a chat; a message's tool calls are parts of their own."""
    parts = [("Tools", as_json(tools, indent=1))] if tools else []
    for message in chat:
        role = str(message["role"]).capitalize()
        calls = [(f"{role}: {key}", as_json(message[key], indent=1)) for key in CALLS if message.get(key)]
        content = str(message.get("content") or "")
        parts += [(role, content), *calls] if content or not calls else calls
    return parts


def readable_prompt(text: str, chat: str | None, tools: Any = None) -> str:
    """Return a prompt's text, or the turns of a chat prompt, which end where the assistant goes on.

    `chat` are the messages as JSON, None for plain text; `tools` is the prompt's cell of the column `tools`.
    """
    if chat is None:
        return text
    messages: Chat = json.loads(chat)
    parts = turns(messages, read_tools(tools, "prompts"))
    if messages[-1]["role"] != ASSISTANT:
        parts.append((ASSISTANT.capitalize(), ""))
    return "\n\n".join(f"{name}: {content}" for name, content in parts)


def readable_prompts(prompts: PromptDataset) -> list[str]:
    """Return each prompt as `readable_prompt` shows it."""
    if not prompts.has_chats:
        return prompts.texts[:]
    tools = prompts.columns.get(TOOLS, [None] * len(prompts))
    return [readable_prompt(*row) for row in zip(prompts.texts, prompts.chats, tools, strict=True)]
