"""Arguments of a command that a shell script gives, as far as they can be known without running it."""

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
    """The arguments behind a command's name, and the variables of the script."""

    words: list[str]
    variables: Mapping[str, str]


def find_command(script: str, names: Sequence[tuple[str, ...]], where: str) -> Command:
    """Return the one command of a script that has one of these names, of one or several words.

    Comments, line continuations, variables of the script with their defaults, and sums of two numbers are read.

    Raises:
        ConfigError: There is no such command, or several; or a quotation mark is not closed.
    """
    text = re.sub(r"(?m)(^|\s)#(?!\S*['\"]).*$", r"\1", script)
    variables: dict[str, str] = {}
    found = []
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
            found.append(rest[: next((i for i, word in enumerate(rest) if _ENDS.fullmatch(word)), len(rest))])
    if len(found) != 1:
        raise ConfigError(f"{where} has {len(found)} commands `{' '.join(names[0])}`; it must have one.")
    return Command(found[0], variables)


def options_of(words: list[str], where: str) -> tuple[list[str], dict[str, Any]]:
    """Return the words before the first option, and the options: text, a list of several, or true without a value.

    Raises:
        ConfigError: A value is known only to the shell.
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
            raise ConfigError(f"{where}: --{name} has {shell}, which only the shell knows. Write its value there.")
        options[name] = values if len(values) > 1 else values[0] if values else True
    return words[:first], options


def _known(line: str, variables: Mapping[str, str]) -> str:
    """Return a line with the variables and the sums that are known in their places."""

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2], found[3])
        return found[0] if known is None else known

    def total(found: re.Match[str]) -> str:
        left, operator, right = [part for part in found.groups() if part is not None]
        return str(_OPERATORS[operator[-1]](int(left), int(right)))

    return _SUM.sub(total, _VARIABLE.sub(value, line))
