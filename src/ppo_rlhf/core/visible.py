"""Texts of models and files, made harmless where a terminal would obey them."""

import logging

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Return a text with its control characters, except tab and newline, written out as Python writes them."""
    return text.translate(_CONTROL)


class VisibleRecord(logging.LogRecord):
    """A log line without control characters."""

    def getMessage(self) -> str:  # noqa: N802  # logging's name
        """Return the line."""
        return visible(super().getMessage())
