"""Stores the weights of a model that never trains as autocast casts the weights of a model that trains."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.models.forward import backbone_of, logits_of, packs
from ppo_rlhf.models.weight_copies import Place, computes_alike, linear_places


def store_linear_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the float32 linear weights of a model that never trains in a 16-bit `dtype`, in place.

    Under autocast the model computes the same results, to the bit, as a policy that trains, whose weights are float32:
    autocast would cast the linear weights to `dtype`, and leaves embeddings and norms as they are. The model computes
    only under autocast afterwards. It is unchanged if `dtype` has more bits, or results would differ.
    """
    if dtype.itemsize != 2 or not _stored_places(model):
        return
    # Run the probes now, because they need one dtype without autocast; the probes' results are cached
    packs(backbone_of(model))
    logits_of(model)
    with torch.autocast(model.device.type, dtype):
        if not computes_alike(model):
            return
    cast_linear_weights(model, dtype)
    # A weight that is a view of the mapped weights file would keep the whole file in a CPU run's memory
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def cast_linear_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that `store_linear_weights` casts, without probes; the model may be on the device `meta`."""
    stored: dict[int, nn.Parameter] = {}
    for table, name, weight in _stored_places(model):
        if id(weight) not in stored:
            stored[id(weight)] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        table[name] = stored[id(weight)]


def _stored_places(model: nn.Module) -> list[Place]:
    """Return the places of linear weights that only linear layers read: not those of a head tied to the embeddings."""
    places = linear_places(model)
    linear = {id(place.table) for place in places}
    others = {id(p) for m in model.modules() if id(m._parameters) not in linear for p in m._parameters.values()}
    return [place for place in places if id(place.tensor) not in others]
