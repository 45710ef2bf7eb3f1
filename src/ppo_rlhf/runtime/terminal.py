"""Standard streams of a command: the output may be closed or full, and Ctrl-C may come while Python imports."""

import io
import os
import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

_LOST = "{} cannot be written to ({}): its output is lost, the command continues.\n"


def prepare_terminal() -> None:
    """Keep a command running if its output cannot be written, and print one line instead of a traceback on Ctrl-C.

    A pipe without a reader still raises an error. Standard streams that have been replaced, as in a notebook or a test,
    are not changed.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    # Open the closed streams in the order of `closed`, so that each stream gets its usual file descriptor, which a file
    # of the run would get otherwise
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for name, stream in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if stream is not None and stream is getattr(sys, name):
            output = io.BufferedWriter(_Output(stream.fileno(), name))
            setattr(sys, name, io.TextIOWrapper(output, stream.encoding, "backslashreplace", line_buffering=True))
    if "stdout" in closed:
        sys.stderr.write(_LOST.format("stdout", "it is closed"))
    show = sys.excepthook

    def show_in_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("Stopped by SIGINT.\n")
        else:
            show(kind, error, traceback)

    sys.excepthook = show_in_one_line


class WithoutPadding(io.TextIOBase):
    """Standard output without the spaces with which rich fills lines up to its width."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed calls it writeable, which it is not
        """The encoding of standard output."""
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        """Write a text without the spaces at the ends of its lines."""
        sys.stdout.write(re.sub(" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def flush(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()


class _Output(io.FileIO):
    """Standard output or standard error."""

    def __init__(self, descriptor: int, label: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._label, self._is_full = label, False

    def write(self, data: Any) -> int:
        """Write the data; if writing fails, discard the data and print one line about the first failure."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                with suppress(OSError):
                    os.write(2, _LOST.format(self._label, error.strerror).encode())
            return len(data)
