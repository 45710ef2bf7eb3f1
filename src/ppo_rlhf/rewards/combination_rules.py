"""Rules on `reward.combine`, for the settings and for rewards that a user's script builds."""

from collections.abc import Mapping

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.option_names import RewardCombination

DISAGREEMENT = "disagreement"
"""`reward/<DISAGREEMENT>` is the metric of how far the components' scores of a response are apart."""


def check_combination(combine: RewardCombination, normalise: str, weights: Mapping[str, float]) -> None:
    """Raise `ConfigError` if `reward.combine` cannot combine components of these names and weights."""
    if combine == "sum":
        return
    setting, names = f"reward.combine={combine}", list(weights)
    if len(names) == 1:
        raise ConfigError(f"{setting}: {names[0]} is the only component, so there is nothing to combine.")
    if DISAGREEMENT in names:
        raise ConfigError(f"{setting}: the metric reward/{DISAGREEMENT} exists; give the component another name.")
    for name, weight in weights.items():
        if weight != 1.0:
            raise ConfigError(
                f"{setting}: {name} has weight={weight:g}, but only combine=sum weighs components. Leave weight out."
            )
    if combine != "mean" and normalise == "total":
        raise ConfigError(
            f"{setting} compares the components' scores, which need one scale: set reward.normalise=component."
        )


def check_whole(combine: RewardCombination, name: str) -> None:
    """Raise `ConfigError` if `reward.combine` does not support the rewards per token that component `name` returns."""
    if combine != "sum":
        raise ConfigError(
            f"reward.combine={combine} combines scores of whole responses, but {name} returns one number per token; "
            "leave reward.combine out"
        )
