"""The books of a conversion: every setting of the source is entered exactly once, carried or left with a reason."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ppo_rlhf.compat.conversion import Conversion, NotCarried
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

PROMPT_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
NOT_IN_THE_SOURCE = "not in the source; PPOConfig's default"

_GLOBALS: dict[str, Any] = {
    "seed": Annotated[int, Field(ge=0)],
    "sft_model_path": str,
    "reward_model_path": str,
    "prompts_path": str,
}
# The shipped demo sets these for its own tiny model: a converted configuration that left one out would run with it.
_NEVER_LEFT_TO_THE_DEMO = (
    "total_episodes",
    "per_device_train_batch_size",
    "response_length",
    "temperature",
    "learning_rate",
    "value_learning_rate",
    "kl_coef",
    "missing_eos_penalty",
    "value_model",
)


class Ledger:
    """Turns settings into parameters, and keeps the books: each given setting is carried, or left with a reason."""

    def __init__(
        self,
        source: str,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        *,
        written: Mapping[str, str] | None = None,
        unread: Mapping[str, str] | None = None,
    ) -> None:
        """Open the books.

        Args:
            source: What is read, for errors and comments.
            settings: Those that were given.
            defaults: What the source does where a setting is absent.
            written: Settings that were given by another name, each with that name.
            unread: Settings that were given but have no value to read, each with the reason.
        """
        self._source = source
        self._settings = {name: _plain(value) for name, value in settings.items()}
        self._defaults = defaults
        self._written = written or {}
        self._unread = unread or {}
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._carried: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}
        self._remarks: list[str] = []

    def given(self, setting: str) -> bool:
        """Whether the source names the setting."""
        return setting in self._settings

    def value(self, setting: str) -> Any:
        """Return the setting as given, else the source's default."""
        return self._settings.get(setting, self._defaults.get(setting))

    def checked(self, setting: str, kind: Any) -> Any:
        """Return the setting as the given type; raise ConfigError if it is of another."""
        value = self.value(setting)
        try:
            return _adapter(kind).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{self._source}: {setting}={value!r}: {_message(error)}") from None

    def count(self, setting: str) -> int:
        """Return the setting as a whole number of at least 1."""
        return self.checked(setting, Annotated[int, Field(ge=1)])

    def flag(self, setting: str) -> bool:
        """Return the setting as true or false; None is false."""
        return self.value(setting) is not None and self.checked(setting, bool)

    def entered(self, target: str) -> Any:
        """Return what was entered for the target; None if nothing was."""
        return self._values.get(target)

    def carry(self, target: str, setting: str, read: Callable[[Any], Any] = lambda value: value) -> None:
        """Enter the setting's value as it is, or as `read` puts it; the source's default if it is absent.

        A value that is not accepted here is left, with the rule, and the source's default stands in for it; not for
        None, which names nothing, where the default of a path would name a model.
        """
        self.derive(target, read(self.value(setting)), setting)
        refused = target not in self._values and self._settings.get(setting) is not None
        if refused and setting in self._defaults:
            self._admit(target, read(self._defaults[setting]), [setting], given=[])

    def derive(self, target: str, value: Any, *settings: str) -> None:
        """Enter a value that was worked out from settings; if it is not accepted here they are left, with the rule."""
        self._admit(target, value, settings, [setting for setting in settings if self.given(setting)])

    def fix(self, target: str, value: Any, why: str) -> None:
        """Enter what the source always does."""
        self._enter(target, _adapter(_type_of(target)).validate_python(value), why)

    def leave(self, setting: str, reason: str) -> None:
        """Say why a setting is not carried; nothing happens if it was not given, or is entered already."""
        if self.given(setting) and setting not in self._carried:
            self._left.setdefault(setting, reason)

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Leave each setting for its reason, as `leave` does."""
        for setting, reason in reasons.items():
            self.leave(setting, reason)

    def remark(self, text: str) -> None:
        """Note a difference that no single setting is to blame for."""
        self._remarks.append(text)

    def close(self, known: Iterable[str]) -> Conversion:
        """Enter settings that nobody knows as not carried, with the closest name, and return the whole."""
        candidates = sorted(known)
        for name in self._settings:
            if name not in self._carried and name not in self._left:
                self._left[name] = f"not a setting of {self._source}{_guess(name, candidates)}"
        for name in _NEVER_LEFT_TO_THE_DEMO:
            if f"ppo.{name}" not in self._values:
                self.fix(f"ppo.{name}", _default_of(name), NOT_IN_THE_SOURCE)
        order = ["ppo." + each.name for each in fields(PPOConfig)] + list(_GLOBALS)
        parameters: dict[str, Any] = {"ppo": {}}
        for target in sorted(self._values, key=order.index):
            group, _, name = target.rpartition(".")
            (parameters[group] if group else parameters)[name] = self._values[target]
        return Conversion(
            self._source,
            parameters,
            [
                *(
                    NotCarried(self._written.get(name, name), self._left[name])
                    for name in self._settings
                    if name in self._left
                ),
                *(NotCarried(name, reason) for name, reason in self._unread.items()),
            ],
            {self._written.get(name, name): targets for name, targets in self._carried.items()},
            self._origins,
            self._remarks,
        )

    def _admit(self, target: str, value: Any, settings: Sequence[str], given: Sequence[str]) -> None:
        """Do what `derive` says; without `given` settings the value is the source's default."""
        if not _exists(target):
            for setting in given:
                self._refuse(setting, f"there is no {target} here")
            return
        try:
            accepted = _adapter(_type_of(target)).validate_python(value)
        except ValidationError as error:
            reason = f"{target} does not take {value!r}: {_message(error)}"
            for setting in given:
                self._refuse(setting, reason)
            if not given:
                self.remark(f"{self._source}'s default of {', '.join(settings)} is not carried: {reason}.")
            return
        shown = ", ".join(self._written.get(setting, setting) for setting in given or settings[:1])
        self._enter(target, accepted, shown if given else f"default of {shown}")
        for setting in given:
            if setting in self._left:
                self.remark(f"{setting}: {self._left.pop(setting)}.")
            self._carried.setdefault(setting, []).append(target)

    def _refuse(self, setting: str, reason: str) -> None:
        if setting in self._carried:  # to another place: what is lost here is said all the same
            self.remark(f"{setting}: {reason}.")
        else:
            self._left[setting] = reason

    def _enter(self, target: str, value: Any, origin: str) -> None:
        self._values[target] = value
        self._origins[target] = origin


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text that separates them by blanks: long lists read better so."""
    return tuple(text.split())


def by_setting(grouped: Mapping[str, str]) -> dict[str, str]:
    """Turn {reason: names, separated by blanks} into {name: reason}."""
    return {name: reason for reason, text in grouped.items() for name in names(text)}


def carry_prompts(ledger: Ledger, setting: str) -> None:
    """Carry the name of a data set if it is a file of prompts; the names of data sets on the hub are left."""
    value = ledger.value(setting)
    if isinstance(value, str) and value.endswith(PROMPT_FILES):
        ledger.carry("prompts_path", setting)
    else:
        files = ", ".join(PROMPT_FILES)
        ledger.leave(setting, f"prompts come from a file ({files}): write them to one, and set prompts_path")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


@functools.cache
def _ppo_types() -> dict[str, Any]:
    return get_type_hints(PPOConfig, include_extras=True)


def _exists(target: str) -> bool:
    group, _, name = target.rpartition(".")
    return name in (_ppo_types() if group else _GLOBALS)


def _type_of(target: str) -> Any:
    group, _, name = target.rpartition(".")
    return _ppo_types()[name] if group else _GLOBALS[name]


def _default_of(name: str) -> Any:
    return next(each.default for each in fields(PPOConfig) if each.name == name)


def _guess(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; the closest is {near[0]}" if near else ""


def _message(error: ValidationError) -> str:
    text = error.errors()[0]["msg"]
    return f"{text[:1].lower()}{text[1:]}"
