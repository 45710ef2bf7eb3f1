import math
import re
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.errors import CheckpointError, ConfigError, ShapeError, TrainingError
from ppo_rlhf.core.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, kl_estimate
from ppo_rlhf.core.option_names import KLEstimator

from .support import NAN, prefix_mask

INF = math.inf


def test_estimates_of_hand_made_differences():
    """d = log 2 and −log 2: k3 = ½ − 1 + log 2 and 2 − 1 − log 2."""
    logp = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25), math.log(0.5)], dtype=torch.float64)
    ln2 = math.log(2)
    for estimator, expected in {
        "k1": [ln2, -ln2],
        "k2": [ln2**2 / 2, ln2**2 / 2],
        "k3": [ln2 - 0.5, 1 - ln2],
        "k3+": [ln2 - 0.5, 1 - ln2],
    }.items():
        wanted = torch.tensor(expected, dtype=torch.float64)
        assert_close(kl_estimate(logp, reference, estimator), wanted, rtol=0.0, atol=1e-12)
    assert torch.equal(kl_estimate(logp, reference), kl_estimate(logp, reference, "k1"))


def test_k2_and_k3_agree_to_second_order_near_zero_in_float32():
    """k3 = d²/2 − d³/6 + …: computed as exp(−d) − 1 + d in float32, a difference of 1e-3 would lose most digits."""
    difference = torch.tensor([1e-3, -1e-3, 2e-3])
    exact = [math.expm1(-d) + d for d in difference.double().tolist()]
    k3 = kl_estimate(difference, torch.zeros(3), "k3")
    assert_close(k3.double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d)), ("k3+", lambda d: d)],
)
def test_gradient_with_respect_to_the_policy(estimator: str, slope):
    for d in (-3.0, -0.1, 0.0, 0.5, 4.0):
        logp = torch.tensor([d - 1.0], dtype=torch.float64, requires_grad=True)
        kl_estimate(logp, torch.tensor([-1.0], dtype=torch.float64), estimator).backward()
        assert logp.grad.item() == pytest.approx(slope(d), abs=1e-12)


def test_k3_is_finite_for_any_gap_and_exact_above_its_floor():
    """Below d = −20 the value stays at exp(20) − 21 and the gradient is 0; for large positive d it is d − 1."""
    logp = torch.tensor([-500.0, -20.5, 30.0, 90.0], requires_grad=True)
    k3 = kl_estimate(logp, torch.zeros(4), "k3")
    floor = math.exp(20) - 21
    assert_close(k3, torch.tensor([floor, floor, 29.0, 89.0]), rtol=1e-6, atol=0.0)
    k3.sum().backward()
    assert_close(logp.grad, torch.tensor([0.0, 0.0, 1.0, 1.0]), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_padding_is_passed_through_and_sends_no_gradient_once_masked(estimator: str):
    mask = prefix_mask([2, 1], 3)
    for fill in (NAN, INF, -INF):
        logp = torch.full((2, 3), -1.0).masked_fill(~mask, fill).requires_grad_()
        reference = torch.full((2, 3), -1.5).masked_fill(~mask, fill).requires_grad_()
        kl = kl_estimate(logp, reference, estimator)
        assert (~kl[~mask].isfinite()).all()
        torch.where(mask, kl, 0.0).sum().backward()
        assert logp.grad.isfinite().all()
        assert (logp.grad[~mask] == 0).all()
        assert (logp.grad[mask] != 0).all()
        assert (reference.grad[~mask] == 0).all()


def test_each_declared_estimator_but_that_over_the_vocabulary_has_a_function():
    assert {*KL_ESTIMATORS, "full"} == set(get_args(KLEstimator))


@pytest.mark.parametrize("estimator", ["k4", "full", "k3"])
def test_an_estimator_without_a_function_is_refused_whether_it_is_declared_or_not(estimator, monkeypatch):
    monkeypatch.delitem(KL_ESTIMATORS, "k3")
    names = re.escape(", ".join(KL_ESTIMATORS))
    with pytest.raises(ConfigError, match=rf"kl_estimate: estimator='{estimator}'.*{names}\."):
        kl_estimate(torch.zeros(2), torch.zeros(2), estimator)


def test_unequal_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"kl_estimate.*logprobs \[2\], reference_logprobs \[3\]"):
        kl_estimate(torch.zeros(2), torch.zeros(3))


def test_the_adaptive_controller_moves_towards_its_target_by_the_clipped_error():
    """Target 6, 100 episodes, horizon 1000: no change on target; + 1 % if 10 % above the target; ± 2 % far from it."""
    for observed, factor in ((6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (INF, 1.02), (0.0, 0.98), (-5.0, 0.98)):
        controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
        controller.update(observed, 100)
        assert controller.kl_coef == pytest.approx(0.2 * factor, rel=1e-12)


@pytest.mark.parametrize("episodes", [5_000, 50_000])
def test_the_adaptive_coefficient_stays_positive_however_many_episodes_one_update_spans(episodes: int):
    """The published factor is 1 − 0.2 · 5 = 0 and 1 − 0.2 · 50 = −9 here; ours stops at 0.1."""
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(0.0, episodes)
    assert controller.kl_coef == pytest.approx(0.02)


def test_controllers_resume_from_their_state():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100)
    controller.update(12.0, 50)
    state = controller.state_dict()
    resumed = AdaptiveKLController(0.2, target=6.0, horizon=100)
    resumed.load_state_dict(state)
    for c in (controller, resumed):
        c.update(3.0, 50)
    assert resumed.kl_coef == controller.kl_coef != 0.2
    fixed = FixedKLController(0.1)
    fixed.load_state_dict(FixedKLController(0.3).state_dict())
    assert fixed.kl_coef == 0.3


def test_a_foreign_state_is_refused():
    for controller in (FixedKLController(0.1), AdaptiveKLController(0.1, 6.0, 100)):
        with pytest.raises(CheckpointError, match=r"load_state_dict.*\['count'\].*'kl_coef'"):
            controller.load_state_dict({"count": 1})


def test_controllers_refuse_what_they_cannot_follow():
    with pytest.raises(ConfigError, match=r"FixedKLController: kl_coef=-0\.1.*>= 0"):
        FixedKLController(-0.1)
    for arguments in ((0.0, 6.0, 100), (0.1, 0.0, 100), (0.1, 6.0, 0), (NAN, 6.0, 100)):
        with pytest.raises(ConfigError, match=r"AdaptiveKLController: \w+=.*> 0"):
            AdaptiveKLController(*arguments)
    controller = AdaptiveKLController(0.1, 6.0, 100)
    with pytest.raises(TrainingError, match=r"observed_kl.*NaN"):
        controller.update(NAN, 10)
    with pytest.raises(ConfigError, match="num_episodes=-1"):
        controller.update(6.0, -1)
    assert controller.kl_coef == 0.1
