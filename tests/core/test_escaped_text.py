"""Control characters, which a terminal would obey, are escaped."""

from ppo_rlhf.core.escaped_text import escaped

EVIL = "\x1b]0;title\x07\x9b2Jred"


def test_control_characters_are_written_out_and_lines_and_tabs_stay():
    assert escaped(EVIL) == r"\x1b]0;title\x07\x9b2Jred"
    assert escaped("a\n\tb é 漢") == "a\n\tb é 漢"
    assert escaped("\r\x7f") == r"\r\x7f"
