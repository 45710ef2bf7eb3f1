"""Weights in 16 bits at addresses that stay, in the place of the copies that autocast makes in every pass.

Autocast keeps trained weights in float32 and casts those of matrix products, each time into new memory. While nothing
trains, copies that are made once do as well: the products are the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.probe import some_ids
from ppo_rlhf.models.products.linear import is_plain_linear


class SixteenBitWeights:
    """Copies of the weights of a causal language model's linear layers.

    A table of embeddings stays as it is, also where the output layer shares it: that layer alone reads the copy. Left
    out are layers of other types, which may do more with their weights, and layers that compute without autocast.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Make room for copies in a 16-bit type; a pass of a few tokens shows which layers autocast."""
        copies: dict[int, Tensor] = {}
        self._entries: list[tuple[dict[str, Any], str, Tensor]] = []  # table, name, copy
        for module in layers_that_autocast(model, dtype):
            for name, weight in module._parameters.items():
                if weight is not None and weight.dtype == torch.float32:
                    if id(weight) not in copies:
                        copies[id(weight)] = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False)
                    self._entries.append((module._parameters, name, copies[id(weight)]))
        self.dtype = dtype

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the layers hold copies of what their weights are now; then their own parameters again."""
        originals = [table[name] for table, name, _ in self._entries]
        with torch.no_grad():
            torch._foreach_copy_([copy for _, _, copy in self._entries], originals)
        try:
            for table, name, copy in self._entries:
                table[name] = copy
            yield
        finally:
            for (table, name, _), original in zip(self._entries, originals, strict=True):
                table[name] = original


def layers_that_autocast(model: PreTrainedModel, dtype: torch.dtype) -> list[nn.Linear | Conv1D]:
    """Return the linear layers, in the model's order, that autocast computes in 16 bits whenever they are called.

    A pass of a few tokens shows them, the first time that a model is asked about: with autocast on and never with it
    off. It attends plainly, so not to be called first within `packed_attention`.
    """
    return list(calls_that_autocast(model, dtype))


def calls_that_autocast(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[nn.Linear | Conv1D, int]:
    """Return how often one pass calls each of `layers_that_autocast`: blocks that come twice are called twice."""
    known = _calls.setdefault(model, {})
    if dtype not in known:
        known[dtype] = _count_calls(model, dtype)
    return known[dtype]


_calls: WeakKeyDictionary[nn.Module, dict[torch.dtype, Mapping[nn.Linear | Conv1D, int]]] = WeakKeyDictionary()


def _count_calls(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[nn.Linear | Conv1D, int]:
    device, on, off = model.device.type, Counter[nn.Module](), set[nn.Module]()

    def watch(module: nn.Module, *_: object) -> None:
        if torch.is_autocast_enabled(device):
            on[module] += 1
        else:
            off.add(module)

    linear = [module for module in model.modules() if is_plain_linear(module)]
    handles = [module.register_forward_pre_hook(watch) for module in linear]
    try:
        # without its cache: around this there may be an autocast that would keep all copies until its end
        with torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False):
            model(input_ids=some_ids(model, 4)[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {module: on[module] for module in linear if module in on and module not in off}
