"""Log-probabilities of responses under a model, one micro-batch at a time, from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppo_rlhf.core.logprobs import token_entropy, token_logprobs
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forward import backbone_of, logits_of, states_at
from ppo_rlhf.models.packed_attention import take_rows
from ppo_rlhf.models.probe import vocabulary_size
from ppo_rlhf.models.products.compiled_shapes import fills_rows, rounded_up
from ppo_rlhf.ppo.batch import PackedSequences, pack

LOGITS_HELD = 2**24
"""Logits that may be in memory at a time (64 MiB of float32); on an accelerator, whose memory is larger, 16 times as
many. Of more, the backward pass recomputes each chunk's (about 2 % of an update)."""


@dataclass(frozen=True)
class ResponseStatistics:
    """What a policy says of the response tokens of B packed sequences, in nats, 0 in padding."""

    logprobs: Tensor  # [B, T] of the tempered policy, float32 or wider
    entropy: Tensor | None  # [B, T]; None if it was not asked for
    states: Tensor  # [M, H], last hidden states of s_0 to s_T of each row, for a value head


def response_states(backbone: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Return a backbone's last hidden states of s_0 to s_T of each row, `[M, H]`, row by row."""
    return states_at(backbone, packed.rows, packed.states)


def response_statistics(
    model: PreTrainedModel, packed: PackedSequences, temperature: float, *, with_entropy: bool = False
) -> ResponseStatistics:
    """Return log-probabilities, and entropies if asked for, of the response tokens; differentiable.

    Logits are computed for response positions alone, and never of more than `LOGITS_HELD` numbers at a time.
    """
    states = response_states(backbone_of(model), packed)
    logprobs, entropies = token_statistics(
        logits_of(model),
        take_rows(states, packed.predicting),
        packed.targets,
        temperature,
        vocabulary_size(model),
        with_entropy=with_entropy,
        fill=fills_rows(model),
    )
    return ResponseStatistics(
        packed.of_responses(logprobs), packed.of_responses(entropies) if with_entropy else None, states
    )


def token_statistics(
    head: Callable[[Tensor], Tensor],
    states_RH: Tensor,
    targets_R: Tensor,
    temperature: float,
    vocabulary: int,
    *,
    with_entropy: bool = False,
    fill: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities `[R]` of the tokens behind R states, and entropies `[R]` (else nothing, `[0]`).

    Args:
        head: Gives logits `[n, V]` of states `[n, H]`.
        states_RH: Last hidden states.
        targets_R: The next tokens.
        temperature: Divides the logits.
        vocabulary: V.
        with_entropy: Whether to compute entropies.
        fill: Whether the head is given rows of zeros, too, so that its products have few different shapes.
    """
    held = LOGITS_HELD * (1 if states_RH.device.type == "cpu" else 16)
    size = max(1, held // vocabulary)
    chunks = [slice(start, start + size) for start in range(0, len(targets_R), size)]
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    fill_to = size if fill else 0
    parts = [
        _chunk_statistics(
            head, states_RH[chunk], targets_R[chunk], temperature, with_entropy, fill_to=fill_to, recompute=recompute
        )
        for chunk in chunks
    ]
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropies


def _chunk_statistics(
    head: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    fill_to: int,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies `[n]` (or nothing, `[0]`) of the tokens behind n states.

    The head is given up to `fill_to` rows; no more than n if that is less.
    """

    def statistics(states: Tensor) -> tuple[Tensor, Tensor]:
        more = max(0, min(rounded_up(len(states)), fill_to) - len(states))
        logits = head(nn.functional.pad(states, (0, 0, 0, more)) if more else states)[None, : len(states)]
        logprobs = token_logprobs(logits, targets[None], temperature)[0]
        return logprobs, token_entropy(logits, temperature)[0] if with_entropy else logprobs.new_empty(0)

    if not recompute:
        return statistics(states)
    found: tuple[Tensor, Tensor] = checkpoint(statistics, states, use_reentrant=False, preserve_rng_state=False)
    return found


def response_logprobs(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Tensor,
    lengths: Tensor,
    temperature: float,
    batch_size: int,
    *,
    pad_token_id: int = 0,
) -> Tensor:
    """Return the log-probability of each response token under the tempered model, `[N, T]` in nats, 0 in padding.

    Args:
        model: A causal language model with dropout off.
        prompt_ids: N prompts as token ids.
        response_ids: `[N, T]` long, right-padded.
        lengths: `[N]` long, tokens in each response.
        temperature: Divides the logits.
        batch_size: Rows in one forward pass.
        pad_token_id: Any id inside the vocabulary; its value has no effect.
    """
    by_length = sorted(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]) + int(lengths[row]))
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    result = torch.zeros(response_ids.shape, dtype=dtype)
    with torch.no_grad():
        for start in range(0, len(by_length), batch_size):
            rows = by_length[start : start + batch_size]
            packed = pack([prompt_ids[i] for i in rows], response_ids[rows], lengths[rows], pad_token_id, model.device)
            scatter_rows(result, rows, response_statistics(model, packed, temperature).logprobs)
    return result


def scatter_rows(target: Tensor, rows: list[int], values: Tensor) -> None:
    """Write `values` `[b, t]` into the first t columns of `target`'s rows."""
    target[rows, : values.shape[1]] = values.to(target.device, target.dtype)
