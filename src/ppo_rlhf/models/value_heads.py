"""Value heads on disk, as TRL's `AutoModelForCausalLMWithValueHead` names them: `v_head.summary.weight` and `.bias`.

They lie among the language model's own weights. transformers leaves them out when it loads the directory.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ppo_rlhf.core.errors import ModelError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
VALUE_HEAD = WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"


def read_value_head(folder: Path) -> nn.Linear | None:
    """Return the value head in a model directory, float32 or wider; None if the directory has none.

    Raises:
        ModelError: What lies there under these names is no linear head with one output.
    """
    tensors = {name: tensor for name in VALUE_HEAD if (tensor := _read(folder, name)) is not None}
    if not tensors:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    width = shapes.get(WEIGHT, (0,))[-1]
    if shapes != {WEIGHT: (1, width), BIAS: (1,)}:
        raise ModelError(
            f"{folder}: its value head has {', '.join(f'{name} {shape}' for name, shape in shapes.items())}; "
            f"{WEIGHT} (1, width) and {BIAS} (1,) are expected, as TRL writes them"
        )
    dtype = torch.promote_types(tensors[WEIGHT].dtype, torch.float32)
    head = nn.Linear(width, 1, dtype=dtype)
    head.load_state_dict({"weight": tensors[WEIGHT], "bias": tensors[BIAS]})
    return head


def value_head_tensors(head: nn.Linear) -> dict[str, Tensor]:
    """Return a value head's weights under the names that it has in a checkpoint."""
    return {WEIGHT: head.weight.detach(), BIAS: head.bias.detach()}


def _read(folder: Path, name: str) -> Tensor | None:
    index = folder / WEIGHTS_INDEX
    file = WEIGHTS
    if index.is_file():
        file = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name, "")
    if not file or not (folder / file).is_file():
        return None
    with safe_open(folder / file, framework="pt") as weights:
        return weights.get_tensor(name) if name in weights.keys() else None  # noqa: SIM118, not a mapping
