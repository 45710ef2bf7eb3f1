"""A question and its two responses as MLflow's review page shows them: Markdown in which every text stays a text.

MLflow shows the same Markdown, unread, in the queue's list: so it has as few signs as possible.
"""

from __future__ import annotations

import re

from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.data.chats import Chat, Tools
from ppo_rlhf.data.readable_prompts import turns
from ppo_rlhf.people.answers import Comparison

CUT_OFF = "cut off at the length limit"
_ISOLATED = "\u2068{}\u2069"
"""Unicode's isolates around a line: the line takes the direction of its first letter, and no space at its end is
dropped."""


def page(pair: Comparison) -> tuple[str, str]:
    """Return the question and the two responses of a pair."""
    shown = responses(pair.response_a, pair.response_b, cut_off_a=pair.cut_off_a, cut_off_b=pair.cut_off_b)
    return question(pair.prompt, pair.tools), shown


def question(prompt: str | Chat, tools: Tools = None) -> str:
    """Return a prompt, or all messages of a chat with tool calls and tools, under the names of their roles."""
    chat = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    return "\n\n".join(_under(*part) for part in turns(chat, tools))


def responses(response_a: str, response_b: str, *, cut_off_a: bool = False, cut_off_b: bool = False) -> str:
    """Return both responses under their names; a response that ended at the length limit is named as cut off."""
    named = ("Response A", response_a, cut_off_a), ("Response B", response_b, cut_off_b)
    return "\n\n".join(_under(f"{name} ({CUT_OFF})" if cut else name, text) for name, text, cut in named)


def as_text(text: str) -> str:
    """Return Markdown that shows a text character for character, with hidden characters written out.

    Each line is a code span with more backticks than any run of backticks in the text: nothing in the text is read as
    Markdown, no link or image is loaded, and, unlike in a fenced block, long lines wrap.
    """
    lines = escaped(text.replace("\r\n", "\n")).split("\n")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return "\\\n".join(f"{fence}{_ISOLATED.format(line)}{fence}" for line in lines)


def _under(name: str, text: str) -> str:
    # A line below makes a heading that is plain in the list; a number or a dash before it would make an item of a list
    heading = " ".join(re.sub(r"[^\w(),:. -]", "", name).split()).lstrip("0123456789().,:- ") or "Message"
    return f"{heading}\n-\n\n{as_text(text) if text else '(empty)'}"
