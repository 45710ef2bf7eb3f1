"""Compiled layers: the same numbers, in a form that fits all lengths and all layers."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.passes import compilation
from ppo_rlhf.passes.compilation import check_compiler, compile_layers, compiles
from ppo_rlhf.passes.forward import hidden_states
from ppo_rlhf.passes.gradient_checkpointing import enable_gradient_checkpointing, recomputing
from ppo_rlhf.passes.token_rows import right_padded
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("quick_compiler")

CPU = torch.device("cpu")
FIRST = ((5, 4), (7, 7), (20, 2))
OTHERS = ((9, 4, 2), (16, 7), (13, 13, 13), (30, 2, 11), (6, 5, 4, 3, 2), (10, 10))
"""Both: of different lengths, and all of one. No sum is a width of the models: torch would take them for one size."""


def states(model: PreTrainedModel, lengths: tuple[int, ...]) -> Tensor:
    rows = [[(3 + 7 * row + place) % 20 for place in range(length)] for row, length in enumerate(lengths)]
    return hidden_states(model.base_model, right_padded(rows, 0))


def gradients(model: PreTrainedModel, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    with recomputing(model):
        states(model, lengths).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "checkpointing"), [("gpt2", True), ("llama", False)])
def test_compiled_states_and_gradients_are_those_of_the_layers_as_they_are(kind: str, checkpointing: bool) -> None:
    plain, compiled = tiny_model(kind), tiny_model(kind)
    if checkpointing:
        enable_gradient_checkpointing(compiled)
    compile_layers(compiled)
    for lengths in FIRST[::2]:
        with torch.no_grad():
            assert_close(states(compiled, lengths), states(plain, lengths), rtol=1e-5, atol=1e-5)
        found, expected = gradients(compiled, lengths), gradients(plain, lengths)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    assert graphs()


@pytest.mark.slow
def test_neither_other_lengths_nor_more_layers_compile_anything_again() -> None:
    counted = []
    for depth in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        model = tiny_model("gpt2", n_layer=depth)
        compile_layers(model)
        for lengths in FIRST:
            gradients(model, lengths)
        counted.append(graphs())
        for lengths in OTHERS:
            gradients(model, lengths)
        counted.append(graphs())
    assert len(set(counted)) == 1
    assert counted[0] > 0


def test_a_torch_that_has_one_limit_of_compiled_forms_gets_that_one_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's `compile` has no `recompile_limit`."""
    calls = []

    def older(model: object, *, dynamic: bool | None = None, backend: str = "inductor") -> object:
        calls.append((dynamic, backend))
        return model

    compile_layers(tiny_model("gpt2"))  # newer torch takes the limit per layer
    assert torch.compiler.config.recompile_limit < compilation.MOST_FORMS
    monkeypatch.setattr(torch, "compile", older)
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_layers(tiny_model("gpt2"))
        assert torch.compiler.config.recompile_limit == compilation.MOST_FORMS
    assert calls == [(True, compilation.BACKEND)] * 2


def test_compiled_layers_keep_the_names_of_weights() -> None:
    model = tiny_model("gpt2")
    compile_layers(model)
    assert list(model.state_dict()) == list(tiny_model("gpt2").state_dict())


def test_a_model_that_does_not_say_which_modules_are_layers_is_refused() -> None:
    model = tiny_model("gpt2").base_model
    model._no_split_modules = None
    with pytest.raises(ModelError, match=r"ppo\.compile=true: GPT2Model"):
        compile_layers(model)


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_refused_with_torchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    check_compiler.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError) as caught:
        check_compiler(CPU)
    check_compiler.cache_clear()
    assert str(caught.value).startswith("ppo.compile=true: ")
    assert "no-such-compiler" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_compiler(CPU)  # with the machine's own compiler


def test_generate_goes_on_without_compiled_layers_where_nothing_can_be_compiled_and_says_so_once(monkeypatch, caplog):
    def refuse(_: torch.device) -> None:
        raise ConfigError("no C++ compiler")

    compiles.cache_clear()
    monkeypatch.setattr(compilation, "check_compiler", refuse)
    try:
        assert [compiles(CPU), compiles(CPU)] == [False, False]
        assert ["no C++ compiler" in record.getMessage() for record in caplog.records] == [True]
    finally:
        compiles.cache_clear()
