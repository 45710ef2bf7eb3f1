"""16-bit copies of the weights of linear layers, for passes without gradients under autocast.

Autocast casts each float32 weight once per autocast context; in a CUDA graph, autocast would cast each weight in each
replay. The 16-bit copies hold the same numbers as autocast's casts, and one operation refreshes all 16-bit copies. The
16-bit copies keep their addresses, so that a CUDA graph can read them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.capabilities import PROBE_ERRORS, hidden_states_alone, probe_ids, probed_once
from ppo_rlhf.models.captures import DECODING, Captures
from ppo_rlhf.models.decoding import decodes
from ppo_rlhf.models.forward import backbone_of, logits_of
from ppo_rlhf.models.transfers import Place, replaced

log = logging.getLogger(__name__)


@contextmanager
def copied_weights(model: PreTrainedModel, captures: Captures | None) -> Iterator[None]:
    """Replace a model's linear weights by 16-bit copies within the block, for passes without gradients under autocast.

    `copied_weights` refreshes the 16-bit copies at the start of the `with` block. `captures` holds the copies until
    `captures.release`. `copied_weights` changes nothing in four cases:

    - autocast is off;
    - no decoding steps are captured as CUDA graphs;
    - the model has no linear layer with float32 weights;
    - the model would compute other results with 16-bit copies of its linear weights.
    """
    if captures is None or not has_copies(model, captures):
        yield
        return
    with _copies_of(model, captures).in_place():
        yield


def has_copies(model: PreTrainedModel, captures: Captures) -> bool:
    """Return whether `copied_weights` would use 16-bit copies of the model's weights under the current autocast."""
    casts = torch.is_autocast_enabled(model.device.type)
    return captures.serves(DECODING) and casts and bool(linear_places(model)) and computes_alike(model)


def linear_weights(model: nn.Module) -> list[Tensor]:
    """Return the float32 weights of a model's `nn.Linear` and `Conv1D` layers, each weight once.

    These float32 weights get 16-bit copies; 16-bit weights and quantised weights get no copies. If the embedding is
    tied to the language-model head, only the head uses the 16-bit copy.
    """
    return list({id(place.tensor): place.tensor for place in linear_places(model)}.values())


class WeightCopies:
    """Copies of the linear weights of one model, in autocast's dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Allocate the 16-bit copies without filling them; must be called under autocast."""
        self.model = model
        dtype = torch.get_autocast_dtype(model.device.type)
        self._copies = [  # make separate tensors, because a tensor's alignment decides which matrix kernel runs
            nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False) for weight in linear_weights(model)
        ]

    @property
    def bytes(self) -> int:
        """Bytes of the 16-bit copies of the weights."""
        return sum(copy.nbytes for copy in self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Refresh the 16-bit copies from the current weights, and let the model use the copies within the block."""
        weights = linear_weights(self.model)
        with torch.no_grad():
            # torch has no public function that copies many tensors in one kernel
            torch._foreach_copy_(tuple(self._copies), tuple(weights))
        with replaced(linear_places(self.model), dict(zip(map(id, weights), self._copies, strict=True))):
            yield


@probed_once
def computes_alike(model: PreTrainedModel) -> bool:
    """Return whether a model computes the same results, to the bit, with 16-bit copies of its linear weights.

    The model is probed at the first call, which must be under autocast. Results with and without 16-bit copies differ
    if a model reads its linear weights outside of matrix products or switches autocast off.
    """
    # Probe `decodes` before copies replace the weights, because `decodes` needs the float32 weights without autocast
    decodes(model)
    try:
        with torch.no_grad():
            expected = _results(model)
            with WeightCopies(model).in_place():
                with_copies = _results(model)
        if all(map(torch.equal, with_copies, expected)):
            return True
    except PROBE_ERRORS:
        pass
    log.info("%s needs linear weights in float32: autocast casts them in each pass.", type(model).__name__)
    return False


def _copies_of(model: PreTrainedModel, captures: Captures) -> WeightCopies:
    """Return the 16-bit copies of the model's weights that `captures` holds; make new copies if there are none."""
    held = captures.held.get(WeightCopies)
    if isinstance(held, WeightCopies) and held.model is model:
        return held
    if held is not None:
        captures.release()  # the CUDA graphs read the held copies, which belong to another model
    copies = WeightCopies(model)
    captures.held[WeightCopies] = copies
    return copies


def _results(model: PreTrainedModel) -> list[Tensor]:
    states = hidden_states_alone(backbone_of(model), probe_ids(model, 5))
    return [states.nan_to_num(), logits_of(model)(states).nan_to_num()]


def linear_places(model: nn.Module) -> list[Place]:
    return [
        Place(module._parameters, name, weight)
        for module in model.modules()
        if type(module) in (nn.Linear, Conv1D)
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
