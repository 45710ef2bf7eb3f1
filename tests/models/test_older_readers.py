"""Saved models as transformers 4 reads them. Oracle: transformers 4.57, in an environment of its own (slow)."""

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ppo_rlhf.models.older_readers import LOWEST, TRIED, add_older_names, readers
from ppo_rlhf.models.trained_model import TrainedModel
from tests.tiny_models import draw_weights, vision_model, word_tokenizer

OLDER_PYTHON = "PPO_RLHF_TRANSFORMERS_4"
"""Environment variable with the Python of an environment that has torch and transformers 4.57, for the slow test."""
IDS = torch.randint(4, 250, (1, 300), generator=torch.Generator().manual_seed(3))
PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA3 = {
    **PLAIN,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXTENDED = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
OF_TWO_KINDS = {
    "full_attention": {**PLAIN, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
POSITIONS = {"gemma3_text": OF_TWO_KINDS, "gpt_neox": HALF, "phi3": HALF, "stablelm": HALF, "llama": LLAMA3}
"""Rotary positions that no architecture has by default; the others of `TRIED` with rotary positions get `PLAIN`."""
WITHOUT_ROPE = ("bloom", "gpt2", "opt")


def model_of(kind: str, **settings: Any) -> PreTrainedModel:
    shape = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    if kind not in WITHOUT_ROPE:
        shape["rope_parameters"] = copy.deepcopy(POSITIONS.get(kind, PLAIN))
    return draw_weights(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **settings})), 0.2
    ).eval()


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_bytes())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"rope_theta": 500_000.0, "rope_scaling": EXTENDED}),
        ("qwen2", {"rope_theta": 500_000.0, "rope_scaling": None}),
        ("phi3", {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rotary_emb_base": 500_000.0, "rotary_pct": 0.5}),
        (
            "gemma3_text",
            {
                "rope_theta": 500_000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 20_000.0,
            },
        ),
        ("gpt2", {"torch_dtype": "float32", "rope_theta": None}),
    ],
)
def test_a_saved_configuration_has_the_older_names_and_is_read_as_before(tmp_path, kind, expected):
    model = model_of(kind)
    TrainedModel(model, word_tokenizer()).save(tmp_path)
    saved = config_of(tmp_path)
    assert {name: saved.get(name) for name in expected} == expected
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.to_dict().get("rope_parameters") == model.config.to_dict().get("rope_parameters")
    assert_close(again(IDS).logits, model(IDS).logits, rtol=0.0, atol=0.0)


def test_layers_without_rotary_positions_have_no_older_name(tmp_path):
    positions = {"sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0}, "full_attention": None}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "beam", "rope_parameters": positions}))
    add_older_names(tmp_path)
    assert config_of(tmp_path) == {"model_type": "beam", "rope_parameters": positions}


def test_the_configuration_within_a_configuration_has_the_older_names(tmp_path):
    TrainedModel(vision_model(), word_tokenizer()).save(tmp_path)
    text = config_of(tmp_path)["text_config"]
    assert (text["rope_theta"], text["partial_rotary_factor"]) == (10_000.0, 0.25)


def test_a_saved_tokenizer_is_of_a_class_that_both_versions_have(tmp_path):
    tokenizer = word_tokenizer(extra_special_tokens=["a", "b"])
    TrainedModel(model_of("llama"), tokenizer).save(tmp_path)
    saved = config_of(tmp_path, "tokenizer_config.json")
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["additional_special_tokens"] == ["a", "b"]
    assert "extra_special_tokens" not in saved
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("a b c")["input_ids"] == tokenizer("a b c")["input_ids"]


def test_the_card_names_the_lowest_version_that_was_tried():
    assert readers(AutoConfig.for_model("llama")).startswith(
        f"transformers {LOWEST}, the lowest version that was tried"
    )
    assert "older versions were not tried" in readers(AutoConfig.for_model("lfm2"))


READ = """
import sys, torch, transformers
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith(sys.argv[2]), transformers.__version__
for file in sorted(Path(sys.argv[1]).glob("*.pt")):
    wanted = torch.load(file)
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(file.with_suffix(""))(wanted["ids"]).logits.log_softmax(-1)
    tokenizer = AutoTokenizer.from_pretrained(file.with_suffix(""))
    assert tokenizer("a b c")["input_ids"] == wanted["tokens"], file.stem
    assert set(tokenizer.all_special_tokens) == wanted["special"], file.stem
    print(file.stem, (got - wanted["logprobs"]).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(OLDER_PYTHON not in os.environ, reason=f"{OLDER_PYTHON} names no Python with transformers {LOWEST}")
def test_transformers_4_gives_the_log_probabilities_that_were_saved(tmp_path):
    tokenizer = word_tokenizer(extra_special_tokens=["a", "b"])
    for kind in TRIED:
        model = model_of(kind)
        TrainedModel(model, tokenizer).save(tmp_path / kind)
        with torch.no_grad():
            logprobs = model(IDS).logits.log_softmax(-1)
        facts = {"tokens": tokenizer("a b c")["input_ids"], "special": set(tokenizer.all_special_tokens)}
        torch.save({"ids": IDS, "logprobs": logprobs, **facts}, tmp_path / f"{kind}.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        [os.environ[OLDER_PYTHON], "-c", READ, str(tmp_path), LOWEST], env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    apart = {kind: float(number) for kind, number in (line.split() for line in finished.stdout.splitlines())}
    assert apart.keys() == set(TRIED)
    assert {kind: number for kind, number in apart.items() if number > 1e-5} == {}
