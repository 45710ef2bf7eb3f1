"""Rules between fields of PPOConfig; one line a problem, which names all fields in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppo_rlhf.config.model_rules import model_problems

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

POLYNOMIAL_END = 1e-7  # transformers' polynomial schedule ends at this learning rate, whatever the peak


def problems(config: PPOConfig) -> list[str]:
    """Return every broken rule; an empty list if the settings fit together."""
    return [
        *_batches(config),
        *_stopping(config),
        *_truncation(config),
        *_kl(config),
        *_optimisation(config),
        *model_problems(config),
    ]


def _batches(c: PPOConfig) -> Iterator[str]:
    for name in ("batch_size", "local_batch_size"):
        size = getattr(c, name)
        if size % c.num_mini_batches:
            yield _indivisible(c, name, size, "num_mini_batches")
            break
    if c.batch_size % c.responses_per_prompt:
        yield _indivisible(c, "batch_size", c.batch_size, "responses_per_prompt")
    if c.reward_normalisation == "batch" and c.batch_size == 1:
        yield (
            "ppo.reward_normalisation=batch and ppo.batch_size=1 exclude each other: a single score is normalised to "
            "0; raise ppo.per_device_train_batch_size, or set ppo.reward_normalisation=running"
        )


def _stopping(c: PPOConfig) -> Iterator[str]:
    if c.stop_token_id is not None and c.stop_token != "eos":
        yield (
            f"ppo.stop_token={c.stop_token} and ppo.stop_token_id={c.stop_token_id} exclude each other: leave one out"
        )
    if c.min_response_length > c.response_length:
        yield (
            f"ppo.min_response_length={c.min_response_length} is above ppo.response_length={c.response_length}: lower "
            "the first or raise the second"
        )
    if c.stop_token == "none" and c.min_response_length:
        yield (
            f"ppo.stop_token=none and ppo.min_response_length={c.min_response_length} exclude each other: without a "
            "stop token every response has ppo.response_length tokens; leave one out"
        )
    if c.stop_token == "none" and c.missing_eos_penalty is not None:
        yield (
            f"ppo.stop_token=none and ppo.missing_eos_penalty={c.missing_eos_penalty} exclude each other: without a "
            "stop token every response would pay the penalty; leave one out"
        )


def _truncation(c: PPOConfig) -> Iterator[str]:
    handling, penalty = c.truncated_responses, c.missing_eos_penalty
    if handling in ("penalise", "replace") and penalty is None:
        yield f"ppo.truncated_responses={handling} needs ppo.missing_eos_penalty: set it, in score units"
    if handling in ("mask", "bootstrap") and penalty is not None:
        why = {
            "mask": "a response that is left out of the loss pays nothing",
            "bootstrap": "a response that is valued as if it went on pays nothing for not ending",
        }[handling]
        yield (
            f"ppo.truncated_responses={handling} and ppo.missing_eos_penalty={penalty} exclude each other: {why}; "
            "leave one out"
        )
    if handling in ("mask", "bootstrap") and c.stop_token == "none":
        why = {"mask": "nothing would be learnt", "bootstrap": "no score would ever count"}[handling]
        yield (
            f"ppo.truncated_responses={handling} and ppo.stop_token=none exclude each other: without a stop token "
            f"every response counts as cut off, and {why}; leave one out"
        )
    if handling == "bootstrap" and c.overlong_buffer is not None:
        yield (
            f"ppo.truncated_responses=bootstrap and ppo.overlong_buffer={c.overlong_buffer} exclude each other: a "
            "response that is cut off would pay nothing, one that ends just before nearly all; leave one out"
        )
    if c.overlong_buffer is not None and c.overlong_buffer > c.response_length:
        yield (
            f"ppo.overlong_buffer={c.overlong_buffer} is above ppo.response_length={c.response_length}: lower the "
            "first or raise the second"
        )
    if c.overlong_buffer is not None and c.stop_token == "none":
        yield (
            f"ppo.stop_token=none and ppo.overlong_buffer={c.overlong_buffer} exclude each other: without a stop token "
            "every response would pay the whole penalty; leave one out"
        )


def _kl(c: PPOConfig) -> Iterator[str]:
    if c.kl_in == "loss" and c.kl_estimator == "k1":
        yield (
            "ppo.kl_in=loss and ppo.kl_estimator=k1 exclude each other: the gradient of k1 is 0 on average and holds "
            "nothing back; set ppo.kl_estimator=k2, or ppo.kl_in=reward"
        )
    if c.kl_warning > c.kl_alarm and "kl_warning" in c.not_default():
        yield (
            f"ppo.kl_warning={c.kl_warning:g} is above ppo.kl_alarm={c.kl_alarm:g} and would never be reached first: "
            "lower it, or raise the other"
        )
    if c.kl_controller == "adaptive":
        if c.kl_coef == 0:
            yield (
                "ppo.kl_controller=adaptive and ppo.kl_coef=0 exclude each other: the controller multiplies, so 0 "
                "would stay 0; give a first coefficient such as 0.05, or set ppo.kl_controller=fixed"
            )
        if c.kl_hold_iterations and c.held_iterations >= c.num_total_batches:
            yield (
                f"ppo.kl_hold_iterations={c.kl_hold_iterations} leaves the controller no iteration: "
                f"ppo.total_episodes={c.total_episodes} makes {c.num_total_batches}, of which the critic's warm-up "
                f"takes {c.critic_warmup_iterations}; lower it, or set ppo.kl_controller=fixed"
            )
        return
    for name in ("kl_target", "kl_horizon", "kl_hold_iterations"):
        if name in c.not_default():
            yield (
                f"ppo.{name}={getattr(c, name):g} and ppo.kl_controller=fixed exclude each other: it belongs to the "
                "adaptive controller; set ppo.kl_controller=adaptive, or leave it out"
            )


def _optimisation(c: PPOConfig) -> Iterator[str]:
    if c.critic_warmup_iterations >= c.num_total_batches:
        yield (
            f"ppo.critic_warmup_iterations={c.critic_warmup_iterations} leaves the policy no iteration: "
            f"ppo.total_episodes={c.total_episodes} makes {c.num_total_batches}; lower the first or raise the second"
        )
    rates = {"learning_rate": c.learning_rate, "value_learning_rate": c.value_learning_rate}
    for name, rate in rates.items():
        if c.lr_scheduler_type == "polynomial" and rate is not None and rate <= POLYNOMIAL_END:
            yield (
                f"ppo.lr_scheduler_type=polynomial ends at {POLYNOMIAL_END:g}, and ppo.{name}={rate:g} is not above "
                "that: raise it, or choose another schedule"
            )


def _indivisible(c: PPOConfig, name: str, size: int, divisor: str) -> str:
    n = getattr(c, divisor)
    lower, upper = size - size % n, size - size % n + n
    processes = f" x {c.world_size} processes" if c.world_size > 1 and name == "batch_size" else ""
    near = sorted({value for value in (lower, upper) if value > 0})
    return (
        f"ppo.{name}={size} (per_device_train_batch_size {c.per_device_train_batch_size} x "
        f"gradient_accumulation_steps {c.gradient_accumulation_steps}{processes}) is not a multiple of "
        f"ppo.{divisor}={n}; nearest sizes that are: {', '.join(map(str, near))}"
    )
