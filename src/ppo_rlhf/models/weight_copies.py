"""16-bit copies of the weights of linear layers, for passes without gradients under autocast.

Autocast casts each float32 weight once in each of its contexts; in a CUDA graph that would be once in each replay. The
copies have the numbers of autocast's casts and stay where they are, so a graph can read them, and one launch casts all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.capabilities import PROBE_ERRORS, hidden_states_alone, probe_ids, probed_once
from ppo_rlhf.models.captures import DECODING, Captures
from ppo_rlhf.models.decoding import decodes
from ppo_rlhf.models.forward import backbone_of, logits_of

log = logging.getLogger(__name__)


@contextmanager
def copied_weights(model: PreTrainedModel, captures: Captures | None) -> Iterator[None]:
    """Let a model compute with 16-bit copies of its linear weights in the block, whose passes have no gradients.

    The copies are refreshed at the start of each block, and `captures` holds them until it is released. Enter the block
    under autocast. Nothing happens where that is off, where nothing is captured, and with a model that has no such
    weights or would compute other numbers.
    """
    if captures is None or not has_copies(model, captures):
        yield
        return
    with _copies_of(model, captures).in_place():
        yield


def has_copies(model: PreTrainedModel, captures: Captures) -> bool:
    """Return whether a block of `copied_weights` under this autocast has copies."""
    casts = torch.is_autocast_enabled(model.device.type)
    return captures.serves(DECODING) and casts and bool(_places(model)) and computes_alike(model)


def linear_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that have copies, each once: those of `nn.Linear` and transformers' `Conv1D` in float32.

    What has 16 bits, or is quantised, has none. An embedding that is the head, too, gives a copy to the head alone.
    """
    return list({id(place.weight): place.weight for place in _places(model)}.values())


class WeightCopies:
    """Copies of the linear weights of one model, in the type of autocast."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Allocate them, without numbers; autocast is on."""
        self.model = model
        dtype = torch.get_autocast_dtype(model.device.type)
        self._copies = [  # apart from each other: kernels depend on how a tensor is aligned
            nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False) for weight in linear_weights(model)
        ]

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Cast the weights as they are now, and put the copies in their places for the block."""
        places, weights = _places(self.model), linear_weights(self.model)
        with torch.no_grad():
            torch._foreach_copy_(tuple(self._copies), tuple(weights))  # torch has no public one for many tensors
        copy_of = dict(zip(map(id, weights), self._copies, strict=True))
        try:
            for table, name, weight in places:
                table[name] = copy_of[id(weight)]
            yield
        finally:
            for table, name, weight in places:
                table[name] = weight


@probed_once
def computes_alike(model: PreTrainedModel) -> bool:
    """Return whether results are equal to the bit with copies; probed at the first call, which is under autocast.

    A model may read its linear weights outside of matrix products, or where it has switched autocast off.
    """
    decodes(model)  # like all other probes, with the weights as they are: without autocast copies multiply nothing
    try:
        with torch.no_grad():
            expected = _results(model)
            with WeightCopies(model).in_place():
                found = _results(model)
        if all(map(torch.equal, found, expected)):
            return True
    except PROBE_ERRORS:
        pass
    log.info("%s needs linear weights in float32: autocast casts them in each replay.", type(model).__name__)
    return False


def _copies_of(model: PreTrainedModel, captures: Captures) -> WeightCopies:
    """Return the copies that the run's graphs read."""
    held = captures.held.get(WeightCopies)
    if isinstance(held, WeightCopies) and held.model is model:
        return held
    if held is not None:
        captures.release()  # of another model
    copies = WeightCopies(model)
    captures.held[WeightCopies] = copies
    return copies


def _results(model: PreTrainedModel) -> list[Tensor]:
    states = hidden_states_alone(backbone_of(model), probe_ids(model, 5))
    return [states.nan_to_num(), logits_of(model)(states).nan_to_num()]


class _Place(NamedTuple):
    """Where a module has a weight."""

    table: dict[str, Any]
    name: str
    weight: nn.Parameter


def _places(model: nn.Module) -> list[_Place]:
    return [
        _Place(module._parameters, name, weight)
        for module in model.modules()
        if type(module) in (nn.Linear, Conv1D)
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
