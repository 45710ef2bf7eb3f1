"""Log-probability of chosen tokens, exact entropy and exact KL, from logits, under a temperature.

All are written as autograd functions that walk over the logits in blocks: beside the logits themselves and their
gradient, both in the logits' own type, no `[B, T, V]` tensor is ever held, and softmax is recomputed in the backward
pass. A position whose incoming gradient is 0 (padding, once the loss is masked) gets a gradient of exactly 0, even if
its logits are NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_rlhf.core.checks import check_range, check_shape, compute_dtype

BLOCK_ELEMENTS = 2**20  # logits widened at a time: 4 MiB of float32, small enough for a CPU's cache
BLOCK_ELEMENTS_CUDA = 2**26  # on an accelerator kernel launches cost more than memory

Block = tuple[slice, slice]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each chosen token: z[token] − logsumexp(z), z = logits / temperature.

    Args:
        logits: [B, T, V], aligned: `logits[b, t]` is the distribution that `tokens[b, t]` was drawn from. −inf is
            allowed.
        tokens: Ids [B, T], each in 0..V−1, in padding too (the value there is computed and means nothing).
        temperature: Divides the logits exactly; > 0.

    Returns:
        [B, T] nats, float32, or float64 for float64 logits. NaN where the logits are NaN: mask it afterwards.

    Raises:
        ShapeError: `logits` is not [B, T, V] or `tokens` not [B, T].
        ConfigError: `temperature` is not positive.
    """
    check_shape("token_logprobs", "BTV", logits=logits)
    check_shape("token_logprobs", None, logits_without_vocabulary=logits[..., 0], tokens=tokens)
    check_range("token_logprobs", above=0.0, temperature=temperature)
    result: Tensor = _TokenLogprobs.apply(logits, tokens.long(), temperature)
    return result


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of each token's distribution: −Σ_v p_v log p_v, p = softmax(logits / temperature), with 0·log 0 = 0.

    Args:
        logits: [B, T, V]; −inf is allowed and contributes nothing.
        temperature: Divides the logits exactly; > 0.

    Returns:
        [B, T] nats in 0..log V, float32, or float64 for float64 logits. NaN where the logits are NaN.

    Raises:
        ShapeError: `logits` is not [B, T, V].
        ConfigError: `temperature` is not positive.
    """
    check_shape("token_entropy", "BTV", logits=logits)
    check_range("token_entropy", above=0.0, temperature=temperature)
    result: Tensor = _TokenEntropy.apply(logits, temperature)
    return result


def token_kl(logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(policy || reference) of each token's distributions: Σ_v p_v (log p_v − log q_v), with 0 · log 0 = 0.

    Args:
        logits: [B, T, V] of the policy, with p = softmax(logits / temperature).
        reference_logits: [B, T, V], with q likewise, without a gradient; −inf where p is not 0 gives inf.
        temperature: Divides both exactly; > 0.

    Returns:
        [B, T] nats, >= 0 up to rounding, float32, or float64 for float64 logits. NaN where either is NaN.

    Raises:
        ShapeError: `logits` is not [B, T, V], or `reference_logits` has another shape.
        ConfigError: `temperature` is not positive.
    """
    check_shape("token_kl", "BTV", logits=logits, reference_logits=reference_logits)
    check_range("token_kl", above=0.0, temperature=temperature)
    result: Tensor = _TokenKL.apply(logits, reference_logits, temperature)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        result_BT = logits.new_empty(tokens.shape, dtype=compute_dtype(logits))
        for block in _blocks(logits):
            log_p = _tempered(logits[block], temperature).log_softmax(dim=-1)
            result_BT[block] = log_p.gather(-1, tokens[block].unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        return result_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """∂logp / ∂logits_v = (1[v = token] − p_v) / temperature."""
        logits, tokens = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scale = (grad_outputs[0][block] / ctx.temperature).unsqueeze(-1)
            grad = _tempered(logits[block], ctx.temperature).softmax(dim=-1).mul_(-scale)
            grad.scatter_add_(-1, tokens[block].unsqueeze(-1), scale)
            grad_logits[block] = grad.masked_fill_(scale == 0, 0.0)
        return grad_logits, None, None


class _TokenEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy_BT = logits.new_empty(logits.shape[:-1], dtype=compute_dtype(logits))
        for block in _blocks(logits):
            p = _tempered(logits[block], temperature).softmax(dim=-1)
            entropy_BT[block] = torch.special.entr(p).sum(dim=-1)  # entr(p) = −p log p, and 0 at 0
        ctx.save_for_backward(logits, entropy_BT)
        ctx.temperature = temperature
        return entropy_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """∂H / ∂logits_v = (−p_v log p_v − p_v H) / temperature."""
        logits, entropy_BT = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scale = (grad_outputs[0][block] / ctx.temperature).unsqueeze(-1)
            p = _tempered(logits[block], ctx.temperature).softmax(dim=-1)
            grad = torch.special.entr(p).sub_(p.mul_(entropy_BT[block].unsqueeze(-1))).mul_(scale)
            grad_logits[block] = grad.masked_fill_(scale == 0, 0.0)
        return grad_logits, None


class _TokenKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, reference_logits: Tensor, temperature: float) -> Tensor:
        kl_BT = logits.new_empty(logits.shape[:-1], dtype=compute_dtype(logits, reference_logits))
        for block in _blocks(logits):
            p, log_ratio = _ratio(logits[block], reference_logits[block], temperature)
            kl_BT[block] = log_ratio.mul_(p).sum(dim=-1)
        ctx.save_for_backward(logits, reference_logits, kl_BT)
        ctx.temperature = temperature
        return kl_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """∂KL / ∂logits_v = p_v (log p_v − log q_v − KL) / temperature."""
        logits, reference_logits, kl_BT = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scale = (grad_outputs[0][block] / ctx.temperature).unsqueeze(-1)
            p, log_ratio = _ratio(logits[block], reference_logits[block], ctx.temperature)
            grad = log_ratio.sub_(kl_BT[block].unsqueeze(-1)).mul_(p).mul_(scale)
            grad_logits[block] = grad.masked_fill_(scale == 0, 0.0)
        return grad_logits, None, None


def _ratio(logits: Tensor, reference_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return p and log p − log q of a block; the second is 0 where p is."""
    log_p = _tempered(logits, temperature).log_softmax(dim=-1)
    log_q = _tempered(reference_logits, temperature).log_softmax(dim=-1)
    p = log_p.exp()
    return p, (log_p - log_q).masked_fill_(p == 0, 0.0)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    z = logits.to(compute_dtype(logits))
    return z if temperature == 1.0 else z / temperature


def _blocks(logits: Tensor) -> Iterator[Block]:
    """Slices of the first two axes that cover `logits` [B, T, V] in blocks of about BLOCK_ELEMENTS numbers."""
    rows, width, vocabulary = logits.shape
    budget = BLOCK_ELEMENTS_CUDA if logits.is_cuda else BLOCK_ELEMENTS
    positions = max(1, budget // max(1, vocabulary))  # token positions in a block
    step_B, step_T = max(1, positions // max(1, width)), min(max(1, width), positions)
    for b in range(0, rows, step_B):
        for t in range(0, width, step_T):
            yield slice(b, b + step_B), slice(t, t + step_T)
