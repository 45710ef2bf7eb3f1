"""Reads the arguments of a command from a shell script, without running the script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_rlhf.core.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export\s+)?(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_SUM = re.compile(r"\$\(expr\s+(\d+)\s+([-+*/]|\\\*)\s+(\d+)\s*\)|\$\(\(\s*(\d+)\s*([-+*/])\s*(\d+)\s*\)\)")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}
_ENDS = re.compile(r"[|;&<>]|\d?>.*|&&|\|\|")


@dataclass(frozen=True)
class Command:
    """The words after a command's name, and the variables of the script."""

    words: list[str]
    variables: Mapping[str, str]


def find_command(script: str, names: Sequence[tuple[str, ...]], where: str) -> Command:
    """Return the only command in a shell script that has one of `names`. A name consists of one or several words.

    The parser of shell scripts understands comments, line continuations, variables with their defaults, and arithmetic
    with two numbers.

    Raises:
        ConfigError: The script has no such command or several, or a quotation mark is not closed.
    """
    text = re.sub(r"(?m)(^|\s)#(?!\S*['\"]).*$", r"\1", script)
    variables: dict[str, str] = {}
    commands = []
    for line in re.sub(r"\\[ \t]*\n(\s*\n)*", " ", text).splitlines():
        try:
            words = shlex.split(_known(line, variables))
        except ValueError as error:
            raise ConfigError(f"{where}: this line cannot be read ({error}): {line.strip()[:60]}") from None
        while words and (
            assignment := _ASSIGNMENT.fullmatch(" ".join(words[:2]) if words[0] == "export" else words[0])
        ):
            variables[assignment[1]] = assignment[2]
            words = words[2 if words[0] == "export" else 1 :]
        files = [word.rpartition("/")[2] for word in words]
        ends = [i + len(name) for name in names for i in range(len(files)) if tuple(files[i : i + len(name)]) == name]
        if ends:
            rest = words[ends[0] :]
            commands.append(rest[: next((i for i, word in enumerate(rest) if _ENDS.fullmatch(word)), len(rest))])
    if len(commands) != 1:
        raise ConfigError(f"{where} has {len(commands)} commands `{' '.join(names[0])}`; it must have exactly one.")
    return Command(commands[0], variables)


def options_of(words: list[str], where: str) -> tuple[list[str], dict[str, Any]]:
    """Return the words before the first option, and the options by name.

    An option's value is a text or a list of texts; an option without a value is True.

    Raises:
        ConfigError: A value has an expression that only a shell can evaluate.
    """
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    name = ""
    for word in words[first:]:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = [value] if value else []
        else:
            options[name].append(word)
    for name, values in options.items():
        if shell := next((value for value in values if "$" in value or "`" in value), None):
            raise ConfigError(f"{where}: --{name} has {shell}, which only a shell can evaluate. Write its value.")
        options[name] = values if len(values) > 1 else values[0] if values else True
    return words[:first], options


def _known(line: str, variables: Mapping[str, str]) -> str:
    """Return a line in which known variables and arithmetic are replaced by their values."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[2], match[3])
        return match[0] if known is None else known

    def total(match: re.Match[str]) -> str:
        left, operator, right = [part for part in match.groups() if part is not None]
        return str(_OPERATORS[operator[-1]](int(left), int(right)))

    return _SUM.sub(total, _VARIABLE.sub(value, line))
