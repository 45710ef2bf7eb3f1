"""One optimiser step of policy and critic: gradients clipped, and no step taken with one that is not finite."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.training.state import TrainingState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learner:
    """A model that a step moves."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def learners(state: TrainingState, *, policy_learns: bool = True) -> list[Learner]:
    """Return the models that learn: the critic, and the policy unless the critic is being warmed up.

    Policy and critic on a shared trunk are one; while the critic is warmed up, that is its head alone.
    """
    if state.shares_trunk and policy_learns:
        both = nn.ModuleList([state.policy, state.critic])
        return [Learner("policy", both, state.policy_optimizer, state.policy_scaler)]
    policy = Learner("policy", state.policy, state.policy_optimizer, state.policy_scaler)
    critic = Learner("critic", state.critic, state.critic_optimizer, state.critic_scaler)
    return [policy, critic] if policy_learns else [critic]


def clip_gradients(learning: list[Learner], max_grad_norm: float) -> dict[str, Tensor]:
    """Undo the loss scaling, clip each model's gradient to the 2-norm, and return the norms before clipping."""
    norms = {}
    for learner in learning:
        learner.scaler.unscale_(learner.optimizer)
        norms[learner.name] = nn.utils.clip_grad_norm_(learner.model.parameters(), max_grad_norm)
    return norms


def leave_out(learning: list[Learner]) -> None:
    """Take no step with these gradients; the loss scales take note of them all the same."""
    for learner in learning:
        learner.scaler.update()


def step_where_finite(
    state: TrainingState, learning: list[Learner], norms: dict[str, Tensor], losses: dict[str, Tensor]
) -> None:
    """Step each model whose gradient is finite (all or none, with `align_overflow`), and count.

    Args:
        state: Its counters advance.
        learning: The models.
        norms: Of their gradients, before clipping. A loss that is not finite has such a gradient, so they cover both.
        losses: Of the whole minibatch, to tell a float16 overflow from a fault.

    Raises:
        DivergenceError: `max_skipped_steps` steps in a row were skipped.
    """
    config = state.config
    faulty = [learner for learner in learning if not bool(torch.isfinite(norms[learner.name]))]
    for learner in learning:
        if learner not in faulty and not (faulty and config.align_overflow):
            learner.optimizer.step()
            if learner.name == "policy" and state.policy_average is not None:
                state.policy_average.update(state.policy)
    overflow = all(_is_overflow(learner, losses[learner.name]) for learner in faulty)
    for learner in learning:
        learner.scaler.update()
    if not faulty:
        state.optimiser_steps += 1
        state.skipped_in_a_row = 0
        return
    state.skipped_steps += 1
    where = f"iteration {state.iteration + 1}, optimiser step {state.optimiser_steps + state.skipped_steps}"
    culprits = " and ".join(learner.name for learner in faulty)
    if overflow:
        scales = ", ".join(f"{learner.scaler.get_scale():g}" for learner in faulty)
        log.info("float16 overflow of the %s in %s: step skipped, loss scale now %s.", culprits, where, scales)
        return
    state.skipped_in_a_row += 1
    log.warning("Non-finite gradient of the %s in %s: step skipped.", culprits, where)
    if state.skipped_in_a_row >= config.max_skipped_steps:
        raise DivergenceError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, the last of the {culprits} "
            f"in {where} (ppo.max_skipped_steps={config.max_skipped_steps}). The weights are those of the last good "
            "step; lower ppo.learning_rate, or look for non-finite rewards",
            last_good_iteration=state.iteration,
        )


def _is_overflow(learner: Learner, loss: Tensor) -> bool:
    """Whether a smaller loss scale may mend it: the loss is finite, and its scale can still fall."""
    return learner.scaler.is_enabled() and learner.scaler.get_scale() > 1.0 and bool(torch.isfinite(loss))
