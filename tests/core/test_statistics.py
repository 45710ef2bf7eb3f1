import math
import statistics

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.errors import CheckpointError, ShapeError
from ppo_rlhf.core.statistics import (
    RunningMoments,
    correlation,
    explained_variance,
    masked_mean,
    masked_variance,
    masked_whiten,
)

from .support import NAN, poison

HOLED = torch.tensor([[True, False, True], [False, True, False]])
X = torch.tensor([[1.0, NAN, 2.0], [NAN, 4.0, NAN]], dtype=torch.float64)  # selected: 1, 2, 4


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_mean_and_variances_of_one_two_four_by_hand():
    """Mean 7/3; squared distances 16/9, 1/9, 25/9 add up to 14/3: 14/9 over n, 7/3 over n − 1."""
    assert_close(masked_mean(X, HOLED), scalar(7 / 3), rtol=0.0, atol=1e-12)
    assert_close(masked_variance(X, HOLED, unbiased=False), scalar(14 / 9), rtol=0.0, atol=1e-12)
    assert_close(masked_variance(X, HOLED, unbiased=True), scalar(7 / 3), rtol=0.0, atol=1e-12)


def test_an_empty_mask_gives_zero_with_zero_gradients():
    x = torch.full((2, 2), NAN, requires_grad=True)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    results = [
        masked_mean(x, nothing),
        masked_variance(x, nothing, unbiased=True),
        masked_variance(x, nothing, unbiased=False),
        masked_whiten(x, nothing).sum(),
        explained_variance(x, x, nothing),
        correlation(x, x, nothing),
    ]
    for result in results:
        assert result.item() == 0.0
    sum(results).backward()
    assert (x.grad == 0).all()
    empty = torch.zeros(0)
    assert masked_mean(empty, empty.bool()).item() == masked_variance(empty, empty.bool(), unbiased=True).item() == 0.0
    assert masked_whiten(empty, empty.bool()).shape == (0,)


def test_whitening_by_hand():
    """1, 2, 4 with the Bessel variance 7/3: −4/3, −1/3, 5/3 over its root."""
    root = math.sqrt(7 / 3 + 1e-8)
    expected = torch.tensor([[-4 / 3, 0.0, -1 / 3], [0.0, 5 / 3, 0.0]], dtype=torch.float64) / root
    assert_close(masked_whiten(X, HOLED), expected, rtol=0.0, atol=1e-12)


def test_whitening_without_shift_keeps_the_mean_and_scales_about_it():
    """`shift_mean=False` adds the mean back (torchtune's argument has the opposite meaning)."""
    whitened = masked_whiten(X, HOLED, shift_mean=False)
    chosen = whitened[HOLED].tolist()
    assert statistics.fmean(chosen) == pytest.approx(7 / 3, abs=1e-12)
    assert statistics.variance(chosen) == pytest.approx(1.0, abs=1e-7)
    assert (whitened[~HOLED] == 0).all()


@pytest.mark.parametrize("value", [0.1, 100.1, -3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_numbers_gives_exactly_zero(value: float, dtype: torch.dtype):
    """For seven numbers 100.1 in float32, the rounding error of their mean times 1e4 = rsqrt(1e-8) is 0.08."""
    x = torch.full((7,), value, dtype=dtype)
    mask = torch.ones(7, dtype=torch.bool)
    assert (masked_whiten(x, mask) == 0).all()
    assert (masked_whiten(x, mask, shift_mean=False) == x).all()


def test_shards_whitened_with_global_moments_equal_the_whole():
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(8, 5, generator=generator) < 0.6
    x = poison(torch.randn(8, 5, generator=generator, dtype=torch.float64), mask)
    moments = (masked_mean(x, mask), masked_variance(x, mask, unbiased=True))
    for shift_mean in (True, False):
        whole = masked_whiten(x, mask, shift_mean=shift_mean)
        for given in (moments, tuple(float(m) for m in moments)):
            shards = [
                masked_whiten(x[rows], mask[rows], shift_mean=shift_mean, moments=given)
                for rows in (slice(0, 1), slice(1, 5), slice(5, 8))
            ]
            assert_close(torch.cat(shards), whole, rtol=0.0, atol=1e-12)


def test_explained_variance_by_hand():
    """Returns 1, 2, 4 (Var 14/9); residuals 0, 0, 1 (Var 2/9): 1 − 1/7."""
    values = torch.tensor([[1.0, NAN, 2.0], [NAN, 3.0, NAN]], dtype=torch.float64)
    assert_close(explained_variance(values, X, HOLED), scalar(6 / 7), rtol=0.0, atol=1e-12)


def test_explained_variance_of_returns_that_do_not_vary_is_zero():
    returns = torch.full((3, 3), 0.1)
    everything = torch.ones(3, 3, dtype=torch.bool)
    assert explained_variance(torch.randn(3, 3), returns, everything).item() == 0.0
    one = torch.zeros(3, 3, dtype=torch.bool)
    one[1, 1] = True
    assert explained_variance(torch.randn(3, 3), torch.randn(3, 3), one).item() == 0.0


def test_correlation_by_hand_does_not_depend_on_shift_and_scale_and_its_sign_does():
    """Returns 1, 2, 4 and values 1, 2, 3: Cov 1, Var 14/9 and 2/3, so 1 / √(28/27)."""
    values = torch.tensor([[1.0, NAN, 2.0], [NAN, 3.0, NAN]], dtype=torch.float64)
    expected = math.sqrt(27 / 28)
    for factor, shift in ((1.0, 0.0), (-3.0, 7.0), (1e-3, 100.0)):
        found = correlation(factor * values + shift, X, HOLED)
        assert_close(found, scalar(math.copysign(expected, factor)), rtol=0.0, atol=1e-9)
    assert_close(correlation(X, X, HOLED), scalar(1.0), rtol=0.0, atol=1e-12)


def test_correlation_of_tiny_numbers_in_float32_is_that_of_large_ones():
    """float32 can hold the variances, 1e-24, but not their product, which would make the correlation 0."""
    values, returns = torch.tensor([[1.0, 2.0, 3.0]]) * 1e-12, torch.tensor([[1.0, 2.0, 4.0]]) * 1e-12
    found = correlation(values, returns, torch.ones(1, 3, dtype=torch.bool))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(math.sqrt(27 / 28), rel=1e-5)


def test_correlation_is_never_beyond_one_by_rounding():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        x = torch.randn(1, 5, generator=generator)
        everything = torch.ones_like(x, dtype=torch.bool)
        assert 1.0 - 1e-5 < correlation(x, x, everything).item() <= 1.0
        assert -1.0 <= correlation(x, -x, everything).item() < -1.0 + 1e-5


def test_correlation_without_spread_on_either_side_is_zero():
    constant, everything = torch.full((3, 3), 0.1), torch.ones(3, 3, dtype=torch.bool)
    for pair in ((constant, torch.randn(3, 3)), (torch.randn(3, 3), constant)):
        assert correlation(*pair, everything).item() == 0.0
    one = torch.zeros(3, 3, dtype=torch.bool)
    one[1, 1] = True
    assert correlation(torch.randn(3, 3), torch.randn(3, 3), one).item() == 0.0


def test_unequal_shapes_are_refused():
    x, mask = torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool)
    for call in (
        lambda: masked_mean(x, mask),
        lambda: masked_variance(x, mask, unbiased=True),
        lambda: masked_whiten(x, mask),
        lambda: explained_variance(x, x, mask),
        lambda: correlation(x, x, mask),
        lambda: RunningMoments().update(x, mask),
    ):
        with pytest.raises(ShapeError, match=r"\[2, 3\].*\[2, 1\]"):
            call()


def test_running_moments_take_in_selected_numbers_only():
    moments = RunningMoments()
    moments.update(X, HOLED)
    assert (moments.count, moments.mean) == (3, pytest.approx(7 / 3))
    assert moments.variance == pytest.approx(7 / 3)


def test_running_moments_resume_from_their_state_bit_for_bit():
    import json

    numbers = torch.linspace(-1, 7, 40)
    straight, first, second = RunningMoments(), RunningMoments(), RunningMoments()
    straight.update(numbers[:13])
    straight.update(numbers[13:])
    first.update(numbers[:13])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(numbers[13:])
    assert second.state_dict() == straight.state_dict()
    assert isinstance(second.count, int)
    with pytest.raises(CheckpointError, match=r"load_state_dict.*\['kl_coef'\].*count, m2.*mean"):
        second.load_state_dict({"kl_coef": 0.1})


def test_whitening_numbers_whose_squares_overflow_float32_is_that_of_their_unit():
    unit = torch.tensor([[3.0, -1.0, 7.0], [2.0, 0.0, -4.0]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    assert_close(masked_whiten(unit * 1e30, mask), masked_whiten(unit, mask), rtol=1e-5, atol=1e-6)
