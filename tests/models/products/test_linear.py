"""Linear layers in float32 by oneDNN, against the same layers in float64 and by torch."""

import copy
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.products import linear, processors, rounded
from ppo_rlhf.models.products.linear import (
    FEWEST_WEIGHTS,
    FastConv1D,
    FastLinear,
    has_fast_products,
    is_plain_linear,
    use_fast_products,
)

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, ...]]:
    """Return the shapes of the products by oneDNN, wherever the tests run."""
    shapes: list[tuple[int, ...]] = []
    product = linear.times_transposed

    def watched(left, right, *others):
        shapes.append((*left.shape, len(right)))
        return product(left, right, *others)

    monkeypatch.setattr(linear, "times_transposed", watched)
    monkeypatch.setattr(linear, "is_faster", lambda: True)
    monkeypatch.setattr(rounded, "lacks_fast_instructions", lambda _: False)
    return shapes


def layer(kind: str, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    made = Conv1D(320, 256) if kind == "conv1d" else nn.Linear(256, 320, bias=bias)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made


def with_gradients(module: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    rows = rows.clone().requires_grad_()
    found = module(rows)
    found.square().sum().backward()
    return [found.detach(), rows.grad, *(p.grad for p in module.parameters())]


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 7, 256), (33, 256)])
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_products_and_gradients_are_those_worked_out_in_float64(asked, kind, bias, shape):
    plain = layer(kind, bias=bias)
    fast, wide = copy.deepcopy(plain), copy.deepcopy(plain).double()
    use_fast_products(fast)
    rows = torch.randn(shape)
    found, expected = with_gradients(fast, rows), with_gradients(wide, rows.double())
    assert len(asked) == 3  # forward, for the rows, for the weight
    for one, other, mine in zip(found, expected, with_gradients(plain, rows), strict=True):
        assert one.shape == other.shape
        assert one.stride() == mine.stride()
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


@needs_onednn
def test_nothing_is_computed_for_what_does_not_train(asked):
    fast = layer("linear")
    use_fast_products(fast)
    fast.requires_grad_(False)
    rows = torch.randn(5, 256, requires_grad=True)
    fast(rows).sum().backward()
    assert asked == [(5, 256, 320), (5, 320, 256)]
    assert rows.grad is not None
    with torch.no_grad():
        fast(rows)
    assert len(asked) == 3


@needs_onednn
@pytest.mark.parametrize("trains", ["rows", "weight", "both"])
def test_the_graph_keeps_what_a_gradient_needs_and_no_more(asked, trains):
    """Below adapters weights are frozen: to keep the rows of each layer would take as much memory as training it."""
    fast, kept = layer("linear", bias=False), []
    use_fast_products(fast)
    fast.weight.requires_grad_(trains != "rows")
    rows = torch.randn(5, 256, requires_grad=trains != "weight")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        product = fast(rows)
    assert asked
    assert kept == {"rows": [(320, 256)], "weight": [(5, 256)], "both": [(5, 256), (320, 256)]}[trains]
    product.sum().backward()


@needs_onednn
def test_whatever_it_is_not_for_is_left_to_torch(asked, monkeypatch):
    fast = layer("linear")
    use_fast_products(fast)
    rows = torch.randn(5, 256)
    fast(rows[:1])
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(rows).dtype == torch.bfloat16
    with monkeypatch.context() as switched:
        switched.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # as `torch.backends.mkldnn.enabled = False`
        fast(rows)
    small = nn.Linear(256, FEWEST_WEIGHTS // 256 - 1)
    use_fast_products(small)
    small(rows)
    fast.double()(rows.double())
    assert not asked


def test_layers_change_their_class_alone_and_subclasses_are_left_alone(asked):
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4), Other(4, 4), nn.LayerNorm(4))
    before = model.state_dict()
    use_fast_products(model)
    assert [type(part) for part in model] == [FastLinear, FastConv1D, Other, nn.LayerNorm]
    assert [is_plain_linear(part) for part in model] == [True, True, False, False]
    assert list(model.state_dict()) == list(before)
    use_fast_products(model)
    assert type(copy.deepcopy(model)[0]) is FastLinear


def test_only_processors_of_amd_take_it_without_avx512_for_packed_weights_alone(monkeypatch):
    def found(vendor: str, capability: str) -> list[bool]:
        monkeypatch.setattr(processors, "_vendor", lambda: vendor)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return [asked.__wrapped__() for asked in (linear.is_faster, linear.is_faster_packed)]

    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert found("AuthenticAMD", "AVX512") == [True, True]
    assert found("AuthenticAMD", "AVX2") == [False, True]
    assert found("AuthenticAMD", "DEFAULT") == [False, False]
    assert found("GenuineIntel", "AVX512") == found("GenuineIntel", "AVX2") == [False, False]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert found("AuthenticAMD", "AVX512") == [False, False]


def test_the_module_is_imported_where_torch_has_no_onednn(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    spec = importlib.util.spec_from_file_location("without_onednn", linear.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.is_plain_linear(nn.Linear(2, 2))


def test_models_that_do_not_gain_keep_their_classes(monkeypatch):
    monkeypatch.setattr(linear, "is_faster", lambda: False)
    monkeypatch.setattr(linear, "lacks_fast_instructions", lambda _: False)
    model = layer("linear")
    use_fast_products(model)
    assert type(model) is nn.Linear
    assert_close(model(torch.zeros(2, 256)), model.bias.expand(2, 320))


@needs_onednn
def test_a_model_has_fast_products_where_a_layer_is_large_enough_and_in_float32(asked, monkeypatch):
    large, small = nn.Sequential(nn.ReLU(), layer("conv1d")), nn.Sequential(nn.Linear(8, 8))
    assert not has_fast_products(large)
    for model in (large, small):
        use_fast_products(model)
    assert has_fast_products(large)
    assert not has_fast_products(small)
    assert not has_fast_products(copy.deepcopy(large).double())
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert not has_fast_products(large)
