"""Per-token rewards: what a function may return, and on which tokens PPO uses the numbers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.ppo.experience import score_responses, shape_rewards
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer, Scores
from ppo_rlhf.runtime.user_functions import load_function
from ppo_rlhf.training import PPOTrainer
from tests.ppo.test_experience import LENGTHS, OLD, REFERENCE, TERMINATED, shaping_of
from tests.ppo_runs import build_model, build_rollouts, build_run, build_tokenizer

IDS = [[7, 2], [8, 9, 2], [5]]


def call(result: Any, ids: list[list[int]] = IDS) -> Any:
    texts = [f"text {row}" for row in range(len(ids))]
    return call_reward_function(lambda prompts, completions: result, "mine", ["p"] * len(ids), texts, {}, ids)


@pytest.mark.parametrize(
    "result",
    [
        [[1, 2], (3.0, 4, 5), [6]],
        [torch.tensor([1.0, 2.0]), np.array([3, 4, 5]), torch.tensor([6.0])],
    ],
)
def test_a_response_may_get_one_number_a_token(result: Any) -> None:
    assert call(result) == [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]


def test_numbers_of_any_kind_are_scores_of_responses() -> None:
    assert call([1, np.float32(2.0), torch.tensor(3.0)]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([[1.0, 2.0], [3.0, 4.0], [6.0]], r"2 numbers for response 1 \('text 1'\) of 3 tokens"),
        (torch.ones(3, 3), "3 numbers for response 0"),
        ([[1.0, 2.0], 3.0, [6.0]], "only one number for response 1"),
        ([1.0, [3.0, 4.0, 5.0], 6.0], "only one number for response 0"),
        ([[1.0, 2.0], [3.0, math.nan, 5.0], [6.0]], "nan for response 1"),
        ([[1.0, 2.0], [3.0, [4.0], 5.0], [6.0]], "a value of type list for response 1"),
        ([[1.0, 2.0], [3.0, 4.0, 5.0]], "2 values for 3 responses"),
    ],
)
def test_wrong_counts_and_mixed_kinds_are_refused_with_the_row(result: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward function mine returned {message}") as caught:
        call(result)
    assert "\n" not in str(caught.value)


def test_a_judge_cannot_return_one_number_a_token() -> None:
    with pytest.raises(RewardError, match="a value of type list for response 0"):
        call_reward_function(lambda prompts, completions: [[1.0], [2.0]], "mine", ["p", "p"], ["x", "y"], {})


def test_only_functions_that_name_the_tokens_get_them() -> None:
    def named(completions, completion_ids):
        return [[float(token) for token in ids] for ids in completion_ids]

    def tokens_alone(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    def greedy(prompts, completions, **columns):
        return [float(len(columns))] * len(prompts)

    def called(function):
        return call_reward_function(function, "mine", ["p"] * 3, ["x"] * 3, {"label": [1, 2, 3]}, IDS)

    assert called(named) == [[7.0, 2.0], [8.0, 9.0, 2.0], [5.0]]
    assert called(tokens_alone) == [2.0, 3.0, 1.0]
    assert called(greedy) == [1.0, 1.0, 1.0]


async def slow_length(prompts, completions):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def test_an_asynchronous_function_is_awaited_in_a_script_and_in_a_notebook() -> None:
    def score() -> list[float]:
        return call_reward_function(slow_length, "mine", ["p"], ["four"], {})

    async def in_a_running_loop() -> list[float]:
        return score()

    assert score() == [4.0]
    assert asyncio.run(in_a_running_loop()) == [4.0]


def test_an_asynchronous_function_of_a_project_imports_its_neighbours(tmp_path) -> None:
    (tmp_path / "neighbour_of_async.py").write_text("five = 5.0\n")
    (tmp_path / "async_reward.py").write_text(
        "async def score(prompts, completions):\n    from neighbour_of_async import five\n    return [five]\n"
    )
    function = load_function("async_reward:score", tmp_path)
    assert call_reward_function(function, "mine", ["p"], ["x"], {}) == [5.0]


def test_components_of_both_kinds_add_up() -> None:
    batch = ResponseBatch(["p"] * 3, ["x"] * 3, {}, [[4]] * 3, IDS, [True, True, False])

    def by_token(completions, completion_ids):
        return [[float(token) for token in ids] for ids in completion_ids]

    scorer = RewardScorer(
        [
            ("ids", 2.0, lambda batch: score_by_function(by_token, "ids", batch)),
            ("whole", -1.0, lambda batch: torch.tensor([1.0, 2.0, 3.0])),
            ("again", 0.5, lambda batch: score_by_function(by_token, "again", batch)),
        ]
    )
    scored = scorer.score(batch)
    assert scored.token_rewards.tolist() == [[17.5, 5.0, 0.0], [20.0, 22.5, 5.0], [12.5, 0.0, 0.0]]
    assert scored.total.tolist() == [21.5, 45.5, 9.5]
    assert scored.components["ids"].tolist() == [9.0, 19.0, 5.0]
    assert scored.components["whole"].tolist() == [1.0, 2.0, 3.0]


# --- shaping: three responses of 2, 4 and 3 tokens, the second cut off ------------------------------------------------

BY_TOKEN = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 0.0, -2.0, 4.0], [0.5, 0.0, 8.0, 0.0]]).double()
WHOLE = torch.tensor([10.0, 20.0, 30.0]).double()


def shaped(**settings: Any) -> torch.Tensor:
    rollouts = build_rollouts(LENGTHS, TERMINATED, 4, old_logprobs=OLD, reference_logprobs=REFERENCE)
    total = WHOLE + BY_TOKEN.sum(-1)
    return shape_rewards(rollouts, Scores(total, {"both": total}, BY_TOKEN), shaping_of(**settings))


def test_each_number_is_paid_on_its_token_beside_the_kl_and_the_score() -> None:
    """(7): the KL is [0.5, -1], [0, 0.5, -0.25, 2], [-1, 0, 0] nats a token."""
    expected = [[0.95, 12.1, 0.0, 0.0], [1.0, -0.05, -1.975, 23.8], [0.6, 0.0, 38.0, 0.0]]
    assert_close(shaped(kl_coef=0.1), torch.tensor(expected).double(), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "cut_off"),
    [
        ({"reward_scale": 0.5}, [0.5, 0.0, -1.0, 12.0]),
        ({"missing_eos_penalty": 3.0}, [1.0, 0.0, -2.0, 21.0]),
        ({"truncated_responses": "replace", "missing_eos_penalty": 3.0}, [0.0, 0.0, 0.0, -3.0]),
        ({"truncated_responses": "bootstrap"}, [1.0, 0.0, -2.0, 4.0]),
    ],
)
def test_scale_and_penalties_of_a_cut_off_response(settings: Any, cut_off: list[float]) -> None:
    rewards = shaped(kl_coef=0.0, **settings)
    scale = settings.get("reward_scale", 1.0)
    assert rewards[1].tolist() == cut_off
    assert rewards[0].tolist() == [scale * 1.0, scale * 12.0, 0.0, 0.0]


@pytest.mark.parametrize("setting", [{"reward_clip": 5.0}, {"reward_normalisation": "running"}])
def test_settings_for_whole_scores_are_refused(setting: Any) -> None:
    with pytest.raises(ConfigError, match=f"ppo.{next(iter(setting))}="):
        shaped(**setting)


def test_the_rollouts_own_tokens_are_scored_and_their_rewards_are_as_wide_as_the_responses() -> None:
    def by_token(completions, completion_ids):
        return [[float(token) for token in ids] for ids in completion_ids]

    run = build_run(scorer=RewardScorer([("ids", 1.0, lambda batch: score_by_function(by_token, "ids", batch))]))
    rollouts = run.rollouts()
    scores = score_responses(rollouts, run.scorer, run.state.sampler, run.state.progress)
    expected = torch.where(rollouts.mask, rollouts.responses.response_ids, 0).double()
    assert torch.equal(scores.token_rewards, expected[:, : int(rollouts.responses.lengths.max())])
    assert torch.equal(scores.total, expected.sum(-1))
    rewards = shape_rewards(rollouts, scores, run.state.shaping)
    last = rollouts.responses.lengths - 1
    penalties = torch.where(rollouts.responses.terminated, 0.0, 0.5)  # the run's missing_eos_penalty; its KL is 0
    expected[torch.arange(len(last)), last] -= penalties
    assert_close(rewards, expected, rtol=0.0, atol=1e-12)


def test_ppo_learns_from_a_reward_by_token() -> None:
    """Each token has its own reward, so the share of the rewarded words rises."""

    def first_words(completions, completion_ids):
        return [[float(3 <= token < 13) for token in ids] for ids in completion_ids]

    config = PPOConfig(
        total_episodes=16 * 8,
        per_device_train_batch_size=16,
        response_length=6,
        temperature=1.0,
        learning_rate=1e-2,
        kl_coef=0.01,
        stop_token="none",
        device="cpu",
    )
    model = build_model(dtype=torch.float32)
    prompts = ["a b", "c d e", "f", "g h"]
    trainer = PPOTrainer(config, model, tokenizer=build_tokenizer(), reward=first_words, prompts=prompts)
    rewards = [row["reward/first_words"] for row in trainer.train()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1.0
