"""16-bit copies of linear weights: which weights have a copy, and that no result changes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.adapters import LoraSettings
from ppo_rlhf.models.captures import Captures
from ppo_rlhf.models.forward import backbone_of, logits_of
from ppo_rlhf.models.weight_copies import WeightCopies, computes_alike, copied_weights, linear_weights
from tests.graph_on_cpu import graphs_on_cpu
from tests.tiny_models import KINDS, tiny_model, with_trained_adapter

__all__ = ["graphs_on_cpu"]  # a fixture
CPU, IDS = torch.device("cpu"), torch.tensor([[3, 9, 14, 6, 12]])

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")


def in_bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def adapted(kind: str, dtype: torch.dtype):
    return with_trained_adapter(tiny_model(kind).to(dtype), LoraSettings(2, 4, "all-linear"))


MODELS = {
    **{kind: lambda _, kind=kind: tiny_model(kind) for kind in KINDS},
    "a Llama whose head is its embedding": lambda _: tiny_model("llama", tie_word_embeddings=True),
    "a Llama with biases": lambda _: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "adapters on float32": lambda _: adapted("llama", torch.float32),
    "adapters on 16 bits": lambda dtype: adapted("gpt2", dtype),
}


@torch.no_grad()
def results(model) -> list[torch.Tensor]:
    """Hidden states, and the logits by the head alone and by the model's own forward."""
    states = backbone_of(model)(input_ids=IDS, use_cache=False).last_hidden_state
    return [states, logits_of(model)(states), model(input_ids=IDS, use_cache=False).logits]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_equal_to_the_bit_and_no_weight_is_cast(name, dtype):
    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                cast.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    cast: list[torch.Size] = []
    model, captures = MODELS[name](dtype), Captures(CPU)
    with torch.autocast("cpu", dtype):
        logits_of(model)
        with Casts():
            expected = results(model)
        assert len(cast) >= len(linear_weights(model)) > 0
        cast.clear()
        with copied_weights(model, captures), Casts():
            found = results(model)
    assert cast == []
    assert all(map(torch.equal, found, expected))


def test_linear_weights_and_biases_have_copies_and_other_weights_and_the_embedding_none():
    model, captures = tiny_model("gpt2"), Captures(CPU)
    before = dict(model.named_parameters())
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    with in_bfloat16(), copied_weights(model, captures):
        for layer in layers:
            assert (layer.weight.dtype, layer.bias.dtype) == (torch.bfloat16, torch.bfloat16)
            assert not layer.weight.requires_grad
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert (
            model.transformer.wte.weight is before["transformer.wte.weight"]
        )  # the embedding, tied to the head, keeps its float32 weight
        others = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.Embedding)]
        assert {p.dtype for module in others for p in module.parameters(recurse=False)} == {torch.float32}
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert captures.bytes == 2 * sum(weight.numel() for weight in linear_weights(model))
    assert len(linear_weights(model)) == 2 * len(layers) + 1


def test_of_an_adapted_model_in_16_bits_only_the_adapter_has_copies():
    model = adapted("gpt2", torch.bfloat16)
    adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
    assert {id(weight) for weight in linear_weights(model)} == {id(weight) for weight in adapters}


def test_the_weights_are_back_after_an_error():
    model = tiny_model()
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), in_bfloat16(), copied_weights(model, Captures(CPU)):
        raise ZeroDivisionError
    assert all(p is before[name] for name, p in model.named_parameters())


def test_each_block_has_the_weights_of_its_time_at_the_same_addresses_cast_in_one_launch():
    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(func)
            return func(*args, **(kwargs or {}))

    model, captures = tiny_model("gpt2"), Captures(CPU)
    launched: list[object] = []
    addresses, launches = [], []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.03)
        with in_bfloat16():
            expected = results(model)
        launched.clear()
        with in_bfloat16(), Launches(), copied_weights(model, captures):
            launches.append(list(launched))
            addresses.append([p.data_ptr() for p in model.parameters() if p.dtype == torch.bfloat16])
            assert all(map(torch.equal, results(model), expected))
    assert addresses[0]
    assert addresses == addresses[:1] * 3
    assert launches[1:] == [[torch.ops.aten._foreach_copy_.default]] * 2  # the first block also runs a probe


def test_released_copies_are_gone():
    model, captures = tiny_model(), Captures(CPU)
    with in_bfloat16(), copied_weights(model, captures):
        pass
    assert captures.bytes > 0
    captures.close()
    assert (captures.bytes, captures.held) == (0, {})


def test_for_another_model_the_graphs_that_read_the_first_ones_copies_are_released():
    first, second, captures = tiny_model(seed=1), tiny_model(seed=2), Captures(CPU)
    with in_bfloat16():
        for model in (first, second, first):
            expected = results(model)
            with copied_weights(model, captures):
                assert all(map(torch.equal, results(model), expected))
                for _ in range(2):
                    captures.run(("doubled",), lambda: IDS * 2)
                assert len(captures) == 1
            assert captures.bytes == 2 * sum(weight.numel() for weight in linear_weights(model))
            captures.run(("another",), lambda: None)


@pytest.mark.parametrize("why", ["no autocast", "float64", "nothing is captured", "captures are off", "16 bits"])
def test_nothing_is_copied(why):
    model, captures = tiny_model(), Captures(CPU, wanted=why != "captures are off")
    if why == "float64":
        model.double()
    if why == "16 bits":
        model.bfloat16()
    context = torch.autocast("cpu", torch.bfloat16, enabled=why != "no autocast")
    before = dict(model.named_parameters())
    with context, copied_weights(model, None if why == "nothing is captured" else captures):
        assert all(p is before[name] for name, p in model.named_parameters())
    assert captures.held == {}


@pytest.mark.parametrize("reads", ["in float32", "without autocast"])
def test_a_model_that_reads_a_linear_weight_otherwise_computes_without_copies(reads, caplog):
    """The first model uses float32 digits that the copies lack; the second multiplies in float32."""
    model, captures = tiny_model(), Captures(CPU)
    layer = model.model.layers[0].mlp
    plain = type(layer).forward

    def forward(states):
        if reads == "in float32":
            return plain(layer, states) * layer.up_proj.weight.float().mean()
        with torch.autocast("cpu", enabled=False):
            return plain(layer, states.float())

    layer.forward = forward
    with in_bfloat16(), caplog.at_level("INFO"):
        expected = results(model)
        with copied_weights(model, captures):
            assert all(map(torch.equal, results(model), expected))
        assert not computes_alike(model)
    assert captures.held == {}
    assert caplog.text.count("LlamaForCausalLM needs linear weights in float32") == 1


def test_a_weight_that_two_layers_share_has_one_copy():
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with in_bfloat16():
        expected = results(model)
        copies = WeightCopies(model)
        with copies.in_place():
            assert model.model.layers[1].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
            assert all(map(torch.equal, results(model), expected))
