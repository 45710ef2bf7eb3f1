import math

import pytest
import torch

from ppo_rlhf.core.checks import (
    check_prefix_mask,
    check_range,
    check_shape,
    compute_dtype,
    select,
)
from ppo_rlhf.core.errors import ConfigError, ShapeError

from .support import NAN


def test_a_message_says_where_what_was_given_the_rule_and_the_fix():
    with pytest.raises(ShapeError) as same:
        check_shape("shape_rewards", None, kl=torch.zeros(2, 3), mask=torch.zeros(3))
    assert str(same.value) == (
        "shape_rewards: got kl [2, 3], mask [3]; all must have the same shape. Cut or pad them to one shape first."
    )
    with pytest.raises(ConfigError) as given:
        check_range("f", above=0.0, at_most=1.0, top_p=1.5)
    assert str(given.value) == "f: top_p=1.5; it must be finite and > 0 and <= 1. Change top_p."
    with pytest.raises(ShapeError) as hole:
        check_prefix_mask("f", torch.tensor([[True, True], [False, True]]))
    assert "row 1 of mask is True after a False" in str(hole.value)
    assert "length_mask(lengths, width)" in str(hole.value)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_out_of_every_range(value: float):
    with pytest.raises(ConfigError, match="finite"):
        check_range("f", x=value)


def test_the_widest_float_type_wins_and_nothing_is_narrower_than_float32():
    half, single, double, whole = (
        torch.zeros(1, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64, torch.long)
    )
    assert compute_dtype(half, half) == compute_dtype(half, single) == compute_dtype(whole) == torch.float32
    assert compute_dtype(half, double) == compute_dtype(double, single) == compute_dtype(double) == torch.float64


def test_select_gives_zero_outside_the_mask_even_over_nan_and_blocks_its_gradient():
    x = torch.tensor([NAN, 2.0], requires_grad=True)
    selected = select(x, torch.tensor([False, True]), torch.float64)
    assert selected.tolist() == [0.0, 2.0]
    assert selected.dtype == torch.float64
    selected.sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]
