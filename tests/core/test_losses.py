import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError, ShapeError
from ppo_rlhf.core.importance_weights import importance_weights
from ppo_rlhf.core.losses import clipped_policy_loss, clipped_value_loss, masked_policy_loss

from .support import NAN, poison, prefix_mask

ONE = torch.ones(1, 1, dtype=torch.bool)


def one(x: float) -> Tensor:
    return torch.tensor([[x]], dtype=torch.float64)


def policy_token(ratio: float, advantage: float, **options: float) -> tuple[float, float, float]:
    """Loss, gradient with respect to logp, and clipfrac of a single token with the given ratio."""
    logp = one(math.log(ratio) - 1.0).requires_grad_()
    result = clipped_policy_loss(logp, one(-1.0), one(advantage), ONE, **options)
    result.loss.backward()
    return result.loss.item(), logp.grad.item(), result.clipfrac.item()


# ratio, advantage, options, loss, gradient; where the gradient is not 0 it is −A · ratio
POLICY_REGIMES = {
    "inside, A > 0": (1.1, 2.0, {}, -2.2, -2.2),
    "inside, A < 0": (0.9, -2.0, {}, 1.8, 1.8),
    "above, A > 0: clipped": (1.5, 2.0, {}, -2.4, 0.0),
    "above, A < 0: not clipped": (1.5, -2.0, {}, 3.0, 3.0),
    "below, A > 0: not clipped": (0.5, 2.0, {}, -1.0, -1.0),
    "below, A < 0: clipped": (0.5, -2.0, {}, 1.6, 0.0),
    "clip higher lets more through": (1.25, 2.0, {"cliprange_high": 0.28}, -2.5, -2.5),
    "clip higher clips above": (1.5, 2.0, {"cliprange_high": 0.28}, -2.56, 0.0),
    "clip higher leaves the lower side": (0.75, -2.0, {"cliprange_high": 0.28}, 1.6, 0.0),
    "wide clip": (1.5, 2.0, {"cliprange": 0.6}, -3.0, -3.0),
    "dual clip caps A < 0": (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
    "dual clip below its cap": (2.5, -2.0, {"dual_clip": 3.0}, 5.0, 5.0),
    "dual clip leaves A > 0": (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),
    "dual clip leaves the lower clip": (0.5, -2.0, {"dual_clip": 3.0}, 1.6, 0.0),
    "no advantage": (1.5, 0.0, {"dual_clip": 3.0}, 0.0, 0.0),
}


@pytest.mark.parametrize("regime", POLICY_REGIMES)
def test_policy_loss_and_gradient_in_closed_form(regime: str):
    ratio, advantage, options, loss, gradient = POLICY_REGIMES[regime]
    actual_loss, actual_gradient, _ = policy_token(ratio, advantage, **options)
    assert actual_loss == pytest.approx(loss, abs=1e-12)
    assert actual_gradient == pytest.approx(gradient, abs=1e-12)


def test_policy_statistics_by_hand():
    """Log-ratios 0.3, −0.1 and 0.2 on real tokens: approxkl is half the mean square, ratio the mean exponential."""
    mask = prefix_mask([2, 1], 2)
    old = torch.tensor([[-1.0, -2.0], [-3.0, NAN]], dtype=torch.float64)
    log_ratio = torch.tensor([[0.3, -0.1], [0.2, NAN]], dtype=torch.float64)
    result = clipped_policy_loss(old + log_ratio, old, torch.ones(2, 2, dtype=torch.float64), mask)
    assert result.approxkl.item() == pytest.approx(0.5 * (0.09 + 0.01 + 0.04) / 3, abs=1e-12)
    assert result.ratio.item() == pytest.approx((math.exp(0.3) + math.exp(-0.1) + math.exp(0.2)) / 3, abs=1e-12)
    assert result.clipfrac.item() == pytest.approx(2 / 3, abs=1e-12)
    assert result.loss.item() == pytest.approx(-(1.2 + math.exp(-0.1) + 1.2) / 3, abs=1e-12)
    assert not any(x.requires_grad for x in result[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_before_any_update_the_ratio_is_exactly_one_in_every_dtype(dtype: torch.dtype):
    """The first ratio is exactly 1, and the loss is minus the mean advantage.

    With 997 tokens, a mean computed with a rounded reciprocal would not be 1.
    """
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(1, 997, generator=generator).to(dtype).requires_grad_()
    advantages = torch.randn(1, 997, generator=generator).to(dtype)
    result = clipped_policy_loss(logp, logp.detach().clone(), advantages, torch.ones(1, 997, dtype=torch.bool))
    assert result.ratio.item() == 1.0
    assert result.approxkl.item() == result.clipfrac.item() == 0.0
    assert result.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.loss.item() == pytest.approx(-advantages.double().mean().item(), abs=1e-6)
    result.loss.backward()
    assert_close(logp.grad.double(), -advantages.double() / 997, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-7)


def test_a_huge_log_ratio_is_clamped_before_exp_and_stays_finite():
    logp = torch.tensor([[400.0, -400.0]], requires_grad=True)
    result = clipped_policy_loss(logp, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool())
    result.loss.backward()
    assert result.loss.item() == pytest.approx(math.exp(20) / 2, rel=1e-6)
    assert result.approxkl.item() == pytest.approx(0.5 * 400.0**2)
    assert logp.grad.tolist() == [[0.0, 0.0]]


def value_token(value: float, old: float, target: float, cliprange_value: float | None) -> tuple[float, float, float]:
    values = one(value).requires_grad_()
    result = clipped_value_loss(values, one(old), one(target), ONE, cliprange_value=cliprange_value)
    result.loss.backward()
    return result.loss.item(), values.grad.item(), result.clipfrac.item()


# value, old value, return, cliprange_value -> loss, gradient, clipfrac
VALUE_REGIMES = {
    "inside the clip": (1.1, 1.0, 2.0, 0.2, 0.405, -0.9, 0.0),
    "moved past the clip towards the return": (1.5, 1.0, 2.0, 0.2, 0.32, 0.0, 1.0),
    "moved past the clip away from the return": (0.5, 1.0, 2.0, 0.2, 1.125, -1.5, 0.0),
    "moved down past the clip towards the return": (0.0, 1.0, -2.0, 0.2, 3.92, 0.0, 1.0),
    "no clipping": (1.5, 1.0, 2.0, None, 0.125, -0.5, 0.0),
    "at the return": (2.0, 2.0, 2.0, 0.2, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("regime", VALUE_REGIMES)
def test_value_loss_and_gradient_in_closed_form(regime: str):
    """½ (V − R)² with gradient V − R, or ½ (V_old ± c − R)² with gradient 0 where that is larger."""
    *arguments, loss, gradient, clipfrac = VALUE_REGIMES[regime]
    actual = value_token(*arguments)
    assert actual == pytest.approx((loss, gradient, clipfrac), abs=1e-12)


def batch(seed: int, rows: int = 5, width: int = 6) -> tuple[list[Tensor], Tensor]:
    """Three float64 tensors with NaN in padding, and their mask; the spread reaches all clip regimes."""
    generator = torch.Generator().manual_seed(seed)
    mask = prefix_mask([6, 1, 3, 0, 4][:rows], width)
    base = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    moved = base + 0.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    third = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return [poison(x, mask) for x in (moved, base, third)], mask


LOSSES = {
    "policy": lambda x, y, z, mask, **options: clipped_policy_loss(x, y, z, mask, dual_clip=1.5, **options),
    "value": clipped_value_loss,
    "masked policy": lambda x, y, z, mask, **options: masked_policy_loss(x, y, z, mask, **BAND, **options),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_zero_with_zero_gradients(name: str):
    x = torch.full((2, 3), NAN, requires_grad=True)
    result = LOSSES[name](x, x.detach(), x.detach(), torch.zeros(2, 3, dtype=torch.bool))
    result.loss.backward()
    assert [r.item() for r in result] == [0.0] * len(result)
    assert (x.grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_on_a_real_token_is_not_hidden(name: str):
    (x, y, z), mask = batch(5)
    x[0, 0] = NAN
    assert LOSSES[name](x, y, z, mask).loss.isnan()


def test_gradients_agree_with_finite_differences():
    (x, y, z), mask = batch(6)
    x = x.masked_fill(~mask, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: clipped_policy_loss(t, y, z, mask, cliprange_high=0.3, dual_clip=2.0)[0], x
    )
    assert torch.autograd.gradcheck(lambda t: clipped_value_loss(t, y, z, mask)[0], x)
    assert torch.autograd.gradcheck(lambda t: masked_policy_loss(t, y, z, mask, **BAND)[0], x)


def test_wrong_options_and_shapes_are_refused():
    x, mask = torch.zeros(2, 3), prefix_mask([3, 1], 3)
    for option in ({"cliprange": 0.0}, {"cliprange_high": -0.1}, {"dual_clip": 1.0}):
        with pytest.raises(ConfigError, match=r"clipped_policy_loss: \w+=.*> "):
            clipped_policy_loss(x, x, x, mask, **option)
    with pytest.raises(ConfigError, match=r"clipped_value_loss: cliprange_value=0\.0"):
        clipped_value_loss(x, x, x, mask, cliprange_value=0.0)
    for band in ({"low": -0.1, "high": 2.0}, {"low": 1.0, "high": 2.0}, {"low": 0.5, "high": 1.0}):
        with pytest.raises(ConfigError, match=r"masked_policy_loss: (low|high)=.*finite and "):
            masked_policy_loss(x, x, x, mask, **band)
    for loss in (clipped_policy_loss, clipped_value_loss, LOSSES["masked policy"]):
        with pytest.raises(ConfigError, match="loss_aggregation='sum'"):
            loss(x, x, x, mask, loss_aggregation="sum")
        with pytest.raises(ShapeError, match=r"\[2, 3\].*\[2, 2\]"):
            loss(x, x, x[:, :2], mask)


# --- the masked policy loss of SAO -----------------------------------------------------------------------------------

# ratio, advantage, share of tokens left out; the band is that of arXiv:2607.07508 for reasoning
BAND = {"low": 0.7, "high": 6.0}
MASKED_REGIMES = {
    "inside, A > 0": (1.1, 2.0, 0.0),
    "inside, A < 0": (1.1, -2.0, 0.0),
    "far above 1 and inside, A > 0: PPO would clip": (5.9, 2.0, 0.0),
    "below 1 and inside, A < 0: PPO would clip": (0.75, -2.0, 0.0),
    "above the band, A > 0": (6.1, 2.0, 1.0),
    "above the band, A < 0: PPO would not clip": (6.1, -2.0, 1.0),
    "below the band, A > 0: PPO would not clip": (0.65, 2.0, 1.0),
    "below the band, A < 0": (0.65, -2.0, 1.0),
}


@pytest.mark.parametrize("regime", MASKED_REGIMES)
def test_a_token_within_the_band_is_weighed_by_its_ratio_and_others_are_left_out_whatever_their_advantage(regime: str):
    """−A ρ with the gradient −A ρ of REINFORCE with a fixed weight ρ; or neither."""
    ratio, advantage, left_out = MASKED_REGIMES[regime]
    logp = one(math.log(ratio) - 1.0).requires_grad_()
    result = masked_policy_loss(logp, one(-1.0), one(advantage), ONE, **BAND)
    result.loss.backward()
    expected = 0.0 if left_out else -advantage * ratio
    assert (result.loss.item(), logp.grad.item()) == (pytest.approx(expected), pytest.approx(expected))
    assert result.clipfrac.item() == left_out
    assert result.ratio.item() == pytest.approx(ratio)


def test_a_ratio_on_the_edge_of_the_band_is_outside():
    """exp(log 2) and exp(−log 2) are exactly 2 and 0.5 in float64, the ends of this band."""
    logp = torch.tensor([[math.log(0.5), math.log(2.0), 0.0]], dtype=torch.float64)
    result = masked_policy_loss(
        logp, torch.zeros_like(logp), torch.ones_like(logp), ONE.expand(1, 3), low=0.5, high=2.0
    )
    assert result.clipfrac.item() == pytest.approx(2 / 3)
    assert result.loss.item() == pytest.approx(-1 / 3)  # divided by all three tokens


def test_the_masked_loss_is_divided_by_all_tokens_that_count_and_its_means_are_over_them():
    """Ratios 0.5 (out), 1.5, 8 (out) and 2 with advantages 1, −2, 3 and 4 on four tokens; NaN in padding."""
    ratios = torch.tensor([[0.5, 1.5, NAN], [8.0, 2.0, NAN]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -2.0, NAN], [3.0, 4.0, NAN]], dtype=torch.float64)
    sampler = torch.full((2, 3), -2.0, dtype=torch.float64)
    logp = (ratios.log() + sampler).requires_grad_()
    mask = prefix_mask([2, 2], 3)
    result = masked_policy_loss(logp, sampler, advantages, mask, **BAND)
    result.loss.backward()
    assert result.loss.item() == pytest.approx((2.0 * 1.5 - 4.0 * 2.0) / 4)
    assert_close(logp.grad, torch.tensor([[0.0, 3.0 / 4, 0.0], [0.0, -8.0 / 4, 0.0]], dtype=torch.float64))
    assert result.clipfrac.item() == 0.5
    assert result.ratio.item() == pytest.approx((0.5 + 1.5 + 8.0 + 2.0) / 4)
    assert result.approxkl.item() == pytest.approx(sum(math.log(r) ** 2 for r in (0.5, 1.5, 8.0, 2.0)) / 8)
    assert not any(x.requires_grad for x in result[1:])


# --- importance weights ----------------------------------------------------------------------------------------------


def test_importance_weights_are_probability_ratios_up_to_the_cap():
    """pi_old / pi_sampler = 1/2, 1, 1.5 and 4 (capped at 2); 0 in padding, whatever it holds."""
    ratios, mask = [0.5, 1.0, 1.5, 4.0], prefix_mask([4], 5)
    old = torch.tensor([[*(math.log(0.1 * ratio) for ratio in ratios), NAN]], dtype=torch.float64)
    sampler = torch.tensor([[*[math.log(0.1)] * 4, NAN]], dtype=torch.float64)
    weights = importance_weights(old, sampler, mask, 2.0)
    assert_close(weights, torch.tensor([[0.5, 1.0, 1.5, 2.0, 0.0]], dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_importance_weights_of_equal_log_probabilities_are_exactly_one_and_carry_no_gradient():
    logp = torch.tensor([[-0.1, -7.3, NAN]]).requires_grad_()
    weights = importance_weights(logp, logp.detach(), prefix_mask([2], 3), 3.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]
    assert not weights.requires_grad
    assert importance_weights(logp, logp.detach(), prefix_mask([2], 3), 0.5).tolist() == [[0.5, 0.5, 0.0]]
