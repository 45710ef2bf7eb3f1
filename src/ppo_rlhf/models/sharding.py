"""Models whose weights are shared out among the processes of a run, by torch's FSDP2.

A pass that trains goes through FSDP2, which gathers the weights of one layer at a time. Every other pass (sampling,
log-probabilities, values, scores) goes through the model's own modules, which hold the shards outside of passes:
`transfers.on_device` puts whole weights in their place for a block, in which each process may make its own number of
passes. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ppo_rlhf.models.capabilities import copy_probe_results
from ppo_rlhf.runtime.processes import quick_group

_shards = WeakTensorKeyDictionary()  # by the whole weights, while a model still has them: several share a frozen one


def sharded(forward: nn.Module, device: torch.device) -> nn.Module:
    """Return a forward pass that trains by FSDP2; from now on the modules of the given one hold the shards, too.

    Each transformer layer is a unit, and what is not in a layer is one. Gradients are summed over processes. The given
    pass is whole, its models are probed already, and its weights may be on the host; this process computes on `device`.
    """
    whole_tensors = {id(tensor): tensor for tensor in (*forward.parameters(), *forward.buffers())}
    trained = copy.deepcopy(forward, whole_tensors)
    pairs = list(zip(forward.modules(), trained.modules(), strict=True))
    layers = {name for own, _ in pairs for name in getattr(own, "_no_split_modules", None) or ()}
    for own, unit in [*(pair for pair in reversed(pairs) if type(pair[0]).__name__ in layers), pairs[0]]:
        part = fully_shard(unit, mesh=_mesh(device.type))
        part.set_gradient_divide_factor(1.0)  # neither reaches a module's children
        part.set_force_sum_reduction_for_comms(True)
        for holder, shards in zip(own.modules(), unit.modules(), strict=True):
            for name, shard in shards._parameters.items():
                weight = holder._parameters[name]
                if weight is not None and weight is not shard:
                    _shards[weight] = shard
                    holder._parameters[name] = shard
    for own, copied in pairs:
        copy_probe_results(own, copied)
    return trained


def shard_in_place(model: nn.Module, device: torch.device) -> None:
    """Leave each process its share of a model that never trains, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or isinstance(weight, DTensor) or not weight.dim():
                continue
            if weight not in _shards:
                shard = distribute_tensor(weight.detach(), _mesh(device.type), [Shard(0)], src_data_rank=None)
                _shards[weight] = nn.Parameter(shard.clone(), requires_grad=False)  # a view would keep all of it
            module._parameters[name] = _shards[weight]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor whose shards are in the processes, each of which must ask for it; of others itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    has_padding = full.untyped_storage().nbytes() > full.nbytes  # safetensors takes no part of a buffer
    return full.clone() if has_padding else full


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard_of(values: Tensor, like: Tensor) -> Tensor:
    """Return this process's share of values that every process has, if another tensor is sharded; else the values."""
    if not isinstance(like, DTensor) or values.shape != like.shape:
        return values
    shard = distribute_tensor(values.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return shard.clone()


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(quick_group(), device_type)
