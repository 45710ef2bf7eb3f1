"""Runs with single options: the first ratio is exactly 1. `test_any_cut_of_a_run.py` cuts and interrupts such runs."""

import dataclasses
import math

import pytest
import torch

from tests.ppo_runs import learn_from, with_responses

OPTIONS = {
    "lambda by length": {"lam_alpha": 0.3, "lam_critic": 1.0},
    "positive examples": {"positive_coef": 0.3, "positive_threshold": 0.75},
    "more epochs of the critic": {"num_critic_epochs": 4},
    "KL over the vocabulary in the reward": {"kl_estimator": "full", "kl_coef": 0.5},
    "KL over the vocabulary in the loss": {"kl_in": "loss", "kl_estimator": "full", "kl_coef": 0.5},
    "prompts without a signal": {"responses_per_prompt": 2, "drop_uniform_prompts": 2},
    "k3 with the gradient of k2": {"kl_in": "loss", "kl_estimator": "k3+", "kl_coef": 0.5},
    "frozen attention of the critic": {"value_freeze": "attention"},
    "no clip of values": {"cliprange_value": None},
}
BAND = {"importance_low": 0.7, "importance_high": 6.0}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_ratio_is_exactly_one(make_run, name):
    run = make_run(dtype="float32", num_ppo_epochs=1, num_mini_batches=1, **OPTIONS[name])
    metrics = run.iteration()
    assert (metrics["val/ratio"], metrics["policy/approxkl_avg"], metrics["policy/clipfrac_avg"]) == (1.0, 0.0, 0.0)


def test_with_a_band_the_first_ratio_is_that_to_the_engine_and_no_token_of_our_own_is_left_out(make_run):
    """Decoding and the forward pass compute the same log-probabilities up to rounding."""
    run = make_run(num_ppo_epochs=1, num_mini_batches=1, **BAND)
    metrics = run.iteration()
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["policy/clipfrac_avg"] == 0.0
    assert metrics["policy/rollout_logprob_gap"] < 1e-12


def test_the_share_of_tokens_left_out_and_the_ratio_are_those_to_the_sampler(make_run):
    """A sampler whose every second row claims a tenth of the probability: ratio 10, above the band; the others 1."""
    run = make_run(num_ppo_epochs=1, num_mini_batches=1, **BAND)
    experience = run.before_update()[-1]
    rollouts = experience.rollouts
    stale = torch.arange(len(rollouts.mask))[:, None] % 2 == 1
    sampler = torch.where(stale, rollouts.old_logprobs - math.log(10.0), rollouts.old_logprobs)
    experience = dataclasses.replace(experience, rollouts=with_responses(rollouts, sampler_logprobs=sampler))
    metrics = learn_from(run.state, experience)
    share = int((rollouts.mask & stale).sum()) / int(rollouts.mask.sum())
    assert 0.2 < share < 0.8
    assert metrics["policy/clipfrac_avg"] == pytest.approx(share, abs=1e-9)
    assert metrics["val/ratio"] == pytest.approx(1.0 + 9.0 * share, rel=1e-9)
    weights = torch.where(rollouts.mask & ~stale, experience.advantages, 0.0)
    assert metrics["loss/policy_avg"] == pytest.approx(float(-weights.sum() / rollouts.mask.sum()), abs=1e-9)
