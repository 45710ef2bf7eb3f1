"""Computes log-probabilities, entropies and KL of response tokens from hidden states, in chunks of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ppo_rlhf.core.logprobs import token_entropy, token_kl, token_logprobs
from ppo_rlhf.passes.capabilities import vocabulary_size
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at, logits_of
from ppo_rlhf.passes.free_memory import whole_memory
from ppo_rlhf.passes.linear_head import LinearHead
from ppo_rlhf.passes.packed_attention import take_rows
from ppo_rlhf.passes.sequences import SequenceBatch
from ppo_rlhf.runtime.processes import process_count

LOGIT_SHARE = 256
"""A process holds at most one logit per this many bytes of its device's memory: 16-bit logits take 1/128 of the memory,
float32 ones 1/64. A pass with more logits computes them in chunks (`linear_head`). The memory is the whole one, because
the free memory would give a resumed run other chunks, and so other rounding. With a vocabulary of 262,144, 256
positions at once took 3.2 CPU seconds, in chunks of 64 they took 5.1."""

Reference = PreTrainedModel | None
"""The frozen reference policy for the KL over the whole vocabulary; None: no KL is computed. The reference policy has
the same vocabulary as the policy."""


def response_statistics(
    model: PreTrainedModel,
    batch: SequenceBatch,
    states_MH: Tensor,
    temperature: float,
    *,
    with_entropy: bool = False,
    reference: Reference = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-probabilities, entropies and KL of the response tokens, `[B, T]` each, in nats.

    The results are differentiable in the weights of `model`; the reference policy runs without gradients. Logits are
    computed only for the states before response tokens, at most `logits_held` at a time for each model.

    Args:
        model: The language model whose head computes the logits.
        batch: B sequences with T response columns.
        states_MH: The model's last hidden states at `batch.state_positions`.
        temperature: Divides the logits.
        with_entropy: Whether to compute entropies; if False, None is returned for the entropies.
        reference: The reference policy of the KL; if None, None is returned for the KL.
    """
    head = logits_of(model)

    def of_logits(logits: Tensor, targets: Tensor, *reference_states: Tensor) -> tuple[Tensor, ...]:
        results = [token_logprobs(logits[None], targets[None], temperature)[0]]
        if with_entropy:
            results.append(token_entropy(logits[None], temperature)[0])
        if reference is not None:
            with torch.no_grad():
                reference_logits = logits_of(reference)(*reference_states)[None]
            results.append(token_kl(logits[None], reference_logits, temperature)[0])
        return tuple(results)

    def of_states(states: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return of_logits(head(states), *others)

    states_RH, targets_R = take_rows(states_MH, batch.predicting), batch.targets
    inputs = [states_RH, targets_R]
    if reference is not None:
        with torch.no_grad():
            reference_MH = hidden_states_at(backbone_of(reference), batch.rows, batch.state_positions)
            inputs.append(take_rows(reference_MH, batch.predicting))
    size = max(1, logits_held(states_RH.device) // vocabulary_size(model))
    if len(targets_R) <= size:
        columns = of_states(*inputs)
    elif type(head) is nn.Linear:
        columns = LinearHead.apply(of_logits, size, states_RH, head.weight, head.bias, *inputs[1:])
    else:  # a head that scales or caps its logits, or one with an adapter
        compute: Callable[..., tuple[Tensor, ...]] = of_states
        if torch.is_grad_enabled():
            compute = partial(checkpoint, of_states, use_reentrant=False, preserve_rng_state=False)
        chunks = map(compute, *(rows.split(size) for rows in inputs))
        columns = tuple(torch.cat(column) for column in zip(*chunks, strict=True))
    scattered = map(batch.scatter_responses, columns)
    return next(scattered), next(scattered) if with_entropy else None, next(scattered, None)


def logits_held(device: torch.device) -> int:
    """Return the most logits of one model in a device's memory at a time."""
    return most_logits(whole_memory(device, process_count()))


def most_logits(memory: int) -> int:
    """Return `logits_held` for a device that has `memory` bytes for each process."""
    return memory // LOGIT_SHARE
