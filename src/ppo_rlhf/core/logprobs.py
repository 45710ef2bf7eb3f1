"""Log-probability of chosen tokens, exact entropy and exact KL, from logits, under a temperature.

`logits` are [B, T, V], −inf is allowed, and `temperature`, which is > 0, divides them exactly. Results are [B, T] nats,
float32, or float64 for float64 logits, and NaN where the logits are NaN: mask them afterwards. Other shapes raise
ShapeError, other temperatures ConfigError.

All are one autograd function that walks over the logits in blocks: beside the logits themselves and their gradient,
both in the logits' own type, no `[B, T, V]` tensor is ever held, and softmax is recomputed in the backward pass. A
position whose incoming gradient is 0 (padding, once the loss is masked) gets a gradient of exactly 0, even if its
logits are NaN.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_rlhf.core.checks import check_range, check_shape, compute_dtype

BLOCK_ELEMENTS = 2**20
"""Logits widened at a time on a CPU: 4 MiB of float32, small enough for its cache."""
BLOCK_SHARE = 1024
"""Bytes of an accelerator's memory for each logit widened at a time there, where launches cost more than memory: in
float32 a block takes 1/256 of the card."""
UNKNOWN_CARD = 64 * 2**30
"""Bytes of a device whose memory torch does not tell."""

Block = tuple[slice, slice]


@cache
def card_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory, free or not, so that a run computes alike from start to end."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return UNKNOWN_CARD


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each chosen token: z[token] − logsumexp(z), z = logits / temperature.

    `logits[b, t]` is the distribution that `tokens[b, t]` was drawn from. The ids [B, T] are in 0..V−1, in padding too
    (the value there is computed and means nothing).
    """
    check_shape("token_logprobs", "BTV", logits=logits)
    check_shape("token_logprobs", None, logits_without_vocabulary=logits[..., 0], tokens=tokens)
    check_range("token_logprobs", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_log_p, _log_p_gradient, temperature, logits, tokens.long())
    return result


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of each token's distribution: −Σ_v p_v log p_v, p = softmax(logits / temperature), with 0·log 0 = 0.

    It is in 0..log V.
    """
    check_shape("token_entropy", "BTV", logits=logits)
    check_range("token_entropy", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_entropy, _entropy_gradient, temperature, logits)
    return result


def token_kl(logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(policy || reference) of each token's distributions: Σ_v p_v (log p_v − log q_v), with 0 · log 0 = 0.

    p = softmax(logits / temperature) is the policy's, and q likewise of `reference_logits` [B, T, V], which have no
    gradient. −inf there, where p is not 0, gives inf. The result is >= 0 up to rounding, NaN where either is NaN.
    """
    check_shape("token_kl", "BTV", logits=logits, reference_logits=reference_logits)
    check_range("token_kl", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_kl, _kl_gradient, temperature, logits, reference_logits)
    return result


class _InBlocks(torch.autograd.Function):
    """A statistic [B, T] of logits [B, T, V], and of one more tensor that has no gradient.

    Of a block `value(temperature, logits, other)` computes it; `gradient(temperature, logits, other, value, scale)` is
    its gradient in z = logits / temperature, times `scale`.
    """

    @staticmethod
    def forward(ctx: Any, value: Any, gradient: Any, temperature: float, logits: Tensor, *other: Tensor) -> Tensor:
        result_BT = logits.new_empty(logits.shape[:-1], dtype=compute_dtype(logits, *other))
        for block in _blocks(logits):
            result_BT[block] = value(temperature, *(x[block] for x in (logits, *other)))
        ctx.save_for_backward(result_BT, logits, *other)
        ctx.gradient, ctx.temperature = gradient, temperature
        return result_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        result_BT, logits, *other = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scale = (grad_outputs[0][block] / ctx.temperature).unsqueeze(-1)
            value = result_BT[block].unsqueeze(-1)
            grad = ctx.gradient(ctx.temperature, *(x[block] for x in (logits, *other)), value, scale)
            grad_logits[block] = grad.masked_fill_(scale == 0, 0.0)
        return None, None, None, grad_logits, *(None for _ in other)


def _log_p(temperature: float, logits: Tensor, tokens: Tensor) -> Tensor:
    return _tempered(logits, temperature).log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _log_p_gradient(temperature: float, logits: Tensor, tokens: Tensor, log_p: Tensor, scale: Tensor) -> Tensor:
    """1[v = token] − p_v."""
    grad = _tempered(logits, temperature).softmax(dim=-1).mul_(-scale)
    return grad.scatter_add_(-1, tokens.unsqueeze(-1), scale)


def _entropy(temperature: float, logits: Tensor) -> Tensor:
    p = _tempered(logits, temperature).softmax(dim=-1)
    return torch.special.entr(p).sum(dim=-1)  # entr(p) = −p log p, and 0 at 0


def _entropy_gradient(temperature: float, logits: Tensor, entropy: Tensor, scale: Tensor) -> Tensor:
    """−p_v log p_v − p_v H."""
    p = _tempered(logits, temperature).softmax(dim=-1)
    return torch.special.entr(p).sub_(p.mul_(entropy)).mul_(scale)


def _kl(temperature: float, logits: Tensor, reference_logits: Tensor) -> Tensor:
    p, log_ratio = _ratio(temperature, logits, reference_logits)
    return log_ratio.mul_(p).sum(dim=-1)


def _kl_gradient(temperature: float, logits: Tensor, reference_logits: Tensor, kl: Tensor, scale: Tensor) -> Tensor:
    """p_v (log p_v − log q_v − KL)."""
    p, log_ratio = _ratio(temperature, logits, reference_logits)
    return log_ratio.sub_(kl).mul_(p).mul_(scale)


def _ratio(temperature: float, logits: Tensor, reference_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and log p − log q of a block; the second is 0 where p is."""
    log_p = _tempered(logits, temperature).log_softmax(dim=-1)
    log_q = _tempered(reference_logits, temperature).log_softmax(dim=-1)
    p = log_p.exp()
    return p, (log_p - log_q).masked_fill_(p == 0, 0.0)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    z = logits.to(compute_dtype(logits))
    return z if temperature == 1.0 else z / temperature


def _blocks(logits: Tensor) -> Iterator[Block]:
    """Slices of the first two axes that cover `logits` [B, T, V] in blocks that fit the device."""
    rows, width, vocabulary = logits.shape
    budget = BLOCK_ELEMENTS if logits.device.type == "cpu" else card_bytes(logits.device) // BLOCK_SHARE
    positions = max(1, budget // max(1, vocabulary))  # token positions in a block
    step_B, step_T = max(1, positions // max(1, width)), min(max(1, width), positions)
    for b in range(0, rows, step_B):
        for t in range(0, width, step_T):
            yield slice(b, b + step_B), slice(t, t + step_T)
