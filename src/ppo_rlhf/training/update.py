"""The PPO update: epochs of clipped policy and value steps over one iteration's experience."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.losses import ValueLoss, clipped_policy_loss, clipped_value_loss
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.experience import Experience, response_values
from ppo_rlhf.training.metrics import StepStatistics, iteration_metrics
from ppo_rlhf.training.packing import PackedSequences
from ppo_rlhf.training.randomness import micro_batches, minibatch_partition
from ppo_rlhf.training.scoring import response_logits
from ppo_rlhf.training.state import TrainingState, set_learning_rates

log = logging.getLogger(__name__)


def optimise(state: TrainingState, experience: Experience, config: PPOConfig) -> dict[str, float]:
    """Run all epochs of one iteration, advance the state's counters, and return the iteration's metrics.

    Raises:
        DivergenceError: The rollouts' KL exceeds `kl_stop` (nothing was changed), or `max_skipped_steps` optimiser
            steps in a row had a non-finite loss or gradient.
    """
    started = time.perf_counter()
    iteration = experience.rollouts.iteration
    _check_kl(float(experience.shaped_rewards.kl.sum(-1).mean()), iteration, config)
    rates = set_learning_rates(state, iteration)
    steps = [_optimiser_step(state, experience, minibatch, config) for minibatch in _all_minibatches(config, iteration)]
    state.iteration = iteration
    state.episode += config.batch_size
    metrics = iteration_metrics(experience, steps, state, rates, time.perf_counter() - started)
    observed_kl = metrics["objective/kl"]
    state.kl_controller.update(observed_kl, config.batch_size)
    state.history.append({"iteration": float(iteration), **metrics})
    return metrics


def _check_kl(kl: float, iteration: int, config: PPOConfig) -> None:
    """Stop before an update on rollouts that have left the reference policy too far behind."""
    if config.kl_stop is None or kl <= config.kl_stop:
        return
    raise DivergenceError(
        f"iteration {iteration}: the policy's KL from the reference policy is {kl:.1f} nats per response, above "
        f"ppo.kl_stop={config.kl_stop:g}. Raise ppo.kl_coef (now {config.kl_coef:g}) or lower ppo.learning_rate (now "
        f"{config.learning_rate:g}) and train anew, or raise ppo.kl_stop and go on",
        last_good_iteration=max(0, iteration - 2),  # these rollouts measure the policy of the iteration before
    )


def _all_minibatches(config: PPOConfig, iteration: int) -> Iterator[list[int]]:
    for epoch in range(config.num_ppo_epochs):
        yield from minibatch_partition(config.seed, iteration, epoch, config.local_batch_size, config.num_mini_batches)


def _optimiser_step(
    state: TrainingState, experience: Experience, minibatch: list[int], config: PPOConfig
) -> StepStatistics:
    """Accumulate one minibatch's gradient over its micro-batches, clip it, and step both optimisers once."""
    tokens = experience.rollouts.lengths[minibatch].sum()
    state.policy_optimizer.zero_grad(set_to_none=True)
    state.critic_optimizer.zero_grad(set_to_none=True)
    parts = [
        _accumulate_gradients(state, experience, rows, tokens, config)
        for rows in micro_batches(minibatch, config.local_micro_batch_size)
    ]
    policy_norm = torch.nn.utils.clip_grad_norm_(state.policy.parameters(), config.max_grad_norm)
    value_norm = torch.nn.utils.clip_grad_norm_(state.critic.parameters(), config.max_grad_norm)
    _step_if_finite(state, policy_norm, value_norm, config)
    losses, token_sums = torch.stack(parts).sum(0).tensor_split([2])
    norms = torch.stack([policy_norm, value_norm])
    return StepStatistics(*torch.cat([losses, token_sums / tokens.to(state.device), norms]))


def _accumulate_gradients(
    state: TrainingState, experience: Experience, rows: list[int], tokens: Tensor, config: PPOConfig
) -> Tensor:
    """Backpropagate one micro-batch; return its part of both losses and its sums over tokens of the rest, `[6]`.

    Every loss is divided by the whole minibatch's token count, so the gradient does not depend on the cut.
    """
    packed = experience.rollouts.pack(rows, state.sampling.pad_token_id, state.device)
    width = packed.response_ids.shape[1]

    def of_rows(values: Tensor) -> Tensor:
        return values[rows, :width].to(state.device)

    logits = response_logits(state.policy, packed)
    policy = clipped_policy_loss(
        token_logprobs(logits, packed.response_ids, config.temperature),
        of_rows(experience.rollouts.old_logprobs),
        of_rows(experience.advantages),
        packed.is_response,
        cliprange=config.cliprange,
        denominator=tokens,
    )
    policy.loss.backward()
    value = _value_loss(state, experience, packed, of_rows, tokens, config)
    (config.vf_coef * value.loss).backward()
    count = packed.is_response.sum()  # sums, not shares: the mean of ratios that are all 1 is then exactly 1
    means = [policy.approxkl, policy.clipfrac, value.clipfrac, policy.ratio]
    return torch.stack([policy.loss.detach(), value.loss.detach(), *(mean * count for mean in means)])


def _value_loss(
    state: TrainingState,
    experience: Experience,
    packed: PackedSequences,
    of_rows: Callable[[Tensor], Tensor],
    tokens: Tensor,
    config: PPOConfig,
) -> ValueLoss:
    return clipped_value_loss(
        response_values(state, packed)[:, :-1],
        of_rows(experience.scores.values),
        of_rows(experience.returns),
        packed.is_response,
        cliprange_value=config.cliprange_value,
        denominator=tokens,
    )


def _step_if_finite(state: TrainingState, policy_norm: Tensor, value_norm: Tensor, config: PPOConfig) -> None:
    """Step both optimisers if both gradients are finite; else count a skipped step, and stop after too many in a row.

    A non-finite loss has a non-finite gradient, so the norm covers both.
    """
    finite = {"policy": bool(torch.isfinite(policy_norm)), "critic": bool(torch.isfinite(value_norm))}
    if all(finite.values()):
        state.policy_optimizer.step()
        state.critic_optimizer.step()
        state.optimiser_steps += 1
        state.skipped_in_a_row = 0
        return
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    culprits = " and ".join(name for name, good in finite.items() if not good)
    where = f"iteration {state.iteration + 1}, optimiser step {state.optimiser_steps + state.skipped_steps}"
    log.warning("Non-finite gradient of the %s in %s: step skipped.", culprits, where)
    if state.skipped_in_a_row >= config.max_skipped_steps:
        raise DivergenceError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, the last of the {culprits} "
            f"in {where} (ppo.max_skipped_steps={config.max_skipped_steps}). The weights are those of the last good "
            "step; lower ppo.learning_rate, or look for non-finite rewards",
            last_good_iteration=state.iteration,
        )
