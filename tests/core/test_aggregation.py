import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.aggregation import aggregate_loss, aggregation_count
from ppo_rlhf.core.errors import ConfigError, ShapeError
from ppo_rlhf.core.option_names import LOSS_AGGREGATIONS

from .support import NAN, poison, prefix_mask

# rows of 2, 0, 3 and 1 real tokens
LOSS = torch.tensor([[1.0, 2.0, NAN], [NAN, NAN, NAN], [3.0, 4.0, 8.0], [10.0, NAN, NAN]], dtype=torch.float64)
MASK = prefix_mask([2, 0, 3, 1], 3)


@pytest.mark.parametrize(
    ("mode", "expected", "count"),
    [
        ("token_mean", 28 / 6, 6),
        ("seq_mean_token_sum", (3 + 15 + 10) / 3, 3),
        ("seq_mean_token_mean", (1.5 + 5 + 10) / 3, 3),
        ("token_sum_fixed_length", 28 / (3 * 3), 9),
    ],
)
def test_each_mode_by_hand(mode: str, expected: float, count: int):
    """A row without tokens does not count as a sequence."""
    assert aggregate_loss(LOSS, MASK, mode).item() == pytest.approx(expected, abs=1e-12)
    assert aggregation_count(MASK, mode).item() == count


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", [1 / 6, 1 / 9, 1 / 3]),
        ("token_sum_fixed_length", [1 / 9, 1 / 9, 1 / 9]),
    ],
)
def test_gradients_are_the_weights_of_the_mode_and_zero_in_padding(mode: str, weights: list[float]):
    loss = LOSS.clone().requires_grad_()
    aggregate_loss(loss, MASK, mode).backward()
    rows = torch.tensor([weights[0], 0.0, *weights[1:]], dtype=torch.float64)
    assert_close(loss.grad, rows[:, None] * MASK, rtol=0.0, atol=1e-12)


def minibatch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [7, 1, 3, 0, 5, 2, 7, 4]
    mask = prefix_mask(lengths, 7)
    return poison(torch.randn(8, 7, generator=generator, dtype=torch.float64), mask), mask


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_trimming_and_reordering_micro_batches_changes_nothing(mode: str):
    """Micro-batches are sorted by length and cut to their longest row, as in the update."""
    loss, mask = minibatch(1)
    expected = aggregate_loss(loss, mask, mode).item()
    count = int(aggregation_count(mask, mode, fixed_length=7))
    order = torch.argsort(mask.sum(dim=1), descending=True)
    total = 0.0
    for rows in (order[:3], order[3:6], order[6:]):
        width = max(1, int(mask[rows].sum(dim=1).max()))
        total += aggregate_loss(loss[rows, :width], mask[rows, :width], mode, denominator=count).item()
    assert total == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("denominator", [None, 0, 5])
def test_an_empty_mask_gives_zero_with_zero_gradient(mode: str, denominator: int | None):
    loss = torch.full((2, 3), NAN, requires_grad=True)
    result = aggregate_loss(loss, torch.zeros(2, 3, dtype=torch.bool), mode, denominator)
    result.backward()
    assert result.item() == 0.0
    assert (loss.grad == 0).all()


def test_half_precision_is_summed_in_float32():
    """Sum 4096 ones: a sum in bfloat16 would stop at 256."""
    loss = torch.ones(1, 4096, dtype=torch.bfloat16)
    total = aggregate_loss(loss, torch.ones(1, 4096, dtype=torch.bool), "seq_mean_token_sum")
    assert total.dtype == torch.float32
    assert total.item() == 4096.0


def test_wrong_options_and_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"loss_aggregation='mean'.*token_mean, seq_mean"):
        aggregate_loss(LOSS, MASK, "mean")
    with pytest.raises(ConfigError, match=r"denominator=-1.*>= 0"):
        aggregate_loss(LOSS, MASK, denominator=-1)
    with pytest.raises(ShapeError, match=r"token_loss \[4, 3\], mask \[3, 3\]"):
        aggregate_loss(LOSS, MASK[:3])
