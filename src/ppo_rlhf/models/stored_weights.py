"""Stores the weights of a model that never trains as autocast casts the weights of a model that trains."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.passes.capabilities import PROBE_ERRORS, hidden_states_alone, probe_ids
from ppo_rlhf.passes.decoding import decodes
from ppo_rlhf.passes.forward import backbone_of, logits_of
from ppo_rlhf.passes.transfers import Place, replaced

log = logging.getLogger(__name__)


def store_linear_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the float32 linear weights of a model that never trains in a 16-bit `dtype`, in place.

    Under autocast the model computes the same results, to the bit, as a policy that trains, whose weights are float32:
    autocast would cast the linear weights to `dtype`, and leaves embeddings and norms as they are. The model computes
    only under autocast afterwards. It is unchanged if `dtype` has more bits, or results would differ.
    """
    if dtype.itemsize != 2 or not _linear_places(model):
        return
    # Run the probes now, because they need one dtype without autocast; the probes' results are cached
    decodes(model)
    logits_of(model)
    if not _computes_alike(model, dtype):
        log.info("%s needs linear weights in float32: autocast casts them in each pass.", type(model).__name__)
        return
    cast_linear_weights(model, dtype)
    # A weight that is a view of the mapped weights file would keep the whole file in a CPU run's memory
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def cast_linear_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that `store_linear_weights` casts, without probes; the model may be on the device `meta`."""
    places = _linear_places(model)
    stored = _in_dtype(places, dtype)
    for table, name, weight in places:
        table[name] = stored[id(weight)]


def _computes_alike(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether a model computes the same results, to the bit, with linear weights in `dtype` under autocast.

    Results differ if a model reads its linear weights outside of matrix products or switches autocast off.
    """

    def results() -> list[Tensor]:
        states = hidden_states_alone(backbone_of(model), probe_ids(model, 5))
        return [states.nan_to_num(), logits_of(model)(states).nan_to_num()]

    places = _linear_places(model)
    with torch.no_grad(), torch.autocast(model.device.type, dtype):
        try:
            expected = results()
            with replaced(places, _in_dtype(places, dtype)):
                return all(map(torch.equal, results(), expected))
        except PROBE_ERRORS:
            return False


def _in_dtype(places: list[Place], dtype: torch.dtype) -> dict[int, nn.Parameter]:
    """Return the weights at `places` in `dtype`, by the id of the weight: one copy of a weight that layers share."""
    weights = {id(place.tensor): place.tensor for place in places}
    return {key: nn.Parameter(weight.detach().to(dtype), requires_grad=False) for key, weight in weights.items()}


def _linear_places(model: nn.Module) -> list[Place]:
    """Return the places of float32 weights that only linear layers read: not those of a head tied to the embeddings."""
    places = [
        Place(module._parameters, name, weight)
        for module in model.modules()
        if type(module) in (nn.Linear, Conv1D)
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
    linear = {id(place.table) for place in places}
    others = {id(p) for m in model.modules() if id(m._parameters) not in linear for p in m._parameters.values()}
    return [place for place in places if id(place.tensor) not in others]
