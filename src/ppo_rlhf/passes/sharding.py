"""Shards the weights of models over the processes of a run, with torch's FSDP2.

A training pass runs in FSDP2's modules, which gather the weights of one layer at a time. Every pass that does not train
(sampling, log-probabilities, values, scores) runs in the model's own modules, which hold the shards. Within a block of
`transfers.on_device` the model's own modules hold whole weights, and each process may run its own number of passes. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
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

from ppo_rlhf.passes.capabilities import copy_probe_results
from ppo_rlhf.runtime.processes import quick_group

# Shard of each frozen whole weight, as long as the weight exists: two models may share a frozen weight
_shards = WeakTensorKeyDictionary()


def sharded(forward: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a forward module that trains with FSDP2; `forward` and the copy hold the same shards.

    Each transformer layer is an FSDP2 unit; all other weights form one more unit. Gradients are summed over processes.
    `forward` must hold whole weights, which may be on the host, and the models in `forward` must have been probed
    (`capabilities`). `device` is the device of this process.
    """
    whole_tensors = {id(tensor): tensor for tensor in (*forward.parameters(), *forward.buffers())}
    trained = copy.deepcopy(forward, whole_tensors)
    pairs = list(zip(forward.modules(), trained.modules(), strict=True))
    layers = {name for original, _ in pairs for name in getattr(original, "_no_split_modules", None) or ()}
    for original, unit in [*(pair for pair in reversed(pairs) if type(pair[0]).__name__ in layers), pairs[0]]:
        sharded_unit = fully_shard(unit, mesh=_mesh(device.type))
        # Set both options on every sharded unit, because FSDP2 does not pass them on to child modules
        sharded_unit.set_gradient_divide_factor(1.0)
        sharded_unit.set_force_sum_reduction_for_comms(True)
        for holder, shards in zip(original.modules(), unit.modules(), strict=True):
            for name, shard in shards._parameters.items():
                weight = holder._parameters[name]
                if weight is not None and weight is not shard:
                    _shards[weight] = shard
                    holder._parameters[name] = shard
    for original, copied in pairs:
        copy_probe_results(original, copied)
    return trained


def shard_in_place(model: nn.Module, device: torch.device) -> None:
    """Replace the weights of a model that never trains by this process's shards, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or isinstance(weight, DTensor) or not weight.dim():
                continue
            if weight not in _shards:
                shard = distribute_tensor(weight.detach(), _mesh(device.type), [Shard(0)], src_data_rank=None)
                # clone, because a view of the whole weight would keep the whole weight in memory
                _shards[weight] = nn.Parameter(shard.clone(), requires_grad=False)
            module._parameters[name] = _shards[weight]


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes; every process must call this function.

    Return other tensors unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    # safetensors refuses a tensor whose storage is larger than the tensor, as FSDP2's padding makes it
    has_padding = full.untyped_storage().nbytes() > full.nbytes
    return full.clone() if has_padding else full


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard_of(values: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of `values`, sharded as the tensor `like` is. Every process has all of `values`.

    `values` are returned unchanged if `like` is not sharded or has another shape.
    """
    if not isinstance(like, DTensor) or values.shape != like.shape:
        return values
    shard = distribute_tensor(values.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return shard.clone()


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(quick_group(), device_type)
