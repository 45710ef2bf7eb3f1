"""The micro-batches of an update, made epoch by epoch and copied to the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.aggregation import aggregation_count
from ppo_rlhf.passes.sequences import SequenceBatch
from ppo_rlhf.passes.transfers import to_device
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.micro_batches import BatchCut, MicroBatch, Minibatch, StepInputs, own_micro_batches


class EpochBatches:
    """The micro-batches of an update: those of one epoch on the device, and those of the next epoch on the CPU.

    A minibatch whose micro-batches became smaller (`follow`) is made anew.
    """

    def __init__(self, config: PPOConfig, experience: Experience, device: torch.device, halvings: int) -> None:
        """Prepare the micro-batches of the first epoch, by the cut of the rollouts, halved as often as `halvings`."""
        self._config, self._experience, self._device = config, experience, device
        self.cut: BatchCut = experience.rollouts.cut
        self.follow(halvings)
        self._epoch = 0
        self.prepare(0)

    def follow(self, halvings: int) -> None:
        """Cut the micro-batches that are still to come as often into two as `halvings` says."""
        if self.cut.halvings < halvings:
            self.cut = replace(self.cut, halvings=halvings)

    def prepare(self, epoch: int) -> None:
        """Make the micro-batches of an epoch, counted from 0, on the CPU; do nothing after the last epoch."""
        if epoch == len(self.cut.epochs):
            return
        cut = self._prepared_cut = self.cut
        inputs = cut.first_inputs if epoch == 0 else None
        self._prepared = _micro_batches(self._experience, cut, own_micro_batches(cut.epochs[epoch]), inputs)

    def start(self, epoch: int) -> None:
        """Copy the epoch's micro-batches, which `prepare` made, to the device in one transfer."""
        self._epoch, self._cut = epoch, self._prepared_cut
        on_device = iter(to_device(self._prepared, self._device))
        self._micro_batches = [[next(on_device) for _ in each.micro_batches] for each in self._cut.epochs[epoch]]

    def of(self, number: int) -> StepInputs:
        """Return the inputs of a minibatch of the epoch by its number, counted from 0."""
        minibatch = self.cut.epochs[self._epoch][number]
        if self.cut is self._cut:
            return self._step_inputs(minibatch, self._micro_batches[number])
        made = _micro_batches(self._experience, self.cut, minibatch.micro_batches)
        return self._step_inputs(minibatch, to_device(made, self._device))

    def _step_inputs(self, minibatch: Minibatch, micro_batches: list[MicroBatch]) -> StepInputs:
        experience, config = self._experience, self._config
        count = partial(
            aggregation_count, loss_aggregation=config.loss_aggregation, fixed_length=config.response_length
        )
        # Mask of the minibatch's rows of all processes
        mask, positive = experience.mask[minibatch.rows], experience.positive
        return StepInputs(
            micro_batches,
            most_rows=minibatch.most_rows,
            tokens=int(mask.sum()),
            denominator=float(count(mask)),
            positives=0.0 if positive is None else float(count(positive[minibatch.rows])),
            with_policy=minibatch.with_policy,
            learns=experience.rollouts.iteration > config.critic_warmup_iterations,
        )


def _micro_batches(
    experience: Experience,
    cut: BatchCut,
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
        for rows, batch in zip(groups, inputs or cut.inputs(groups), strict=True)
    ]
