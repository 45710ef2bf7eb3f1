"""Value heads on disk, under the names of TRL's `AutoModelForCausalLMWithValueHead`.

They are among the language model's own weights; transformers ignores them when it loads the directory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.directories import weight_files

VALUE_HEAD = WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"


def width_of_states(config: PretrainedConfig) -> int:
    """Return the width of the hidden states that a head reads; raise `ModelError` if the configuration names none."""
    text = config.get_text_config()
    # OPT's smallest model projects its hidden states to another width; every other configuration has this one name
    width = getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)
    if width is None:
        raise ModelError(f"{type(text).__name__}: this configuration has no hidden_size, so no value head fits it")
    return int(width)


def read_value_head(folder: Path) -> nn.Linear | None:
    """Return the value head in a model directory, float32 or wider; None if the directory has none.

    Raises:
        ModelError: The weights of these names are not those of a linear layer with one output.
    """
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            found |= {name: weights.get_tensor(name) for name in set(VALUE_HEAD) & set(weights.keys())}
    if not found:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    width = shapes.get(WEIGHT, (0,))[-1]
    if shapes != {WEIGHT: (1, width), BIAS: (1,)}:
        raise ModelError(f"{folder}: its value head has {shapes}, expected {WEIGHT} (1, width) and {BIAS} (1,)")
    head = nn.Linear(width, 1, dtype=torch.promote_types(found[WEIGHT].dtype, torch.float32))
    head.load_state_dict({"weight": found[WEIGHT], "bias": found[BIAS]})
    return head
