"""Characters that a terminal obeys, and those that a page shows as something else or not at all, are written out."""

import unicodedata

import pytest

from ppo_rlhf.core.escaped_text import escaped

EVIL = "\x1b]0;title\x07\x9b2Jred"


def test_control_characters_are_written_out_and_lines_and_tabs_stay():
    assert escaped(EVIL) == r"\x1b]0;title\x07\x9b2Jred"
    assert escaped("a\n\tb é 漢") == "a\n\tb é 漢"
    assert escaped("\r\x7f") == r"\r\x7f"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("\u202eevil\u202c", r"\u202eevil\u202c"),  # shown as `live`
        ("a\u2069 b\u2066c", r"a\u2069 b\u2066c"),  # closes the page's own isolate
        ("pass\u200bword\u2060\u00ad\ufeff", r"pass\u200bword\u2060\xad\ufeff"),
        ("a\u200cb\u200d\ufe0f", r"a\u200cb\u200d\ufe0f"),  # joiners that join nothing
        ("\u200d", r"\u200d"),
        ("\U000e0041\U000e01ef\u2028\ue000", r"\U000e0041\U000e01ef\u2028\ue000"),
        ("\u3164\u115f\u2800\u034f", r"\u3164\u115f\u2800\u034f"),  # letters, a symbol and a mark that are blank
        ("\u2065\ufff0\ufff8\ufdd0\ufffe", r"\u2065\ufff0\ufff8\ufdd0\ufffe"),  # assigned to no character
        ("مرحبا \u200fשלום\u061c", "مرحبا \\u200fשלום\\u061c"),
    ],
)
def test_characters_that_show_nothing_or_reorder_a_text_are_written_out(text: str, written: str):
    assert escaped(text) == written


def test_no_control_or_format_character_passes_between_letters():
    hidden = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf")]
    assert len(hidden) > 200
    passed = {char for char in hidden if char in escaped(f"a{char}b")}
    assert passed == {"\t", "\n"}


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian: without the joiner the letters look different
        "क्\u200dष श्\u200cर",
        "👩\u200d🔬 ❤\ufe0f\u200d🔥 👍🏽 👩🏽\u200d🚀 1\ufe0f\u20e3 ☎\ufe0e",
        "e\u0301 漢字 ไทย Ж «\u00a0»",
    ],
)
def test_joiners_and_selectors_that_shape_their_neighbours_stay(text: str):
    assert escaped(text) == text
