"""Configurations that models do not share.

Each pass sets in its model's how it attends (`models.passes.packed_attention`).
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import PretrainedConfig


def keep_apart(first: nn.Module, second: nn.Module) -> None:
    """Give the second model copies of the configurations that it shares with the first, if there are any.

    Two models that `from_config` made of one configuration hold the very same object. Passes of both at the same time
    would change it under each other's feet.
    """
    shared = {id(config) for config in _configurations(first)}
    copies: dict[int, object] = {}  # what deepcopy has copied, so that what a model holds twice stays one
    for module in second.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and id(config) in shared:
            module.config = copy.deepcopy(config, copies)  # type: ignore[assignment]


def _configurations(model: nn.Module) -> list[PretrainedConfig]:
    found = (vars(module).get("config") for module in model.modules())
    return [config for config in found if isinstance(config, PretrainedConfig)]
