"""The PPO update: epochs of clipped policy and value steps over one iteration's experience.

Schulman et al. 2017, arXiv:1707.06347. Each minibatch is one optimiser step. The gradients of a minibatch's
micro-batches add up to the minibatch's gradient. Every loss is divided by the token count of the whole minibatch, so
the gradient does not depend on how the minibatch is split into micro-batches and across processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.aggregation import aggregation_count
from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.passes.gradient_checkpointing import recomputing
from ppo_rlhf.passes.response_logprobs import Reference
from ppo_rlhf.passes.sequences import SequenceBatch
from ppo_rlhf.passes.sharding import whole
from ppo_rlhf.passes.transfers import to_device
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.losses import CRITIC_TERMS, POLICY_TERMS, LossInputs, coefficients, measured, total
from ppo_rlhf.ppo.metrics import StepSums, add_over_processes
from ppo_rlhf.ppo.micro_batches import MicroBatch, Minibatch, own_micro_batches
from ppo_rlhf.ppo.optimisers import set_learning_rates
from ppo_rlhf.ppo.precision import deterministic
from ppo_rlhf.ppo.rollouts import UpdatePlan, halve_plan, update_plan
from ppo_rlhf.ppo.state import UPDATE, TrainingState
from ppo_rlhf.runtime.processes import process_count, shards_models, together

log = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""Optimiser steps in a row that may be skipped because of a non-finite gradient. No setting: a skipped step changes no
weight, so what made the gradient non-finite stays; a batch that was at fault has passed after fewer steps."""

# The update ends early above target_kl times this factor, as in TRL's first PPO, Spinning Up and stable-baselines3
EARLY_STOP_FACTOR = 1.5


def optimise_policy(state: TrainingState, experience: Experience, reference_policy: PreTrainedModel) -> list[StepSums]:
    """Take one optimiser step for each minibatch of each epoch, and return the statistics of every step.

    The update does not complete the iteration: `TrainingState.advance` does. The reference policy runs again in each
    optimiser step if the loss has the KL over the whole vocabulary.

    Raises:
        DivergenceError: The rollouts' KL exceeds `kl_stop` (no weight was changed), or `MAX_SKIPPED_STEPS` optimiser
            steps in a row had a non-finite gradient.
    """
    config, rollouts = state.config, experience.rollouts
    state.check_whole()
    state.requests.meet()
    _check_kl(float(rollouts.kl.sum(-1).mean()), rollouts.iteration, config)
    set_learning_rates(state.policy_optimizer, state.critic_optimizer, config, rollouts.iteration)
    _drop_gradients(state.optimizers)  # drop gradients that an interrupted update has left in the weights
    reference = reference_policy if config.kl_estimator == "full" and config.kl_in == "loss" else None
    steps: list[StepSums] = []
    with state.clock.timed(UPDATE), deterministic(config), recomputing(*state.forwards):
        plan = _agreed_plan(state)  # `measure` made the plan with these rollouts
        assert plan.responses is rollouts.responses
        _warn_of_no_tokens(experience)
        batches = EpochBatches(state, experience)
        for epoch, minibatches in enumerate(plan.epochs):
            batches.start(epoch)
            for number in range(len(minibatches)):
                step = _gradients_in_memory(state, experience, batches, number, reference)
                steps.append(step)
                # Prepare the next epoch's micro-batches while the device works, before the next device sync
                if number + 1 == len(minibatches) and epoch + 1 < len(plan.epochs):
                    batches.prepare(epoch + 1)
                if not state.updating:
                    state.requests.meet()  # the last time before weights change
                state.updating = True
                if _exceeds_target_kl(step, config):
                    _drop_gradients(state.optimizers)
                    state.early_stops += 1
                    return add_over_processes(steps)
                take_step(state, step)
        return add_over_processes(steps)


class EpochBatches:
    """The micro-batches of an update: those of one epoch on the device, and those of the next epoch on the CPU.

    They follow the state's plan: a minibatch whose micro-batches became smaller (`halve_plan`) is made anew.
    """

    def __init__(self, state: TrainingState, experience: Experience) -> None:
        """Prepare the micro-batches of the first epoch."""
        self._state, self._experience = state, experience
        self._epoch = 0
        self.prepare(0)

    def prepare(self, epoch: int) -> None:
        """Make the micro-batches of an epoch, counted from 0, on the CPU."""
        plan = self._prepared_plan = update_plan(self._state)
        inputs = plan.first_inputs if epoch == 0 else None
        self._prepared = _micro_batches(self._experience, plan, own_micro_batches(plan.epochs[epoch]), inputs)

    def start(self, epoch: int) -> None:
        """Copy the epoch's micro-batches, which `prepare` made, to the device in one transfer."""
        self._epoch, self._plan = epoch, self._prepared_plan
        on_device = iter(to_device(self._prepared, self._state.device))
        self._micro_batches = [[next(on_device) for _ in each.micro_batches] for each in self._plan.epochs[epoch]]

    def of(self, number: int) -> tuple[Minibatch, list[MicroBatch]]:
        """Return a minibatch of the epoch by its number, counted from 0, and this process's micro-batches of it."""
        plan = update_plan(self._state)
        minibatch = plan.epochs[self._epoch][number]
        if plan is self._plan:
            return minibatch, self._micro_batches[number]
        micro_batches = _micro_batches(self._experience, plan, minibatch.micro_batches)
        return minibatch, to_device(micro_batches, self._state.device)


def _micro_batches(
    experience: Experience,
    plan: UpdatePlan,
    groups: list[list[int]],
    inputs: list[SequenceBatch] | None = None,
) -> list[MicroBatch]:
    """Return the micro-batch of each group of rows on the CPU. `inputs` are the groups' inputs, if they exist."""
    rollouts, mask = experience.rollouts, experience.mask
    tables = (
        mask,
        experience.behaviour_logprobs,
        rollouts.reference_logprobs,
        experience.weighted_advantages,
        rollouts.values,
        experience.returns,
        *(() if experience.positive is None else (experience.positive,)),
    )
    return [
        MicroBatch(batch, int(mask[rows].sum()), *(table[rows, : batch.shape[1]] for table in tables))
        for rows, batch in zip(groups, inputs or plan.inputs(groups), strict=True)
    ]


def _gradients_in_memory(
    state: TrainingState, experience: Experience, batches: EpochBatches, number: int, reference: Reference
) -> StepSums:
    """Return `compute_gradients` of a minibatch; if memory runs out, begin it again with smaller micro-batches."""
    while True:
        minibatch, micro_batches = batches.of(number)
        # In its second minibatch DDP rebuilds its buckets of policy and critic, which the processes must do in step
        state.exchanged = process_count() > 1 and not state.shares_trunk and state.minibatches == 1
        with state.update_halving.catching(minibatch.most_rows, lambda: state.exchanged):
            step = compute_gradients(state, experience, minibatch, micro_batches, reference)
            break
        _drop_gradients(state.optimizers)
        halve_plan(state)
    state.minibatches += 1
    _agreed_plan(state)
    return step


def _agreed_plan(state: TrainingState) -> UpdatePlan:
    """Return the state's plan, with the micro-batches of the process whose memory ran out most often."""
    state.agree_on_halvings()
    plan = update_plan(state)
    return halve_plan(state) if plan.halvings < state.update_halving.count else plan


def compute_gradients(
    state: TrainingState,
    experience: Experience,
    minibatch: Minibatch,
    micro_batches: list[MicroBatch],
    reference: Reference,
) -> StepSums:
    """Accumulate the gradients of policy and critic over this process's micro-batches of one minibatch.

    Returns the losses and token sums of this process's micro-batches, and the number of tokens that the losses count in
    the whole minibatch.
    """
    config = state.config
    # Mask of the minibatch's rows of all processes
    mask = experience.mask[minibatch.rows]
    count = partial(aggregation_count, loss_aggregation=config.loss_aggregation, fixed_length=config.response_length)
    denominator = float(count(mask))
    positives = 0.0 if experience.positive is None else float(count(experience.positive[minibatch.rows]))
    learns = experience.rollouts.iteration > config.critic_warmup_iterations
    step = StepSums(tokens=int(mask.sum()), with_policy=minibatch.with_policy)
    for micro_batch in micro_batches:
        with synchronised(state, is_last=micro_batch is micro_batches[-1]):
            numbers = add_gradients(
                state,
                micro_batch,
                denominator=denominator,
                positives=positives,
                reference=reference,
                learns=learns,
                with_policy=minibatch.with_policy,
            )
        step.add(numbers, micro_batch.tokens)
    return step


def add_gradients(
    state: TrainingState,
    micro_batch: MicroBatch,
    *,
    denominator: float,
    positives: float,
    reference: Reference,
    learns: bool,
    with_policy: bool,
) -> dict[str, Tensor]:
    """Add the gradients of a micro-batch; return the terms of its losses, and their statistics, by name.

    Args:
        state: The models, and the controller of the KL coefficient.
        micro_batch: The inputs.
        denominator: Divisor of the summed losses of policy and critic: the count of the whole minibatch.
        positives: Divisor of the summed loss of positive examples.
        reference: The reference policy, if the loss has the KL over the whole vocabulary; else None.
        learns: False while only the critic warms up, so that the policy has no gradients.
        with_policy: False in epochs that train only the critic, so that the policy has no forward pass.
    """
    config, accelerator = state.config, state.accelerator
    inputs = LossInputs(config, micro_batch, denominator, positives)
    weights = coefficients(config, state.kl_controller.kl_coef)
    numbers: dict[str, Tensor] = {}
    if with_policy:
        with accelerator.autocast():
            output = state.policy_forward(
                micro_batch.batch, with_entropy=bool(config.entropy_coef), learns=learns, reference=reference
            )
        losses, statistics = measured(POLICY_TERMS, output, inputs)
        numbers = losses | statistics
        policy_loss = total(losses, weights)
        if learns and not state.shares_trunk:
            _backward(policy_loss, accelerator.scaler)
        values = output.values
    if state.critic_forward is not None:
        with accelerator.autocast():
            values = state.critic_forward(micro_batch.batch)
    losses, statistics = measured(CRITIC_TERMS, values, inputs)
    numbers |= losses | statistics
    loss = total(losses, weights)
    if learns and state.shares_trunk:
        loss = loss + policy_loss
    _backward(loss, accelerator.scaler)
    return numbers


def _backward(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    """Accumulate the gradients of a loss.

    accelerate's `backward` is not used, because it would spend four kernels on dividing the loss by 1.
    """
    (loss if scaler is None else scaler.scale(loss)).backward()


def take_step(state: TrainingState, step: StepSums) -> None:
    """Clip the gradients of policy and critic and step both optimisers; step neither if a gradient is not finite.

    Raises:
        DivergenceError: `MAX_SKIPPED_STEPS` optimiser steps in a row were skipped.
    """
    config, scaler = state.config, state.accelerator.scaler
    # A shared trunk and its value head are clipped as one gradient, by however many optimisers they are moved
    models = {"policy": (state.policy_forward, state.optimizers)}
    if state.critic_forward is not None:
        models = {
            "policy": (state.policy_forward, [state.policy_optimizer]),
            "critic": (state.critic_forward, [state.critic_optimizer]),
        }
    learners = {name: pair for name, pair in models.items() if _has_gradients(pair[0])}
    policy_learns = _has_gradients(state.policy)  # the policy has no gradients while only the critic warms up
    clipped = []
    for model, optimizers in learners.values():
        if scaler is not None:
            # Unscale directly, because accelerate unscales only optimisers that accelerate prepared
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        clipped.append(state.accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm))
    # Reading the gradient norms is the only device sync of the optimiser step
    values = torch.stack([whole(norm) for norm in clipped]).tolist() if clipped else []
    norms = dict(zip(learners, values, strict=True))
    step.policy_grad_norm = norms.get("policy", 0.0) if policy_learns else 0.0
    step.value_grad_norm = norms.get("policy" if state.shares_trunk else "critic", 0.0)
    non_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if step.tokens and not non_finite:
        for _, optimizers in learners.values():
            for optimizer in optimizers:
                optimizer.step()
        if state.policy_average is not None and policy_learns:
            state.policy_average.update(state.policy)
        state.optimiser_steps += 1
        state.skipped_in_a_row = 0
    elif non_finite and step.tokens:
        _skip_step(state, " and ".join(non_finite))
    if scaler is not None:
        scaler.update()
    _drop_gradients(state.optimizers)


def _skip_step(state: TrainingState, culprits: str) -> None:
    """Count and log a skipped optimiser step.

    Raises:
        DivergenceError: `MAX_SKIPPED_STEPS` optimiser steps in a row were skipped.
    """
    state.skipped_steps += 1
    where = f"iteration {state.iteration + 1}, optimiser step {state.optimiser_steps + state.skipped_steps}"
    scaler = state.accelerator.scaler
    # A smaller loss scale may end float16's overflow, so do not count the skipped step towards `MAX_SKIPPED_STEPS`
    if scaler is not None and scaler.get_scale() > 1.0:
        log.info("float16 overflow of the %s in %s: step skipped, loss scale lowered.", culprits, where)
        return
    state.skipped_in_a_row += 1
    log.warning("Non-finite gradient of the %s in %s: step skipped.", culprits, where)
    if state.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise DivergenceError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, the last of the "
            f"{culprits} in {where}. The steps were skipped; lower ppo.learning_rate, or check for non-finite rewards",
            last_good_iteration=state.iteration,
        )


@contextmanager
def synchronised(state: TrainingState, *, is_last: bool) -> Iterator[None]:
    """Sum gradients over processes only in the backward pass of a minibatch's last micro-batch.

    FSDP2 sums gradients in every backward pass, so that no process holds the gradients of all weights.
    DDP expects the backward pass of a forward pass that has returned: `state.exchanged` is True from then on.
    """
    with ExitStack() as stack:
        if is_last or shards_models():
            stack.enter_context(together())
            if process_count() > 1:
                for forward in state.forwards:
                    hook = forward.register_forward_hook(lambda *_: setattr(state, "exchanged", True))
                    stack.callback(hook.remove)
        else:
            for forward in state.forwards:
                stack.enter_context(state.accelerator.no_sync(forward))
        yield


def _check_kl(kl: float, iteration: int, config: PPOConfig) -> None:
    """Raise `DivergenceError` before an update on rollouts whose KL, in nats per response, exceeds `ppo.kl_stop`."""
    if config.kl_stop is None or kl <= config.kl_stop:
        return
    raise DivergenceError(
        f"iteration {iteration}: the policy's KL from the reference policy is {kl:.1f} nats per response, above "
        f"ppo.kl_stop={config.kl_stop:g}. Raise ppo.kl_coef (now {config.kl_coef:g}) or lower ppo.learning_rate (now "
        f"{config.learning_rate:g}) and start a new run, or raise ppo.kl_stop and resume",
        # The update of iteration - 1 raised the KL above `kl_stop`, so the last good checkpoint is of iteration - 2
        last_good_iteration=max(0, iteration - 2),
    )


def _warn_of_no_tokens(experience: Experience) -> None:
    """Log a warning if the losses count no token of the batch."""
    if not bool(experience.mask.any()):
        log.warning(
            "Every response of iteration %d was cut off, so ppo.truncated_responses=mask leaves no token to train "
            "on: raise %s.",
            experience.rollouts.iteration,
            "ppo.turn_length and ppo.response_length" if experience.config.environment else "ppo.response_length",
        )


def _exceeds_target_kl(step: StepSums, config: PPOConfig) -> bool:
    """Return whether the update ends before this step, because the policy has moved too far (`ppo.target_kl`)."""
    if config.target_kl is None:
        return False
    (over_processes,) = add_over_processes([step])
    return over_processes.mean("approxkl") > EARLY_STOP_FACTOR * config.target_kl


def _drop_gradients(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
