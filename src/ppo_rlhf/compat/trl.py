"""Configurations of TRL: the legacy and the last PPOConfig, told apart by the names of their settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ppo_rlhf.compat import trl_last, trl_legacy
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import Carried, rule_of
from ppo_rlhf.core.errors import ConfigError

_USUALLY_LEGACY = {"batch_size", "mini_batch_size"}  # TRL's last PPOConfig works them out while it trains


def from_trl(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of TRL's PPO to this project's parameters.

    A converted run does what the source's run would do: absent settings have the source's defaults, not ours, and
    these are written out.

    Args:
        settings: Fields of a PPOConfig: the legacy one (trl 0.11 and before: `ppo_epochs`, `init_kl_coef`, …) or the
            last one (`trl.experimental.ppo`: `num_ppo_epochs`, `kl_coef`, …).
        num_prompts: Rows of the training data; the last PPOConfig counts its training in passes over them.

    Raises:
        ConfigError: Names of both are given, or a size that TRL refuses too.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"a configuration of TRL is a mapping of names to values, got {type(settings).__name__}.")
    legacy, last = (_only_in(one, other, settings) for one, other in ((trl_legacy, trl_last), (trl_last, trl_legacy)))
    if legacy and last:
        raise ConfigError(
            f"{legacy[0]} is a setting of TRL's legacy PPOConfig and {last[0]} of its last: give the settings of one."
        )
    if legacy or (not last and _USUALLY_LEGACY & settings.keys()):
        return trl_legacy.from_trl_legacy(settings)
    return trl_last.from_trl_last(settings, num_prompts)


def _only_in(one: ModuleType, other: ModuleType, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that tell `one` from `other`: `one` carries them over, and `other` does not know them."""
    carried = [name for name in settings if isinstance(rule_of(name, one.SETTINGS), Carried)]
    return [name for name in carried if rule_of(name, other.SETTINGS) is None]
