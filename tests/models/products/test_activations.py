"""GELU's tanh approximation by the logistic function, against the formula with tanh in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ppo_rlhf.models.products import activations
from ppo_rlhf.models.products.activations import FEWEST, PIECE, TanhGELU
from ppo_rlhf.training.memory.live_bytes import LiveBytes

TOLERANCES = {  # half a unit in the last place of numbers around 4, and what float32 adds up
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
}
SIZES = {"fewest": (1, FEWEST // 64, 64), "several pieces": (3, PIECE // 2 + 5)}


def expected_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and derivatives of x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), in float64."""
    x = x.detach().double()
    factor = math.sqrt(2 / math.pi)
    t = torch.tanh(factor * (x + 0.044715 * x**3))
    slope = factor * (1 + 3 * 0.044715 * x**2)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) * slope / 2


@pytest.fixture
def used(monkeypatch):
    """Count the calls of the code under test, so that no test passes by torch's own kernel."""
    calls = []
    own = activations._values
    monkeypatch.setattr(activations, "_values", lambda *args: (calls.append(1), own(*args))[1])
    return calls


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_the_formulas(used, dtype, shape):
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
    incoming = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    values = TanhGELU()(x)
    values.backward(incoming)
    expected, derivatives = expected_of(x)
    assert used == [1]
    assert values.dtype == x.grad.dtype == dtype
    assert_close(values.double(), expected, **TOLERANCES[dtype])
    twice = {name: 2 * tolerance for name, tolerance in TOLERANCES[dtype].items()}  # derivatives are rounded, too
    assert_close(x.grad.double(), incoming.double() * derivatives, **twice)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_pass_without_gradients_gives_the_same_bits(used, dtype):
    x = torch.randn(2, PIECE).to(dtype).requires_grad_()
    with_gradients = TanhGELU()(x)
    with torch.no_grad():
        without = TanhGELU()(x)
    assert torch.equal(with_gradients, without)
    assert with_gradients.requires_grad
    assert not without.requires_grad
    assert not TanhGELU()(x.detach()).requires_grad
    assert used == [1, 1, 1]


def test_large_numbers_have_their_limits_and_what_is_no_number_stays_alone(used):
    large = torch.tensor([1e4, 1e13, 1e25, 3e38])
    x = torch.full((FEWEST,), 0.5)
    x[:4], x[4:8], x[8] = large, -large, torch.nan
    x.requires_grad_()
    values = TanhGELU()(x)
    values.sum().backward()
    assert used == [1]
    assert torch.equal(values[:4], large)
    assert not values[4:8].any()
    assert torch.equal(x.grad[:4], torch.ones(4))
    assert not x.grad[4:8].any()
    assert values.isnan().nonzero().tolist() == x.grad.isnan().nonzero().tolist() == [[8]]


def test_float32_takes_no_memory_but_for_the_results(used):
    """A scratch of some MiB that came and went with each call left holes in the heap: 40 to 130 MiB of small's peak."""
    with LiveBytes() as live:
        x = torch.randn(2, PIECE, requires_grad=True)
        taken = live.peak_of(lambda: TanhGELU()(x))
        without = live.peak_of(lambda: TanhGELU()(x.detach()))
    assert used == [1, 1]
    assert (taken.total, without.total) == (2 * x.nbytes, x.nbytes)


@pytest.mark.parametrize(
    "x",
    [torch.randn(FEWEST - 1), torch.randn(FEWEST, dtype=torch.float64), torch.randn(2, FEWEST).t()],
    ids=["few", "float64", "not contiguous"],
)
def test_what_does_not_suit_is_left_to_torch(used, x):
    x.requires_grad_()
    values = TanhGELU()(x)
    values.sum().backward()
    found, x.grad = x.grad, None
    expected = nn.functional.gelu(x, approximate="tanh")
    expected.sum().backward()
    assert torch.equal(values, expected)
    assert torch.equal(found, x.grad)
    assert used == []
