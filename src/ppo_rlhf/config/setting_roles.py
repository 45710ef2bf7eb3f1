"""What the rest of the code does with a setting, declared beside the field of PPOConfig, as `Typical` is.

Every list of settings elsewhere is derived from these declarations by `names_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar, get_args, get_type_hints

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Role:
    """What a resumed run, an exported policy, the probes and a sweep do with a setting."""

    probe: Literal["taken", "replaced", "left out", "none"]
    """In `kedro doctor --probe`. taken: the probes train with the run's value; replaced: with a value of their own;
    left out: the setting changes training and no probe exercises it, which the doctor says; none: it changes no
    training."""
    resume: Literal["same", "rounds", "free"] = "same"
    """In a resumed run. same: another value is refused; rounds: it is allowed and changes numbers, at least in the last
    bits; free: it is allowed and changes no number."""
    record: Literal["training", "sampling", "here"] = "training"
    """With the exported policy. training: recorded for the report and the advice; sampling: later uses of the policy
    also draw responses with it; here: it belongs to a machine, a run or its prompts, and is not recorded."""
    group: str = ""
    """Settings that have an effect only together, such as `lora`; a subgroup is written `vllm.served`."""
    varies: bool = True
    """False if the trainings of a sweep cannot differ in it, because they share the loaded models and prompts."""


def names_of(config_class: type, wanted: Callable[[Role], bool]) -> tuple[str, ...]:
    """Return the names of the settings whose declaration is wanted, in order of declaration."""
    return tuple(name for name, roles in roles_of(config_class).items() if wanted(roles))


def names_in_group(config_class: type, group: str) -> tuple[str, ...]:
    """Return the names of the settings of a group and its subgroups."""
    return names_of(config_class, lambda roles: roles.group == group or roles.group.startswith(f"{group}."))


@cache
def roles_of(config_class: type) -> dict[str, Role]:
    """Return each setting's declaration."""
    return marks_of(config_class, Role)


def marks_of(config_class: type, kind: type[Mark]) -> dict[str, Mark]:
    """Return the mark of this kind in each setting's annotation; settings without one are left out."""
    hints = get_type_hints(config_class, include_extras=True)
    options = ((name, option) for name, hint in hints.items() for option in (hint, *get_args(hint)))
    marks = ((name, mark) for name, option in options for mark in getattr(option, "__metadata__", ()))
    return {name: mark for name, mark in marks if isinstance(mark, kind)}
