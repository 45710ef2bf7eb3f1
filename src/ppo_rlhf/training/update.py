"""The PPO update: epochs of clipped policy and value steps over one iteration's experience."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.core.aggregation import aggregate_loss, aggregation_count
from ppo_rlhf.core.errors import ConfigError, DivergenceError
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.losses import PolicyLoss, clipped_policy_loss, clipped_value_loss, importance_weights
from ppo_rlhf.models.trunks import packing
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.experience import Experience, learning_mask
from ppo_rlhf.training.host_memory import return_freed_memory
from ppo_rlhf.training.metrics import StepStatistics, iteration_metrics
from ppo_rlhf.training.optimisers import set_learning_rates
from ppo_rlhf.training.packing import PackedSequences
from ppo_rlhf.training.precision import autocast, deterministic
from ppo_rlhf.training.randomness import minibatch_partition
from ppo_rlhf.training.run_models import checkpointing_gradients
from ppo_rlhf.training.scoring import response_statistics
from ppo_rlhf.training.state import TrainingState
from ppo_rlhf.training.stepping import clip_gradients, learners, leave_out, step_where_finite
from ppo_rlhf.training.values import response_values

log = logging.getLogger(__name__)

EARLY_STOP_FACTOR = 1.5  # on target_kl, as in TRL's first PPO, Spinning Up and stable-baselines3


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
    return_freed_memory()
    recomputing = checkpointing_gradients(state.policy, state.critic, config)
    with deterministic(config), recomputing, packing(state.policy, state.critic.backbone):
        steps = _run_epochs(_Update.prepare(state, experience, config))
    _drop_gradients(state)  # as much memory as the models take, until the next update
    state.iteration = iteration
    state.episode += config.batch_size
    scores = experience.scores.total
    state.reward_moments.update(scores, scores.isfinite())  # one score that is not a number would stay for ever
    metrics = iteration_metrics(experience, steps, state, rates, time.perf_counter() - started)
    observed_kl = metrics["objective/kl"]
    if iteration > config.held_iterations:
        state.kl_controller.update(observed_kl, config.batch_size)
    for line in state.kl_alarms.check(observed_kl):
        log.warning(line)
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


def _run_epochs(update: _Update) -> list[StepStatistics]:
    config, steps = update.config, []
    for epoch in range(config.num_ppo_epochs):
        for minibatch in minibatch_partition(
            config.seed, update.experience.rollouts.iteration, epoch, config.local_batch_size, config.num_mini_batches
        ):
            statistics, went_too_far = update.step(minibatch)
            steps.append(statistics)
            if went_too_far:
                update.state.early_stops += 1
                return steps
    return steps


def _drop_gradients(state: TrainingState) -> None:
    state.policy_optimizer.zero_grad(set_to_none=True)
    state.critic_optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class _Update:
    """What stays the same over the optimiser steps of one iteration; tensors lie on the CPU."""

    state: TrainingState
    experience: Experience
    config: PPOConfig
    mask: Tensor  # [B, T] bool, True on the tokens that the losses count
    advantages: Tensor  # [B, T], times the importance weights
    policy_learns: bool

    @classmethod
    def prepare(cls, state: TrainingState, experience: Experience, config: PPOConfig) -> _Update:
        rollouts, advantages = experience.rollouts, experience.advantages
        mask = learning_mask(rollouts, config)
        if config.importance_cap is not None:
            if rollouts.sampler_logprobs is None:
                raise ConfigError(
                    f"ppo.importance_cap={config.importance_cap:g} compares with the log-probabilities of the sampler, "
                    "which responses from elsewhere come without: leave it out, or let PPOTrainer.train() sample"
                )
            advantages = advantages * importance_weights(
                rollouts.old_logprobs, rollouts.sampler_logprobs, rollouts.mask, config.importance_cap
            )
        if not bool(mask.any()):
            log.warning(
                "Every response of iteration %d was cut off, so ppo.truncated_responses=mask leaves nothing to learn "
                "from: raise ppo.response_length.",
                rollouts.iteration,
            )
        return cls(state, experience, config, mask, advantages, rollouts.iteration > config.critic_warmup_iterations)

    def step(self, minibatch: list[int]) -> tuple[StepStatistics, bool]:
        """Accumulate one minibatch's gradient over its micro-batches, clip it, and step policy and critic once.

        Returns:
            The statistics, and whether the policy had moved too far for another step, which was then not taken.
        """
        state, config, mask = self.state, self.config, self.mask[minibatch]
        tokens = mask.sum()
        denominator = aggregation_count(mask, config.loss_aggregation, fixed_length=config.response_length)
        learning = learners(state, policy_learns=self.policy_learns)
        _drop_gradients(state)
        parts = [
            self._accumulate_gradients(rows, denominator)
            for rows in self.experience.rollouts.micro_batches(minibatch, config)
        ]
        losses, token_sums = torch.stack(parts).sum(0).tensor_split([4])
        means = token_sums / tokens.clamp(min=1).to(state.device)
        norms = {"policy": means.new_zeros(()), "critic": means.new_zeros(())} | clip_gradients(
            learning, config.max_grad_norm
        )
        if state.shares_trunk and self.policy_learns:  # one gradient: its norm is both's
            norms["critic"] = norms["policy"]
        statistics = StepStatistics(*torch.cat([losses, means, torch.stack([norms["policy"], norms["critic"]])]))
        too_far = config.target_kl is not None and bool(statistics.approxkl > EARLY_STOP_FACTOR * config.target_kl)
        if too_far or not bool(tokens):
            leave_out(learning)
        else:
            total = {"policy": statistics.policy_loss, "critic": statistics.value_loss}
            if state.shares_trunk:
                total["policy"] = total["policy"] + total["critic"]
            step_where_finite(state, learning, norms, total)
        return statistics, too_far

    def _accumulate_gradients(self, rows: list[int], denominator: Tensor) -> Tensor:
        """Backpropagate one micro-batch; return its part of four losses and its sums over tokens of the rest, `[8]`.

        Every loss is divided by the whole minibatch's count, so the gradient does not depend on the cut.
        """
        state, config = self.state, self.config
        packed = self.experience.rollouts.pack(rows, state.sampling.pad_token_id, state.device)
        counts = self._of_rows(self.mask, rows, packed)
        policy, kl, entropy, states = self._policy_losses(packed, rows, counts, denominator)
        policy_total = policy.loss + self.experience.shaped_rewards.kl_coef * kl - config.entropy_coef * entropy
        if self.policy_learns and not state.shares_trunk:  # its activations are freed before the critic's are made
            state.policy_scaler.scale(policy_total).backward()
        value = clipped_value_loss(
            response_values(state, packed, states)[:, :-1],
            self._of_rows(self.experience.scores.values, rows, packed),
            self._of_rows(self.experience.returns, rows, packed),
            counts,
            cliprange_value=config.cliprange_value,
            loss_aggregation=config.loss_aggregation,
            denominator=denominator,
        )
        value_total = config.vf_coef * value.loss
        if self.policy_learns and state.shares_trunk:
            value_total = policy_total + value_total  # one backward pass through the trunk
        state.critic_scaler.scale(value_total).backward()
        tokens = counts.sum()  # sums, not shares: the mean of ratios that are all 1 is then exactly 1
        losses = [policy.loss, value.loss, kl, entropy]
        means = [policy.approxkl, policy.clipfrac, value.clipfrac, policy.ratio]
        return torch.stack([*(loss.detach() for loss in losses), *(mean * tokens for mean in means)])

    def _policy_losses(
        self, packed: PackedSequences, rows: list[int], counts: Tensor, denominator: Tensor
    ) -> tuple[PolicyLoss, Tensor, Tensor, Tensor | None]:
        """Return the clipped surrogate, the aggregated KL and entropy, and the states that a shared critic reads.

        KL and entropy are 0 where the loss does not have them.
        """
        config, rollouts = self.config, self.experience.rollouts
        with torch.set_grad_enabled(self.policy_learns):
            with autocast(config, self.state.device):
                found = response_statistics(
                    self.state.policy, packed, config.temperature, with_entropy=bool(config.entropy_coef)
                )
            logprobs = found.logprobs
            policy = clipped_policy_loss(
                logprobs,
                self._of_rows(rollouts.old_logprobs, rows, packed),
                self._of_rows(self.advantages, rows, packed),
                counts,
                cliprange=config.cliprange,
                cliprange_high=config.cliprange_high,
                dual_clip=config.dual_clip,
                loss_aggregation=config.loss_aggregation,
                denominator=denominator,
            )
            kl = entropy = torch.zeros_like(policy.loss)
            if config.kl_in == "loss":
                reference = self._of_rows(rollouts.reference_logprobs, rows, packed)
                kl = self._aggregate(kl_estimate(logprobs, reference, config.kl_estimator), counts, denominator)
            if found.entropy is not None:
                entropy = self._aggregate(found.entropy, counts, denominator)
        return policy, kl, entropy, found.states if self.state.shares_trunk else None

    def _aggregate(self, values: Tensor, counts: Tensor, denominator: Tensor) -> Tensor:
        return aggregate_loss(values, counts, self.config.loss_aggregation, denominator)

    def _of_rows(self, values: Tensor, rows: list[int], packed: PackedSequences) -> Tensor:
        return values[rows, : packed.response_ids.shape[1]].to(self.state.device)
