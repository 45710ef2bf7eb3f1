"""Products of 16 bits without instructions for them, against the products of the rounded numbers in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.passes import packed_attention
from ppo_rlhf.models.passes.packed_attention import PackedLayout
from ppo_rlhf.models.products import linear, processors, rounded
from ppo_rlhf.models.products.linear import FastConv1D, FastLinear, is_plain_linear, use_fast_products
from ppo_rlhf.training.memory.live_bytes import counting
from tests.tiny_models import tiny_model

TYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def lacks(monkeypatch) -> dict[torch.dtype, bool]:
    """Let no type of 16 bits have instructions, wherever the tests run; a test may give some back."""
    lacking = dict.fromkeys(TYPES, True)
    monkeypatch.setattr(rounded, "FEWEST_ROWS", 3)
    for module in (rounded, linear, packed_attention):
        monkeypatch.setattr(module, "lacks_fast_instructions", lambda dtype: lacking.get(dtype, False))
    return lacking


@pytest.fixture
def asked(lacks, monkeypatch) -> list[tuple[int, ...]]:
    """Return the shapes of the rounded products of linear layers."""
    shapes: list[tuple[int, ...]] = []
    product = linear.rounded_linear

    def watched(rows, weight, *others):
        shapes.append((*rows.shape, len(weight)))
        return product(rows, weight, *others)

    monkeypatch.setattr(linear, "rounded_linear", watched)
    return shapes


def layer(kind: str, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    made = Conv1D(24, 40) if kind == "conv1d" else nn.Linear(40, 24, bias=bias)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made


def rounded_to(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().to(dtype).double() for tensor in tensors]


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """The nearest number of 16 bits, but for what a float32 sum is off."""
    assert found.dtype in TYPES
    assert found.shape == exact.shape
    allowed = torch.finfo(found.dtype).eps / 2 * exact.abs() + 1e-5 * exact.abs().max()
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("pieces", ["one piece", "pieces"])
@pytest.mark.parametrize("held", ["float32", "16 bits"])
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
@pytest.mark.parametrize("dtype", TYPES)
def test_products_and_gradients_are_those_of_the_rounded_numbers(asked, monkeypatch, dtype, kind, bias, held, pieces):
    """By autocast, with weights in float32, and in weights of 16 bits; sums are not rounded between pieces."""
    if pieces == "pieces":
        monkeypatch.setattr(rounded, "PIECE", 0)
        monkeypatch.setattr(rounded, "NARROWEST", 3)
    plain = layer(kind, bias=bias).to(dtype if held == "16 bits" else torch.float32)
    fast = copy.deepcopy(plain)
    use_fast_products(fast)
    assert type(fast) is (FastConv1D if kind == "conv1d" else FastLinear)
    rows = torch.randn(2, 7, 40).to(plain.weight.dtype).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=held == "float32"):
        found = fast(rows)
    upstream = torch.randn(2, 7, 24).to(dtype)
    found.backward(upstream)
    x, w, g = rounded_to(dtype, rows, plain.weight, upstream)
    w = w if kind == "conv1d" else w.T
    b = rounded_to(dtype, plain.bias)[0] if plain.bias is not None else 0.0
    assert asked == [(2, 7, 40, 24)]
    assert_rounded_once(found.detach(), x @ w + b)
    assert rows.grad.dtype == rows.dtype
    assert_rounded_once(rows.grad.to(dtype), g @ w.T)
    weights = x.flatten(0, 1).T @ g.flatten(0, 1)
    assert fast.weight.grad.dtype == fast.weight.dtype
    assert fast.weight.grad.stride() == fast.weight.stride()
    assert_rounded_once(fast.weight.grad.to(dtype), weights if kind == "conv1d" else weights.T)
    if bias:
        assert_rounded_once(fast.bias.grad.to(dtype), g.sum((0, 1)))


def test_nothing_is_computed_for_what_does_not_train(asked, monkeypatch):
    products = []
    product = linear.rounded_times_transposed
    monkeypatch.setattr(linear, "rounded_times_transposed", lambda *of: products.append(1) or product(*of))
    fast = layer("linear").requires_grad_(False)
    use_fast_products(fast)
    rows = torch.randn(5, 40, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        fast(rows).sum().backward()
    assert len(products) == 2
    assert rows.grad is not None


def test_whatever_it_is_not_for_is_left_to_torch(asked, lacks):
    fast = layer("linear")
    use_fast_products(fast)
    rows = torch.randn(5, 40)
    fast(rows)
    with torch.autocast("cpu", torch.bfloat16):
        fast(rows[:2])
    lacks[torch.bfloat16] = False
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(rows).dtype == torch.bfloat16
    fast.double()(rows.double())
    with pytest.raises(RuntimeError, match="dtype"):
        fast.to(torch.float16)(rows)  # as torch's own layer
    assert not asked
    fast(rows.half())
    assert asked


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", [(5, 2, 3), (4, 4)])
def test_attention_is_that_of_the_rounded_numbers(lacks, dtype, lengths):
    torch.manual_seed(1)
    query, key, value = (torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with torch.autocast("cpu", dtype):
        found = PackedLayout.of(lengths).attend(query, key, value, None)
    upstream = torch.randn(found.shape).to(dtype)
    found.backward(upstream)
    q, k, v = (x.requires_grad_() for x in rounded_to(dtype, query, key, value))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part].repeat_interleave(2, 1)) / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part].repeat_interleave(2, 1))
        assert_rounded_once(found.detach()[part], exact.detach())
        exact.backward(upstream[part].double())
        start += length
    for mine, wide in ((query, q), (key, k), (value, v)):
        assert mine.grad.dtype == torch.float32
        assert_rounded_once(mine.grad.to(dtype), wide.grad)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_computes_as_with_torchs_own_products(asked, lacks, kind):
    model, ids = tiny_model(kind), torch.arange(12).view(2, 6) + 3
    use_fast_products(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=ids, use_cache=False).logits
        rounded = len(asked)
        lacks.clear()
        plain = model(input_ids=ids, use_cache=False).logits
    assert rounded == len(asked) == sum(is_plain_linear(module) for module in model.modules())
    assert found.dtype == plain.dtype
    assert (found - plain).abs().max() <= 0.02 * plain.abs().max()


@pytest.mark.parametrize("trains", ["rows", "weight", "both"])
def test_the_graph_keeps_what_a_gradient_needs_and_no_more(asked, trains):
    """Below adapters weights are frozen: to keep the rows of each layer would take as much memory as training it."""
    fast, kept = layer("linear", bias=False).bfloat16(), []
    use_fast_products(fast)
    fast.weight.requires_grad_(trains != "rows")
    rows = torch.randn(5, 40, dtype=torch.bfloat16, requires_grad=trains != "weight")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        product = fast(rows)
    assert kept == {"rows": [(24, 40)], "weight": [(5, 40)], "both": [(5, 40), (24, 40)]}[trains]
    product.sum().backward()


def test_weights_that_lie_in_no_order_and_layers_without_outputs_compute_too(lacks):
    spread = torch.randn(6, 8, dtype=torch.bfloat16)[::2, ::2].requires_grad_()
    rows, nothing = torch.randn(3, 4, dtype=torch.bfloat16), torch.zeros(0, 4, dtype=torch.bfloat16, requires_grad=True)
    for weight in (spread, nothing):
        found = linear.rounded_linear(rows, weight, None, torch.bfloat16)
        found.sum().backward()
        assert_close(found, (rows.double() @ weight.detach().double().T).bfloat16(), rtol=2**-7, atol=1e-5)
        assert torch.equal(weight.grad, rows.double().sum(0).bfloat16().expand_as(weight))


def test_memory_that_is_kept_is_float32s_on_the_cpu_whatever_the_defaults_are_and_never_large(lacks, monkeypatch):
    monkeypatch.setattr(rounded, "_rooms", rounded._Rooms())
    monkeypatch.setattr(rounded, "LARGEST_KEPT", 300)
    rows, weight = torch.randn(20, 10, dtype=torch.bfloat16), torch.randn(31, 10, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            linear.rounded_linear(rows, weight, None, torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: (x.numel(), x.dtype, x.is_inference()) for name, x in rounded._rooms.held.items()} == {
        "left": (200, torch.float32, False)
    }


def test_no_more_than_the_weight_and_a_piece_is_held_in_float32(lacks, monkeypatch):
    monkeypatch.setattr(rounded, "PIECE", 2**12)
    with counting() as live, torch.no_grad():
        rows, weight = torch.empty(4096, 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.bfloat16)
        peak = live.peak_of(lambda: linear.rounded_linear(rows, weight, None, torch.bfloat16))
    result, wide, piece = 4096 * 64 * 2, 64 * 64 * 4, 128 * 64 * 4
    assert result < peak.total <= result + wide + 2 * piece


def test_a_cpu_that_stands_in_for_a_gpu_lacks_nothing(monkeypatch):
    monkeypatch.setattr(processors, "has_instructions", lambda _: False)
    assert processors.lacks_fast_instructions(torch.bfloat16)
    with processors.standing_in_for_a_gpu():
        assert not processors.lacks_fast_instructions(torch.bfloat16)
    assert processors.lacks_fast_instructions(torch.bfloat16)
    assert not processors.lacks_fast_instructions(torch.float32)


@pytest.mark.parametrize(
    ("vendor", "capabilities", "slow"),
    [
        ("GenuineIntel", {"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, True),
        ("GenuineIntel", {"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, False),
        ("GenuineIntel", {"avx512_bf16": True, "avx512_fp16": False, "amx_bf16": False}, False),  # Cooper Lake
        ("AuthenticAMD", {"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, False),
        ("", {}, False),
    ],
)
def test_instructions_for_bfloat16_are_slow_on_intels_without_amx(monkeypatch, vendor, capabilities, slow):
    monkeypatch.setattr(processors, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(processors, "has_instructions", lambda _: True)
    monkeypatch.setattr(processors, "_has_slow_ones", processors._has_slow_ones.__wrapped__)
    assert processors.lacks_fast_instructions(torch.bfloat16) is slow
    assert not processors.lacks_fast_instructions(torch.float16)


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"avx512_f": True, "avx512_bf16": False}, False),  # Skylake to Ice Lake
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"avx512_f": False, "avx512_bf16": False}, True),  # whatever it is, oneDNN knows it
        ({"bf16": True}, True),  # ARM
    ],
)
def test_avx512_without_instructions_for_bfloat16_has_none_though_onednn_says_so(monkeypatch, capabilities, has):
    operators = {"_is_mkldnn_bf16_supported": lambda: True, "_is_mkldnn_fp16_supported": lambda: True}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert processors.has_instructions.__wrapped__(torch.bfloat16) is has
    assert processors.has_instructions.__wrapped__(torch.float16)


@pytest.mark.parametrize("supported", [False, True])
def test_onednn_is_asked_about_the_type_and_without_it_nothing_is_known(monkeypatch, supported):
    asked = processors.has_instructions.__wrapped__
    operators = {"_is_mkldnn_bf16_supported": lambda: supported, "_is_mkldnn_fp16_supported": lambda: not supported}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert (asked(torch.bfloat16), asked(torch.float16)) == (supported, not supported)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert asked(torch.bfloat16)
    assert asked(torch.float16)
