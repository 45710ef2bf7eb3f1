"""Applies a table of another library's settings: each setting is carried over, or left out with a reason."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ppo_rlhf.compat.conversion import TO_FILL_IN, Conversion, NotCarried
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

PROMPT_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
PROCESSES = (
    "Sizes are those of one process: with fewer processes than the source had, raise ppo.gradient_accumulation_steps "
    "by the same factor."
)
# The shipped demo sets these for its tiny model: a conversion without them would take the demo's values.
_SET_BY_THE_DEMO = (
    "total_episodes per_device_train_batch_size response_length temperature learning_rate value_learning_rate kl_coef "
    "missing_eos_penalty value_model"
)
_FINITE = ConfigDict(allow_inf_nan=False)


def _prompt_file(name: str) -> str:
    if not name.endswith(PROMPT_FILES):
        raise ValueError(f"prompts come from a file ({', '.join(PROMPT_FILES)}): write one, and set prompts_path")
    return name


_GLOBALS: dict[str, Any] = {
    "seed": Annotated[int, Field(ge=0)],
    "sft_model_path": str,
    "reward_model_path": str,
    "prompts_path": Annotated[str, AfterValidator(_prompt_file)],
}


class Left(NamedTuple):
    """The rule of a setting that has no place here."""

    reason: str


class NotOfferedError(Exception):
    """Raised by a derivation: the source's settings have no counterpart here; the text says why."""


Parameters = dict[str, Any]
"""Our parameters by dotted name (`ppo.kl_coef`, `seed`)."""
Derivation = Callable[["Source"], Parameters]


class Carried(NamedTuple):
    """The rule of a setting that is carried over: by a function, which several settings may share.

    A setting that is absent has the source's default; without one (`ABSENT`) it is not looked at.
    """

    derive: Derivation
    default: Any


ABSENT = object()
Table = Mapping[str, Carried | Left]
"""A rule for each setting that a source knows; a name with `*` is a pattern."""


def to(target: str, default: Any = ABSENT, ours: Mapping[Any, Any] = MappingProxyType({})) -> Carried:
    """Return the rule of a setting that becomes one parameter, if need be by our values for theirs."""

    def derive(source: Source) -> Parameters:
        (setting,) = source.present
        if setting not in source:
            return {}
        value = source[setting]
        return {target: next((our for their, our in ours.items() if their == value), value)}

    return Carried(derive, default)


def by(derive: Derivation, **defaults: Any) -> dict[str, Carried | Left]:
    """Return the rules of settings, named with their defaults, that a function derives parameters from."""
    return {name: Carried(derive, default) for name, default in defaults.items()}


def left(reason: str, names: str) -> dict[str, Carried | Left]:
    """Return rules for settings that are left out for one reason; `names` are separated by blanks."""
    return dict.fromkeys(names.split(), Left(reason))


def rule_of(setting: str, table: Table) -> Carried | Left | None:
    """Return the rule of a setting, None if the table does not know it."""
    patterns = (rule for name, rule in table.items() if "*" in name and fnmatchcase(setting, name))
    return table.get(setting) or next(patterns, None)


class Source:
    """The settings of a source, with its defaults behind them. It notes which are read, since those are carried over.

    Attributes:
        name: Of the source, for errors and comments.
        given: The settings that were given.
        num_prompts: Rows of the training data, if known.
        present: The settings of the derivation that runs.
        read: Those that it has read, of these or of others.
        remarks: Differences from a run of the source.
    """

    def __init__(self, name: str, given: Mapping[str, Any], table: Table, num_prompts: int | None = None) -> None:
        self.name, self.table, self.num_prompts = name, table, num_prompts
        self.defaults = {
            key: rule.default for key, rule in table.items() if isinstance(rule, Carried) and rule.default is not ABSENT
        }
        self.given = {key: value.value if isinstance(value, Enum) else value for key, value in given.items()}
        self.present: list[str] = []
        self.read: dict[str, None] = {}
        self.remarks: list[str] = []

    def __contains__(self, setting: str) -> bool:
        return setting in self.given or setting in self.defaults

    def __getitem__(self, setting: str) -> Any:
        self.read[setting] = None
        return self.given.get(setting, self.defaults.get(setting))

    def checked(self, setting: str, kind: Any) -> Any:
        """Return the setting as a value of the type; raise ConfigError if it is of another."""
        try:
            return TypeAdapter(kind, config=_FINITE).validate_python(self[setting])
        except ValidationError as error:
            raise ConfigError(f"{self.name}: {setting}={self[setting]!r}: {_message(error)}") from None

    def count(self, setting: str, least: int = 1) -> int:
        """Return the setting as a whole number of at least `least`."""
        return self.checked(setting, Annotated[int, Field(ge=least)])

    def flag(self, setting: str) -> bool:
        """Return the setting as true or false; None is false."""
        return self[setting] is not None and self.checked(setting, bool)

    def values(self, derive: Derivation, names: list[str]) -> tuple[Parameters, str]:
        """Return what a derivation gives for its settings, and why it gives nothing if a value has no place here."""
        self.present, self.read = names, {}
        try:
            found = derive(self)
        except NotOfferedError as error:
            return {}, str(error)
        for target, value in found.items():
            try:
                found[target] = _adapter(target).validate_python(value)
            except ValidationError as error:
                return {}, f"{target} does not take {value!r}: {_message(error)}"
        return found, ""


def convert(source: Source, always: Mapping[str, Any], remarks: Sequence[str] = ()) -> Conversion:
    """Convert the settings of a source by its table.

    A setting is carried over if a derivation read it. In place of a value that is refused here the source's default is
    written.

    Args:
        source: The settings.
        always: Parameters that the source has no setting for.
        remarks: Differences from the source that hold whatever the settings are.
    """
    entries = {target: (value, "always so in the source") for target, value in always.items()}
    carried: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for derive, names in _derivations(source.table).items():
        values, refusal = source.values(derive, names)
        read, given = list(source.read), [name for name in names if name in source.given]
        used = [name for name in given if name in read]
        if refusal and not used:
            source.remarks.append(f"The default of {', '.join(names)} is not carried over: {refusal}.")
        comment = ", ".join(used) or f"default of {names[0]}"
        if refusal and used:
            values, _ = Source(source.name, {}, source.table).values(derive, names)
            comment = f"default of {names[0]}"
        entries |= {target: (value, comment) for target, value in values.items()}
        for name in read:
            if values and not refusal and name in source.given and not isinstance(rule_of(name, source.table), Left):
                carried.setdefault(name, []).extend(values)
        own = [name for name in names if name in read] or read
        with_these = ", ".join(f"{name}={source[name]}" for name in own)
        for name in given:
            if refusal and name in read:
                reasons[name] = refusal
            elif name not in carried:
                reasons[name] = f"it has no effect with {with_these}"
    for name in source.given.keys() - carried.keys() - reasons.keys():
        rule = rule_of(name, source.table)
        reasons[name] = rule.reason if isinstance(rule, Left) else _unknown(name, source)
    defaults = {f"ppo.{field.name}": field.default for field in fields(PPOConfig)}
    for target in (f"ppo.{name}" for name in _SET_BY_THE_DEMO.split()):
        entries.setdefault(target, (defaults[target], "not in the source; PPOConfig's default"))
    ppo = {target.removeprefix("ppo."): entries[target][0] for target in defaults if target in entries}
    return Conversion(
        source.name,
        {"ppo": ppo} | {name: entries[name][0] for name in _GLOBALS if name in entries},
        [NotCarried(name, reasons[name]) for name in source.given if name in reasons],
        {name: targets for name, targets in carried.items() if name not in reasons},
        {target: comment for target, (_, comment) in entries.items()},
        [name for name in TO_FILL_IN if name not in entries],
        list(dict.fromkeys([*source.remarks, *remarks, PROCESSES])),
    )


def _derivations(table: Table) -> dict[Derivation, list[str]]:
    """Return each function of the table once, with its settings."""
    found: dict[Derivation, list[str]] = {}
    for name, rule in table.items():
        if isinstance(rule, Carried):
            found.setdefault(rule.derive, []).append(name)
    return found


def _unknown(setting: str, source: Source) -> str:
    near = difflib.get_close_matches(setting, [name for name in source.table if "*" not in name], n=1)
    guess = f"; the closest is {near[0]}" if near else ""
    return f"{source.name} has no such setting, or nothing here corresponds to it{guess}"


@functools.cache
def _adapter(target: str) -> TypeAdapter[Any]:
    group, _, name = target.rpartition(".")
    return TypeAdapter(_ppo_types()[name] if group else _GLOBALS[name], config=_FINITE)


@functools.cache
def _ppo_types() -> dict[str, Any]:
    return get_type_hints(PPOConfig, include_extras=True)


def _message(error: ValidationError) -> str:
    text = error.errors()[0]["msg"]
    return f"{text[:1].lower()}{text[1:]}"
