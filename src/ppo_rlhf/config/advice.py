"""Advice on settings of PPO that are legal but unusual, or that do not do what one might expect of them. No errors."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

HORIZONS_NEEDED = 5  # the controller moves by at most 20 % a horizon: five of them are a factor of e


@dataclass(frozen=True)
class Typical:
    """The range in which a setting is usually found; a value outside it gives advice, not an error."""

    low: float
    high: float
    source: str


TUNING_GUIDE = "common practice in RLHF tuning guides"
INSTRUCT_GPT = "InstructGPT (arXiv:2203.02155)"


class _Hint(NamedTuple):
    """Given if `applies`, and if one of `names` is among the settings that a person changed."""

    names: tuple[str, ...]
    applies: Callable[[PPOConfig], bool]
    text: Callable[[PPOConfig], str]


_HINTS = (
    _Hint(
        ("kl_estimator", "kl_in"),
        lambda c: c.kl_in == "reward" and c.kl_estimator != "k1",
        lambda c: (
            f"ppo.kl_estimator={c.kl_estimator} with ppo.kl_in=reward pushes tokens that are rarer than in the "
            "reference further down: training ends away from the optimum of the KL penalty (on a bandit, total "
            "variation 0.2 to 0.7). Use k1 in the reward, or ppo.kl_in=loss with k2"
        ),
    ),
    _Hint(
        ("kl_estimator", "kl_in"),
        lambda c: c.kl_in == "loss" and c.kl_estimator == "k3",
        lambda _: (
            "ppo.kl_estimator=k3 with ppo.kl_in=loss has the gradient of KL(reference || policy), not of "
            "KL(policy || reference): its optimum is another one. k2 has the usual one"
        ),
    ),
    _Hint(
        ("kl_controller", "kl_horizon", "total_episodes"),
        lambda c: c.kl_controller == "adaptive" and c.total_episodes < HORIZONS_NEEDED * c.kl_horizon,
        lambda c: (
            f"ppo.total_episodes={c.total_episodes} is less than {HORIZONS_NEEDED} x ppo.kl_horizon={c.kl_horizon:g}: "
            "the coefficient changes by at most 20 % a horizon and hardly moves in this run; "
            f"set ppo.kl_horizon to {c.total_episodes / HORIZONS_NEEDED:g} or less"
        ),
    ),
    _Hint(
        ("vf_coef",),
        lambda c: c.value_model in ("separate", "reward_init"),
        lambda c: (
            f"ppo.vf_coef={c.vf_coef:g} has next to no effect with ppo.value_model={c.value_model}: the critic has an "
            "optimiser of its own, and Adam's step does not depend on the scale of the loss. Set "
            "ppo.value_learning_rate instead"
        ),
    ),
    _Hint(
        ("importance_cap", "top_k", "top_p", "min_response_length"),
        lambda c: c.importance_cap is not None and (c.top_k > 0 or c.top_p < 1.0 or c.min_response_length > 0),
        lambda _: (
            "ppo.importance_cap corrects the rounding of the decoding loop, not ppo.top_k, ppo.top_p or "
            "ppo.min_response_length: their filtered distribution is not what the weights compare with"
        ),
    ),
)


def advice(config: PPOConfig, names: Container[str] | None) -> list[str]:
    """Return one line for each changed setting, among `names` if given, that is unusual or of little effect."""
    changed = {name: value for name, value in config.not_default().items() if names is None or name in names}
    ranges = _typical_ranges(type(config))
    return [
        *(
            f"ppo.{name}={value} is outside its typical range {typical.low:g} to {typical.high:g} ({typical.source})"
            for name, value in changed.items()
            if (typical := ranges.get(name)) is not None
            and value is not None
            and not typical.low <= value <= typical.high
        ),
        *(hint.text(config) for hint in _HINTS if changed.keys() & set(hint.names) and hint.applies(config)),
    ]


def _typical_ranges(config_class: type) -> dict[str, Typical]:
    ranges = {}
    for name, hint in get_type_hints(config_class, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) is not Annotated else (hint,)
        for option in options:
            found = [extra for extra in getattr(option, "__metadata__", ()) if isinstance(extra, Typical)]
            if found:
                ranges[name] = found[0]
    return ranges
