"""The PPO update: epochs of clipped policy and value steps over one iteration's experience.

Schulman et al. 2017, arXiv:1707.06347. Each minibatch is one optimiser step of `Learner`.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.passes.gradient_checkpointing import recomputing
from ppo_rlhf.passes.response_logprobs import Reference
from ppo_rlhf.ppo.epoch_batches import EpochBatches
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.losses import StepSums, add_over_processes
from ppo_rlhf.ppo.optimisers import set_learning_rates
from ppo_rlhf.ppo.precision import deterministic
from ppo_rlhf.ppo.progress import UPDATE, Progress

log = logging.getLogger(__name__)

# The update ends early above target_kl times this factor, as in TRL's first PPO, Spinning Up and stable-baselines3
EARLY_STOP_FACTOR = 1.5


def optimise_policy(
    learner: Learner, progress: Progress, experience: Experience, kl_coef: float, reference_policy: PreTrainedModel
) -> list[StepSums]:
    """Take one optimiser step for each minibatch of each epoch, and return the statistics of every step.

    The update does not complete the iteration: `TrainingState.advance` does. The reference policy runs again in each
    optimiser step if the loss has the KL over the whole vocabulary.

    Raises:
        DivergenceError: The rollouts' KL exceeds `kl_stop` (no weight was changed), or `learner.MAX_SKIPPED_STEPS`
            optimiser steps in a row had a non-finite gradient.
    """
    config, rollouts = learner.config, experience.rollouts
    progress.check_whole()
    progress.requests.meet()
    _check_kl(float(rollouts.kl.sum(-1).mean()), rollouts.iteration, config)
    _warn_of_no_tokens(experience)
    set_learning_rates(learner.policy_optimizer, learner.critic_optimizer, config, rollouts.iteration)
    learner.drop_gradients()  # those that an interrupted update has left in the weights
    reference = reference_policy if config.kl_estimator == "full" and config.kl_in == "loss" else None
    steps: list[StepSums] = []
    with progress.clock.timed(UPDATE), deterministic(config), recomputing(*learner.forwards):
        learner.halving.agree()
        batches = EpochBatches(config, experience, learner.device, learner.halving.count)
        for epoch, minibatches in enumerate(batches.cut.epochs):
            batches.start(epoch)
            for number in range(len(minibatches)):
                step = _gradients_in_memory(learner, batches, number, kl_coef, reference)
                steps.append(step)
                # Prepare the next epoch's micro-batches while the device works, before the next device sync
                if number + 1 == len(minibatches):
                    batches.prepare(epoch + 1)
                if not progress.updating:
                    progress.requests.meet()  # the last time before weights change
                progress.updating = True
                if _exceeds_target_kl(step, config):
                    learner.drop_gradients()
                    learner.early_stops += 1
                    step.taken = False
                    return add_over_processes(steps)
                learner.take_step(step, rollouts.iteration)
        return add_over_processes(steps)


def _gradients_in_memory(
    learner: Learner, batches: EpochBatches, number: int, kl_coef: float, reference: Reference
) -> StepSums:
    """Compute the gradients of a minibatch; if memory runs out, begin it again with smaller micro-batches."""
    while True:
        inputs = batches.of(number)
        with learner.halving.catching(inputs.most_rows, lambda: learner.is_exchanging):
            step = learner.compute_gradients(inputs, kl_coef, reference)
            break
        learner.drop_gradients()
        batches.follow(learner.halving.count)
    learner.halving.agree()
    batches.follow(learner.halving.count)
    return step


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
