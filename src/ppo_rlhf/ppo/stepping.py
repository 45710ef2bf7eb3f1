"""One optimiser step of policy and critic: gradients clipped, and no step taken with one that is not finite."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.ppo.sixteen_bit_gradients import SixteenBitGradients, kept_in_sixteen_bits
from ppo_rlhf.ppo.state import TrainingState

log = logging.getLogger(__name__)

NO_DIVISION_BY_ZERO = 1e-6  # added to the norm, as torch's clip_grad_norm_ does


@dataclass(frozen=True)
class Learner:
    """A model that a step moves."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    sixteen_bits: SixteenBitGradients | None = None

    def passes(self, count: int) -> AbstractContextManager[None]:
        """Return the context of all forward and backward passes of one step."""
        return nullcontext() if self.sixteen_bits is None else self.sixteen_bits.of_passes(count)

    def gradients(self) -> list[Tensor]:
        """Return those that backward passes have left."""
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return own if self.sixteen_bits is None else own + self.sixteen_bits.held()

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients; of those in 16 bits it is added up in float32."""
        if self.sixteen_bits is None:
            return nn.utils.get_total_norm(self.gradients())
        return torch.stack(torch._foreach_norm(self.gradients(), 2.0, torch.float32)).norm()

    def step(self) -> None:
        """Step with the gradients."""
        if self.sixteen_bits is None:
            self.optimizer.step()
        else:
            self.sixteen_bits.step(self.optimizer)

    def drop_gradients(self) -> None:
        """Let go of the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.sixteen_bits is not None:
            self.sixteen_bits.drop()

    @property
    def decides_itself(self) -> bool:
        """Whether the optimiser's kernel divides gradients and leaves out a step itself, so that nobody has to look.

        Those two numbers are float32 for the kernel, too few digits for float64.
        """
        fused = all(group["fused"] for group in self.optimizer.param_groups)
        wide = any(p.dtype == torch.float64 for group in self.optimizer.param_groups for p in group["params"])
        return fused and not wide and not self.scaler.is_enabled()


def learners(state: TrainingState) -> tuple[Learner, Learner]:
    """Return policy and critic; on a shared trunk the policy is both, and the critic the head alone."""
    policy: nn.Module = nn.ModuleList([state.policy, state.critic]) if state.shares_trunk else state.policy
    actor = Learner("policy", policy, state.policy_optimizer, state.policy_scaler)
    critic = Learner("critic", state.critic, state.critic_optimizer, state.critic_scaler)
    if kept_in_sixteen_bits(state.config, backbone_of(state.policy)):
        actor = replace(actor, sixteen_bits=SixteenBitGradients(backbone_of(state.policy), torch.bfloat16))
    if not state.shares_trunk and kept_in_sixteen_bits(state.config, state.critic.backbone):
        critic = replace(critic, sixteen_bits=SixteenBitGradients(state.critic.backbone, torch.bfloat16))
    return actor, critic


@dataclass(frozen=True)
class StepFaults:
    """What was wrong in one optimiser step, if anything; 0-d tensors, which nobody reads before the update is over."""

    not_finite: dict[str, Tensor]  # bool, by the learner's name: whether its gradient was not finite
    overflowed: dict[str, Tensor]  # bool: whether that was the loss scale's fault, which is lower now
    scales: dict[str, float]  # the loss scales after the step, where there are any


@dataclass
class OptimiserStep:
    """One step of all learners. Each takes its own as soon as its gradient is there, which is then dropped.

    With `align_overflow` all wait for the last one: if a gradient is not finite, none moves.
    """

    state: TrainingState
    moves: bool = True
    """False takes no step with the gradients; the loss scales take note of them all the same."""
    called_off: bool = False
    """True once nobody is to move any more."""
    _norms: dict[str, tuple[Learner, Tensor]] = field(default_factory=dict)
    _not_finite: dict[str, Tensor] = field(default_factory=dict)
    _overflowed: dict[str, Tensor] = field(default_factory=dict)

    def call_off(self) -> None:
        """Take no step with the gradients that come from now on."""
        self.moves, self.called_off = False, True

    def take(self, learner: Learner, loss: Tensor) -> Tensor:
        """Take a learner's step, or remember it; return the 2-norm of its gradient before clipping.

        Args:
            learner: Its gradient is whole.
            loss: Of the whole minibatch, to tell a float16 overflow from a fault.
        """
        learner.scaler.unscale_(learner.optimizer)
        norm = learner.gradient_norm()
        not_finite = ~norm.isfinite()  # a loss that is not finite has such a gradient: this covers both
        self._norms[learner.name] = learner, norm
        if self.moves:
            self._not_finite[learner.name] = not_finite
            self._overflowed[learner.name] = not_finite & loss.isfinite() & _scale_can_fall(learner)
        if not self._waits:
            self._finish(learner, norm, not_finite)
        return norm

    def close(self) -> StepFaults:
        """Take the steps that waited, and let the loss scales take note of all of them."""
        if self._waits:
            any_is_faulty = torch.stack(list(self._not_finite.values())).any()
            for learner, norm in self._norms.values():
                self._finish(learner, norm, any_is_faulty)
        for learner, _ in self._norms.values():
            learner.scaler.update()
        scalers = {name: learner.scaler for name, (learner, _) in self._norms.items()}
        scales = {name: scaler.get_scale() for name, scaler in scalers.items() if scaler.is_enabled()}
        return StepFaults(self._not_finite, self._overflowed, scales)

    @property
    def _waits(self) -> bool:
        """Whether nobody moves before all gradients are there."""
        return self.moves and self.state.config.align_overflow

    def _finish(self, learner: Learner, norm: Tensor, skip: Tensor) -> None:
        if self.moves:
            self._move(learner, norm, skip)
        learner.drop_gradients()

    def _move(self, learner: Learner, norm: Tensor, skip: Tensor) -> None:
        """Step with the gradient divided by what brings its norm down to the limit, unless `skip` is True."""
        state = self.state
        divisor = ((norm + NO_DIVISION_BY_ZERO) / state.config.max_grad_norm).clamp(min=1.0)
        averages = learner.name == "policy" and state.policy_average is not None
        optimizer = learner.optimizer
        if learner.decides_itself:
            optimizer.grad_scale, optimizer.found_inf = divisor, skip.float()  # type: ignore[attr-defined]
            learner.step()
        elif not bool(skip):
            torch._foreach_div_(learner.gradients(), divisor)
            optimizer.step()
        if averages and not bool(skip):
            state.policy_average.update(state.policy)  # type: ignore[union-attr]


def account_for(steps: list[StepFaults], state: TrainingState) -> None:
    """Count the steps of an update and those skipped, and say which; the first look at what the device found.

    Raises:
        DivergenceError: `max_skipped_steps` steps in a row were skipped.
    """
    found = _read([step.not_finite for step in steps]), _read([step.overflowed for step in steps])
    for step, not_finite, overflowed in zip(steps, *found, strict=True):
        if not not_finite:  # nobody was to move
            continue
        faulty = [name for name in ("policy", "critic") if not_finite.get(name)]  # the critic may have been the first
        if not faulty:
            state.optimiser_steps += 1
            state.skipped_in_a_row = 0
            continue
        state.skipped_steps += 1
        where = f"iteration {state.iteration + 1}, optimiser step {state.optimiser_steps + state.skipped_steps}"
        culprits = " and ".join(faulty)
        if all(overflowed[name] for name in faulty):
            scales = ", ".join(f"{step.scales[name]:g}" for name in faulty)
            log.info("float16 overflow of the %s in %s: step skipped, loss scale now %s.", culprits, where, scales)
            continue
        state.skipped_in_a_row += 1
        log.warning("Non-finite gradient of the %s in %s: step skipped.", culprits, where)
        if state.skipped_in_a_row >= state.config.max_skipped_steps:
            raise DivergenceError(
                f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, the last of the "
                f"{culprits} in {where} (ppo.max_skipped_steps={state.config.max_skipped_steps}). No such step was "
                "taken; lower ppo.learning_rate, or look for non-finite rewards",
                last_good_iteration=state.iteration,
            )


def _read(flags: list[dict[str, Tensor]]) -> list[dict[str, bool]]:
    """Return them as Python's own, with one transfer from the device."""
    tensors = [tensor for step in flags for tensor in step.values()]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(values) for name in step} for step in flags]


def _scale_can_fall(learner: Learner) -> bool:
    """Whether a smaller loss scale may mend a gradient that is not finite."""
    return learner.scaler.is_enabled() and learner.scaler.get_scale() > 1.0
