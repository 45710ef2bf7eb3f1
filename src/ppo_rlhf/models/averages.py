"""Finds the weights of a model that train, and computes the moving average of the trained weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from ppo_rlhf.passes.sharding import local_shard_of


class WeightAverage:
    """Exponential moving average of the trained weights: w̄ ← decay · w̄ + (1 − decay) · w.

    The average starts at the model's first weights, without bias correction, as in DeepSpeed-Chat's `moving_average`.

    Attributes:
        decay: Number in (0, 1); the average reaches back over about 1 / (1 − decay) updates.
        weights: Averaged tensors by parameter name.
    """

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        """Start the average at the model's current weights."""
        self.decay = decay
        self.weights = {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}

    def update(self, model: PreTrainedModel) -> None:
        """Update the average with the model's weights in one fused operation; call it after each optimiser step."""
        current = trained_parameters(model)
        move = get_ema_multi_avg_fn(self.decay)
        move(list(self.weights.values()), [current[name] for name in self.weights], None)

    def applied_to(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of the model with averaged instead of trained weights; the copy shares the frozen weights."""
        shared = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        averaged = copy.deepcopy(model, {id(tensor): tensor for tensor in [*shared, *model.buffers()]})
        copy_tensors(self.weights, trained_parameters(averaged))
        return averaged


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that need a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_tensors(source: dict[str, Tensor], target: dict[str, Any]) -> None:
    """Copy the tensors of `source` into the tensors of `target` with the same names.

    Raises:
        ValueError: The names or shapes of the tensors in `source` and `target` differ.
    """
    if source.keys() != target.keys():
        odd = sorted(source.keys() ^ target.keys())
        raise ValueError(f"the names of the weights differ, such as {odd[0]}")
    for name, tensor in source.items():
        if tensor.shape != target[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(target[name].shape)}")
        target[name].data.copy_(local_shard_of(tensor, target[name]))
