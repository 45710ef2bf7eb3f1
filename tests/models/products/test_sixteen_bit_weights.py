"""Weights in 16 bits in the place of autocast's casts: the same numbers bit for bit, and the parameters come back."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.adapters import LoraSettings, with_adapter
from ppo_rlhf.models.products.sixteen_bit_weights import SixteenBitWeights
from tests.tiny_models import tiny_model, with_a_block_twice

IDS = torch.tensor([[4, 7, 9, 12, 5], [6, 8, 10, 11, 3]])
BFLOAT16 = torch.bfloat16


def logits(model) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", BFLOAT16):
        return model(IDS, use_cache=False).logits


def adapted(model, targets: str = "all-linear+head"):
    model = with_adapter(model, LoraSettings(2, 4, targets), torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # 0 at first: the adapter would change nothing
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(2))
    return model


MODELS = {
    "gpt2": lambda: tiny_model("gpt2"),  # its output layer shares the embedding
    "gpt2 untied": lambda: tiny_model("gpt2", tie_word_embeddings=False),
    "llama": lambda: tiny_model("llama"),
    "llama tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "llama with a block twice": with_a_block_twice,
    "bitnet": lambda: tiny_model("bitnet"),  # its layers quantise their weights
    "gpt2 with adapters": lambda: adapted(tiny_model("gpt2")),
    "llama with adapters": lambda: adapted(tiny_model("llama"), "all-linear"),
    "frozen in 16 bits with adapters": lambda: adapted(tiny_model("llama").to(BFLOAT16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_autocast_to_the_last_bit_also_after_the_weights_changed(name):
    model = MODELS[name]()
    weights = SixteenBitWeights(model, BFLOAT16)
    for _ in range(2):
        expected = logits(model)
        with weights.in_place():
            assert torch.equal(logits(model), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)


@pytest.mark.parametrize("name", MODELS)
def test_within_the_block_no_linear_layer_holds_float32_and_behind_it_all_parameters_are_back(name):
    model = MODELS[name]()
    before, buffers = list(model.named_parameters()), list(model.buffers())
    with SixteenBitWeights(model, BFLOAT16).in_place():
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
        assert {p.dtype for m in linear for p in m.parameters()} == {BFLOAT16}
        assert model.get_input_embeddings().weight is before[0][1]
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(first is second for (_, first), (_, second) in zip(before, after, strict=True))
    assert all(first is second for first, second in zip(buffers, model.buffers(), strict=True))
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_copies_keep_their_addresses():
    model = tiny_model()
    weights, addresses = SixteenBitWeights(model, BFLOAT16), []
    for _ in range(2):
        with weights.in_place():
            addresses.append([parameter.data_ptr() for parameter in model.parameters()])
    assert addresses[0] == addresses[1]


def test_after_an_error_the_parameters_are_back():
    model = tiny_model("gpt2")
    before = list(model.parameters())
    with pytest.raises(RuntimeError, match="no memory"), SixteenBitWeights(model, BFLOAT16).in_place():
        raise RuntimeError("no memory")
    assert all(first is second for first, second in zip(before, model.parameters(), strict=True))


def test_a_layer_that_computes_without_autocast_keeps_its_float32_weights():
    model = tiny_model()
    exact, plain = model.model.layers[0].mlp.up_proj, model.model.layers[1].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Outside(exact)
    weights, expected = SixteenBitWeights(model, BFLOAT16), logits(model)
    with weights.in_place():
        assert exact.weight.dtype == torch.float32
        assert plain.weight.dtype == BFLOAT16
        assert torch.equal(logits(model), expected)


class Outside(nn.Module):
    """Calls a layer in float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(states.float())
