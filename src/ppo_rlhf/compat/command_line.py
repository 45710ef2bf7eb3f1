"""A command line as settings: from a list of arguments, from text, or from a shell script that holds it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ppo_rlhf.core.errors import ConfigError

PROGRAM = "main.py"

_CONTROL = "|;&"
_END = re.compile(rf"^\d*(>>?|<)|^[{_CONTROL}]+$")
_PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\(|.""")  # quoted, escaped, `$(`, or one character
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NEGATIVE_NUMBER = re.compile(r"^-\.?\d")


@dataclass
class CommandLine:
    """What a command line says.

    Attributes:
        settings: Values by option, without the leading dashes: a text, a list of texts where an option takes several,
            True where it takes none. Of an option that comes twice the last counts, as in argparse.
        launcher: Likewise, of the options before the program (`deepspeed --num_gpus 8 main.py …`).
        stray: Words that belong to no option.
    """

    settings: dict[str, str | list[str] | bool] = field(default_factory=dict)
    launcher: dict[str, str | list[str] | bool] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)


def read_command_line(given: str | Sequence[str], kinds: Mapping[str, str]) -> CommandLine:
    """Read arguments, with or without a launcher and a program before them.

    Args:
        given: A list of arguments, or text: a command, or a shell script that holds one. In text, continued lines are
            joined, variables that the script sets to plain values are filled in, and comments, redirections,
            parentheses around commands and other commands of the same line are left out.
        kinds: What each known option takes: `value`, `values` (all words up to the next option) or `nothing`. Of an
            unknown option the words up to the next option are its values.

    Raises:
        ConfigError: There is neither a command nor an option, there are several commands, or an option lacks its value.
    """
    words = _words(given) if isinstance(given, str) else list(given)
    program = next((i for i, word in enumerate(words) if _is_program(word)), None)
    result = CommandLine()
    if program is not None:
        result.launcher = _options(words[:program], {}, [])
        words = words[program + 1 :]
    result.settings = _options(words, kinds, result.stray)
    if given and program is None and not result.settings:  # else the defaults would pass for what it says
        raise ConfigError(
            f"{' '.join(words)}: neither {PROGRAM} nor an option is in it. Give a step-3 command, or a file that "
            "exists and holds one."
        )
    return result


def _words(text: str) -> list[str]:
    joined = re.sub(r"\\\r?\n", " ", text).splitlines()
    lines = [line for line in joined if line.strip() and not line.lstrip().startswith("#")]
    values: dict[str, str] = {}
    commands = []
    for line in lines:
        assignment = _ASSIGNMENT.match(line.partition(" #")[0])
        if assignment:
            name, value = assignment.groups()
            values[name] = _fill(value.strip("'\""), values)
        elif PROGRAM in line or len(lines) == 1:
            commands.append(_fill(line, values))
    if len(commands) != 1:
        raise _not_one(len(commands))
    command = _without_groups(commands[0]) if PROGRAM in commands[0] else commands[0]
    lexer = shlex.shlex(command, posix=True, punctuation_chars=_CONTROL)  # `3; ls` is three words
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {str(error).lower()}. Close every quotation mark.") from None
    programs = [i for i, word in enumerate(words) if _is_program(word)]
    if len(programs) > 1:
        raise _not_one(len(programs))
    program = programs[0] if programs else 0
    start = next((i + 1 for i in reversed(range(program)) if _END.match(words[i])), 0)  # `cd step3 && …`
    end = next((i for i in range(program, len(words)) if _END.match(words[i])), len(words))
    return words[start:end]


def _without_groups(command: str) -> str:
    """Return a command with `;` for the parentheses around commands; those of `$(…)`, and quoted ones, are words'."""
    pieces: list[str] = []
    opened: list[str] = []
    for piece in _PIECE.findall(command):
        is_in_word = "$(" in [*opened, piece]
        if piece in ("(", "$("):
            opened.append(piece)
        elif piece == ")" and opened:
            opened.pop()
        pieces.append(" ; " if piece in ("(", ")") and not is_in_word else piece)
    return "".join(pieces)


def _is_program(word: str) -> bool:
    return word.rpartition("/")[2] == PROGRAM


def _not_one(commands: int) -> ConfigError:
    return ConfigError(
        f"the text holds {commands} commands with {PROGRAM}; exactly one step-3 command is expected. Give it alone, as "
        "one line or with each line but the last ending in a backslash."
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Fill in variables; one without a value, or whose value is itself unknown, stays as it is written."""

    def known(found: re.Match[str]) -> str:
        value = values.get(found[1] or found[2])
        return found[0] if value is None or "$" in value else value

    return _VARIABLE.sub(known, text)


def _options(words: Sequence[str], kinds: Mapping[str, str], stray: list[str]) -> dict[str, str | list[str] | bool]:
    options: dict[str, str | list[str] | bool] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_option(word):
            stray.append(word)
            continue
        name, has_value, attached = word.lstrip("-").partition("=")
        values = [attached] if has_value else []
        kind = kinds.get(name, "values")
        most = {"nothing": 0, "value": 1 - len(values)}.get(kind, len(words))
        while most > 0 and position < len(words) and not _is_option(words[position]) and not has_value:
            values.append(words[position])
            position += 1
            most -= 1
        options[name] = _value(name, kind, values, known=name in kinds)
    return options


def _value(name: str, kind: str, values: list[str], *, known: bool) -> str | list[str] | bool:
    if kind == "nothing":
        if values:
            raise ConfigError(f"--{name}={values[0]}: it takes no value; write --{name}.")
        return True
    if kind == "value" and not values:
        raise ConfigError(f"--{name} has no value: write --{name} VALUE.")
    if known:
        return values if kind == "values" else values[0]
    return values if len(values) > 1 else values[0] if values else True


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.match(word)
