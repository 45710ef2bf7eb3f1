"""LoRA adapters on tiny models, saved by peft, with weights that show in what a model computes."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def adapter_of(
    base: PreTrainedModel, folder: Path, base_path: str, layer: str = "q_proj", *, seed: int = 1, **options: Any
) -> PeftModel:
    """Save an adapter whose matrices are not zero, and return the base with it."""
    adapted: Any = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 2, "target_modules": [layer], **options}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapted.peft_config["default"].base_model_name_or_path = base_path
    adapted.save_pretrained(folder)
    return adapted.eval()
