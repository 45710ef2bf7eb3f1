"""`Learner` owns policy and critic while they train: their passes, their optimisers, and one optimiser step.

Schulman et al. 2017, arXiv:1707.06347. The gradients of a minibatch's micro-batches add up to the minibatch's gradient.
Every loss is divided by the token count of the whole minibatch, so the gradient does not depend on how the minibatch is
split into micro-batches and across processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.models.averages import WeightAverage
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.passes.forward import backbone_of, packs
from ppo_rlhf.passes.halvings import Halving, of_updates
from ppo_rlhf.passes.response_logprobs import Reference
from ppo_rlhf.passes.sharding import whole
from ppo_rlhf.ppo.losses import CRITIC_TERMS, POLICY_TERMS, LossInputs, StepSums, coefficients, measured, total
from ppo_rlhf.ppo.micro_batches import MicroBatch, StepInputs
from ppo_rlhf.runtime.processes import process_count, shards_models, together

log = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""Optimiser steps in a row that may be skipped because of a non-finite gradient. No setting: a skipped step changes no
weight, so what made the gradient non-finite stays; a batch that was at fault has passed after fewer steps."""


@dataclass
class Learner:
    """Policy and critic, their forward passes and their optimisers."""

    config: PPOConfig
    policy: PreTrainedModel
    # The critic: a model of its own, or (SharedCritic) a value head on the policy's trunk
    critic: Critic | SharedCritic
    accelerator: Accelerator  # accelerate's Accelerator, which wraps the forward passes, and scales losses in float16
    # The policy's forward pass, wrapped by DDP for several processes; with a shared trunk it also returns the values
    policy_forward: nn.Module
    # The critic's forward pass, wrapped by DDP for several processes; None with a shared trunk
    critic_forward: nn.Module | None
    policy_optimizer: torch.optim.Optimizer
    # Optimiser of the critic, or of the value head on a shared trunk; the same object as policy_optimizer if the value
    # head on a shared trunk has no learning rate of its own
    critic_optimizer: torch.optim.Optimizer
    policy_average: WeightAverage | None = None  # moving average of the policy's weights; None without `ema_decay`
    optimiser_steps: int = 0  # number of optimiser steps taken, without skipped steps; one step moves policy and critic
    skipped_steps: int = 0  # number of optimiser steps skipped because of a non-finite gradient
    # Number of consecutive skipped steps, not counting overflows that lower float16's loss scale
    skipped_in_a_row: int = 0
    early_stops: int = 0  # number of iterations whose update ended early because of `target_kl`
    # Token budget of a micro-batch, computed from the free memory; None: the budget is not computed from the memory
    micro_batch_tokens: int | None = None
    # Halvings of the micro-batches; until `Halving.agree` they count what happened in this process
    halving: Halving = field(default_factory=of_updates)
    # True if the other processes wait for this process's gradients of the current minibatch
    is_exchanging: bool = field(default=False, init=False)
    _minibatches: int = field(default=0, init=False)  # minibatches that this process has computed gradients of

    @property
    def shares_trunk(self) -> bool:
        """Whether policy and critic share one model, and so one forward pass and one loss."""
        return isinstance(self.critic, SharedCritic)

    @property
    def computes_padding(self) -> bool:
        """Whether the architecture of policy or critic needs padding."""
        return not (packs(backbone_of(self.policy)) and packs(self.critic.backbone))

    @property
    def forwards(self) -> list[nn.Module]:
        """The forward passes that train: the policy's, and the critic's if the critic has its own backbone."""
        return [forward for forward in (self.policy_forward, self.critic_forward) if forward is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of policy and critic; one, if the value head on a shared trunk has no rate of its own."""
        is_one = self.critic_optimizer is self.policy_optimizer
        return [self.policy_optimizer] if is_one else [self.policy_optimizer, self.critic_optimizer]

    @property
    def device(self) -> torch.device:
        """Device of policy and critic."""
        return self.policy.device

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Dtype of log-probabilities, entropies and values: float64 with float64 weights, else float32."""
        return compute_dtype(self.policy)

    def compute_gradients(self, inputs: StepInputs, kl_coef: float, reference: Reference) -> StepSums:
        """Accumulate the gradients of policy and critic over this process's micro-batches of one minibatch.

        Returns the losses and token sums of this process's micro-batches, and the number of tokens that the losses
        count in the whole minibatch. The reference policy is given if the loss has the KL over the whole vocabulary.
        """
        # In its second minibatch DDP rebuilds its buckets of policy and critic, which the processes must do in step
        self.is_exchanging = process_count() > 1 and not self.shares_trunk and self._minibatches == 1
        step = StepSums(tokens=inputs.tokens, with_policy=inputs.with_policy)
        for micro_batch in inputs.micro_batches:
            with self.synchronised(is_last=micro_batch is inputs.micro_batches[-1]):
                numbers = self.add_gradients(micro_batch, inputs, kl_coef, reference)
            step.add(numbers, micro_batch.tokens)
        self._minibatches += 1
        return step

    def add_gradients(
        self, micro_batch: MicroBatch, inputs: StepInputs, kl_coef: float, reference: Reference
    ) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch; return the terms of its losses, and their statistics, by name."""
        config, accelerator = self.config, self.accelerator
        loss_inputs = LossInputs(config, micro_batch, inputs.denominator, inputs.positives)
        weights = coefficients(config, kl_coef)
        numbers: dict[str, Tensor] = {}
        if inputs.with_policy:
            # After a forward pass with gradients DDP awaits a backward pass, and would sum the next gradients too early
            with accelerator.autocast(), torch.set_grad_enabled(inputs.learns or self.shares_trunk):
                output = self.policy_forward(
                    micro_batch.batch, with_entropy=bool(config.entropy_coef), learns=inputs.learns, reference=reference
                )
            losses, statistics = measured(POLICY_TERMS, output, loss_inputs)
            numbers = losses | statistics
            policy_loss = total(losses, weights)
            if inputs.learns and not self.shares_trunk:
                self._backward(policy_loss)
            values = output.values
        if self.critic_forward is not None:
            with accelerator.autocast():
                values = self.critic_forward(micro_batch.batch)
        losses, statistics = measured(CRITIC_TERMS, values, loss_inputs)
        numbers |= losses | statistics
        loss = total(losses, weights)
        if inputs.learns and self.shares_trunk:
            loss = loss + policy_loss
        self._backward(loss)
        return numbers

    def _backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss.

        accelerate's `backward` is not used, because it would spend four kernels on dividing the loss by 1.
        """
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    @contextmanager
    def synchronised(self, *, is_last: bool) -> Iterator[None]:
        """Sum gradients over processes only in the backward pass of a minibatch's last micro-batch.

        FSDP2 sums gradients in every backward pass, so that no process holds the gradients of all weights.
        DDP expects the backward pass of a forward pass that has returned: `is_exchanging` is True from then on.
        """
        with ExitStack() as stack:
            if is_last or shards_models():
                stack.enter_context(together())
                if process_count() > 1:
                    for forward in self.forwards:
                        hook = forward.register_forward_hook(lambda *_: setattr(self, "is_exchanging", True))
                        stack.callback(hook.remove)
            else:
                for forward in self.forwards:
                    stack.enter_context(self.accelerator.no_sync(forward))
            yield

    def take_step(self, step: StepSums, iteration: int) -> None:
        """Clip the gradients of policy and critic and step both optimisers; step neither if a gradient is not finite.

        Raises:
            DivergenceError: `MAX_SKIPPED_STEPS` optimiser steps in a row were skipped.
        """
        scaler = self.accelerator.scaler
        # A shared trunk and its value head are clipped as one gradient, by however many optimisers they are moved
        models = {"policy": (self.policy_forward, self.optimizers)}
        if self.critic_forward is not None:
            models = {
                "policy": (self.policy_forward, [self.policy_optimizer]),
                "critic": (self.critic_forward, [self.critic_optimizer]),
            }
        trained = {name: pair for name, pair in models.items() if _has_gradients(pair[0])}
        policy_learns = _has_gradients(self.policy)  # the policy has no gradients while only the critic warms up
        clipped = []
        for model, optimizers in trained.values():
            if scaler is not None:
                # Unscale directly, because accelerate unscales only optimisers that accelerate prepared
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            clipped.append(self.accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm))
        # Reading the gradient norms is the only device sync of the optimiser step
        values = torch.stack([whole(norm) for norm in clipped]).tolist() if clipped else []
        norms = dict(zip(trained, values, strict=True))
        step.policy_grad_norm = norms.get("policy", 0.0) if policy_learns else 0.0
        step.value_grad_norm = norms.get("policy" if self.shares_trunk else "critic", 0.0)
        non_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if step.tokens and not non_finite:
            for _, optimizers in trained.values():
                for optimizer in optimizers:
                    optimizer.step()
            if self.policy_average is not None and policy_learns:
                self.policy_average.update(self.policy)
            self.optimiser_steps += 1
            self.skipped_in_a_row = 0
        elif non_finite and step.tokens:
            self._skip_step(" and ".join(non_finite), iteration)
        if scaler is not None:
            scaler.update()
        self.drop_gradients()

    def _skip_step(self, culprits: str, iteration: int) -> None:
        """Count and log a skipped optimiser step.

        Raises:
            DivergenceError: `MAX_SKIPPED_STEPS` optimiser steps in a row were skipped.
        """
        self.skipped_steps += 1
        where = f"iteration {iteration}, optimiser step {self.optimiser_steps + self.skipped_steps}"
        scaler = self.accelerator.scaler
        # A smaller loss scale may end float16's overflow, so do not count the skipped step towards `MAX_SKIPPED_STEPS`
        if scaler is not None and scaler.get_scale() > 1.0:
            log.info("float16 overflow of the %s in %s: step skipped, loss scale lowered.", culprits, where)
            return
        self.skipped_in_a_row += 1
        log.warning("Non-finite gradient of the %s in %s: step skipped.", culprits, where)
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise DivergenceError(
                f"{self.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, the last of the "
                f"{culprits} in {where}. The steps were skipped; lower ppo.learning_rate, or check for non-finite "
                "rewards",
                last_good_iteration=iteration - 1,
            )

    def drop_gradients(self) -> None:
        """Drop all gradients, also those that an interrupted update has left in the weights."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
