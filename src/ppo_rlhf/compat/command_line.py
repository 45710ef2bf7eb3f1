"""Reads the one command of a shell script that starts training, without running anything.

Only what has one meaning is read: assignments, `export`, `set`, `cd`, `mkdir`, `echo`, and the command itself. Any
other construct is refused with its line, because it could change what the command does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ppo_rlhf.core.errors import ConfigError

LONGEST = 200_000
"""Largest number of characters of a script, of a file of settings, and of a variable's value."""
_EXPANSION = r"\$(?:\w+|[@*]|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\(\([^()]*\)\)|\([^()]*\))"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t]+) | (?P<joined>\\\n) | (?P<end>\n|;|&(?![&>])) | (?P<redirect>&?>>?(?:&\d)?)
    | (?P<tee>\|[ \t]*tee\b[^\n;&|<>]*) | (?P<single>'[^']*') | (?P<double>"(?:[^"\\]|\\.)*") | (?P<escaped>\\.)
    | (?P<expansion>{_EXPANSION}) | (?P<hash>\#) | (?P<plain>[^\s\\'"$`;&|<>(){{}}\#]+) | (?P<refused>.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\\n])|(?P<expansion>{_EXPANSION})|[$`]")
_VARIABLE = re.compile(r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?P<default>:?-.*)?\})", re.DOTALL)
_SUM = re.compile(r"\$(?:\(\(|\(\s*expr\s)\s*(\S+?)\s*(\\?[-+*/])\s*(\S+?)\s*\)?\)")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,11}")  # a shell reads 010 as 8
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_UNKNOWN = "\0"  # stands around a variable that the script does not set; only the training command may not have it
_SET = re.compile(r"[-+][eux]*o?|pipefail|errexit|nounset|xtrace")
_TORCHRUN = ("nproc_per_node", "nnodes")
_LAUNCHERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("torchrun",): _TORCHRUN,
    ("python", "torch.distributed.run"): _TORCHRUN,
    ("python", "torch.distributed.launch"): _TORCHRUN,
    ("accelerate", "launch"): ("num_processes",),
    ("deepspeed",): ("num_gpus", "num_nodes"),
}
"""Launchers, each with the options whose product is the number of processes."""


@dataclass
class Command:
    """The command that starts training."""

    where: str  # file and line, for errors
    launcher: list[str]  # the words before the command's name, paths cut off
    words: list[str]  # the words after it
    environment: dict[str, str]  # what the script exports to the command
    hidden: set[str]  # names of variables that the script sets, but does not export
    folder: str  # where `cd` leads, seen from the folder in which the script starts; empty: that folder
    takes_arguments: bool  # whether the script passes its own arguments ($@) on

    def processes(self, variables: Sequence[str] = ()) -> int:
        """Return the number of processes that the launcher starts, else the product of environment variables."""
        words = [re.sub(r"^python[\d.]+$", "python", word) for word in self.launcher if word not in ("-m", "-u")]
        for launcher, names in _LAUNCHERS.items():
            if tuple(words[: len(launcher)]) == launcher:
                return self._launched(options_of(words[len(launcher) :], self.where)[1], names)
        if words not in ([], ["python"]):
            raise ConfigError(
                f"{self.where}: `{' '.join(self.launcher)}` is no launcher that can be read; write torchrun, "
                "accelerate launch or python before the command."
            )
        if hidden := next((name for name in variables if name in self.hidden), None):
            raise ConfigError(
                f"{self.where}: {hidden} is set, but the command does not see it; write export {hidden}=…."
            )
        given = [self.environment.get(name, "1") for name in variables]
        if (total := _product(variables, given, self.where)) > 1 and words:
            raise ConfigError(
                f"{self.where}: python starts one process whatever {', '.join(variables)} say; remove them, or write "
                "torchrun before the command."
            )
        return total

    def _launched(self, options: dict[str, Any], names: Sequence[str]) -> int:
        given = [str(options.get(name, "")) for name in names]
        visible = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        if given[0] in ("gpu", "auto") or (not given[0] and names != _TORCHRUN):
            if not visible or {"config_file", "include", "hostfile"} & options.keys():
                raise ConfigError(f"{self.where}: the number of processes is not given; write --{names[0]}.")
            given[0] = str(len([device for device in visible.split(",") if device]))
        return _product(names, [number or "1" for number in given], self.where)


def _product(names: Sequence[str], given: Sequence[str], where: str) -> int:
    total = 1
    for name, number in zip(names, given, strict=True):
        if not re.fullmatch(r"[1-9][0-9]{0,5}", number):
            shown = number.replace(_UNKNOWN, "")
            raise ConfigError(f"{where}: {name}={shown!r} is no number of processes; write a whole number.")
        total *= int(number)
    return total


def find_command(script: str, names: Sequence[tuple[str, ...]], where: str) -> Command:
    """Return the only command in a shell script that has one of `names`. A name consists of one or several words.

    Raises:
        ConfigError: The script has no such command or several, or a construct that is not read.
    """
    if len(script) > LONGEST:
        raise ConfigError(f"{where} has {len(script)} characters, a script has at most {LONGEST}.")
    reader = _Script(script.replace("\r\n", "\n").removeprefix("\ufeff"), names, where)
    commands = [command for command in map(reader.run, reader.statements()) if command is not None]
    if len(commands) != 1:
        raise ConfigError(f"{where} has {len(commands)} commands `{' '.join(names[0])}`; it must have exactly one.")
    return commands[0]


@dataclass
class _Statement:
    line: int
    assignments: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    is_redirected: bool = False


class _Script:
    """A script's statements, read one after the other: the variables of a statement are those set before it."""

    def __init__(self, text: str, names: Sequence[tuple[str, ...]], where: str) -> None:
        self.text, self.names, self.where, self.line = text, names, where, 1
        self.variables = {"HOME": str(Path.home()), "PWD": os.getcwd()}
        self.visible = self.variables  # what a word's expansions see: an assignment also sees those on its left
        self.exported: set[str] = set()
        self.folder, self.takes_arguments = "", False

    def refuse(self, what: str, why: str) -> NoReturn:
        shown = what.replace(_UNKNOWN, "").strip()[:60]
        raise ConfigError(f"{self.where}, line {self.line}: `{shown}` {why}.")

    def statements(self) -> Iterator[_Statement]:
        statement, word, at, skips = _Statement(1), None, 0, False
        while at <= len(self.text):
            token = _TOKEN.match(self.text, at) if at < len(self.text) else None
            kind, text = (token.lastgroup, token[0]) if token else ("end", "\n")
            at += len(text)
            if kind in ("space", "end", "redirect", "tee"):
                if kind == "redirect" and word is not None and word.isdecimal():
                    word = None  # the number of a file descriptor
                if word is not None and not skips:
                    self._add(statement, word)
                skips = skips and word is None
                word = None
            is_assigned = _ASSIGNMENT.match(word or "") and statement.words[:1] in ([], ["export"])
            sees_left = is_assigned and not statement.words
            self.visible = self.variables | statement.assignments if sees_left else self.variables
            if kind == "end":
                statement.is_redirected |= text == "&"
                if statement.words or statement.assignments or statement.is_redirected:
                    yield statement
                self.line += text == "\n"
                statement, skips = _Statement(self.line), False
            elif kind in ("redirect", "tee"):
                statement.is_redirected, skips = True, kind == "redirect" and not text[-1].isdigit()
            elif kind == "hash" and word is None:
                end = self.text.find("\n", at)
                at = len(self.text) if end < 0 else end
            elif kind == "expansion":
                self.takes_arguments |= text in ("$@", "$*")
                value = "" if text in ("$@", "$*") else self._value(text)
                first, *others = [value] if is_assigned else re.split(r"\s+", value)
                word = f"{word or ''}{first}" if first or word is not None else None
                for each in others:
                    if word is not None and not skips:
                        self._add(statement, word)
                    word = each or None
            elif kind == "double" and text in ('"$@"', '"${@}"'):
                self.takes_arguments = True  # the script is read as if it had no arguments
            elif kind in ("single", "double", "hash", "plain"):
                inner = {"single": text[1:-1], "double": text[1:-1]}.get(kind, text)
                word = (word or "") + (self._quoted(inner) if kind == "double" else inner)
            elif kind == "escaped":
                if text == "\\ " and self.text[at:].lstrip(" \t").startswith(("\n", "#")):
                    self.refuse(
                        self._line_at(at), "has a backslash that is not last in its line, so the command ends there"
                    )
                word = (word or "") + text[1]
            elif kind == "refused":
                why = "is not closed" if text in "'\"" else "is not read; write simple commands, one a line"
                self.refuse(self._line_at(at), f"has {text}, which {why}")
            if word is not None and len(word) > LONGEST:
                self.refuse(word, f"is longer than {LONGEST} characters")
            self.line += text.count("\n") if kind in ("joined", "single", "double", "expansion") else 0

    def _line_at(self, at: int) -> str:
        return self.text[self.text.rfind("\n", 0, at - 1) + 1 : at + 60].partition("\n")[0]

    def _add(self, statement: _Statement, word: str) -> None:
        assigned = _ASSIGNMENT.fullmatch(word) if not statement.words else None
        if assigned:
            statement.assignments[assigned[1]] = assigned[2]
        else:
            statement.words.append(word)

    def _quoted(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            if match["escaped"]:
                return match["escaped"].strip("\n")
            return self._value(match[0])

        return _IN_QUOTES.sub(value, text)

    def _value(self, text: str) -> str:
        """Return the value of `$name`, `${name:-default}`, or a sum of two numbers."""
        if variable := _VARIABLE.fullmatch(text):
            name, default = variable["name"] or variable["braced"], variable["default"]
            known = self.visible.get(name)
            if known or (known is not None and not (default or "").startswith(":")):
                return known
            if default is None:
                return f"{_UNKNOWN}{text}{_UNKNOWN}"
            value = default.removeprefix(":").removeprefix("-")
            if re.search(r"['\"\\`]", value):
                self.refuse(text, "has quotes; write the default without them")
            return self._quoted(value)
        if total := _SUM.fullmatch(text):
            operands = [self._quoted(each) for each in (total[1], total[3])]
            left, right = (self.visible.get(each, each) for each in operands)
            operator = total[2][-1]
            if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right) and (operator != "/" or int(right)):
                return str(_OPERATORS[operator](int(left), int(right)))
        self.refuse(text, "needs a shell; write its value")

    def run(self, statement: _Statement) -> Command | None:
        """Take over what a statement sets, and return the command if the statement starts training."""
        line, self.line = self.line, statement.line
        words, head = statement.words, statement.words[0] if statement.words else ""
        command = None
        if not words and not statement.is_redirected:
            self.variables |= statement.assignments
        elif command := self._command(statement):
            pass
        elif statement.is_redirected or statement.assignments or not self._is_harmless(head, words[1:]):
            self.refuse(
                " ".join([*statement.assignments, *words]),
                "is not read: beside the one command that trains a script may have assignments, export, set, cd, mkdir "
                "and echo; remove the line, or write what it does",
            )
        if "IFS" in self.variables:
            self.refuse("IFS", "changes where words are split, which is not read; remove it")
        self.line = line
        return command

    def _is_harmless(self, head: str, words: list[str]) -> bool:
        if head == "export":
            for word in words:
                assigned = _ASSIGNMENT.fullmatch(word)
                if assigned:
                    self.variables[assigned[1]] = assigned[2]
                self.exported.add(assigned[1] if assigned else word)
            return not any(word.startswith("-") for word in words)
        if head == "set":
            return all(map(_SET.fullmatch, words))
        if head == "cd" and len(words) == 1 and _UNKNOWN not in words[0] and words[0] != "-":
            folder = os.path.expanduser(words[0])
            self.folder = os.path.join(self.folder, folder)
            self.variables["PWD"] = os.path.normpath(os.path.join(self.variables["PWD"], folder))
            return True
        return head in ("mkdir", "echo")

    def _command(self, statement: _Statement) -> Command | None:
        words = statement.words
        files = [word.rpartition("/")[2] for word in words]
        ends = [
            (i, i + len(name))
            for i in range(len(files))
            for name in self.names
            if tuple(files[i : i + len(name)]) == name
        ]
        if not ends or words[0] in ("echo", "mkdir", "cd", "set", "export"):
            return None
        start, end = ends[0]
        if unknown := next((word for word in words if _UNKNOWN in word), None):
            name = unknown.split(_UNKNOWN)[1]
            self.refuse(unknown, f"has {name}, which the script does not set; write its value")
        launcher = files[1 if files[0] == "nohup" else 0 : start]
        exported = {name: self.variables[name] for name in self.exported if name in self.variables}
        environment = exported | statement.assignments
        hidden = self.variables.keys() - environment.keys()
        where = f"{self.where}, line {statement.line}"
        return Command(where, launcher, words[end:], environment, hidden, self.folder, self.takes_arguments)


def options_of(words: Sequence[str], where: str, need_value: Collection[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Return the words before the first option, and the options by name.

    An option's value is a text or a list of texts; an option without a value is True.

    Raises:
        ConfigError: An option is given twice, or one of `need_value` has no value.
    """
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    name = ""
    for word in words[first:]:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in options:
                raise ConfigError(f"{where}: --{name} is given twice. Keep one of the two.")
            options[name] = [value] if has_value else []
        else:
            options[name].append(word)
    for name, values in options.items():
        if name in need_value and not all(values or [""]):
            raise ConfigError(f"{where}: --{name} has no value, or an empty one. Give a value, or leave it out.")
        options[name] = values if len(values) > 1 else values[0] if values else True
    return list(words[:first]), options
