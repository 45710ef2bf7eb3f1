"""A question and its two responses as MLflow's review page shows them: Markdown in which every text stays a text."""

from __future__ import annotations

import re
from typing import Any

from ppo_rlhf.core.visible import visible
from ppo_rlhf.data.chats import CALLS, Chat, Tools
from ppo_rlhf.data.prompt_dataset import as_json

CUT_OFF = "cut off at the length limit"
_ISOLATED = "\u2068{}\u2069"
"""Unicode's isolates around a line: the line takes the direction of its first letter, and no space at its end is
dropped."""


def question(prompt: str | Chat, tools: Tools = None) -> str:
    """Return a prompt, or all messages of a chat with tool calls and tools, under the names of their roles."""
    parts = [("Tools", as_json(tools, indent=1))] if tools else []
    messages: Any = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        role = str(message["role"]).capitalize()
        calls = [(f"{role}: {key}", as_json(message[key], indent=1)) for key in CALLS if message.get(key)]
        content = _plain(message.get("content"))
        parts += [(role, content), *calls] if content or not calls else calls
    return "\n\n".join(_under(*part) for part in parts)


def responses(response_a: str, response_b: str, *, cut_off_a: bool = False, cut_off_b: bool = False) -> str:
    """Return both responses under their names; a response that ended at the length limit is named as cut off."""
    named = ("Response A", response_a, cut_off_a), ("Response B", response_b, cut_off_b)
    return "\n\n".join(_under(f"{name} ({CUT_OFF})" if cut else name, text) for name, text, cut in named)


def as_text(text: str) -> str:
    """Return Markdown that shows a text character for character, with control characters written out.

    Each line is a code span with more backticks than any run of backticks in the text: nothing in the text is read as
    Markdown, no link or image is loaded, and, unlike in a fenced block, long lines wrap.
    """
    lines = visible(text.replace("\r\n", "\n")).split("\n")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return "\\\n".join(f"{fence}{_ISOLATED.format(line)}{fence}" for line in lines)


def _under(name: str, text: str) -> str:
    heading = " ".join(re.sub(r"[^\w(),:. -]", "", name).split())
    return f"### {heading}\n\n{as_text(text) if text else '*(empty)*'}"


def _plain(content: Any) -> str:
    """Return the content of a message as text; parts of other kinds than text as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else as_json(part)
        for part in parts
    )
