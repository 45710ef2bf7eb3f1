"""Configurations of TRL, legacy and last: told apart by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat import trl_last, trl_legacy
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.core.errors import ConfigError

_SHOWN = 3
# In TRL's last PPOConfig these are worked out while training, so nobody sets them there.
_USUALLY_LEGACY = frozenset({"batch_size", "mini_batch_size"})
_ONLY_LEGACY = trl_legacy.SETTINGS - trl_last.SETTINGS | {"generation_kwargs"}


def from_trl(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of TRL's PPO to this project's parameters.

    A converted run does what the source's run would do: settings that are absent have the source's defaults, which are
    written out, not ours.

    Args:
        settings: Fields of a PPOConfig: the legacy one (trl 0.11 and before: `ppo_epochs`, `init_kl_coef`, …) or the
            last one (`trl.experimental.ppo`: `num_ppo_epochs`, `kl_coef`, …), told apart by their names.
        num_prompts: Rows of the training data; the last one counts its training in passes over them.

    Raises:
        ConfigError: Names of both are given, or a size that the source too refuses.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"a configuration of TRL is a mapping of names to values, got {type(settings).__name__}.")
    names = [str(name) for name in settings]
    legacy = [name for name in names if name in _ONLY_LEGACY]
    last = [name for name in names if name in trl_last.TELLING]
    if legacy and last:
        raise ConfigError(
            f"{_listed(legacy)} belong{'s' * (len(legacy) == 1)} to TRL's legacy PPOConfig and {_listed(last)} to its "
            "last: give the settings of one of them."
        )
    if legacy or (not last and _USUALLY_LEGACY & set(names)):
        return trl_legacy.from_trl_legacy(settings)
    return trl_last.from_trl_last(settings, num_prompts=num_prompts)


def _listed(names: list[str]) -> str:
    more = f", … ({len(names)} names)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
