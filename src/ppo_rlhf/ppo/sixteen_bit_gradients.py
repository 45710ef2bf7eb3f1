"""Gradients in 16 bits of products in 16 bits; the optimiser gets them in float32, piece by piece.

Autocast casts every weight in each pass, and the backward pass writes each gradient twice: as the product gives it, and
in float32. Here the copies in 16 bits are what the graph ends in, so their gradients stay as the product gave them, in
half of the memory. The numbers are autocast's to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.products.sixteen_bit_weights import calls_that_autocast

FEW = 2**22
"""A model that trains no more weights is left to autocast: copies and hooks would cost it more time than they save (4 %
of an update of 3 million weights)."""
PIECE = 2**20
"""Weights whose gradients are in float32 at a time, 4 MiB: the optimiser then reads them from the processor's caches. A
step of 24 million weights takes 13.7 ms, with four times as many at a time 15.7 (two cores)."""
PIECE_ELSEWHERE = 2**26
"""Likewise off the CPU, where each piece costs a round of launches: 256 MiB."""


def kept_in_sixteen_bits(config: PPOConfig, backbone: PreTrainedModel) -> bool:
    """Whether gradients of a backbone stay in 16 bits until the optimiser takes them.

    Not in float16, which scales them; not with compiled layers, which keep to their parameters; not without the fused
    optimiser, which divides and checks each gradient itself; and not those of few weights.
    """
    fits = config.dtype == "bfloat16" and config.optim == "adamw_torch_fused" and not config.compile
    return fits and sum(p.numel() for p in backbone.parameters() if p.requires_grad) > FEW


class SixteenBitGradients:
    """Gradients of a backbone's matrices in linear layers, from their backward passes to the optimiser step.

    Left to autocast are biases, which are small, and weights that a pass multiplies with more than once: what they get
    would add up in 16 bits. A weight that other layers than linear ones use, too, has one gradient, in its own type.
    The output layer is not the backbone's: its product may come in chunks, whose gradients add up in float32.
    """

    def __init__(self, backbone: PreTrainedModel, dtype: torch.dtype) -> None:
        """Find the layers; not to be called within `packed_attention`."""
        self._dtype = dtype
        calls = calls_that_autocast(backbone, dtype)
        products = Counter[Tensor]()
        for layer, count in calls.items():
            products[layer.weight] += count
        self._weights = {
            layer: layer.weight
            for layer in calls
            if products[layer.weight] == 1 and layer.weight.dtype == torch.float32 and layer.weight.requires_grad
        }
        self._held: dict[Tensor, Tensor] = {}

    @contextmanager
    def of_passes(self, count: int) -> Iterator[None]:
        """Within the block, of so many backward passes, the layers hold copies of their weights.

        What one pass leaves is held here in 16 bits; the gradients of several add up in float32, in the weights'
        `grad`. Weights must not change within the block, and a copy of one pass is gone when its gradient is there.
        """
        keep = self._hold if count == 1 else _add_up
        copies = {weight: nn.Parameter(weight.detach().to(self._dtype)) for weight in self._weights.values()}
        for weight, copy in copies.items():
            copy.register_post_accumulate_grad_hook(partial(keep, weight))
        try:
            for layer, weight in self._weights.items():
                layer.weight = copies[weight]
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            for layer, weight in self._weights.items():
                layer.weight = weight
        for weight, gradient in list(self._held.items()):
            if weight.grad is not None:
                weight.grad.add_(gradient)
                del self._held[weight]

    def _hold(self, weight: Tensor, copy: Tensor) -> None:
        assert copy.grad is not None
        self._held[weight] = copy.grad
        copy.grad = None
        copy.data = copy.new_empty(0)  # the graph holds the copy itself to the end of the pass

    def held(self) -> list[Tensor]:
        """Return the gradients in 16 bits."""
        return list(self._held.values())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with all gradients, those that are held in 16 bits and those of the weights themselves; drop them."""
        size = 0
        for weight in list(self._held):
            if size and size + weight.numel() > (PIECE if weight.is_cpu else PIECE_ELSEWHERE):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                size = 0
            weight.grad = self._held.pop(weight).to(weight.dtype)
            size += weight.numel()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """Let go of the gradients."""
        self._held.clear()


def _add_up(weight: Tensor, copy: Tensor) -> None:
    assert copy.grad is not None
    if weight.grad is None:
        weight.grad = copy.grad.to(weight.dtype)
    else:
        weight.grad.add_(copy.grad)
    copy.grad = None
