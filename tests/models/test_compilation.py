"""Compiled layers: the same numbers, in a form that fits all lengths and all layers, and gone outside their block."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models import compilation
from ppo_rlhf.models import forward as trunks
from ppo_rlhf.models.compilation import check_compiler, compile_layers, compiled_layers
from ppo_rlhf.models.forward import hidden_states, packing, packs
from ppo_rlhf.models.token_rows import right_padded
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("quick_compiler")

CPU = torch.device("cpu")
FIRST = ((5, 3), (11, 4, 7), (8, 8), (20, 2))
OTHERS = ((9, 4, 2), (16, 7), (13, 13, 13), (30, 2, 11), (29, 31), (6, 5, 4, 3, 2), (3, 2), (12, 25, 19, 7), (10, 10))
"""Both: of different lengths, and all of one."""


def states(model: PreTrainedModel, lengths: tuple[int, ...]) -> Tensor:
    rows = [[(3 + 7 * row + place) % 20 for place in range(length)] for row, length in enumerate(lengths)]
    return hidden_states(model.base_model, right_padded(rows, 0))


def gradients(model: PreTrainedModel, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    with packing(model):
        states(model, lengths).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("kind", "packed", "checkpointing"),
    [
        ("gpt2", True, False),
        ("gpt2", False, True),
        ("llama", False, False),
        pytest.param("llama", True, True, marks=pytest.mark.slow),
    ],
)
def test_compiled_states_and_gradients_are_those_of_the_layers_as_they_are(
    monkeypatch: pytest.MonkeyPatch, kind: str, packed: bool, checkpointing: bool
) -> None:
    monkeypatch.setattr(trunks, "packs", lambda _: packed)
    plain, compiled = tiny_model(kind), tiny_model(kind)
    compile_layers(compiled.base_model, checkpointing=checkpointing)
    for lengths in FIRST[:2]:
        with torch.no_grad():
            assert_close(states(compiled, lengths), states(plain, lengths), rtol=1e-5, atol=1e-5)
        found, expected = gradients(compiled, lengths), gradients(plain, lengths)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    assert graphs()


@pytest.mark.parametrize(
    ("kind", "packed"), [("llama", True), ("gpt2", False), pytest.param("gpt2", True, marks=pytest.mark.slow)]
)
def test_other_lengths_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch, kind: str, packed: bool) -> None:
    monkeypatch.setattr(trunks, "packs", lambda _: packed)
    model = tiny_model(kind)
    compile_layers(model.base_model)
    for lengths in FIRST:
        gradients(model, lengths)
    before = graphs()
    for lengths in OTHERS:
        gradients(model, lengths)
    assert graphs() == before > 0


def test_a_deep_model_compiles_no_more_than_a_shallow_one() -> None:
    counted = []
    for depth in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        model = tiny_model("llama", num_hidden_layers=depth)
        compile_layers(model.base_model)
        gradients(model, FIRST[1])
        counted.append(graphs())
    assert counted[0] == counted[1] > 0


def test_with_checkpointing_a_layer_keeps_its_input_alone() -> None:
    def kept(checkpointing: bool) -> int:
        model = tiny_model("gpt2", n_layer=4)
        compile_layers(model.base_model, checkpointing=checkpointing)
        assert packs(model.base_model)  # asked now: that keeps tensors of its own
        parameters = {p.data_ptr() for p in model.parameters()}
        numbers = []

        def count(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in parameters:
                numbers.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            states(model, FIRST[1])
        return sum(numbers)

    assert kept(True) < 0.3 * kept(False)


def test_outside_the_block_the_model_knows_nothing_of_it() -> None:
    plain, compiled = tiny_model("gpt2"), tiny_model("gpt2")
    compile_layers(compiled.base_model)
    ids = torch.tensor([[4, 5, 6, 7]])
    expected = plain(input_ids=ids).logits
    for model in (compiled, copy.deepcopy(compiled)):
        assert list(model.state_dict()) == list(plain.state_dict())
        assert not any("forward" in vars(module) for module in model.modules())
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert not graphs()
    with compiled_layers(compiled.base_model):
        compiled(input_ids=ids)
    assert graphs()


def test_a_copy_of_a_compiled_model_runs_its_own_weights_as_they_are() -> None:
    model = tiny_model("gpt2")
    compile_layers(model.base_model)
    before = states(model, FIRST[0]).detach()
    copied, compiled = copy.deepcopy(model), graphs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_close(states(copied, FIRST[0]).detach(), before, rtol=1e-5, atol=1e-5)
    assert graphs() == compiled
    assert not torch.allclose(states(model, FIRST[0]), before)


def test_weights_that_are_replaced_are_the_ones_computed_with_and_compile_nothing_anew() -> None:
    """As a frozen model's are that waits in the host's memory between its passes."""
    model = tiny_model("gpt2").requires_grad_(False)
    compile_layers(model.base_model)
    with torch.no_grad():
        states(model, FIRST[1])
        before = graphs()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(1.1 * parameter, requires_grad=False)
        assert_close(states(model, FIRST[1]), states(copy.deepcopy(model), FIRST[1]), rtol=1e-5, atol=1e-5)
    assert graphs() == before > 0


def test_the_layers_are_put_back_after_a_pass_that_fails() -> None:
    model = tiny_model("gpt2")
    compile_layers(model.base_model)
    with pytest.raises(IndexError):
        hidden_states(model.base_model, right_padded([[10_000]], 0))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_does_not_say_what_its_layers_are_is_refused() -> None:
    model = tiny_model("gpt2").base_model
    model._no_split_modules = None
    with pytest.raises(ModelError) as caught:
        compile_layers(model)
    assert str(caught.value) == (
        "ppo.compile=true: GPT2Model does not say which of its modules are layers (_no_split_modules); set it to false"
    )


def test_a_machine_without_a_compiler_is_refused_with_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    compilation._problem.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError) as caught:
        check_compiler(CPU)
    compilation._problem.cache_clear()
    assert str(caught.value).startswith("ppo.compile=true: torch cannot compile here (InvalidCxxCompiler: ")
    assert "no-such-compiler" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_with_a_compiler_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    compilation._problem.cache_clear()
    check_compiler(CPU)
