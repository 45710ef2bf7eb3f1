"""Attention for sequences without padding: B sequences follow each other in a row of N tokens, `[1, N]`.

All layers but attention then compute real tokens only. Attention spreads the tokens into `[B, L]`, padded on the right,
where a causal mask is all that is needed: no token attends to a token on its right. On CUDA in 16 bits torch's
FlashAttention for sequences of different lengths needs no padding here, too.
https://docs.pytorch.org/docs/stable/nn.attention.varlen.html

It works for every transformers model whose layers ask the `AttentionInterface` and pass keyword arguments on to it.
https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "ppo_rlhf_packed"
PADDED = "sdpa"
"""The attention of every pass that has no packed layout: transformers' own, torch's `scaled_dot_product_attention`."""
CAUSAL = (-1, 0)
"""The window of FlashAttention: all tokens on the left, none on the right."""
WIDEST_HEAD = 192
"""FlashAttention has kernels up to 256, but wider ones than this have no backward pass on consumer GPUs."""
FIRST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that FlashAttention serves (Ampere)."""


class Attention(Protocol):
    """Attention of one forward pass over N tokens; the pass gets it as its keyword argument `packed_layout`."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return the attention output of the N tokens, `[N, H, d of the values]`.

        Keys and values are in K heads, and K divides H. `scaling` is the factor of the scores; None is 1 / sqrt(d).
        Every layer calls this once or more, always in the same order.
        """


@dataclass(frozen=True)
class PackedLayout:
    """The places of B sequences in a row of N tokens, one after the other; L is at least the longest length."""

    shape: tuple[int, int]  # B, L
    slots: Tensor  # [N] long, place of each token in the padded form [B, L], flattened
    sources: Tensor  # [B L] long, the token of each place in the padded form, 0 in the padding
    starts: Tensor  # [B + 1] int32, index of each sequence's first token in the row, and N

    @classmethod
    def of(cls, lengths: Sequence[int], width: int | None = None) -> PackedLayout:
        """Return the layout of sequences of these lengths, on the CPU; None as L takes the longest length."""
        width = max(lengths) if width is None else width
        is_real = torch.arange(width) < torch.tensor(lengths)[:, None]
        slots = is_real.flatten().nonzero()[:, 0]
        sources = torch.zeros(len(lengths) * width, dtype=torch.long)
        sources[slots] = torch.arange(len(slots))
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return cls((len(lengths), width), slots, sources, starts)

    @property
    def is_full(self) -> bool:
        """Whether all sequences have L tokens, so that spreading them moves nothing."""
        rows, width = self.shape
        return len(self.slots) == rows * width

    def spread(self, tokens_N: Tensor) -> Tensor:
        """Return `[B, L, …]` of `[N, …]`. The padding repeats the first token, and its gradient is left out."""
        spread = tokens_N if self.is_full else _Spread.apply(tokens_N, self.sources, self.slots)
        return spread.reshape(*self.shape, *tokens_N.shape[1:])

    def collect(self, tokens_BL: Tensor) -> Tensor:
        """Return `[N, …]` of `[B, L, …]`: the inverse of `spread`."""
        flat = tokens_BL.reshape(-1, *tokens_BL.shape[2:])
        return flat if self.is_full else take_rows(flat, self.slots)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Attend within each sequence; see `Attention`."""
        query_NHD, key_NKD, value_NKD = (as_autocast(x) for x in (query_NHD, key_NKD, value_NKD))
        if kernel_fits(query_NHD, value_NKD):
            from torch.nn.attention.varlen import varlen_attn  # the import takes a second, and a CPU does not need it

            kernel: Callable[..., Any] = varlen_attn
            if query_NHD.shape[1] != key_NKD.shape[1]:
                if _takes_fewer_keys(varlen_attn):
                    kernel = partial(varlen_attn, enable_gqa=True)
                else:  # torch 2.11
                    repeats = query_NHD.shape[1] // key_NKD.shape[1]
                    key_NKD, value_NKD = (x.repeat_interleave(repeats, dim=1) for x in (key_NKD, value_NKD))
            given, ends = (query_NHD, key_NKD, value_NKD), (self.starts, self.starts, self.shape[1], self.shape[1])
            attended: Tensor = kernel(*given, *ends, scale=scaling, window_size=CAUSAL)
            return attended
        query, key, value = (self.spread(x).transpose(1, 2) for x in (query_NHD, key_NKD, value_NKD))
        groups = query.shape[1] // key.shape[1]
        shares_keys = groups > 1 and query.is_cuda and query.dtype.itemsize == 2
        if groups > 1 and not shares_keys:  # else torch falls back to a kernel that holds all scores
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shares_keys
        )
        return self.collect(attended.transpose(1, 2))


def kernel_fits(query_NHD: Tensor, value_NKD: Tensor) -> bool:
    """Return whether FlashAttention takes tensors of this kind: device, precision, and width of the heads."""
    width = query_NHD.shape[-1]
    return (
        query_NHD.is_cuda
        and query_NHD.dtype in (torch.bfloat16, torch.float16)
        and width == value_NKD.shape[-1]
        and width % 8 == 0
        and width <= WIDEST_HEAD
        and _has_kernel(query_NHD.device)
    )


@cache
def _takes_fewer_keys(kernel: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


@cache
def _has_kernel(device: torch.device) -> bool:
    built_in = torch.backends.cuda.is_flash_attention_available()
    return built_in and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let a model attend by the layout of a pass that has one, and as before in every other pass.

    Raises:
        ValueError: The model's attention is not transformers' `sdpa`, or cannot be replaced.
    """
    _register()
    if model.config._attn_implementation == NAME:  # a copy of a model that packs
        return
    if model.config._attn_implementation != PADDED:
        raise ValueError(f"{type(model).__name__} attends by {model.config._attn_implementation}, not {PADDED}")
    model.set_attn_implementation(NAME)


def use_padded_attention(model: PreTrainedModel) -> None:
    """Undo `use_packed_attention`; a model with another attention, such as `eager`, keeps it."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation(PADDED)


@contextmanager
def padded_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attend as transformers does within the block; its own attention can be compiled as a whole, this one cannot."""
    packs = model.config._attn_implementation == NAME
    use_padded_attention(model)
    try:
        yield
    finally:
        if packs:
            use_packed_attention(model)


def packed_hidden_states(backbone: PreTrainedModel, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Return the last hidden states `[N, H]` of a row of tokens `[1, N]`, without a cache of transformers' own.

    transformers takes a mask of four dimensions as it is, so this one keeps it from building a mask `[N, N]`.
    """
    no_mask = _no_mask(ids.device)
    output = backbone(
        input_ids=ids, attention_mask=no_mask, position_ids=positions, use_cache=False, packed_layout=attention
    )
    return output.last_hidden_state.squeeze(0)  # squeeze: the backward pass of an index would fill zeros


@cache
def _no_mask(device: torch.device) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def place_rows(rows: Tensor, slots: Tensor, *shape: int) -> Tensor:
    """Return `[*shape, …]` with the first N `rows` at the given slots `[N]`, no slot twice, and 0 elsewhere.

    Slots count through all of the shape. The result is no view: FSDP2 warns of those as outputs.
    """
    return _PlaceRows.apply(rows, slots, shape)


def take_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows at the given slots, no slot twice: the inverse of `place_rows`.

    The backward pass of torch's `index_select` adds rows up one by one, since its index may repeat.
    """
    return _TakeRows.apply(rows, slots)


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows, ctx.dimensions = len(rows), len(shape)
        placed = rows.new_zeros(*shape, *rows.shape[1:])
        placed.view(-1, *rows.shape[1:]).index_copy_(0, slots, rows[: len(slots)])
        return placed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        placed = grad_outputs[0].reshape(-1, *grad_outputs[0].shape[ctx.dimensions :])
        if ctx.rows == len(slots):
            return placed.index_select(0, slots), None, None
        gradient = placed.new_zeros(ctx.rows, *placed.shape[1:])  # 0 of rows that were not placed
        torch.index_select(placed, 0, slots, out=gradient[: len(slots)])
        return gradient, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0].index_select(0, ctx.saved_tensors[0]), None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(rows)
        return rows.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        gradient = grad_outputs[0]
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, ctx.saved_tensors[0], gradient), None


def as_autocast(states: Tensor) -> Tensor:
    """Return an argument of attention in autocast's type; rotary positions, for example, leave it in float32."""
    device = states.device.type
    casts = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(device)) if casts else states


@cache
def _register() -> None:
    """Make the attention known to transformers. torch.compile leaves it out, since it reads lengths as numbers."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()[PADDED])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Attention | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks: query, key and value `[1, heads, N, d]`, result `[1, N, heads, d]`."""
    if packed_layout is None:
        return AttentionInterface()[PADDED](module, query, key, value, attention_mask, **options)
    special = [
        name for name in ("softcap", "s_aux", "position_bias", "sliding_window") if options.get(name) is not None
    ]
    if special or options.get("dropout") or options.get("is_causal") is False:
        raise NotImplementedError(f"packed attention is plain causal attention; asked for: {special or 'dropout'}")
    query_NHD, key_NKD, value_NKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_layout.attend(query_NHD, key_NKD, value_NKD, options.get("scaling"))[None], None
