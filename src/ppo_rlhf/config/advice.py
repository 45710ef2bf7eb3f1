"""Advice on settings of PPO that are allowed, but unusual or of little effect."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_rlhf.config.setting_roles import marks_of

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

# The KL controller changes kl_coef by at most 20 % per horizon, so five horizons change kl_coef by a factor of e
HORIZONS_NEEDED = 5


@dataclass(frozen=True)
class Typical:
    """Usual range of a setting; a value outside the range gives advice, not an error."""

    low: float
    high: float
    source: str
    is_rate: bool = False
    """True for a learning rate. The range of a learning rate holds for policies of LARGE or more parameters, and LoRA
    multiplies the range by LORA_FACTOR."""


TUNING_GUIDE = "common practice in RLHF tuning guides"
INSTRUCT_GPT = "InstructGPT (arXiv:2203.02155)"
LARGE = 1e8
"""Learning rates get advice only if the policy has at least this number of parameters. Smaller policies need larger
learning rates, for which no tuning guide gives a range; GPT-2 small is the smallest policy in common use."""
LORA_FACTOR = 10.0
"""LoRA's learning rate relative to full fine-tuning (Schulman et al. 2025, LoRA Without Regret)."""

HEAD_RATE = Typical(1e-4, 1e-3, "for the head of a shared critic, which starts at 0; measured on SmolLM2", is_rate=True)
"""Range of `value_learning_rate` with `value_model=shared`. Fitted to 512 responses of SmolLM2-135M, a head explains
0.01 of the returns after 16 iterations at a rate of 1.5e-5, and 0.25 at 3e-4."""
HEAD_FACTOR = 20.0
"""Factor from the policy's learning rate to that of a shared critic's head: 3e-4 for 1.5e-5."""


def head_rate(learning_rate: float) -> float:
    """Return a rate for the head of a shared critic: in HEAD_RATE's range, but not below the policy's."""
    rate = min(max(HEAD_FACTOR * learning_rate, HEAD_RATE.low), max(HEAD_RATE.high, learning_rate))
    return float(f"{rate:.3g}")


def _hints(c: PPOConfig) -> Iterator[tuple[set[str], str]]:
    """Yield (setting names, sentence) for each group of settings with little effect or an unexpected effect."""
    if c.kl_in == "reward" and c.kl_estimator == "full":
        yield (
            {"kl_estimator", "kl_in"},
            "ppo.kl_estimator=full with ppo.kl_in=reward penalises a token only for the states that follow it, never "
            "for the token itself: the full KL of a state does not depend on the token sampled there. Use "
            "ppo.kl_estimator=k1, or ppo.kl_in=loss",
        )
    if c.kl_in == "reward" and c.kl_estimator in ("k2", "k3"):
        yield (
            {"kl_estimator", "kl_in"},
            f"ppo.kl_estimator={c.kl_estimator} with ppo.kl_in=reward makes rare tokens even rarer: training misses "
            "the optimum of the KL penalty (by a total variation of 0.2 to 0.7 on a bandit). Use ppo.kl_estimator=k1, "
            "or ppo.kl_in=loss with k2",
        )
    if c.kl_in == "loss" and c.kl_estimator == "k3":
        yield (
            {"kl_estimator", "kl_in"},
            "ppo.kl_estimator=k3 with ppo.kl_in=loss has the gradient of KL(reference || policy), not of "
            "KL(policy || reference), so training has another optimum; ppo.kl_estimator=k2 has the usual optimum",
        )
    if c.kl_controller == "adaptive" and c.total_episodes < HORIZONS_NEEDED * c.kl_horizon:
        yield (
            {"kl_controller", "kl_horizon", "total_episodes"},
            f"ppo.total_episodes={c.total_episodes} is less than {HORIZONS_NEEDED} x ppo.kl_horizon={c.kl_horizon:g}: "
            "the KL coefficient changes by at most 20 % per horizon, so it hardly changes in this run; "
            f"set ppo.kl_horizon to {c.total_episodes / HORIZONS_NEEDED:g} or less",
        )
    if c.value_model != "shared":
        yield (
            {"vf_coef"},
            f"ppo.vf_coef={c.vf_coef:g} has almost no effect with ppo.value_model={c.value_model}: the critic has its "
            "own optimiser, and Adam's step does not depend on the scale of the loss. Set ppo.value_learning_rate "
            "instead",
        )
    if c.deterministic and c.local_rollout_forward_batch_size is None:
        yield (
            {"deterministic", "local_rollout_forward_batch_size"},
            "ppo.deterministic=true with ppo.local_rollout_forward_batch_size=null: the number of responses decoded "
            "at a time, and with it their rounding, depends on the free memory. Set "
            "ppo.local_rollout_forward_batch_size to a number",
        )
    if c.top_k > 0 or c.top_p < 1.0 or c.min_response_length > 0:
        for name in ("importance_cap", "importance_low"):
            if getattr(c, name) is not None:
                yield (
                    {name, "top_k", "top_p", "min_response_length"},
                    f"ppo.{name} corrects for the sampler's rounding, but not for the filters ppo.top_k, ppo.top_p and "
                    "ppo.min_response_length: the importance weights use the sampler's unfiltered distribution",
                )


def advice(config: PPOConfig, given: Container[str] | None, parameters: int | None) -> list[str]:
    """Return one line for each changed setting that is unusual or of little effect; see `PPOConfig.advice`.

    If `given` is None, all changed settings get advice; otherwise only the changed settings in `given`.
    """
    changed = {name: value for name, value in config.not_default().items() if given is None or name in given}
    ranges, lines = marks_of(type(config), Typical), []
    for name, value in changed.items():
        usual = ranges.get(name)
        if usual is None or value is None or (usual.is_rate and (parameters or 0) < LARGE):
            continue
        if name == "value_learning_rate" and config.value_model == "shared":
            usual = HEAD_RATE
        lora = usual is not HEAD_RATE and usual.is_rate and config.use_peft
        low, high = (end * (LORA_FACTOR if lora else 1.0) for end in (usual.low, usual.high))
        if not low <= value <= high:
            where = f"its typical range {'with LoRA ' if lora else ''}{low:g} to {high:g} ({usual.source})"
            lines.append(f"ppo.{name}={value} is outside {where}")
    return lines + [line for names, line in _hints(config) if changed.keys() & names]
