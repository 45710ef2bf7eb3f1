"""The PPO update: epochs of clipped policy and value steps over one iteration's experience."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.aggregation import aggregate_loss, aggregation_count
from ppo_rlhf.core.errors import ConfigError, DivergenceError
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.losses import clipped_policy_loss, clipped_value_loss, importance_weights
from ppo_rlhf.core.randomness import update_minibatches
from ppo_rlhf.models.forward import packing
from ppo_rlhf.ppo.batch import PackedSequences
from ppo_rlhf.ppo.build import checkpointing_gradients
from ppo_rlhf.ppo.experience import Experience, learning_mask
from ppo_rlhf.ppo.host_memory import return_freed_memory
from ppo_rlhf.ppo.lanes import SMALL, side_by_side
from ppo_rlhf.ppo.logprobs import response_statistics
from ppo_rlhf.ppo.metrics import StepStatistics, iteration_metrics
from ppo_rlhf.ppo.optimisers import set_learning_rates
from ppo_rlhf.ppo.precision import autocast, deterministic
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.stepping import Learner, OptimiserStep, StepFaults, account_for, learners
from ppo_rlhf.ppo.values import response_values

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
    two_large_models = experience.rollouts.at_once(config) and state.policy.num_parameters() > SMALL
    return_freed_memory(two_large_models=two_large_models)
    _forget_interrupted_step(state)
    recomputing = checkpointing_gradients(state.policy, state.critic, config)
    prepared = _Update.prepare(state, experience, config)
    with deterministic(config), recomputing, packing(state.policy, state.critic.backbone):
        steps = _run_epochs(prepared)
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
    """Take the steps of all epochs; what the device found is read when they are over."""
    state, config = update.state, update.config
    steps: list[StepStatistics] = []
    faults: list[StepFaults] = []
    minibatches = update_minibatches(
        config.seed,
        update.experience.rollouts.iteration,
        config.num_ppo_epochs,
        config.local_batch_size,
        config.num_mini_batches,
    )
    for minibatch in minibatches:
        statistics, found, went_too_far = update.step(minibatch)
        steps.append(statistics)
        faults.append(found)
        if went_too_far:
            state.early_stops += 1
            break
    account_for(faults, state)
    return steps


def _forget_interrupted_step(state: TrainingState) -> None:
    """Drop the gradients of an update that was interrupted, and what the loss scales noted of them."""
    state.policy_optimizer.zero_grad(set_to_none=True)
    state.critic_optimizer.zero_grad(set_to_none=True)
    for scaler in (state.policy_scaler, state.critic_scaler):
        if scaler.is_enabled():
            scaler.scale(torch.zeros((), device=state.device))  # one that never scaled refuses to be updated
            scaler.update(scaler.get_scale())  # to what it is; this forgets which gradients were unscaled


@dataclass(frozen=True)
class _MicroBatch:
    """Rows of a minibatch that go through the models together, on their device."""

    rows: list[int]
    packed: PackedSequences
    counts: Tensor  # [B, T] bool, True on the tokens that the losses count

    def of(self, values: Tensor) -> Tensor:
        """Return these rows of values `[batch, T]` that lie on the CPU."""
        return values[self.rows, : self.packed.response_ids.shape[1]].to(self.counts.device, non_blocking=True)

    def sums(self, *means: Tensor) -> list[Tensor]:
        """Return means over the tokens as sums: the mean of ratios that are all 1 is then exactly 1."""
        tokens = self.counts.sum()
        return [mean * tokens for mean in means]


@dataclass(frozen=True)
class _Update:
    """What stays the same over the optimiser steps of one iteration; tensors lie on the CPU."""

    state: TrainingState
    experience: Experience
    config: PPOConfig
    mask: Tensor  # [B, T] bool, True on the tokens that the losses count
    advantages: Tensor  # [B, T], times the importance weights
    policy_learns: bool
    policy: Learner  # with a shared trunk the critic, too
    critic: Learner

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
        policy_learns = rollouts.iteration > config.critic_warmup_iterations
        return cls(state, experience, config, mask, advantages, policy_learns, *learners(state))

    def step(self, minibatch: list[int]) -> tuple[StepStatistics, StepFaults, bool]:
        """Accumulate one minibatch's gradients over its micro-batches, clip them, and step policy and critic once.

        Every loss is divided by the whole minibatch's count, so the gradient does not depend on the cut. Unless they
        compute side by side, the policy's step is taken before the critic's passes begin, so that only one model's
        gradient is in memory.

        Returns:
            The statistics, what was not finite, and whether the policy had moved too far for another step, which was
            then not taken.
        """
        state, config, mask = self.state, self.config, self.mask[minibatch]
        tokens = int(mask.sum())
        count = aggregation_count(mask, config.loss_aggregation, fixed_length=config.response_length)
        denominator = count.to(state.device, non_blocking=True)
        step = OptimiserStep(state, moves=tokens > 0)
        parts = [self._micro_batch(rows) for rows in self.experience.rollouts.micro_batches(minibatch, config)]
        if state.shares_trunk:
            policy, value = self._step_of_both(step, parts, denominator, tokens)
        else:
            policy, value = side_by_side(
                lambda: self._policy_step(step, parts, denominator, tokens),
                lambda: self._critic_step(step, parts, denominator),
                at_once=self.experience.rollouts.at_once(config),
            )
        (policy_sums, policy_norm), (value_sums, value_norm) = policy, value
        policy_loss, kl, entropy = policy_sums[:3]
        approxkl, policy_clipfrac, ratio = policy_sums[3:] / max(1, tokens)
        statistics = StepStatistics(
            policy_loss=policy_loss,
            value_loss=value_sums[0],
            kl=kl,
            entropy=entropy,
            approxkl=approxkl,
            policy_clipfrac=policy_clipfrac,
            value_clipfrac=value_sums[1] / max(1, tokens),
            ratio=ratio if tokens else torch.ones_like(ratio),
            policy_grad_norm=policy_norm,
            value_grad_norm=value_norm,
            tokens=tokens,
        )
        return statistics, step.close(), step.called_off

    def _policy_step(
        self, step: OptimiserStep, parts: list[_MicroBatch], denominator: Tensor, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Take the policy's step, if it learns; return what `_policy_losses` says, and the gradient's norm."""
        sums = self._policy_passes(parts, denominator)
        self._call_off_if_too_far(step, sums, tokens)
        return sums, step.take(self.policy, sums[0]) if self.policy_learns else sums.new_zeros(())

    def _critic_step(self, step: OptimiserStep, parts: list[_MicroBatch], denominator: Tensor) -> tuple[Tensor, Tensor]:
        """Take the critic's step; return what `_value_losses` says, and the gradient's norm."""
        sums = self._critic_passes(parts, denominator)
        return sums, step.take(self.critic, sums[0])

    def _step_of_both(
        self, step: OptimiserStep, parts: list[_MicroBatch], denominator: Tensor, tokens: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Do the same for policy and critic on a shared trunk, whose gradient is one."""
        policy_sums, value_sums = self._passes_of_both(parts, denominator)
        self._call_off_if_too_far(step, policy_sums, tokens)
        if self.policy_learns:
            norm = step.take(self.policy, policy_sums[0] + value_sums[0])
            return (policy_sums, norm), (value_sums, norm)
        return (policy_sums, policy_sums.new_zeros(())), (value_sums, step.take(self.critic, value_sums[0]))

    def _call_off_if_too_far(self, step: OptimiserStep, policy_sums: Tensor, tokens: int) -> None:
        limit = self.config.target_kl
        if limit is not None and bool(policy_sums[3] / max(1, tokens) > EARLY_STOP_FACTOR * limit):
            step.call_off()

    def _micro_batch(self, rows: list[int]) -> _MicroBatch:
        packed = self.experience.rollouts.pack(rows, self.state.sampling.pad_token_id, self.state.device)
        counts = self.mask[rows, : packed.response_ids.shape[1]].to(self.state.device, non_blocking=True)
        return _MicroBatch(rows, packed, counts)

    def _policy_passes(self, parts: list[_MicroBatch], denominator: Tensor) -> Tensor:
        """Backpropagate the policy's loss, if it learns; return what `_policy_losses` says, of all micro-batches."""
        with self.policy.passes(len(parts)):
            return torch.stack([self._policy_pass(part, denominator) for part in parts]).sum(0)

    def _policy_pass(self, part: _MicroBatch, denominator: Tensor) -> Tensor:
        loss, sums, _ = self._policy_losses(part, denominator)
        if self.policy_learns:
            self.policy.scaler.scale(loss).backward()
        return sums

    def _critic_passes(self, parts: list[_MicroBatch], denominator: Tensor) -> Tensor:
        """Backpropagate the value loss; return what `_value_losses` says, of all micro-batches."""
        with self.critic.passes(len(parts)):
            return torch.stack([self._critic_pass(part, denominator) for part in parts]).sum(0)

    def _critic_pass(self, part: _MicroBatch, denominator: Tensor) -> Tensor:
        loss, sums = self._value_losses(part, None, denominator)
        self.critic.scaler.scale(loss).backward()
        return sums

    def _passes_of_both(self, parts: list[_MicroBatch], denominator: Tensor) -> tuple[Tensor, Tensor]:
        """Backpropagate once through the trunk that policy and critic share, for each micro-batch."""
        found = []
        with self.policy.passes(len(parts)):
            for part in parts:
                policy_loss, policy_sums, states = self._policy_losses(part, denominator)
                value_loss, value_sums = self._value_losses(part, states, denominator)
                loss = policy_loss + value_loss if self.policy_learns else value_loss
                self.critic.scaler.scale(loss).backward()
                found.append((policy_sums, value_sums))
        policy, value = zip(*found, strict=True)
        return torch.stack(policy).sum(0), torch.stack(value).sum(0)

    def _policy_losses(self, part: _MicroBatch, denominator: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the policy's loss, what it is made of, and the states that a critic on its trunk reads.

        What it is made of, `[6]`: parts of three losses (clipped surrogate, KL and entropy, 0 where the loss does not
        have them), sums over tokens of approximate KL, of the clipped ones and of the ratios. They are kept to the
        end of the update, so no graph hangs on them.
        """
        config, rollouts = self.config, self.experience.rollouts
        with torch.set_grad_enabled(self.policy_learns):
            with autocast(config, self.state.device, keeps_copies=False):
                found = response_statistics(
                    self.state.policy, part.packed, config.temperature, with_entropy=bool(config.entropy_coef)
                )
            policy = clipped_policy_loss(
                found.logprobs,
                part.of(rollouts.old_logprobs),
                part.of(self.advantages),
                part.counts,
                cliprange=config.cliprange,
                cliprange_high=config.cliprange_high,
                dual_clip=config.dual_clip,
                loss_aggregation=config.loss_aggregation,
                denominator=denominator,
            )
            kl = entropy = torch.zeros_like(policy.loss)
            if config.kl_in == "loss":
                reference = part.of(rollouts.reference_logprobs)
                estimate = kl_estimate(found.logprobs, reference, config.kl_estimator)
                kl = self._aggregate(estimate, part.counts, denominator)
            if found.entropy is not None:
                entropy = self._aggregate(found.entropy, part.counts, denominator)
            loss = policy.loss + self.experience.shaped_rewards.kl_coef * kl - config.entropy_coef * entropy
        sums = part.sums(policy.approxkl, policy.clipfrac, policy.ratio)
        losses = [policy.loss, kl, entropy]
        return loss, torch.stack([*losses, *sums]).detach(), found.states if self.state.shares_trunk else None

    def _value_losses(self, part: _MicroBatch, states: Tensor | None, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value loss times its coefficient, and without it beside the number of clipped tokens, `[2]`."""
        config = self.config
        value = clipped_value_loss(
            response_values(self.state, part.packed, states)[:, :-1],
            part.of(self.experience.scores.values),
            part.of(self.experience.returns),
            part.counts,
            cliprange_value=config.cliprange_value,
            loss_aggregation=config.loss_aggregation,
            denominator=denominator,
        )
        return config.vf_coef * value.loss, torch.stack([value.loss, *part.sums(value.clipfrac)]).detach()

    def _aggregate(self, values: Tensor, counts: Tensor, denominator: Tensor) -> Tensor:
        return aggregate_loss(values, counts, self.config.loss_aggregation, denominator)
