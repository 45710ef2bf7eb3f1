"""Packed weights while sampling: the products of float64 and of autocast, and models that are as before behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ppo_rlhf.models.adapters import LoraSettings, with_adapter
from ppo_rlhf.models.products import packed_weights, rounded
from ppo_rlhf.models.products.linear import is_plain_linear
from ppo_rlhf.models.products.processors import has_instructions
from ppo_rlhf.training.generation.responses import SamplingSettings, generate_responses
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

MODELS = {
    "gpt2": lambda: tiny_model("gpt2"),  # its output layer shares the embedding
    "gpt2 untied": lambda: tiny_model("gpt2", tie_word_embeddings=False),
    "llama": lambda: tiny_model("llama"),
    "llama tied": lambda: tiny_model("llama", tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def _every_layer_wherever_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "is_faster_packed", lambda: True)
    monkeypatch.setattr(packed_weights, "FEWEST_WEIGHTS", 0)


@pytest.fixture(params=[False, True], ids=["by instructions", "rounded"])
def sixteen_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products in bfloat16 be those of instructions, where there are some, and those without."""
    if not request.param and not has_instructions(torch.bfloat16):
        pytest.skip("this processor has no instructions for bfloat16")
    for module in (packed_weights, rounded):
        monkeypatch.setattr(module, "lacks_fast_instructions", lambda dtype: request.param and dtype.itemsize == 2)


class Rounded(nn.Linear):
    """A layer that does more with its weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.round())


def logits(model: nn.Module, rows: int) -> torch.Tensor:
    ids = torch.arange(rows * 3).view(rows, 3) % 10 + 3
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def packed(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if "forward" in module.__dict__}


def plain_linear(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if is_plain_linear(module)}


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_worked_out_in_float64_also_after_the_weights_changed(name: str, rows: int):
    model, wide = MODELS[name](), MODELS[name]().double()
    for _ in range(2):
        with packed_weights.packed_weights(model):
            assert packed(model) == plain_linear(model)
            found = logits(model, rows)
        assert not packed(model)
        assert_close(found.double(), logits(wide, rows), rtol=1e-5, atol=1e-6)
        halved(model), halved(wide)


@pytest.mark.usefixtures("sixteen_bits")
@pytest.mark.parametrize("name", MODELS)
def test_logits_under_autocast_are_as_far_from_float64_as_without_packing(name: str):
    model, expected = MODELS[name](), logits(MODELS[name]().double(), 5)
    with torch.autocast("cpu", torch.bfloat16):
        plain = logits(model, 5)
        with packed_weights.packed_weights(model):
            assert packed(model) == plain_linear(model)
            found = logits(model, 5)
    assert found.dtype == plain.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 1.5 * (plain - expected).abs().max()
    assert (plain - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_that_two_layers_share_are_copied_once(monkeypatch: pytest.MonkeyPatch):
    model, copies = tiny_model("llama"), []
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    pack = packed_weights._pack
    monkeypatch.setattr(packed_weights, "_pack", lambda *of: copies.append(pack(*of)) or copies[-1])
    with packed_weights.packed_weights(model):
        pass
    assert len(copies) == len(plain_linear(model)) - 1
    assert sorted(packed_weights.packed_sizes(model, torch.float32)) == sorted(4 * copy.numel() for copy in copies)


def test_weights_below_adapters_are_not_copied():
    model = with_adapter(tiny_model(), LoraSettings(2, 4, "all-linear"), torch.Generator().manual_seed(1))
    with packed_weights.packed_weights(model):
        assert {layer.weight.requires_grad for layer in packed(model)} == {True}
        assert len(packed(model)) == 2 * 2 * 7  # A and B of seven layers in each of two blocks
    assert len(packed_weights.packed_sizes(model, torch.float32)) == 2 * 2 * 7


def test_small_layers_other_types_and_forwards_of_somebody_else_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    own = attention.q_proj.forward = attention.q_proj.forward  # as accelerate's hooks do
    other = model.model.layers[1].self_attn.o_proj = Rounded(16, 16, bias=False)
    monkeypatch.setattr(packed_weights, "FEWEST_WEIGHTS", attention.q_proj.weight.numel())
    with packed_weights.packed_weights(model):
        assert not {attention.k_proj, other} & packed(model)
        assert attention.q_proj.forward is own
        assert attention.o_proj in packed(model)
    assert attention.q_proj.forward is own
    assert packed(model) == {attention.q_proj}
    with packed_weights.packed_weights(model.double()):
        assert packed(model) == {attention.q_proj}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch's own, of whoever switches oneDNN off
def test_nothing_is_packed_where_another_library_is_as_fast_or_onednn_is_switched_off(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    monkeypatch.setattr(packed_weights, "lacks_fast_instructions", lambda _: False)
    with torch.backends.mkldnn.flags(enabled=False), packed_weights.packed_weights(model):
        assert not packed(model)
    with torch.autocast("cpu", torch.float16), packed_weights.packed_weights(model):
        assert not packed(model)
    monkeypatch.setattr(packed_weights, "is_faster_packed", lambda: False)
    with packed_weights.packed_weights(model):
        assert not packed(model)
    assert packed_weights.packed_sizes(model, torch.float32) == []


@pytest.mark.parametrize("where", ["_pack", "within"])
def test_after_an_error_the_layers_compute_as_before(where: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    expected = logits(model, 2)
    if where == "_pack":
        pack, calls = packed_weights._pack, []

        def third_fails(*of: object) -> torch.Tensor:
            calls.append(of)
            if len(calls) == 3:
                raise RuntimeError("no memory")
            return pack(*of)

        monkeypatch.setattr(packed_weights, "_pack", third_fails)

    def fail() -> None:
        assert where == "within"
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), packed_weights.packed_weights(model):
        fail()
    assert not packed(model)
    assert torch.equal(logits(model, 2), expected)


def test_the_static_engine_samples_from_packed_weights_and_its_oracles_do_not(monkeypatch: pytest.MonkeyPatch):
    products = []
    product = packed_weights._product
    monkeypatch.setattr(packed_weights, "_product", lambda *of: products.append(1) or product(*of))
    settings = SamplingSettings(6, 0.9, 0, 1.0, (2,), 2)
    uniforms = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    prompts = [[4, 7], [5], [9, 3, 8], [6, 6]]
    wide = generate_responses(tiny_model("gpt2").double(), prompts, uniforms, settings)
    assert not products
    for engine in ("static", "plain", "hf"):
        found = generate_responses(tiny_model("gpt2"), prompts, uniforms, settings, engine=engine)
        assert torch.equal(found.response_ids, wide.response_ids)
        assert_close(found.sampler_logprobs.double(), wide.sampler_logprobs.double(), rtol=1e-5, atol=1e-5)
        assert bool(products) == (engine == "static")
        products.clear()


@pytest.mark.usefixtures("sixteen_bits")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_autocast_a_model_that_nobody_asked_before_samples_from_large_layers_packed_and_small_ones_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """What gives a model's logits is found out without autocast, so before the layers give 16 bits."""
    settings, uniforms = SamplingSettings(4, 1.0, 0, 1.0, (2,), 2), torch.full((2, 4), 0.5, dtype=torch.float64)
    monkeypatch.setattr(packed_weights, "FEWEST_WEIGHTS", 16 * 16 + 1)  # the attention's output has one less
    with torch.autocast("cpu", torch.bfloat16):
        found = generate_responses(tiny_model(kind), [[4, 7], [5]], uniforms, settings)
        plain = generate_responses(tiny_model(kind), [[4, 7], [5]], uniforms, settings, engine="plain")
    assert torch.equal(found.response_ids[:, 0], plain.response_ids[:, 0])
    assert_close(found.sampler_logprobs[:, 0], plain.sampler_logprobs[:, 0], rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("sixteen_bits")
def test_looking_for_the_layers_leaves_nothing_in_the_cache_of_an_autocast_around_it():
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        with packed_weights.packed_weights(model):
            pass
        with torch.no_grad():
            model.lm_head.weight.zero_()  # a copy in the cache would not notice
            assert not nn.functional.linear(torch.ones(1, 16), model.lm_head.weight).any()


def test_where_bfloat16_is_rounded_the_copies_hold_the_rounded_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_weights, "lacks_fast_instructions", lambda dtype: dtype == torch.bfloat16)
    model, held = tiny_model(), []
    pack = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: held.append(weight) or pack(weight))
    with torch.autocast("cpu", torch.bfloat16), packed_weights.packed_weights(model):
        pass
    assert {weight.dtype for weight in held} == {torch.float32}
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in held)
    assert sorted(packed_weights.packed_sizes(model, torch.bfloat16)) == sorted(4 * weight.numel() for weight in held)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_rows_are_compiled_in_sixteen_bits_and_where_products_in_float32_are_onednns(monkeypatch, is_fast, packs):
    """On AMD's processors: with AVX-512 all products are, with AVX2 those with packed weights."""
    monkeypatch.setattr(packed_weights, "has_fast_products", lambda _: is_fast)
    monkeypatch.setattr(packed_weights, "is_faster_packed", lambda: packs)
    model = tiny_model()

    def are_compiled(model: nn.Module) -> bool:
        with packed_weights.packed_weights(model) as compiled:
            return compiled

    assert are_compiled(model) is (is_fast or packs)
    with torch.autocast("cpu", torch.bfloat16):
        assert are_compiled(model)
    assert not are_compiled(tiny_model().to("meta"))
    for filled in (False, True):
        monkeypatch.setattr(packed_weights, "fills_rows", lambda _, filled=filled: filled)
        assert are_compiled(model.bfloat16()) is (filled or is_fast)
