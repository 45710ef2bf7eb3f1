"""Computes log-probabilities, entropies and KL of response tokens from hidden states, in chunks of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ppo_rlhf.core.logprobs import card_bytes, token_entropy, token_kl, token_logprobs
from ppo_rlhf.passes.capabilities import vocabulary_size
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at, logits_of
from ppo_rlhf.passes.packed_attention import take_rows
from ppo_rlhf.passes.sequences import SequenceBatch

LOGITS_HELD = 2**24
"""The most logits in memory at a time on a CPU: 64 MiB of float32. If a forward pass has more logits, the logits are
computed in chunks, and computed again in the backward pass; the second computation takes about 2 % of an update."""
LOGIT_SHARE = 256
"""An accelerator holds at most one logit per this many bytes of its memory: 16-bit logits take 1/128 of the memory."""

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

    def statistics(states: Tensor, targets: Tensor, *reference_states: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)[None]
        results = [token_logprobs(logits, targets[None], temperature)[0]]
        if with_entropy:
            results.append(token_entropy(logits, temperature)[0])
        if reference is not None:
            with torch.no_grad():
                reference_logits = logits_of(reference)(*reference_states)[None]
            results.append(token_kl(logits, reference_logits, temperature)[0])
        return tuple(results)

    states_RH, targets_R = take_rows(states_MH, batch.predicting), batch.targets
    inputs = [states_RH, targets_R]
    if reference is not None:
        with torch.no_grad():
            reference_MH = hidden_states_at(backbone_of(reference), batch.rows, batch.state_positions)
            inputs.append(take_rows(reference_MH, batch.predicting))
    size = max(1, logits_held(states_RH.device) // vocabulary_size(model))
    if len(targets_R) <= size:
        columns = statistics(*inputs)
    else:
        compute: Callable[..., tuple[Tensor, ...]] = statistics
        if torch.is_grad_enabled():
            compute = partial(checkpoint, statistics, use_reentrant=False, preserve_rng_state=False)
        chunks = map(compute, *(rows.split(size) for rows in inputs))
        columns = tuple(torch.cat(column) for column in zip(*chunks, strict=True))
    scattered = map(batch.scatter_responses, columns)
    return next(scattered), next(scattered) if with_entropy else None, next(scattered, None)


def logits_held(device: torch.device) -> int:
    """Return the most logits of one model in a device's memory at a time."""
    return most_logits(None if device.type == "cpu" else card_bytes(device))


def most_logits(card: int | None) -> int:
    """Return `logits_held` for an accelerator with `card` bytes of memory, or for a CPU if `card` is None."""
    return LOGITS_HELD if card is None else card // LOGIT_SHARE
