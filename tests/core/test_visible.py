"""Control characters, which a terminal would obey, are escaped."""

from ppo_rlhf.core.escaped_text import visible

EVIL = "\x1b]0;title\x07\x9b2Jred"


def test_control_characters_are_written_out_and_lines_and_tabs_stay():
    assert visible(EVIL) == r"\x1b]0;title\x07\x9b2Jred"
    assert visible("a\n\tb é 漢") == "a\n\tb é 漢"
    assert visible("\r\x7f") == r"\r\x7f"
