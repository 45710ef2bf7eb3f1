"""Attention for packed sequences: B sequences follow each other in one row of N tokens, `[1, N]`, without padding.

With packed sequences all layers but attention compute real tokens only. Attention spreads the packed tokens into
`[B, L]`, padded on the right. In the padded form a causal mask is enough, because a real token never attends to the
padding on its right. On CUDA in 16 bits, attention needs no padding: torch's FlashAttention reads packed sequences.
https://docs.pytorch.org/docs/stable/nn.attention.varlen.html

Sequences that begin with the same tokens may share one copy of these tokens (`SharedLayout`). Then attention alone
repeats the keys and values of the copy for each sequence. The gradient of the copy is the sum over the sequences.

Packed attention works for every transformers model whose layers call the `AttentionInterface` and pass on keyword
arguments. https://huggingface.co/docs/transformers/attention_interface
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
"""transformers' name for torch's `scaled_dot_product_attention`, which passes without a packed layout use."""
CAUSAL = (-1, 0)
"""FlashAttention's window for causal attention: all tokens on the left, none on the right."""
WIDEST_HEAD = 192
"""Widest attention head that is given to FlashAttention. FlashAttention supports heads of up to 256 numbers, but on
consumer GPUs it has no backward pass for heads wider than 192."""
FIRST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that FlashAttention supports (Ampere)."""


class Attention(Protocol):
    """Attention of one forward pass over N tokens; the model's forward takes it as the argument `packed_layout`."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return the attention output of the N tokens, `[N, H, d of the values]`.

        Keys and values have K heads, and K divides H. The attention scores are multiplied by `scaling`; None:
        1 / sqrt(d). Every layer of the model calls `attend` once or more, in the same order in each forward pass.
        """


@dataclass(frozen=True)
class PackedLayout:
    """Indices between a packed row of N tokens and the padded form `[B, L]`; L is the longest length."""

    shape: tuple[int, int]  # batch size B and padded length L
    slots: Tensor  # [N] long, index of each packed token in the flattened padded form [B · L]
    sources: Tensor  # [B · L] long, index of each padded position's token in the packed row, 0 in padding
    starts: Tensor  # [B + 1] int32, index of each sequence's first token in the packed row, followed by N

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedLayout:
        """Return the layout, on the CPU, of sequences of the given lengths."""
        width = max(lengths)
        is_real = torch.arange(width) < torch.tensor(lengths)[:, None]
        slots = is_real.flatten().nonzero()[:, 0]
        sources = torch.zeros(len(lengths) * width, dtype=torch.long)
        sources[slots] = torch.arange(len(slots))
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return cls((len(lengths), width), slots, sources, starts)

    @property
    def is_full(self) -> bool:
        """Whether all sequences have L tokens, so that the packed row and the padded form hold the same order."""
        rows, width = self.shape
        return len(self.slots) == rows * width

    def spread(self, tokens_N: Tensor) -> Tensor:
        """Return the padded form `[B, L, …]` of `[N, …]`. Padding repeats the first token, without a gradient."""
        spread = tokens_N if self.is_full else _Spread.apply(tokens_N, self.sources, self.slots)
        return spread.reshape(*self.shape, *tokens_N.shape[1:])

    def collect(self, tokens_BL: Tensor) -> Tensor:
        """Return the packed form `[N, …]` of `[B, L, …]`: the inverse of `spread`."""
        flat = tokens_BL.reshape(-1, *tokens_BL.shape[2:])
        return flat if self.is_full else take_rows(flat, self.slots)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return the attention output of the N tokens, each attending within its sequence; see `Attention.attend`."""
        query_NHD, key_NKD, value_NKD = (as_autocast(x) for x in (query_NHD, key_NKD, value_NKD))
        if kernel_fits(query_NHD, value_NKD):
            starts, longest = (self.starts, self.starts), (self.shape[1], self.shape[1])
            return _by_kernel(query_NHD, key_NKD, value_NKD, starts, longest, scaling)
        query, key, value = (self.spread(x) for x in (query_NHD, key_NKD, value_NKD))
        return self.collect(_padded(query, key, value, scaling))


@dataclass(frozen=True)
class SharedLayout:
    """B sequences that begin with the same P tokens, of which a packed row has one copy, and whole sequences.

    The packed row holds first the own tokens of the B sequences, which follow the P tokens, then the P tokens, then the
    whole sequences. Own tokens attend to the P tokens and within their sequence.
    """

    own: PackedLayout  # layout of the own tokens, B sequences padded to L
    others: PackedLayout  # layout of the P tokens and the whole sequences
    length: int  # P
    keys: Tensor  # [n] long, index of each key of the own tokens in the flattened padded form [B · (P + L)]
    key_starts: Tensor  # [B + 1] int32, index of each sequence's first key among the n keys, followed by n

    @classmethod
    def of(cls, length: int, own: Sequence[int], whole: Sequence[int]) -> SharedLayout:
        """Return the layout, on the CPU, of sequences that share `length` tokens, and of whole sequences.

        `own` counts the own tokens of each sequence that shares, and `whole` the tokens of each whole sequence.
        """
        keys = PackedLayout.of([length + count for count in own])
        return cls(PackedLayout.of(own), PackedLayout.of([length, *whole]), length, keys.slots, keys.starts)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return the attention output of the N tokens; see `Attention.attend`."""
        counts = [len(self.own.slots), len(self.others.slots)]
        (own_query, query), (own_key, key), (own_value, value) = (
            as_autocast(x).split(counts) for x in (query_NHD, key_NKD, value_NKD)
        )
        prefix_key, prefix_value = key[: self.length], value[: self.length]
        own = self._attend_own(own_query, own_key, own_value, prefix_key, prefix_value, scaling)
        return torch.cat([own, self.others.attend(query, key, value, scaling)])

    def _attend_own(
        self,
        query_MHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        prefix_key_PKD: Tensor,
        prefix_value_PKD: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """Return the attention output of the M own tokens, `[M, H, d of the values]`."""
        rows, width = self.own.shape
        key, value = (
            torch.cat([prefix.expand(rows, *prefix.shape), self.own.spread(own)], dim=1)  # [B, P + L, K, d]
            for prefix, own in ((prefix_key_PKD, key_MKD), (prefix_value_PKD, value_MKD))
        )
        if kernel_fits(query_MHD, value):
            key, value = (take_rows(x.flatten(0, 1), self.keys) for x in (key, value))
            starts, longest = (self.own.starts, self.key_starts), (width, self.length + width)
            return _by_kernel(query_MHD, key, value, starts, longest, scaling)
        # Own token i sees the prefix and the own tokens 0 to i
        sees = torch.ones(width, self.length + width, dtype=torch.bool, device=key.device).tril(self.length)
        return self.own.collect(_padded(self.own.spread(query_MHD), key, value, scaling, sees))


def _by_kernel(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
) -> Tensor:
    """Return the attention output of packed sequences by FlashAttention.

    `starts` are those of queries and of keys, `longest` the most queries and keys of a sequence. The last query of a
    sequence sees all its keys, and each earlier query one key less.
    """
    # Imported inside the function because the import takes 1 s, and a CPU does not need varlen_attn
    from torch.nn.attention.varlen import varlen_attn

    kernel: Callable[..., Any] = varlen_attn
    if query_NHD.shape[1] != key_NKD.shape[1]:
        if _has_grouped_queries(varlen_attn):
            kernel = partial(varlen_attn, enable_gqa=True)
        else:  # torch 2.11 has no `enable_gqa` for varlen_attn
            repeats = query_NHD.shape[1] // key_NKD.shape[1]
            key_NKD, value_NKD = (x.repeat_interleave(repeats, dim=1) for x in (key_NKD, value_NKD))
    attended: Tensor = kernel(query_NHD, key_NKD, value_NKD, *starts, *longest, scale=scaling, window_size=CAUSAL)
    return attended


def _padded(
    query_BLHD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, scaling: float | None, sees_LS: Tensor | None = None
) -> Tensor:
    """Return the attention output `[B, L, H, d of the values]` of padded queries; `sees_LS` None is a causal mask."""
    query, key, value = (x.transpose(1, 2) for x in (query_BLHD, key_BSKD, value_BSKD))
    groups = query.shape[1] // key.shape[1]
    shares_keys = groups > 1 and query.is_cuda and query.dtype.itemsize == 2 and sees_LS is None
    # Repeat the keys for each head: with enable_gqa, torch would use a kernel that stores all attention scores
    if groups > 1 and not shares_keys:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees_LS, is_causal=sees_LS is None, scale=scaling, enable_gqa=shares_keys
    )
    return attended.transpose(1, 2)


def kernel_fits(query_NHD: Tensor, value_NKD: Tensor) -> bool:
    """Return whether FlashAttention supports the tensors' device, precision, and width of the heads."""
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
def _has_grouped_queries(kernel: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


@cache
def _has_kernel(device: torch.device) -> bool:
    built_in = torch.backends.cuda.is_flash_attention_available()
    return built_in and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention in forward passes with a `packed_layout`; other passes compute as before.

    Raises:
        ValueError: The model's attention is not transformers' `sdpa`, or cannot be replaced.
    """
    _register()
    if model.config._attn_implementation == NAME:  # the model is a copy of a model whose attention was switched before
        return
    if model.config._attn_implementation != PADDED:
        raise ValueError(f"{type(model).__name__} uses {model.config._attn_implementation} attention, not {PADDED}")
    model.set_attn_implementation(NAME)


def use_padded_attention(model: PreTrainedModel) -> None:
    """Undo `use_packed_attention`. A model with another attention, such as `eager`, is left unchanged."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation(PADDED)


@contextmanager
def padded_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own attention within the block, because torch cannot compile packed attention."""
    packs = model.config._attn_implementation == NAME
    use_padded_attention(model)
    try:
        yield
    finally:
        if packs:
            use_packed_attention(model)


def packed_hidden_states(backbone: PreTrainedModel, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Return the last hidden states `[N, H]` of a packed row of tokens `[1, N]`, without transformers' cache.

    transformers uses a four-dimensional mask as given. The dummy mask `[1, 1, 1, 1]` keeps transformers from building a
    mask `[N, N]`.
    """
    no_mask = _no_mask(ids.device)
    output = backbone(
        input_ids=ids, attention_mask=no_mask, position_ids=positions, use_cache=False, packed_layout=attention
    )
    # squeeze, not [0], because the backward pass of [0] fills a whole tensor with zeros
    return output.last_hidden_state.squeeze(0)


@cache
def _no_mask(device: torch.device) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def place_rows(rows: Tensor, slots: Tensor, *shape: int) -> Tensor:
    """Return a tensor `[*shape, …]` with the first N `rows` at the N given `slots`, and 0 elsewhere.

    A slot is an index into the flattened shape. No slot may occur twice. The returned tensor is not a view, because
    FSDP2 warns about outputs that are views.
    """
    return _PlaceRows.apply(rows, slots, shape)


def take_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows at the given `slots`: the inverse of `place_rows`. No slot may occur twice.

    `take_rows` is faster than torch's `index_select`, whose backward pass adds up the rows one by one because an index
    of `index_select` may repeat.
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
        # Rows of the source that were not copied have gradient 0
        gradient = placed.new_zeros(ctx.rows, *placed.shape[1:])
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
    """Cast queries, keys or values to autocast's dtype: rotary embeddings, for example, may return float32."""
    device = states.device.type
    casts = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(device)) if casts else states


@cache
def _register() -> None:
    """Register packed attention with transformers.

    torch.compile must skip packed attention, because packed attention reads sequence lengths as Python numbers.
    """
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
    """Attention with transformers' signature: query, key and value `[1, heads, N, d]`, result `[1, N, heads, d]`."""
    if packed_layout is None:
        return AttentionInterface()[PADDED](module, query, key, value, attention_mask, **options)
    special = [
        name for name in ("softcap", "s_aux", "position_bias", "sliding_window") if options.get(name) is not None
    ]
    if special or options.get("dropout") or options.get("is_causal") is False:
        raise NotImplementedError(f"packed attention is plain causal attention, without {special or 'dropout'}")
    query_NHD, key_NKD, value_NKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_layout.attend(query_NHD, key_NKD, value_NKD, options.get("scaling"))[None], None
