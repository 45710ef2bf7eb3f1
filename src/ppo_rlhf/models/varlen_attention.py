"""Attention to sequences of different lengths in one kernel: torch's FlashAttention, on CUDA in 16 bits.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CAUSAL = (-1, 0)
"""The kernel's window: all tokens on the left, none on the right."""
WIDEST_HEAD = 192
"""FlashAttention has kernels up to 256, but wider ones than this have no backward pass on consumer GPUs."""
FIRST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that FlashAttention serves (Ampere)."""


def kernel_fits(query_NHD: Tensor, value_NKD: Tensor) -> bool:
    """Return whether the kernel takes tensors of this kind: device, precision, and width of the heads."""
    width = query_NHD.shape[-1]
    return (
        query_NHD.is_cuda
        and query_NHD.dtype in (torch.bfloat16, torch.float16)
        and width == value_NKD.shape[-1]
        and width % 8 == 0
        and width <= WIDEST_HEAD
        and _has_kernel(query_NHD.device)
    )


def attend_by_kernel(
    query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Return causal attention within each of B sequences, `[N, H, d]`.

    Args:
        query_NHD: Queries of N tokens in H heads, one sequence after the other.
        key_NKD: Keys in K heads; K divides H.
        value_NKD: Values in K heads.
        starts: `[B + 1]` int32, the index of each sequence's first token, and N.
        longest: Tokens of the longest sequence.
        scaling: Factor of the scores; None is 1 / sqrt(d).
    """
    from torch.nn.attention.varlen import varlen_attn  # here: the import takes a second, and a CPU does not need it

    return varlen_attn(  # type: ignore[return-value]  # a tuple only if more is asked for
        query_NHD,
        key_NKD,
        value_NKD,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=CAUSAL,
        enable_gqa=query_NHD.shape[1] != key_NKD.shape[1],
    )


@cache
def _has_kernel(device: torch.device) -> bool:
    built_in = torch.backends.cuda.is_flash_attention_available()
    return built_in and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
