"""The reward that a guard against exploitation compares is the one that PPO trains on, whatever the settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.evaluation.exploitation import EXPLOITS, exploitation
from ppo_rlhf.evaluation.policy import PolicyEvaluation
from ppo_rlhf.evaluation.since_best import REWARDED, SCORES, TRAINED_REWARD, since_best
from ppo_rlhf.evaluation.trained_reward import TrainedReward, reward_parts
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from tests.ppo_runs import Run, build_run, first_letters
from tests.rewards.test_normalised_components import PLAIN, lengths, letters, rare


def evaluation(scores: Scores, judge: Any, terminated: Any = None, tokens: Any = None) -> PolicyEvaluation:
    """An evaluation of single responses to prompts."""
    number = len(scores.total)
    return PolicyEvaluation(
        prompts=[f"prompt {row}" for row in range(number)],
        completions=["c"] * number,
        response_ids=[[row] for row in range(number)],
        rewards=scores.total.numpy(),
        judges={"judge_score": np.asarray(judge, dtype=float)},
        rates={},
        kl=np.zeros(number),
        lengths=np.full(number, 5) if tokens is None else np.asarray(tokens),
        terminated=np.ones(number, dtype=bool) if terminated is None else np.asarray(terminated),
        scores=scores,
    )


def by_token(prompts: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    return [[0.1 * (token % 5) for token in ids] for ids in completion_ids]


TWO = [("length", 1.0, lengths), ("letters", 3.0, letters)]
EQUAL = [("length", 1.0, lengths), ("letters", 1.0, letters), ("rare", 1.0, rare)]
TOKENS = [("by_token", 2.0, lambda batch: score_by_function(by_token, "by_token", batch)), ("letters", 1.0, letters)]
SETTINGS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (EQUAL, {"normalise": "component", "combine": "min"}, {"reward_normalisation": "running"}),
    (EQUAL, {"normalise": "component", "combine": "mean_minus_std"}, {"reward_normalisation": "batch"}),
    (EQUAL, {"combine": "mean"}, {}),
    (TWO, {"normalise": "component"}, {"reward_normalisation": "running", "reward_scale": 2.0, "reward_clip": 0.7}),
    (TWO, {}, {"reward_normalisation": "running", "missing_eos_penalty": 0.4}),
    (TWO, {}, {"reward_normalisation": "batch", "truncated_responses": "replace", "missing_eos_penalty": 0.4}),
    (TWO, {}, {"reward_clip": 2.0, "overlong_buffer": 4}),
    (TOKENS, {}, {"reward_scale": 0.5, "truncated_responses": "replace", "missing_eos_penalty": 0.4}),
    (TOKENS, {}, {"truncated_responses": "bootstrap"}),
]


def paid(run: Run) -> tuple[Scores, np.ndarray, np.ndarray, np.ndarray]:
    """The scores of an iteration's responses, whether they stopped, their tokens, and what PPO pays for each."""
    rollouts, scores, rewards, _ = run.before_update()
    return scores, rollouts.responses.terminated.numpy(), rollouts.responses.lengths.numpy(), rewards.sum(-1).numpy()


def halves(scores: Scores, ended: np.ndarray, tokens: np.ndarray) -> list[PolicyEvaluation]:
    middle = len(ended) // 2
    return [
        evaluation(
            Scores(
                scores.total[part],
                {name: values[part] for name, values in scores.components.items()},
                None if scores.token_rewards is None else scores.token_rewards[part],
            ),
            np.zeros(middle),
            ended[part],
            tokens[part],
        )
        for part in (slice(middle), slice(middle, None))
    ]


@pytest.mark.parametrize(("components", "how", "settings"), SETTINGS)
def test_the_rise_is_that_of_what_ppo_pays(components, how, settings):
    """Two halves of a batch; PPO's own rewards are those of the loop, without a KL penalty."""
    given = {**PLAIN, "total_episodes": 36, **settings}
    run = build_run(scorer=RewardScorer(components, **how), **given)
    for _ in range(2):
        state = run.state
        scores, ended, tokens, expected = paid(run)
        trained = TrainedReward(run.scorer, run.config, state.shaping.reward_moments, state.shaping.component_moments)
        before, now = (reward_parts(each) for each in halves(scores, ended, tokens))
        rise = expected[len(expected) // 2 :].mean() - expected[: len(expected) // 2].mean()
        assert trained.rise(now, before) == pytest.approx(rise, abs=1e-9)
        assert trained.rise(before, now) == pytest.approx(-rise, abs=1e-9)
        run.iteration()


def test_rewards_of_other_components_are_not_compared():
    run = build_run(scorer=RewardScorer([("first_letters", 1.0, first_letters)]))
    trained = TrainedReward(run.scorer, run.config, RunningMoments(), {})
    one, other = (
        reward_parts(evaluation(Scores(torch.zeros(3), {name: torch.zeros(3)}), np.zeros(3))) for name in "ab"
    )
    assert trained.rise(one, one) == 0.0
    assert trained.rise(one, other) is None
    assert trained.rise(one, {}) is None


def scored(wide: np.ndarray, narrow: np.ndarray) -> Scores:
    return Scores(torch.from_numpy(wide + narrow), {"wide": torch.from_numpy(wide), "narrow": torch.from_numpy(narrow)})


RNG = np.random.default_rng(0)
WIDE, NARROW, JUDGE, NOISE = (RNG.normal(size=64) for _ in range(4))
APART = {"normalise": "component"}
RUNNING = {"reward_normalisation": "running"}
# What falls by 0.2 of its deviation is wide, what rises by 1.5 of its own is narrow: the raw scores fall
FALLEN = scored(10.0 * WIDE, NARROW), scored(10.0 * WIDE - 2.0, NARROW + 1.5)
# High scores fall, above the clip; the others rise
HIGH = np.arange(64) % 2 * 20.0
CLIPPED = scored(HIGH, 0.0 * HIGH), scored(0.5 * HIGH + 0.5, 0.0 * HIGH)


@pytest.mark.parametrize(
    ("responses", "how", "settings", "exploits"),
    [
        (FALLEN, APART | {"combine": "min"}, RUNNING, 1.0),
        (FALLEN, APART | {"combine": "mean_minus_std"}, RUNNING, 1.0),
        (FALLEN, APART, RUNNING, 1.0),
        (FALLEN, APART, {"reward_normalisation": "batch"}, 1.0),
        (CLIPPED, {}, {"reward_clip": 1.0}, 1.0),
        (CLIPPED, {}, {}, 0.0),
        (FALLEN, {}, RUNNING, 0.0),
        (FALLEN, {"combine": "mean"}, {}, 0.0),
    ],
)
def test_a_trained_reward_that_rises_while_its_raw_scores_fall_is_exploited(responses, how, settings, exploits):
    """The judge's scores fall by nine standard errors. Before, only the raw mean was read, and nothing was said."""
    before, after = responses
    moments, total = {name: RunningMoments() for name in before.components}, RunningMoments()
    for name, values in before.components.items():
        moments[name].update(values)
    total.update(before.total)
    config = PPOConfig(total_episodes=800, eval_interval=10, device="cpu", **settings)
    scorer = RewardScorer([(name, 1.0, lambda batch: torch.zeros(0)) for name in moments], **how)
    policy = evaluation(after, JUDGE - 1.0 + 0.8 * NOISE)
    row = {"iteration": 10.0, "eval/judge_score": policy.deciding_scores.mean()}
    row |= since_best(policy, evaluation(before, JUDGE), [], TrainedReward(scorer, config, total, moments))
    assert row["eval/since_best_reward"] < 0.0
    assert (row[TRAINED_REWARD] > 0.0) is (exploits == 1.0)
    metrics, text = exploitation(row, [], config, "warn")
    assert metrics[EXPLOITS] == exploits
    assert (text is not None) is (exploits == 1.0)


def test_the_best_evaluation_is_compared_by_todays_moments():
    """A later evaluation is compared with the best one's scores, which the log of evaluations keeps."""
    config = PPOConfig(reward_normalisation="running", device="cpu", total_episodes=800)
    scorer, moments = RewardScorer([("a", 1.0, lambda batch: torch.zeros(0))]), RunningMoments()
    moments.update(torch.tensor([0.0, 100.0] * 500))
    sft, best, now = (
        evaluation(Scores(torch.full((4,), level).double(), {"a": torch.full((4,), level)}), [level] * 4)
        for level in (0.0, 2.0, 1.0)
    )
    trained = TrainedReward(scorer, config, moments, {})
    first = since_best(best, sft, [], trained)
    assert first[REWARDED]["whole"] == first[SCORES] == [2.0] * 4
    found = since_best(now, sft, [{"eval/reward": 2.0, SCORES: first[SCORES], REWARDED: first[REWARDED]}], trained)
    assert found[TRAINED_REWARD] == pytest.approx(-1.0 / 50.0, rel=0.01)  # the run's deviation is 50
    assert REWARDED not in found
