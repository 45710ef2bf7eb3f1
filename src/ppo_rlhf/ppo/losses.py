"""The terms of the losses, by name: `POLICY_TERMS` of the policy's loss, `CRITIC_TERMS` of the critic's.

A loss is the sum of its terms, each times its coefficient. The update takes the gradient of this sum, and the metrics
`loss/<name>_avg` and `loss/total` follow from the same tables, so a new term is a row of a table. `StepSums` adds the
terms of a minibatch up, over micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.aggregation import aggregate_loss
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.losses import clipped_policy_loss, clipped_value_loss, masked_policy_loss
from ppo_rlhf.passes.transfers import to_cpu
from ppo_rlhf.ppo.forward_passes import PolicyOutput
from ppo_rlhf.ppo.micro_batches import MicroBatch
from ppo_rlhf.runtime.processes import gather_tensors

STATISTICS = ("approxkl", "policy_clipfrac", "value_clipfrac", "ratio")
"""Names of the statistics that terms measure beside their losses: means over the tokens that the losses count."""

Number = TypeVar("Number", Tensor, float)
Output = TypeVar("Output")


@dataclass(frozen=True)
class LossInputs:
    """What a term reads of a micro-batch, apart from the output of the forward pass."""

    config: PPOConfig
    micro_batch: MicroBatch
    # Divisor of the losses' sums over the micro-batch: the count of the whole minibatch
    denominator: float
    positives: float  # divisor of the sum over the tokens of positive examples

    def aggregated(self, token_losses: Tensor) -> Tensor:
        """Return the micro-batch's share of a loss of the minibatch, from the loss of each token, `[b, t]`."""
        return aggregate_loss(token_losses, self.micro_batch.mask, self.config.loss_aggregation, self.denominator)


class Term(NamedTuple):
    """A term's loss of one micro-batch, before its coefficient, and the `STATISTICS` that belong to it."""

    loss: Tensor
    statistics: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class LossTerm(Generic[Output]):
    """A row of `POLICY_TERMS` or `CRITIC_TERMS`."""

    # From the output of the forward pass; None if the settings leave the term out
    measure: Callable[[Output, LossInputs], Term | None]
    coefficient: Callable[[PPOConfig, float], float]  # from the settings and the present KL coefficient


def _surrogate(output: PolicyOutput, inputs: LossInputs) -> Term:
    """Return the clipped policy loss, or with `importance_low` the loss masked outside a band of ratios."""
    config, micro_batch = inputs.config, inputs.micro_batch
    compared = output.logprobs, micro_batch.old_logprobs, micro_batch.advantages, micro_batch.mask
    if config.importance_low is not None and config.importance_high is not None:
        loss = masked_policy_loss(
            *compared,
            low=config.importance_low,
            high=config.importance_high,
            loss_aggregation=config.loss_aggregation,
            denominator=inputs.denominator,
        )
    else:
        loss = clipped_policy_loss(
            *compared,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
            loss_aggregation=config.loss_aggregation,
            denominator=inputs.denominator,
        )
    return Term(loss.loss, {"approxkl": loss.approxkl, "policy_clipfrac": loss.clipfrac, "ratio": loss.ratio})


def _kl(output: PolicyOutput, inputs: LossInputs) -> Term | None:
    """Return the KL from the reference policy, if `ppo.kl_in` is `loss`."""
    config = inputs.config
    if config.kl_in != "loss":
        return None
    estimate = output.kl
    if estimate is None:
        estimate = kl_estimate(output.logprobs, inputs.micro_batch.reference_logprobs, config.kl_estimator)
    return Term(inputs.aggregated(estimate))


def _entropy(output: PolicyOutput, inputs: LossInputs) -> Term | None:
    """Return the entropy, which `ppo.entropy_coef` rewards."""
    return None if output.entropy is None else Term(inputs.aggregated(output.entropy))


def _positive(output: PolicyOutput, inputs: LossInputs) -> Term | None:
    """Return the negative log-likelihood of positive examples, if `ppo.positive_threshold` is set."""
    positive = inputs.micro_batch.positive
    if positive is None:
        return None
    return Term(aggregate_loss(-output.logprobs, positive, inputs.config.loss_aggregation, inputs.positives))


def _value(values: Tensor, inputs: LossInputs) -> Term:
    """Return the clipped squared error of the critic's values."""
    config, micro_batch = inputs.config, inputs.micro_batch
    loss = clipped_value_loss(
        values[:, :-1],
        micro_batch.values,
        micro_batch.returns,
        micro_batch.mask,
        cliprange_value=config.cliprange_value,
        loss_aggregation=config.loss_aggregation,
        denominator=inputs.denominator,
    )
    return Term(loss.loss, {"value_clipfrac": loss.clipfrac})


POLICY_TERMS: dict[str, LossTerm[PolicyOutput]] = {
    "policy": LossTerm(_surrogate, lambda config, kl_coef: 1.0),
    "kl": LossTerm(_kl, lambda config, kl_coef: kl_coef),
    "entropy": LossTerm(_entropy, lambda config, kl_coef: -config.entropy_coef),
    "positive": LossTerm(_positive, lambda config, kl_coef: config.positive_coef),
}
"""The terms of the policy's loss in the order in which they are added. `loss/<name>_avg` is the metric of a term."""

CRITIC_TERMS: dict[str, LossTerm[Tensor]] = {"value": LossTerm(_value, lambda config, kl_coef: config.vf_coef)}
"""The terms of the critic's loss, likewise. With a shared trunk one gradient is taken of both losses' sum."""


def measured(
    terms: Mapping[str, LossTerm[Output]], output: Output, inputs: LossInputs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of a micro-batch's terms by name, before their coefficients, and the terms' statistics.

    `output` is what the forward pass returned. Terms that the settings leave out are left out.
    """
    found = {name: term.measure(output, inputs) for name, term in terms.items()}
    losses = {name: term.loss for name, term in found.items() if term is not None}
    return losses, {name: mean for term in found.values() if term is not None for name, mean in term.statistics.items()}


def coefficients(config: PPOConfig, kl_coef: float) -> dict[str, float]:
    """Return the coefficient of each term of both losses."""
    tables: list[Mapping[str, LossTerm[Any]]] = [POLICY_TERMS, CRITIC_TERMS]
    return {name: term.coefficient(config, kl_coef) for table in tables for name, term in table.items()}


def total(losses: Mapping[str, Number], coefficients: Mapping[str, float]) -> Number:
    """Return the sum of at least one term's loss times its coefficient."""
    return reduce(add, (coefficients[name] * loss for name, loss in losses.items()))


def summed_names() -> tuple[str, ...]:
    """Return the names of the terms and of the `STATISTICS`, which are summed over micro-batches and processes."""
    return *POLICY_TERMS, *CRITIC_TERMS, *STATISTICS


@dataclass
class StepSums:
    """Statistics of one minibatch.

    During the update `local` holds this process's sums on the device; `add_over_processes` sums `local` over all
    processes into `sums`.
    """

    tokens: int  # number of the whole minibatch's tokens that the losses count; if 0, no optimiser step is taken
    local: Tensor | None = None  # [len(summed_names())], this process's sums in the order of `summed_names`
    # By name: each term of the losses before its coefficient, 0 if the settings leave the term out, as a mean over the
    # minibatch; each of `STATISTICS` as a sum over tokens
    sums: dict[str, float] = field(default_factory=dict)
    with_policy: bool = True  # False if the step trained only the critic
    taken: bool = True  # False for the minibatch before whose step `target_kl` ended the update
    policy_grad_norm: float = 0.0  # norm of the policy's gradient before clipping; 0 if the step was not taken
    value_grad_norm: float = 0.0

    def add(self, numbers: Mapping[str, Tensor], tokens: int) -> None:
        """Add a micro-batch's numbers by name: its shares of the terms' losses, and its means of the `STATISTICS`.

        `tokens` is the number of the micro-batch's tokens that the losses count. Means are multiplied by `tokens`, so
        ratios of 1 add up exactly.
        """
        none = next(iter(numbers.values())).new_zeros(())
        sums = torch.stack([numbers.get(name, none).detach() for name in summed_names()])
        sums[-len(STATISTICS) :] *= tokens
        self.local = sums if self.local is None else self.local + sums

    def mean(self, name: str) -> float:
        """Return the mean over tokens of one of `STATISTICS`."""
        return self.sums[name] / max(1, self.tokens)


def add_over_processes(steps: list[StepSums]) -> list[StepSums]:
    """Return the statistics of each optimiser step, summed over all processes, as Python numbers."""
    names = summed_names()
    none = torch.zeros(len(names))  # sums of 0 for a process that had no micro-batches in the step
    local = torch.stack(to_cpu([none if step.local is None else step.local for step in steps])).double()
    sums = torch.stack(gather_tensors(local)).sum(0).tolist()
    return [
        replace(step, local=None, sums=dict(zip(names, row, strict=True)))
        for step, row in zip(steps, sums, strict=True)
    ]
