r"""Write out the characters of texts from models and files that are not visible as themselves.

A terminal obeys control characters, and a page obeys Unicode's formatting characters, which hide text and change its
order: the text `\u202eevil` is shown as `live`.
"""

import logging
import re
import unicodedata

_CONTEXTUAL = re.compile("([\u200c\u200d\ufe0e\ufe0f])")
"""Unicode's joiners and the selectors of an emoji's form: some neighbours make them visible."""
_JOINER, _SELECTORS, _KEYCAP, _VIRAMA = "\u200d", "\ufe0e\ufe0f", "\u20e3", 9
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufdd0-\ufdef\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\ufffe\uffff\U000e0000-\U000e0fff]"
)
"""Fillers and selectors that show nothing, although Unicode counts them as letters, marks, symbols or unassigned."""


class _Written(dict[int, str]):
    """What each character is written as, for `str.translate`; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        is_hidden = unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp") or _BLANK.match(char)
        self[code] = ascii(char)[1:-1] if is_hidden else char
        return self[code]


_WRITTEN = _Written({ord(char): char for char in "\t\n"})


def escaped(text: str) -> str:
    r"""Return a text whose characters that are not visible as themselves are Python escapes such as `\x1b`.

    These are control characters except tab and newline, formatting characters (zero-width ones, and those that change
    the direction of writing), line separators, private characters and blank fillers. Joiners and selectors stay where
    they shape their neighbours: in Arabic and Indic words and in emoji.
    """
    if _CONTEXTUAL.search(text) is None:
        return text.translate(_WRITTEN)
    parts = _CONTEXTUAL.split(text)  # texts at even places, one joiner or selector at each odd place
    parts[::2] = [part.translate(_WRITTEN) for part in parts[::2]]
    for place in range(1, len(parts), 2):
        before = (parts[place - 1] or parts[place - 2])[-1:]
        if not _shapes(before, parts[place], parts[place + 1][:1]):
            parts[place] = parts[place].translate(_WRITTEN)
    return "".join(parts)


def _shapes(before: str, char: str, after: str) -> bool:
    """Return whether a joiner or selector changes how the characters before and after it look."""
    if not before:
        return False
    is_symbol = unicodedata.category(before) in ("So", "Sm")
    if char in _SELECTORS:
        return is_symbol or after == _KEYCAP
    is_arabic = bool(after) and {*map(unicodedata.bidirectional, (before, after))} == {"AL"}
    is_emoji = is_symbol or before == _SELECTORS[1] or unicodedata.category(before) == "Sk"  # Sk: a tone of skin
    joins_emoji = char == _JOINER and is_emoji and bool(after) and unicodedata.category(after) == "So"
    return is_arabic or joins_emoji or unicodedata.combining(before) == _VIRAMA


class EscapedRecord(logging.LogRecord):
    """A log record whose message has its hidden characters escaped."""

    def getMessage(self) -> str:  # noqa: N802  # logging's name
        """Return the message with hidden characters escaped."""
        return escaped(super().getMessage())
