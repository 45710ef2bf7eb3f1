"""What a conversion returns, and its two files: parameters.yml and globals.yml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import yaml

from ppo_rlhf.config import PPOConfig

TO_FILL_IN = {
    "sft_model_path": "your SFT model, a directory or hub id",
    "reward_model_path": "your reward model; or leave null and name a function in reward.components",
    "prompts_path": "your prompts: .jsonl, .json, .csv, .parquet or .txt",
}
"""Globals without which a run would take the shipped demo's part."""


class NotCarried(NamedTuple):
    """A setting of the source that has no place here, and why."""

    setting: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """A configuration of another library, in this project's terms.

    Attributes:
        source: The kind of configuration that was read, such as "TRL's legacy PPOConfig".
        parameters: Nested as `--params` and `KedroSession.create(runtime_params=…)` take it: a mapping is a parameter
            group (`ppo`), anything else a global (`seed`, `sft_model_path`).
        not_carried: Settings of the source without a place here, each with the reason, in the order given.
        carried: The other settings of the source, each with the parameters that it went to (`ppo.kl_coef`, `seed`).
        origins: The setting that each parameter comes from, by dotted name.
        missing: Globals that the source does not name and a person has to fill in, of `TO_FILL_IN`.
        remarks: Other differences from a run of the source, one or two sentences each.
    """

    source: str
    parameters: dict[str, Any]
    not_carried: list[NotCarried]
    carried: dict[str, list[str]]
    origins: dict[str, str]
    missing: list[str]
    remarks: list[str]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The parameter groups: the content of parameters.yml."""
        return {name: value for name, value in self.parameters.items() if isinstance(value, dict)}

    @property
    def globals(self) -> dict[str, Any]:
        """The other parameters: the content of globals.yml."""
        return {name: value for name, value in self.parameters.items() if not isinstance(value, dict)}

    def ppo_config(self, **changes: Any) -> PPOConfig:
        """Return the settings as a PPOConfig, with the globals that are fields of it, and `changes` on top.

        Raises:
            ConfigError: Settings that the source allows together exclude each other here.
        """
        known = {each.name for each in fields(PPOConfig)}
        from_globals = {name: value for name, value in self.globals.items() if name in known}
        return PPOConfig(**from_globals | self.parameters["ppo"] | changes)

    def parameters_text(self) -> str:
        """Return parameters.yml: each value with the setting that it comes from."""
        lines = self._heading()
        for group, values in self.groups.items():
            lines += [f"{group}:", *(f"  {self._line(name, value, f'{group}.')}" for name, value in values.items())]
        return "\n".join(lines) + "\n"

    def globals_text(self) -> str:
        """Return globals.yml in the same form; what is missing is null, with a comment that says what to fill in."""
        lines = [self._line(name, value) for name, value in self.globals.items()]
        lines += [f"{name}: null # FILL IN: {TO_FILL_IN[name]}" for name in self.missing]
        return "\n".join([*self._heading(), *lines]) + "\n"

    def _heading(self) -> list[str]:
        return [
            f"# Written by `kedro convert-config` from {self.source}. The comment beside a value is the setting it",
            "# comes from. Defaults of the source are written too: otherwise the shipped demo's values would apply.",
        ]

    def _line(self, name: str, value: Any, group: str = "") -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
        return f"{name}: {text} # {self.origins[group + name]}"
