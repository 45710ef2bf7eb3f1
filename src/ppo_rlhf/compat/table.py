"""Applies a table of another library's settings: each setting is carried over, or left out with a reason."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ppo_rlhf.compat.conversion import Conversion, NotCarried
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

PROMPT_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
PROCESSES = (
    "Sizes are those of one process: with fewer processes than the source had, raise ppo.gradient_accumulation_steps "
    "by the same factor."
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
# The shipped demo sets these for its tiny model: a conversion without them would take the demo's values.
_SET_BY_THE_DEMO = (
    "total_episodes per_device_train_batch_size response_length temperature learning_rate value_learning_rate kl_coef "
    "missing_eos_penalty value_model"
)


@dataclass(frozen=True)
class Left:
    """The rule of a setting that has no place here."""

    reason: str


Rule = str | tuple[str, Mapping[Any, str]] | Left | Callable[["Ledger"], None]
"""The name of our parameter (`ppo.kl_coef`, `seed`), if need be with our values by theirs; or the reason why there is
none; or a function that derives parameters."""


def left(reason: str, names: str) -> dict[str, Rule]:
    """Return rules for settings that are left out for one reason; `names` are separated by blanks."""
    return dict.fromkeys(names.split(), Left(reason))


def rule_of(setting: str, table: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a setting; a name with `*` in the table is a pattern. None: the table does not know it."""
    patterns = (rule for name, rule in table.items() if "*" in name and fnmatchcase(setting, name))
    return table.get(setting) or next(patterns, None)


def convert(
    source: str,
    settings: Mapping[str, Any],
    table: Mapping[str, Rule],
    *,
    defaults: Mapping[str, Any],
    always: Mapping[str, tuple[Any, str]],
    remarks: Sequence[str] = (),
    num_prompts: int | None = None,
) -> Conversion:
    """Convert the settings of a source.

    Args:
        source: Name of the source, for errors and comments.
        settings: The settings that were given.
        table: A rule for each setting that the source knows. Functions run last, in the table's order, once each.
        defaults: The source's values where a setting is absent.
        always: Parameters that the source has no setting for, each with its value and a comment.
        remarks: Differences from the source that hold whatever the settings are.
        num_prompts: Rows of the training data, if known.
    """
    ledger = Ledger(source, settings, defaults, num_prompts)
    for target, (value, comment) in always.items():
        ledger.fix(target, value, comment)
    for setting, rule in table.items():
        if isinstance(rule, str | tuple) and (ledger.given(setting) or setting in defaults):
            target, ours = (rule, {}) if isinstance(rule, str) else rule
            ledger.carry(target, setting, ours)
    for function in dict.fromkeys(filter(callable, table.values())):
        function(ledger)
    ledger.remarks += [*remarks, PROCESSES]
    return ledger.close(table)


class Ledger:
    """Turns settings into parameters, and notes for each given setting where it went or why it was left out."""

    def __init__(
        self, source: str, settings: Mapping[str, Any], defaults: Mapping[str, Any], num_prompts: int | None
    ) -> None:
        self.source = source
        self.num_prompts = num_prompts
        self.values: dict[str, Any] = {}
        self.remarks: list[str] = []
        self._settings = {name: value.value if isinstance(value, Enum) else value for name, value in settings.items()}
        self._defaults = defaults
        self._origins: dict[str, str] = {}
        self._carried: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}

    def given(self, setting: str) -> bool:
        """Whether the source names the setting."""
        return setting in self._settings

    def value(self, setting: str) -> Any:
        """Return the setting as given, or the source's default."""
        return self._settings.get(setting, self._defaults.get(setting))

    def checked(self, setting: str, kind: Any) -> Any:
        """Return the setting as a value of the type; raise ConfigError if it is of another."""
        try:
            return TypeAdapter(kind, config=_FINITE).validate_python(self.value(setting))
        except ValidationError as error:
            raise ConfigError(f"{self.source}: {setting}={self.value(setting)!r}: {_message(error)}") from None

    def count(self, setting: str, least: int = 1) -> int:
        """Return the setting as a whole number of at least `least`."""
        return self.checked(setting, Annotated[int, Field(ge=least)])

    def flag(self, setting: str) -> bool:
        """Return the setting as true or false; None is false."""
        return self.value(setting) is not None and self.checked(setting, bool)

    def carry(self, target: str, setting: str, ours: Mapping[Any, str] = MappingProxyType({})) -> None:
        """Enter the setting's value, by `ours` if it is there: the source's default if it is absent or refused here.

        A refused None has no substitute: the default of a path would name a model that nobody asked for.
        """
        value, default = self.value(setting), self._defaults.get(setting)
        value = next((our for their, our in ours.items() if their == value), value)
        accepted = self.derive(target, value, setting)
        if not accepted and self._settings.get(setting) is not None and setting in self._defaults:
            self.fix(target, ours.get(default, default), f"default of {setting}")

    def derive(self, target: str, value: Any, *settings: str) -> bool:
        """Enter a value that was worked out from settings; if it is refused here, leave them out and return False."""
        given = [setting for setting in settings if self.given(setting)]
        try:
            self.fix(target, value, ", ".join(given) or f"default of {settings[0]}")
        except ValidationError as error:
            reason = f"{target} does not take {value!r}: {_message(error)}"
            self._left = dict.fromkeys(given, reason) | self._left
            if not given:
                self.remarks.append(f"The default of {', '.join(settings)} is not carried over: {reason}.")
            return False
        for setting in given:
            self._carried.setdefault(setting, []).append(target)
        return True

    def fix(self, target: str, value: Any, comment: str) -> None:
        """Enter a value that no setting is carried over to."""
        self.values[target] = _adapter(target).validate_python(value)
        self._origins[target] = comment

    def leave(self, reason: str, *settings: str) -> None:
        """Say why settings are not carried over; nothing is said of those that are, or that were not given."""
        for setting in settings:
            if self.given(setting) and setting not in self._carried:
                self._left.setdefault(setting, reason)

    def close(self, table: Mapping[str, Rule]) -> Conversion:
        """Return the conversion. Settings that the table does not know are left out, with the closest name."""
        for setting in self._settings.keys() - self._carried.keys() - self._left.keys():
            rule = rule_of(setting, table)
            self._left[setting] = rule.reason if isinstance(rule, Left) else self._unknown(setting, table)
        for name, fix in {"sft_model_path": "set it", "reward_model_path": "set it, or reward.components"}.items():
            if name not in self.values:
                self.remarks.append(f"The source names no {name}: {fix}.")
        defaults = {f"ppo.{field.name}": field.default for field in fields(PPOConfig)}
        for target in (f"ppo.{name}" for name in _SET_BY_THE_DEMO.split()):
            if target not in self.values:
                self.fix(target, defaults[target], "not in the source; PPOConfig's default")
        ppo = {target.removeprefix("ppo."): self.values[target] for target in defaults if target in self.values}
        for setting in self._left.keys() & self._carried.keys():  # accepted in one place, refused in another
            self.remarks.append(f"{setting}: {self._left.pop(setting)}.")
        return Conversion(
            self.source,
            {"ppo": ppo} | {name: self.values[name] for name in _GLOBALS if name in self.values},
            [NotCarried(name, self._left[name]) for name in self._settings if name in self._left],
            self._carried,
            self._origins,
            self.remarks,
        )

    def _unknown(self, setting: str, table: Mapping[str, Rule]) -> str:
        near = difflib.get_close_matches(setting, [name for name in table if "*" not in name], n=1)
        guess = f"; the closest is {near[0]}" if near else ""
        return f"{self.source} has no such setting, or nothing here corresponds to it{guess}"


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
