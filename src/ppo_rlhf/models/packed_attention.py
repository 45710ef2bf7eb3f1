"""Sequences of different lengths in one row, `[1, N]`, without padding: all layers but attention see real tokens only.

In attention each sequence looks at itself alone. The tokens are spread into `[B, L]`, padded on the right, where a
causal mask is all that is needed: no token looks to its right. What lies in the padding is never read again.

Works for every transformers model whose layers ask `ALL_ATTENTION_FUNCTIONS` and hand keyword arguments on to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ppo_rlhf.models.annotations import PretrainedConfig, PreTrainedModel
from ppo_rlhf.models.passes.attention_by_sequence import (
    Run,
    attend_by_sequence,
    has_fused_kernel,
    runs_of,
    spares_enough,
)
from ppo_rlhf.models.passes.plain_attention import PlainAttention
from ppo_rlhf.models.products.compiled_shapes import rounded_up
from ppo_rlhf.models.products.processors import SIXTEEN_BITS, lacks_fast_instructions

NAME = "ppo_rlhf_packed"
_LOOK_FOR_PADDING = "warn_if_padding_and_no_attention_mask"  # a method of transformers' models
LONGEST_PLAIN_ATTENTION = 512
"""Tokens. On a CPU with fast instructions for 16 bits attention up to this length is computed plainly: torch's fused
kernel takes 5.7 times as long (8 x 8 heads, 96 tokens, bfloat16, with its backward pass); longer, it would hold too
many scores."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each of B sequences lies in a row of N tokens: one behind the other.

    Attributes:
        lengths: Tokens of each sequence, at least 1.
        width: L, the longest length, or a little more.
        slots: `[N]` long, place of each token in `[B, L]`, flattened.
        more: Tokens behind the N that are of no sequence: they fill the row up, and attention gives 0 for them.
    """

    lengths: tuple[int, ...]
    width: int
    slots: Tensor
    more: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu", *, fill: bool = False) -> PackedLayout:
        """Return the layout of sequences of these lengths.

        With `fill` N + more and L are rounded up, unless all sequences are of one length: few different numbers.
        """
        width, more = max(lengths), 0
        if fill and min(lengths) < width:
            width, more = rounded_up(width), rounded_up(sum(lengths)) - sum(lengths)
        slots = [torch.arange(row * width, row * width + length) for row, length in enumerate(lengths)]
        return cls(tuple(lengths), width, torch.cat(slots).to(device), more)

    def to(self, device: torch.device) -> PackedLayout:
        """Return the same, that lies on the CPU, elsewhere, without waiting."""
        return PackedLayout(self.lengths, self.width, self.slots.to(device, non_blocking=True), self.more)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences are of one length and nothing follows, so that spreading them moves nothing."""
        return min(self.lengths) == self.width and not self.more

    @cached_property
    def plain_attention(self) -> PlainAttention:
        """Attention within each sequence, computed without torch's fused kernel."""
        return PlainAttention.of(self.lengths, self.width, self.slots)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbouring sequences of one length."""
        return runs_of(self.lengths)

    def spread(self, tokens_N: Tensor) -> Tensor:
        """Return `[B, L, …]` of `[N + more, …]`, with 0 in the padding."""
        shape = (len(self.lengths), self.width, *tokens_N.shape[1:])
        if self.is_even:
            return tokens_N.reshape(shape)
        return place_rows(tokens_N, self.slots, len(self.lengths) * self.width).view(shape)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Attend within each sequence; see `Attention`."""
        query, key, value = (as_autocast(x) for x in (query_NHD, key_NKD, value_NKD))
        if query.is_cpu and query.dtype in SIXTEEN_BITS:
            if lacks_fast_instructions(query.dtype):
                with torch.autocast("cpu", enabled=False):  # it would round them again
                    attended = self._attend_fused(query.float(), key.float(), value.float(), scaling)
                return attended.to(query.dtype)
            if self.width <= LONGEST_PLAIN_ATTENTION:
                return self.plain_attention.attend(query, key, value, scaling)
        return self._attend_fused(query, key, value, scaling)

    def _attend_fused(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend by torch's fused kernel: sequence by sequence where that is faster, else padded."""
        if query.is_cpu and spares_enough(self.runs, self.width, query.shape[1]):
            of_all_heads = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
            if has_fused_kernel(query, *of_all_heads):
                return attend_by_sequence(query, *of_all_heads, runs=self.runs, scaling=scaling)
        query, key, value = (self.spread(x).transpose(1, 2) for x in (query, key, value))
        return self.collect(causal_attention(query, key, value, scaling).transpose(1, 2))

    def collect(self, tokens_BL: Tensor) -> Tensor:
        """Return `[N + more, …]` of `[B, L, …]`: what `spread` undoes, and 0 behind it."""
        flat = tokens_BL.reshape(-1, *tokens_BL.shape[2:])
        return flat if self.is_even else take_rows(flat, self.slots, self.more)


def place_rows(rows: Tensor, slots: Tensor, size: int) -> Tensor:
    """Return `[size, …]` that holds the first N `rows` at the given slots `[N]`, none twice, and 0 elsewhere."""
    placed: Tensor = _PlaceRows.apply(rows, slots, size)
    return placed


def take_rows(rows: Tensor, slots: Tensor, more: int = 0) -> Tensor:
    """Return the rows at the given slots, none of them twice, and `more` rows of 0: `place_rows` undone.

    The backward pass of torch's own `index_select` adds rows up one by one, since its index may repeat.
    """
    taken: Tensor = _TakeRows.apply(rows, slots, more)
    return taken


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.more = len(rows) - len(slots)
        return _placed(rows, slots, size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _taken(grad_outputs[0], ctx.saved_tensors[0], ctx.more), None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, more: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(rows)
        return _taken(rows, slots, more)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _placed(grad_outputs[0], ctx.saved_tensors[0], ctx.size), None, None


def _placed(rows: Tensor, slots: Tensor, size: int) -> Tensor:
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, slots, rows[: len(slots)])


def _taken(rows: Tensor, slots: Tensor, more: int) -> Tensor:
    if not more:
        return rows.index_select(0, slots)
    taken = rows.new_empty(len(slots) + more, *rows.shape[1:])
    torch.index_select(rows, 0, slots, out=taken[: len(slots)])
    taken[len(slots) :] = 0.0
    return taken


@contextmanager
def packed_attention(*models: PreTrainedModel) -> Iterator[None]:
    """Within the block the models' forward passes take `packed_layout` and rows without padding, and nothing else."""
    _register()
    configs = {id(model.config): model.config for model in models}.values()
    before = [_implementations(config) for config in configs]
    looks = [vars(model).get(_LOOK_FOR_PADDING) for model in models]
    for config in configs:
        config._attn_implementation = NAME
    for model in models:  # there is none, and a device would have to be waited for
        vars(model)[_LOOK_FOR_PADDING] = lambda *_: None
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for model, look in zip(models, looks, strict=True):
            if look is None:
                vars(model).pop(_LOOK_FOR_PADDING, None)  # a trunk that two models share comes twice
            else:
                vars(model)[_LOOK_FOR_PADDING] = look


def _implementations(config: PretrainedConfig) -> dict[str, Any]:
    """Return the attention of a configuration, under "", and of those within it, as transformers takes them."""
    within = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: _implementations(part) for name, part in within.items() if part is not None}
    return {"": config._attn_implementation, **found}


def packed_states(backbone: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Attention) -> Tensor:
    """Return the last hidden states `[N, H]` of a row of tokens `[1, N]`, without a cache of transformers' own."""
    with packed_attention(backbone):
        states: Tensor = backbone(
            input_ids=ids, position_ids=positions, use_cache=False, packed_layout=layout
        ).last_hidden_state.squeeze(0)  # an index's backward pass would fill zeros
    return states


class Attention(Protocol):
    """What attends in a forward pass within `packed_attention`: its keyword argument `packed_layout`."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return what the N tokens take from the ones before them, `[N, heads, d of the values]`.

        A pass asks once a layer, or more often; always as often, and in the same order.

        Args:
            query_NHD: Of N tokens, in H heads.
            key_NKD: Likewise, in K heads; K divides H.
            value_NKD: Likewise; its d may be another.
            scaling: Of the scores; None: 1 / sqrt(d).
        """


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend to oneself and what came before: query and result `[B, H, L, d]`, key and value `[B, K, L, d]`."""
    heads = query.shape[1]
    shares = key.shape[1] < heads and query.device.type != "cpu" and query.dtype in SIXTEEN_BITS
    if not shares:  # wider numbers have no kernel that shares keys but the one that holds all scores
        key, value = _repeated(key, heads), _repeated(value, heads)
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=shares)


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Return keys or values `[…, K, …]` of all heads, which stand in dimension 1: those that share one next to it."""
    groups = heads // states.shape[1]
    return states.repeat_interleave(groups, dim=1) if groups > 1 else states


def as_autocast(states: Tensor) -> Tensor:
    """Return what autocast makes of an argument of attention; rotary positions, for one, leave it in float32."""
    device = states.device.type
    casts = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(device)) if casts else states


@cache
def _register() -> None:
    """Make the attention known to transformers; not on import, which would import all of its models' basis."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


@cache
def keep_attention_out_of_graphs() -> None:
    """Have `torch.compile` leave this attention as it is; not from the start, since it imports torch's compiler."""
    from transformers import AttentionInterface

    _register()  # first: it would put back what is replaced here
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Attention,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: query, key and value `[1, heads, N, d]`, result `[1, N, heads, d]`."""
    strange = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if sliding_window is not None and not isinstance(query, FakeTensor):  # memory is planned as if there were no window
        strange.append("sliding_window")
    if attention_mask is not None or dropout or is_causal is False or strange:
        raise NotImplementedError(f"packed attention is plain causal attention; asked for: {strange or 'a mask'}")
    query_NHD, key_NKD, value_NKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attended = packed_layout.attend(query_NHD, key_NKD, value_NKD, scaling)
    return attended[None], None
