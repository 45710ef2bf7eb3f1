"""Linear weights stored in 16 bits: which weights are stored, and that no result under autocast changes."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.adapters import LoraSettings
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.stored_weights import store_linear_weights
from ppo_rlhf.passes.forward import backbone_of, logits_of
from tests.tiny_models import KINDS, save, tiny_model, with_trained_adapter

IDS = torch.tensor([[3, 9, 14, 6, 12]])
MODELS = {
    **{kind: lambda kind=kind: tiny_model(kind) for kind in KINDS},
    "a Llama whose head is its embedding": lambda: tiny_model("llama", tie_word_embeddings=True),
    "a Llama with biases": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "adapters": lambda: with_trained_adapter(tiny_model(), LoraSettings(2, 4, "all-linear")),
}


@torch.no_grad()
def results(model, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Hidden states, and the logits by the head alone and by the model's own forward, under autocast."""
    with torch.autocast("cpu", dtype):
        states = backbone_of(model)(input_ids=IDS, use_cache=False).last_hidden_state
        return [states, logits_of(model)(states), model(input_ids=IDS, use_cache=False).logits]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_under_autocast_are_equal_to_the_bit(name, dtype):
    model = MODELS[name]()
    expected = results(model, dtype)
    before = sum(parameter.nbytes for parameter in model.parameters())
    store_linear_weights(model, dtype)
    assert all(map(torch.equal, results(model, dtype), expected))
    assert sum(parameter.nbytes for parameter in model.parameters()) < before


def test_linear_weights_and_biases_are_stored_and_a_head_that_is_the_embedding_is_not():
    model = tiny_model("gpt2")
    store_linear_weights(model, torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert {p.dtype for layer in layers for p in layer.parameters(recurse=False)} == {torch.bfloat16}
    others = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.Embedding)]
    assert {p.dtype for module in others for p in module.parameters(recurse=False)} == {torch.float32}
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps lists the mapped files")
def test_the_mapped_file_of_the_weights_is_let_go(tmp_path):
    save(tmp_path, tiny_model())
    model, file = PretrainedHandle(str(tmp_path)).causal_lm(), str(tmp_path / "model.safetensors")

    def is_mapped() -> bool:
        gc.collect()
        return file in Path("/proc/self/maps").read_text()

    assert is_mapped()
    store_linear_weights(model, torch.bfloat16)
    assert not is_mapped()


def test_a_weight_that_two_layers_share_is_stored_once():
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    expected = results(model)
    store_linear_weights(model, torch.bfloat16)
    assert model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    assert all(map(torch.equal, results(model), expected))
    assert len(list(model.parameters())) == len({id(p) for p in tiny_model().parameters()}) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_more_bits_nothing_is_stored(dtype):
    model = tiny_model()
    before = dict(model.named_parameters())
    store_linear_weights(model, dtype)
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("reads", ["in float32", "without autocast"])
def test_a_model_that_reads_a_linear_weight_otherwise_keeps_its_weights(reads, caplog):
    """The first model uses float32 digits that 16 bits lack; the second multiplies in float32."""
    model = tiny_model()
    layer = model.model.layers[0].mlp
    plain = type(layer).forward

    def forward(states):
        if reads == "in float32":
            return plain(layer, states) * layer.up_proj.weight.float().mean()
        with torch.autocast("cpu", enabled=False):
            return plain(layer, states.float())

    layer.forward = forward
    before, expected = dict(model.named_parameters()), results(model)
    with caplog.at_level("INFO"):
        store_linear_weights(model, torch.bfloat16)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(map(torch.equal, results(model), expected))
    assert caplog.text.count("LlamaForCausalLM needs linear weights in float32") == 1
