"""A model whose Python code lies with it: transformers reads it only by running that code."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from tests.tiny_models import save, tiny_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def save_with_own_code(folder: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Path:
    """Write the tiny Llama as such a model; the copies of its code that transformers runs are beside the folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder.parent / "modules"))
    save(folder, tiny_model(**overrides))
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own_llama",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
