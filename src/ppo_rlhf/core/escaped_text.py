"""Escape control characters in texts from models and files, so that a terminal does not obey them."""

import logging

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def escaped(text: str) -> str:
    r"""Return a text with all control characters but tab and newline replaced by Python escapes such as `\x1b`."""
    return text.translate(_CONTROL)


class EscapedRecord(logging.LogRecord):
    """A log record whose message has its control characters escaped."""

    def getMessage(self) -> str:  # noqa: N802  # logging's name
        """Return the message with control characters escaped."""
        return escaped(super().getMessage())
