"""Decorator for parameter groups: a validated dataclass whose errors name the group, the value and the rule."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ppo_rlhf.core.errors import ConfigError

T = TypeVar("T")
TYPO = 0.825
"""Lowest difflib similarity to a setting at which an unknown name counts as a misspelling. Names of different settings
of other libraries stay below `TYPO`: `use_cpu` has similarity 0.67 to `use_peft`, and `grad_clip` 0.8 to `reward_clip`,
which are different settings."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed in NumPy's range, because transformers' trainer also seeds NumPy's generator."""


@dataclass_transform(frozen_default=True)
def parameter_group(group: str, *, lives_elsewhere: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a frozen, validated parameter group.

    Args:
        group: The group's name in the parameters files; every error starts with it (`ppo.kl_coef=-1: …`).
        lives_elsewhere: Names that are not settings of the group, each with a hint to the right setting.

    Returns:
        A decorator. The decorated class raises `ConfigError` with one line for each problem, all problems at once.
    """
    elsewhere = dict(lives_elsewhere or {})

    def decorate(cls: type[T]) -> type[T]:
        rules = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
        checked: Any = pydantic_dataclass(frozen=True, config=rules)(cls)
        _document(checked)
        validate, known = checked.__init__, [field.name for field in fields(checked)]
        accepted = inspect.signature(checked).parameters  # the settings, and what is no setting (`InitVar`)

        @functools.wraps(validate)
        def check_and_init(self: Any, *args: Any, **values: Any) -> None:
            problems = [_unknown(group, name, known, elsewhere) for name in values if name not in accepted]
            try:
                validate(self, *args, **{name: value for name, value in values.items() if name in accepted})
                problems += [  # refuse a Boolean for a number here, because pydantic would convert True to 1
                    f"{group}.{name}={value}: input should be a number"
                    for name, value in values.items()
                    if isinstance(value, bool) and name in known and type(getattr(self, name)) in (int, float)
                ]
            except ValidationError as error:
                problems += [_describe(group, detail) for detail in error.errors()]
            if problems:
                raise ConfigError("\n".join(problems))

        def absent(_: Any, name: str) -> NoReturn:
            raise AttributeError(_unknown(group, name, known, elsewhere))

        checked.__init__ = check_and_init
        checked.__getattr__ = absent
        return checked

    return decorate


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to a misspelt name, or None if no known name is close enough."""
    one_letter = 1.0 - 1.0 / max(len(name), 4)  # difflib's similarity of two names that differ in one letter
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=min(TYPO, one_letter))), None)


def closest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean `x`?' for the nearest known name, or an empty string."""
    near = nearest(name, known)
    return f" Did you mean `{near}`?" if near else ""


def _document(checked: Any) -> None:
    """Copy each field's docstring into the metadata that HfArgumentParser shows for `--help`."""
    for each in fields(checked):
        text = checked.__pydantic_fields__[each.name].description
        if text:  # argparse would read % in a help text as the start of a placeholder
            each.metadata = MappingProxyType({**each.metadata, "help": " ".join(text.split()).replace("%", "%%")})


def _unknown(group: str, name: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    hint = f": {elsewhere[name]}" if name in elsewhere else f".{closest(name, known)}"
    return f"{group}.{name} is not a parameter of this group{hint}"


def _describe(group: str, detail: Any) -> str:
    raised = detail.get("ctx", {}).get("error")
    where = ".".join(str(part) for part in detail["loc"])
    if raised is not None and not where:
        return str(raised)  # the error was raised in __post_init__, whose message already names the fields
    message = str(raised) if raised is not None else detail["msg"]
    if detail["type"] == "missing":
        return f"{group}.{where} is missing"
    if detail["type"] == "unexpected_keyword_argument":  # the user gave a nested group an unknown key
        return _unknown(group, where, [], {})
    # If the input is a whole group, the message itself names the settings
    given = "" if isinstance(detail["input"], Mapping) else f"={detail['input']!r}"
    return f"{group}.{where}{given}: {message[:1].lower()}{message[1:]}"
