"""The options of a command line, from a list of arguments or from the text of one command."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from ppo_rlhf.core.errors import ConfigError

PROGRAM = "main.py"
_CONTROL = set("();<>|&")


def read_options(
    given: str | Sequence[str], names: Sequence[str], *, switches: Collection[str], lists: Collection[str]
) -> dict[str, Any]:
    """Return the options that are given, each with its text.

    Args:
        given: A list of arguments, or the text of one command. A launcher and the program may come first.
        names: The options whose values are wanted, without dashes.
        switches: Those among them that take no value, and are True.
        lists: Those among them that take several values.

    Returns:
        Values by option. Other options are True; those of the launcher have the prefix `launcher.`.

    Raises:
        ConfigError: The text is not one command without shell variables, or an option lacks its value.
    """
    words = _words(given) if isinstance(given, str) else list(given)
    program = next((i for i, word in enumerate(words) if word.rpartition("/")[2] == PROGRAM), -1)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        if name in switches:
            parser.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", nargs="+" if name in lists else None)
    known, unknown = parser.parse_known_args(words[program + 1 :])
    if unknown and not unknown[0].startswith("--"):
        raise ConfigError(f"{unknown[0]!r} is neither a file nor an option of {PROGRAM}.")
    options: dict[str, Any] = {
        name: value[0] if name in lists and len(value) == 1 else value for name, value in vars(known).items()
    }
    options |= {_name(word): True for word in unknown if word.startswith("--")}
    return options | {f"launcher.{_name(word)}": True for word in words[: max(program, 0)] if word.startswith("-")}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command cannot be read: {message}.")


def _words(text: str) -> list[str]:
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    lexer = shlex.shlex("\n".join(commands), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""  # shlex would cut a word at `#`
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}. Close every quotation mark.") from None
    if len(commands) != 1 or any(map(_is_shell, words)):
        raise ConfigError(
            "the text is not one plain command: paste the expanded command, without shell variables, redirections, "
            "comments and other commands."
        )
    return words


def _is_shell(word: str) -> bool:
    return "$" in word or "`" in word or word.startswith("#") or (word != "" and set(word) <= _CONTROL)


def _name(option: str) -> str:
    return option.lstrip("-").partition("=")[0]
