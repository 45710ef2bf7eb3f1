"""From scores to the last token's reward: each option computed by hand, and the order of the options."""

import math
import statistics
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.rewards.shaping import final_scores, normalised, penalised
from tests.core.support import Case, cases
from tests.ppo_runs import build_run, weights_of

SCORES = torch.tensor([9.0, 9.0, -9.0, -9.0, 1.0], dtype=torch.float64)
TERMINATED = torch.tensor([True, False, True, False, False])
LENGTHS = torch.tensor([3, 53, 48, 53, 53])


def shaped(scores: torch.Tensor = SCORES, moments: RunningMoments | None = None, **settings) -> list[float]:
    config = PPOConfig(**settings)
    return final_scores(scores, TERMINATED, LENGTHS, moments or RunningMoments(), config).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [9.0, 9.0, -9.0, -9.0, 1.0]),
        ({"reward_clip": 5.0}, [5.0, 5.0, -5.0, -5.0, 1.0]),
        (
            {"reward_clip": 5.0, "missing_eos_penalty": 2.0},
            [5.0, 3.0, -5.0, -7.0, -1.0],
        ),  # clip, then penalty
        ({"reward_scale": 0.5}, [4.5, 4.5, -4.5, -4.5, 0.5]),
        ({"reward_scale": 0.5, "reward_clip": 1.0, "missing_eos_penalty": 2.0}, [1.0, -1.0, -1.0, -3.0, -1.5]),
        ({"truncated_responses": "keep"}, [9.0, 9.0, -9.0, -9.0, 1.0]),
        ({"truncated_responses": "mask"}, [9.0, 9.0, -9.0, -9.0, 1.0]),  # no loss uses this value
        ({"truncated_responses": "bootstrap"}, [9.0, 0.0, -9.0, 0.0, 0.0]),  # GAE uses the critic's value instead
        ({"truncated_responses": "penalise", "missing_eos_penalty": 2.0}, [9.0, 7.0, -9.0, -11.0, -1.0]),
        ({"truncated_responses": "keep", "missing_eos_penalty": 2.0}, [9.0, 7.0, -9.0, -11.0, -1.0]),  # as in TRL
        ({"truncated_responses": "replace", "missing_eos_penalty": 2.0}, [9.0, -2.0, -9.0, -2.0, -2.0]),
        # of a buffer of 10 tokens before 53, length 48 uses 5: half a unit; length 53 pays the whole
        ({"overlong_buffer": 10}, [9.0, 8.0, -9.5, -10.0, 0.0]),
        ({"overlong_buffer": 10, "missing_eos_penalty": 2.0}, [9.0, 6.0, -9.5, -12.0, -2.0]),
    ],
    ids=str,
)
def test_scale_clip_and_penalties_come_in_this_order(settings, expected):
    assert shaped(**settings) == expected


# --- normalisation ---------------------------------------------------------------------------------------------------


def test_batch_normalisation_has_mean_zero_and_the_batchs_own_deviation():
    deviation = statistics.stdev(SCORES.tolist())
    expected = [(score - 0.2) / math.sqrt(deviation**2 + 1e-8) for score in SCORES.tolist()]
    assert shaped(reward_normalisation="batch") == pytest.approx(expected, rel=1e-12)


def test_running_normalisation_counts_all_scores_so_far_and_this_batch():
    before = [1.0, 2.0, 4.0]
    moments = RunningMoments()
    moments.update(torch.tensor(before))
    everything = [*before, *SCORES.tolist()]
    mean, variance = statistics.mean(everything), statistics.variance(everything)
    expected = [(score - mean) / math.sqrt(variance + 1e-8) for score in SCORES.tolist()]
    assert shaped(moments=moments, reward_normalisation="running") == pytest.approx(expected, rel=1e-9)
    assert (moments.count, moments.mean) == (3, pytest.approx(7 / 3))  # shaping does not change the moments


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_normalisation_comes_before_scale_clip_and_penalty_and_undoes_a_shift_and_a_scale_of_the_reward(mode):
    options = {"reward_normalisation": mode, "reward_scale": 2.0, "reward_clip": 1.5, "missing_eos_penalty": 0.25}
    found = shaped(**options)
    assert_close(torch.tensor(shaped(100.0 + 3.0 * SCORES, **options)), torch.tensor(found), rtol=1e-6, atol=1e-6)
    z = torch.tensor(shaped(reward_normalisation=mode)).double()
    expected = (2.0 * z).clamp(-1.5, 1.5) - torch.tensor([0.0, 0.25, 0.0, 0.25, 0.25])
    assert_close(torch.tensor(found).double(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_scores_without_spread_are_normalised_to_zero(mode):
    config = PPOConfig(reward_normalisation=mode)
    assert normalised(torch.full((3,), 7.5), RunningMoments(), config).tolist() == [0.0, 0.0, 0.0]
    assert normalised(torch.tensor([7.5]), RunningMoments(), config).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_scores_as_large_as_float32_takes_are_normalised_like_any_others(mode, dtype):
    """Four scores of plus or minus one size have the Bessel-corrected deviation size x sqrt(4/3)."""
    scores = torch.tensor([1e30, -1e30, -1e30, 1e30], dtype=dtype)
    found = normalised(scores, RunningMoments(), PPOConfig(reward_normalisation=mode))
    assert_close(found, torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype) * 0.75**0.5, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_small_differences_of_large_scores_survive_until_they_are_normalised(mode, dtype):
    """Float32 has steps of 8 at 1e8. The scores 0 to 11 have mean 5.5 and the Bessel-corrected variance 13."""
    numbered = partial(score_by_function, lambda prompts, completions: [1e8 + i for i in range(12)], "numbered")
    options = {"reward_normalisation": mode, "dtype": dtype, "missing_eos_penalty": None, "kl_coef": 0.0}
    rollouts, scores, rewards, _ = build_run(
        scorer=RewardScorer([("numbered", 1.0, numbered)]), **options
    ).before_update()
    assert scores.total.tolist() == [1e8 + i for i in range(12)]
    paid = rewards.gather(1, rollouts.responses.lengths[:, None] - 1)[:, 0]
    assert paid.dtype == getattr(torch, dtype)
    assert_close(paid.double(), (torch.arange(12.0).double() - 5.5) / 13**0.5, rtol=1e-6, atol=0.0)


def test_the_update_adds_each_iterations_scores_to_the_running_moments_once():
    run, scores = build_run(reward_normalisation="running"), []
    for _ in range(2):
        experience = run.before_update()[-1]
        assert run.state.shaping.reward_moments.count == len(scores)
        scores += experience.scores.total.tolist()
        run.iteration()  # equal rollouts: only the update changes the state
    moments = run.state.shaping.reward_moments
    assert moments.count == 24
    assert moments.mean == pytest.approx(statistics.mean(scores), rel=1e-12)
    assert moments.variance == pytest.approx(statistics.variance(scores), rel=1e-12)


def test_a_score_that_is_not_finite_leaves_the_running_moments_as_they_were():
    def half_broken(batch):
        return torch.tensor([math.nan, math.inf, *range(len(batch) - 2)], dtype=torch.float64)

    run = build_run(scorer=RewardScorer([("broken", 1.0, half_broken)]), reward_normalisation="running")
    run.iteration()
    assert (run.state.shaping.reward_moments.count, run.state.shaping.reward_moments.mean) == (10, 4.5)
    scores = torch.tensor([math.nan, 1.0, 2.0, 3.0])
    found = normalised(scores, RunningMoments(), run.config)
    assert found.isnan().tolist() == [True, False, False, False]
    assert_close(found[1:], torch.tensor([-1.0, 0.0, 1.0]), rtol=0.0, atol=1e-6)


@pytest.mark.slow
def test_a_normalised_reward_trains_the_same_policy_whatever_the_rewards_unit():
    """Scores times 1000 plus 5 give equal results only with normalisation."""

    def score(factor: float, shift: float):
        return RewardScorer(
            [("r", 1.0, lambda b: factor * torch.tensor([float(len(i)) for i in b.response_ids]) + shift)]
        )

    weights = {}
    for mode in ("none", "running"):
        for name, arguments in (("plain", (1.0, 0.0)), ("other", (1000.0, 5.0))):
            run = build_run(scorer=score(*arguments), reward_normalisation=mode, missing_eos_penalty=None)
            for _ in range(2):
                run.iteration()
            weights[mode, name] = weights_of(run.state.learner.policy)["lm_head.weight"]
    assert_close(weights["running", "plain"], weights["running", "other"], rtol=0.0, atol=1e-4)
    assert float((weights["none", "plain"] - weights["none", "other"]).abs().max()) > 1e-3


@cases("length_penalty", "openrlhf", skip=("overlong", "stop_scale"))
def test_replaced_scores_are_those_of_openrlhf(case: Case):
    """The negative coefficient is the new score. tests/core compares `overlong`; `stop_scale` is not supported."""
    config = PPOConfig(truncated_responses="replace", missing_eos_penalty=-case.i["coef"])
    case.check(penalised(case.i["scores"], ~case.i["truncated"].bool(), case.i["lengths"], config), "scores")
