"""What a conversion returns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ppo_rlhf.config import PPOConfig


class NotCarried(NamedTuple):
    """A setting of the source that has no place here, and why."""

    setting: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """A configuration of another library, in this project's terms.

    Attributes:
        source: What was read, such as "TRL's legacy PPOConfig".
        parameters: Nested as `--params` and `KedroSession.create(runtime_params=…)` take it: a mapping is a parameter
            group (`ppo`), anything else a global (`seed`, `sft_model_path`).
        not_carried: Settings of the source without a place here, each with the reason, in the order given.
        carried: The other settings of the source, each with where it went (`ppo.kl_coef`, `seed`).
        origins: Where each value of `parameters` comes from, by dotted name.
        remarks: What else differs from a run of the source, one sentence or two each.
    """

    source: str
    parameters: dict[str, Any]
    not_carried: list[NotCarried]
    carried: dict[str, list[str]]
    origins: dict[str, str]
    remarks: list[str] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The parameter groups: what belongs in parameters.yml."""
        return {name: value for name, value in self.parameters.items() if isinstance(value, dict)}

    @property
    def globals(self) -> dict[str, Any]:
        """The rest: what belongs in globals.yml."""
        return {name: value for name, value in self.parameters.items() if not isinstance(value, dict)}

    def ppo_config(self, **changes: Any) -> PPOConfig:
        """Return the settings as a PPOConfig, globals that are fields of it included, with `changes` on top.

        Raises:
            ConfigError: Settings that the source allows together exclude each other here.
        """
        known = {each.name for each in fields(PPOConfig)}
        from_globals = {name: value for name, value in self.globals.items() if name in known}
        return PPOConfig(**from_globals | self.parameters["ppo"] | changes)
