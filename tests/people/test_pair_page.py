"""What MLflow's page shows of a pair: texts stay texts, in CommonMark as another library reads it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from markdown_it import MarkdownIt

from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.people.pair_page import as_text, question, responses

HARD = {
    "markdown": "# Response B\n\n- a\n- b\n\n**bold** `code` ---\n\n---\n> quoted",
    "html": "<script>alert(1)</script><div>&lt; &amp; <b>open",
    "fence": "```python\nprint(1)\n\nnever closed\n~~~\n````",
    "right to left": "مرحبا بالعالم \u202e reversed \u200f שלום",
    "escape codes": "\x1b[31mred\x1b[0m \t tab \r carriage \r\n windows\u2028separator",
    "long": "word \u00e9\U0001f600" * 500,
    "empty": "",
    "spaces": "  leading and trailing  \n\n",
}
TEXTS = {
    **HARD,
    "emphasis and escapes": "2*3*4 \\[x\\] a_b_c <b>\\`\\` trailing\\",
    "backticks": "`` ` ``` ```` `start\n````\nend`",
    "image": "![x](http://example.com/a.png) [l](http://example.com) <img src=x> http://example.com",
    "table": "| a | b |\n|--|--|\n| 1 | 2 |",
    "headings": "## Response B\n===\n\n    indented\n\ttab\n1. one",
}
ISOLATES = "\u2068\u2069"


def shown(markdown: str) -> tuple[str, set[str]]:
    """Return the text that CommonMark makes of Markdown, line breaks as newlines, and the kinds of its parts."""
    tokens: list[Any] = MarkdownIt("commonmark").parse(markdown)
    parts = [child for token in tokens for child in token.children or []]
    text = "".join({"hardbreak": "\n", "softbreak": "<soft>"}.get(part.type, part.content) for part in parts)
    return text, {part.type for part in parts} | {token.type for token in tokens}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_is_shown_character_for_character_and_is_nothing_but_text(text: str) -> None:
    found, kinds = shown(as_text(text))
    assert found.translate(dict.fromkeys(map(ord, ISOLATES))) == escaped(text.replace("\r\n", "\n")).translate(
        dict.fromkeys(map(ord, ISOLATES))
    )
    assert kinds <= {"paragraph_open", "inline", "paragraph_close", "code_inline", "hardbreak"}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_response_leads_out_of_its_place(text: str) -> None:
    tokens: list[Any] = MarkdownIt("commonmark").parse(responses(text, f"{text}!", cut_off_a=True))
    headings = [following.content for token, following in pairwise(tokens) if token.type == "heading_open"]
    assert headings == ["Response A (cut off at the length limit)", "Response B"]


def test_each_line_takes_the_direction_of_its_first_letter() -> None:
    assert as_text("שלום\nhello") == "`\u2068שלום\u2069`\\\n`\u2068hello\u2069`"


def test_what_the_list_of_a_queue_shows_is_plain() -> None:
    listed = " ".join(responses("fine .", "bad .").translate(dict.fromkeys(map(ord, ISOLATES))).split())
    assert listed == "Response A - `fine .` Response B - `bad .`"


@pytest.mark.parametrize("role", ["1. user", "- user", "1) user", "# user", "---", "", "> ```user", "user\n\n===\nb"])
def test_every_role_is_one_heading(role: str) -> None:
    tokens: list[Any] = MarkdownIt("commonmark").parse(question([{"role": role, "content": "a"}] * 2))
    assert [token.type for token in tokens if not token.type.startswith("paragraph")] == [
        *["heading_open", "inline", "heading_close", "inline"] * 2
    ]


def test_a_question_has_every_message_with_its_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text, _ = shown(question(chat, tools))
    plain = text.translate(dict.fromkeys(map(ord, ISOLATES)))
    order = ["Tools", '"name": "add"', "System", "Be kind.", "User", "first"]
    order += ["Assistant: tool_calls", '"arguments": {', "Tool", "3", "User", "(empty)"]
    places, place = [], 0
    for each in order:
        place = plain.index(each, place) + len(each)
        places.append(place)
    assert places == sorted(places)
    assert "None" not in plain
    assert "(empty)" in question("")
