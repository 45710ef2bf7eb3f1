"""Computes log-probabilities of chosen tokens, exact entropy and exact KL from logits, under a temperature.

`logits` are [B, T, V]; −inf is allowed. `temperature`, > 0, divides the logits exactly. Results are [B, T], in nats,
float32 (float64 for float64 logits), and NaN where the logits are NaN, so the caller must mask the results. Tensors of
other shapes raise ShapeError; temperatures that are not finite and > 0 raise ConfigError.

`token_logprobs`, `token_entropy` and `token_kl` share one autograd function that processes the logits in blocks. The
only [B, T, V] tensors in memory are the logits and their gradient, both in the logits' dtype; the backward pass
recomputes softmax. `passes.response_logprobs` computes a model's logits in chunks, so that not all are in memory. A
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
"""Number of logits that a CPU processes in one block: 4 MiB of float32, small enough for the CPU's cache."""
BLOCK_SHARE = 1024
"""An accelerator processes logits in blocks of one logit per `BLOCK_SHARE` bytes of its memory: in float32 a block
takes 1/256 of the memory. Blocks of logits are large on accelerators, because kernel launches cost more than memory."""
UNKNOWN_CARD = 64 * 2**30
"""Bytes of memory assumed for a device whose memory torch does not report."""

Block = tuple[slice, slice]


@cache
def card_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator's whole memory, which unlike the free memory gives constant block sizes."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return UNKNOWN_CARD


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each chosen token: z[token] − logsumexp(z), z = logits / temperature.

    `tokens[b, t]` was drawn from the distribution `logits[b, t]`. The token ids [B, T] are in 0..V−1, also in padding,
    where the result has no meaning.
    """
    check_shape("token_logprobs", "BTV", logits=logits)
    check_shape("token_logprobs", None, logits_without_vocabulary=logits[..., 0], tokens=tokens)
    check_range("token_logprobs", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_log_p, _log_p_gradient, temperature, logits, tokens.long())
    return result


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of each token's distribution: −Σ_v p_v log p_v, p = softmax(logits / temperature), with 0·log 0 = 0.

    The entropy is in 0..log V.
    """
    check_shape("token_entropy", "BTV", logits=logits)
    check_range("token_entropy", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_entropy, _entropy_gradient, temperature, logits)
    return result


def token_kl(logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(policy || reference) of each token's distributions: Σ_v p_v (log p_v − log q_v), with 0 · log 0 = 0.

    p = softmax(logits / temperature) is the policy's distribution, and q = softmax(reference_logits / temperature) the
    reference's. `reference_logits` [B, T, V] get no gradient. A reference logit of −inf where p is not 0 gives inf. The
    result is >= 0 up to rounding, and NaN where either logits are NaN.
    """
    check_shape("token_kl", "BTV", logits=logits, reference_logits=reference_logits)
    check_range("token_kl", above=0.0, temperature=temperature)
    result: Tensor = _InBlocks.apply(_kl, _kl_gradient, temperature, logits, reference_logits)
    return result


class _InBlocks(torch.autograd.Function):
    """A statistic [B, T] of logits [B, T, V] and of at most one other tensor, which gets no gradient.

    For each block, `value(temperature, logits, other)` computes the statistic, and `gradient(temperature, logits,
    other, value, scale)` computes the statistic's gradient with respect to z = logits / temperature, times `scale`.
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
    """Return scale · (1[v = token] − p_v)."""
    grad = _tempered(logits, temperature).softmax(dim=-1).mul_(-scale)
    return grad.scatter_add_(-1, tokens.unsqueeze(-1), scale)


def _entropy(temperature: float, logits: Tensor) -> Tensor:
    p = _tempered(logits, temperature).softmax(dim=-1)
    return torch.special.entr(p).sum(dim=-1)  # torch.special.entr(p) is −p log p, and 0 at p = 0


def _entropy_gradient(temperature: float, logits: Tensor, entropy: Tensor, scale: Tensor) -> Tensor:
    """Return scale · (−p_v log p_v − p_v H), with H the entropy."""
    p = _tempered(logits, temperature).softmax(dim=-1)
    return torch.special.entr(p).sub_(p.mul_(entropy)).mul_(scale)


def _kl(temperature: float, logits: Tensor, reference_logits: Tensor) -> Tensor:
    p, log_ratio = _ratio(temperature, logits, reference_logits)
    return log_ratio.mul_(p).sum(dim=-1)


def _kl_gradient(temperature: float, logits: Tensor, reference_logits: Tensor, kl: Tensor, scale: Tensor) -> Tensor:
    """Return scale · p_v (log p_v − log q_v − KL)."""
    p, log_ratio = _ratio(temperature, logits, reference_logits)
    return log_ratio.sub_(kl).mul_(p).mul_(scale)


def _ratio(temperature: float, logits: Tensor, reference_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and log p − log q of a block; log p − log q is set to 0 where p is 0."""
    log_p = _tempered(logits, temperature).log_softmax(dim=-1)
    log_q = _tempered(reference_logits, temperature).log_softmax(dim=-1)
    p = log_p.exp()
    return p, (log_p - log_q).masked_fill_(p == 0, 0.0)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    z = logits.to(compute_dtype(logits))
    return z if temperature == 1.0 else z / temperature


def _blocks(logits: Tensor) -> Iterator[Block]:
    """Yield slices of the first two axes that cut `logits` [B, T, V] into blocks of the device's block size."""
    rows, width, vocabulary = logits.shape
    budget = BLOCK_ELEMENTS if logits.device.type == "cpu" else card_bytes(logits.device) // BLOCK_SHARE
    positions = max(1, budget // max(1, vocabulary))  # number of token positions whose logits are computed in one block
    step_B, step_T = max(1, positions // max(1, width)), min(max(1, width), positions)
    for b in range(0, rows, step_B):
        for t in range(0, width, step_T):
            yield slice(b, b + step_B), slice(t, t + step_T)
