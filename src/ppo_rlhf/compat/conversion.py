"""A converted configuration of another library, and the text of the two files that hold the converted parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from fnmatch import fnmatchcase
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import nearest
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.supervised.optimisation import OptimisationConfig

TO_FILL_IN = {
    "sft_model_path": "your SFT model, a directory or hub id",
    "reward_model_path": "your reward model; or leave null and name a function in reward_components",
    "prompts_path": "your prompts: a file, a folder, or a name on the hub such as trl-lib/tldr:train; the column "
    "prompt has a text or a chat, and reward functions get the other columns",
    "demonstrations_path": "your demonstrations: the column messages, or prompt and completion",
    "preferences_path": "your pairs: the columns chosen and rejected, and prompt unless both begin with it",
}
"""Globals that the user must set before a run can start, each with what to set."""
_OF_PPO = ("sft_model_path", "reward_model_path", "prompts_path")
_GLOBALS: dict[str, Any] = {
    "seed": Annotated[int, Field(ge=0)],
    **dict.fromkeys(("base_model_path", "evaluation_prompts_path", *TO_FILL_IN), str),
    "trust_remote_code": bool,
    "chat_template_kwargs": dict[str, Any],
    "reward_components": list[dict[str, Any]],
}
_GROUPS: dict[str, type[Any]] = {
    "ppo": PPOConfig,
    # The converters set only the optimisation settings that both supervised stages (SFT and reward model) share
    "supervised_finetuning": OptimisationConfig,
    "reward_modelling": OptimisationConfig,
}
_FINITE = ConfigDict(allow_inf_nan=False)
_AS_IT_IS, _NO_VALUE = object(), object()
_NOTHING: tuple[Any, ...] = (None, "", [], {})


class Conversion:
    """A configuration of another library, converted to this project's parameters.

    Attributes:
        source: The kind of configuration that was read, such as "TRL's legacy PPOConfig".
        given: The settings that were given.
        origins: The settings that each parameter comes from, by dotted name (`ppo.kl_coef`, `seed`).
        remarks: Differences from a run of the source, in one or two sentences each.
        processes: Number of processes of the source's run; None if it is not known.
    """

    def __init__(
        self,
        source: str,
        given: Mapping[str, Any],
        renamed: Mapping[str, tuple[str, Any]],
        derived: Mapping[str, Any],
        *,
        always: Mapping[str, Any],
        if_given: Mapping[str, str],
        values: Mapping[str, Mapping[Any, Any]],
        to_fill_in: Iterable[str] = _OF_PPO,
    ) -> None:
        """Carry over what needs no arithmetic.

        Args:
            source: What is converted, for messages.
            given: Settings of the source by name. A setting that is null or empty counts as not given.
            renamed: Settings that become one parameter, each with the parameter and the source's default.
            derived: Defaults of the settings that the caller carries over.
            always: Parameters of the group ppo that are constants in the source, with their values.
            if_given: Settings that become one parameter, but have no default here: conf/base has one.
            values: By setting, the source's values and this project's. Of True and False the setting is a flag.
            to_fill_in: The globals that a run needs.
        """
        self.source = source
        self._defaults = {**{name: default for name, (_, default) in renamed.items()}, **derived}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
        self.given = {
            name: value
            for name, value in plain.items()
            if value not in _NOTHING or self._defaults.get(name) not in _NOTHING
        }
        self.origins: dict[str, str] = {}
        self.remarks: list[str] = []
        self.processes: int | None = None
        self._to_fill_in = tuple(to_fill_in)
        self._names = values
        self._values: dict[str, Any] = {}
        self._carried: set[str] = set()
        self._reasons: dict[str, str] = {}
        for name, (target, _) in renamed.items():
            self.carry(target, name)
        for name, value in always.items():
            self.write(f"ppo.{name}", value, "always so in the source")
        self._defaults |= dict.fromkeys(if_given)
        for name in self.given.keys() & if_given.keys():
            self.carry(if_given[name], name, value=self.ours(name))

    @property
    def parameters(self) -> dict[str, Any]:
        """The converted parameters as a nested mapping: groups are mappings, and other values are globals."""
        return {group: values for group in _GROUPS if (values := self._group(group))} | self.globals

    @property
    def globals(self) -> dict[str, Any]:
        """The parameters outside of groups: the content of globals.yml."""
        return {name: self._values[name] for name in _GLOBALS if name in self._values}

    @property
    def not_carried(self) -> list[tuple[str, str]]:
        """The settings that were not carried over, each with the reason, in the given order."""
        return [(name, self._reasons[name]) for name in self.given if name in self._reasons]

    @property
    def missing(self) -> list[str]:
        """The globals that the source does not set and that the user must fill in."""
        components = self._values.get("reward_components", [{"type": "model"}])
        needs_model = any(component.get("type") == "model" for component in components)
        given = {*self._values, *(() if needs_model else ("reward_model_path",))}
        return [name for name in self._to_fill_in if name not in given]

    def _group(self, group: str) -> dict[str, Any]:
        named = {each.name: f"{group}.{each.name}" for each in fields(_GROUPS[group])}
        return {name: self._values[dotted] for name, dotted in named.items() if dotted in self._values}

    def ppo_config(self, **changes: Any) -> PPOConfig:
        """Return the settings as a PPOConfig, including globals that are fields of PPOConfig, with `changes` applied.

        Raises:
            ConfigError: The source allows a combination of settings that PPOConfig refuses.
        """
        of_config = {each.name for each in fields(PPOConfig)}
        shared = {name: value for name, value in self.globals.items() if name in of_config}
        return PPOConfig(**shared | self.parameters["ppo"] | changes)

    def _parameter_lines(self) -> list[str]:
        groups = {group: values for group in _GROUPS if (values := self._group(group))}
        named = {group: [f"  {self._line(name, f'{group}.')}" for name in values] for group, values in groups.items()}
        return [line for group, lines in named.items() for line in (f"{group}:", *lines)]

    def _global_lines(self) -> list[str]:
        missing = [f"{name}: null # FILL IN: {TO_FILL_IN[name]}" for name in self.missing]
        return [*map(self._line, self.globals), *missing]

    def __getitem__(self, setting: str) -> Any:
        """Return the given value of a setting, or the setting's default in the source library."""
        return self.given.get(setting, self._defaults.get(setting))

    def ours(self, setting: str) -> Any:
        """Return a setting's value by this project's name; a value without one is unchanged."""
        names = self._names.get(setting, {})
        return _named(names, self.flag(setting) if True in names else self[setting])

    def checked(self, setting: str, kind: Any) -> Any:
        """Return a setting's value as the type `kind`; raise ConfigError if the value has another type."""
        try:
            return _validated(TypeAdapter(kind, config=_FINITE), self[setting])
        except ValueError as error:
            raise ConfigError(f"{self.source}: {setting}={self[setting]!r}: {_message(error)}") from None

    def count(self, setting: str) -> int:
        """Return a setting as a whole number of at least 1."""
        return int(self.checked(setting, Annotated[int, Field(ge=1)]))

    def flag(self, setting: str) -> bool:
        """Return a setting as true or false; None is false."""
        return self[setting] is not None and bool(self.checked(setting, bool))

    def write(self, target: str, value: Any, origin: str) -> None:
        """Set the parameter `target`, such as `ppo.kl_coef`, and record the setting that its value comes from."""
        self._values[target], self.origins[target] = value, origin

    def carry(self, target: str, *settings: str, value: Any = _AS_IT_IS, otherwise: Any = _NO_VALUE) -> None:
        """Write a parameter that comes from one or several settings.

        If the parameter does not accept the value, the conversion lists `settings` as not carried over, and writes
        `otherwise`. If `value` is not given, `value` is the first setting's value and `otherwise` is its default, both
        by this project's names.
        """
        if value is _AS_IT_IS:
            value = self.ours(settings[0])
            otherwise = _named(self._names.get(settings[0], {}), self._defaults.get(settings[0]))
        given, default = [name for name in settings if name in self.given], f"default of {settings[0]}"
        self._carried.update(given)
        try:
            self.write(target, _validated(_adapter(target), value), ", ".join(given) or default)
        except ValueError as error:
            self.leave(f"{target} does not accept {value!r}: {_message(error)}", *settings)
            if otherwise is not _NO_VALUE:
                self.write(target, otherwise, default)

    def carry_over(self, *settings: str) -> None:
        """Mark settings as carried over because other settings have their effect."""
        self._carried.update(name for name in settings if name in self.given)

    def leave(self, reason: str, *settings: str) -> None:
        """List the given settings among `settings` as not carried over, with the reason."""
        self._reasons |= {name: reason for name in settings if name in self.given}

    def finish(self, reasons: Mapping[str, str], *remarks: str) -> Conversion:
        """List the remaining settings as not carried over, add remarks, and return the conversion.

        The keys of `reasons` are patterns as in fnmatch, separated by spaces; the values are reasons.
        """
        for setting in self.given.keys() - self._carried - self._reasons.keys():
            known = setting in self._defaults
            reason = "it has no effect with the other settings" if known else _reason(setting, tuple(reasons.items()))
            if not reason:
                # A dotted name comes from a composed configuration, which has no misspelt names
                near = nearest(setting, self._defaults) if "." not in setting else None
                reason = f"{self.source} has no such setting, or it has no counterpart here"
                reason += f"; the closest setting is {near}" if near else ""
            self.leave(reason, setting)
        self.remarks += remarks
        if any(name.startswith("ppo.") for name in self._values):
            count = f" ({self.processes} in the source)" if self.processes else ""
            self.remarks.append(
                f"Batch sizes are per process{count}: if you use fewer processes than the source did, raise "
                "ppo.gradient_accumulation_steps by the same factor."
            )
        return self

    def _line(self, name: str, group: str = "") -> str:
        text = yaml.safe_dump(self._values[group + name], default_flow_style=True, width=10_000)
        text = text.removesuffix("\n").removesuffix("\n...")
        return f"{name}: {text} # {self.origins[group + name]}"


def texts_of(conversions: Sequence[Conversion]) -> tuple[str, str]:
    """Return the texts of parameters.yml and globals.yml for one stage or more that were converted separately.

    A comment names the source setting of each value. A missing global is null with a comment on what to fill in.

    Raises:
        ConfigError: Two stages set a global to different values.
    """
    shared: dict[str, str] = {}
    for line in (line for each in conversions for line in each._global_lines()):
        name = line.partition(":")[0]
        if shared.setdefault(name, line).partition(" # ")[0] != line.partition(" # ")[0]:
            raise ConfigError(f"{name} applies to all stages, but the files set it to different values. Set it to one.")
    parameters = [line for each in conversions for line in each._parameter_lines()]
    return _file(conversions, parameters), _file(conversions, list(shared.values()))


def _file(conversions: Sequence[Conversion], lines: list[str]) -> str:
    sources = " and ".join(each.source for each in conversions)
    heading = (
        f"# Written by `kedro convert-config` from {sources}. The comment beside a value is the setting it",
        "# comes from. Defaults of the source are written, too, because otherwise those of conf/base would apply.",
    )
    return "\n".join([*heading, *lines]) + "\n"


@functools.cache
def _reason(setting: str, reasons: tuple[tuple[str, str], ...]) -> str:
    """Return the reason of the first pattern that matches the setting, or an empty text."""
    matching = (why for names, why in reasons for name in names.split() if fnmatchcase(setting, name))
    return next(matching, "")


def _named(names: Mapping[Any, Any], value: Any) -> Any:
    return names.get(value, value) if value is None or isinstance(value, str | bool) else value


@functools.cache
def _adapter(target: str) -> TypeAdapter[Any]:
    group, _, name = target.rpartition(".")
    hints = get_type_hints(_GROUPS[group], include_extras=True) if group else _GLOBALS
    return TypeAdapter(hints[name], config=_FINITE)


def _validated(adapter: TypeAdapter[Any], value: Any) -> Any:
    """Return a value as the adapter's type. True and False are no numbers, which pydantic would read them as."""
    result = adapter.validate_python(value)
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ValueError("Input should be a number, not true or false")
    return result


def _message(error: ValueError) -> str:
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return f"{text[:1].lower()}{text[1:]}"
