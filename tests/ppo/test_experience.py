"""From scores to advantages, worked by hand; every padded slot holds NaN."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.ppo.experience import (
    Shaping,
    completion_rows,
    estimate_advantages,
    score_responses,
    shape_rewards,
)
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from tests.ppo_runs import build_tokenizer, with_responses

NAN = torch.nan
LENGTHS, TERMINATED = [2, 4, 3], [True, False, True]
OLD = torch.tensor([[-1.0, -2.0, NAN, NAN], [-0.5, -0.5, -0.5, -0.5], [-3.0, -1.0, -2.0, NAN]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.5, -1.0, NAN, NAN], [-0.5, -1.0, -0.25, -2.5], [-2.0, -1.0, -2.0, NAN]]).double()
KL = torch.tensor([[0.5, -1.0, 0.0, 0.0], [0.0, 0.5, -0.25, 2.0], [-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

VALUES = torch.tensor(
    [[0.5, -0.5, NAN, NAN, NAN], [1.0, 2.0, 0.0, -1.0, NAN], [0.25, 0.5, 0.75, NAN, NAN]], dtype=torch.float64
)


def shaping_of(**settings) -> Shaping:
    config = PPOConfig(**settings)
    return Shaping(config, FixedKLController(config.kl_coef))


def scores_of(*totals: float) -> Scores:
    total = torch.tensor(totals, dtype=torch.float64)
    return Scores(total, {"reward": total})


@pytest.fixture
def rollouts(make_rollouts):
    return make_rollouts(LENGTHS, TERMINATED, 4, VALUES, old_logprobs=OLD, reference_logprobs=REFERENCE)


# --- shaping ---------------------------------------------------------------------------------------------------------


def test_the_score_lands_on_the_last_real_token_and_each_token_pays_its_kl(rollouts):
    shaped = shape_rewards(rollouts, scores_of(3.0, -7.0, 1.0), shaping_of(kl_coef=0.1))
    expected = [[-0.05, 0.1 + 3.0, 0.0, 0.0], [0.0, -0.05, 0.025, -0.2 - 7.0], [0.1, 0.0, 1.0, 0.0]]
    assert_close(shaped, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert_close(rollouts.kl, KL, rtol=0.0, atol=0.0)
    assert_close(rollouts.kl_penalty("k1"), KL, rtol=0.0, atol=0.0)


def test_clip_and_penalty_enter_the_reward_but_not_the_reported_score(rollouts):
    shaping = shaping_of(kl_coef=0.0, reward_clip=2.0, missing_eos_penalty=0.5)
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping)
    assert shaped.tolist() == [[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, -2.5], [0.0, 0.0, 1.0, 0.0]]
    assert scores.total.tolist() == [3.0, -7.0, 1.0]


def test_whitened_rewards_keep_their_mean_and_get_unit_variance_over_real_tokens(rollouts):
    plain = shape_rewards(rollouts, scores_of(3.0, -7.0, 1.0), shaping_of(kl_coef=0.1))
    white = shape_rewards(rollouts, scores_of(3.0, -7.0, 1.0), shaping_of(kl_coef=0.1, whiten_rewards=True))
    numbers = plain[rollouts.mask]
    mean = sum(numbers.tolist()) / 9
    variance = sum((x - mean) ** 2 for x in numbers.tolist()) / 8
    expected = torch.where(rollouts.mask, (plain - mean) / (variance + 1e-8) ** 0.5 + mean, 0.0)
    assert_close(white, expected, rtol=0.0, atol=1e-12)
    assert float(white[rollouts.mask].mean()) == pytest.approx(mean, rel=0.0, abs=1e-12)


# --- advantages ------------------------------------------------------------------------------------------------------


def advantages_by_brute_force(rewards, values, lengths, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V after the end is 0."""
    advantages = torch.zeros_like(rewards)
    for row, length in enumerate(lengths):
        r, v = rewards[row].tolist(), [*values[row, :length].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            advantages[row, t] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length))
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_advantages_and_returns_are_those_of_brute_force_and_nothing_is_bootstrapped_past_the_end(rollouts, gamma, lam):
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of(kl_coef=0.1))
    shaping = shaping_of(gamma=gamma, lam=lam, whiten_advantages=False)
    experience = estimate_advantages(rollouts, scores, shaped, shaping)
    expected = advantages_by_brute_force(shaped, VALUES, LENGTHS, gamma, lam)
    assert_close(experience.advantages, expected, rtol=0.0, atol=1e-12)
    returns = torch.where(rollouts.mask, expected + VALUES[:, :-1], 0.0)
    assert_close(experience.returns, returns, rtol=0.0, atol=1e-12)


def test_whitened_advantages_have_mean_zero_and_unit_variance_and_returns_are_not_whitened(rollouts):
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of())
    raw = estimate_advantages(rollouts, scores, shaped, shaping_of(whiten_advantages=False))
    white = estimate_advantages(rollouts, scores, shaped, shaping_of(whiten_advantages=True))
    numbers = raw.advantages[rollouts.mask]
    mean = numbers.sum() / 9
    variance = (numbers - mean).square().sum() / 8
    expected = torch.where(rollouts.mask, (raw.advantages - mean) / (variance + 1e-8).sqrt(), 0.0)
    assert_close(white.advantages, expected, rtol=0.0, atol=1e-12)
    assert torch.equal(white.returns, raw.returns)
    assert white.rollouts is rollouts
    assert white.scores is scores
    assert white.rewards is shaped


def test_the_critics_targets_can_have_a_lambda_of_their_own(rollouts):
    """lam 0 for the advantages, 1 for the returns: returns are then the sums of rewards to the end, by hand."""
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of(kl_coef=0.1))
    shaping = shaping_of(lam=0.0, lam_critic=1.0, whiten_advantages=False)
    experience = estimate_advantages(rollouts, scores, shaped, shaping)
    to_go = shaped.flip(1).cumsum(1).flip(1)
    assert_close(experience.returns, torch.where(rollouts.mask, to_go, 0.0), rtol=0.0, atol=1e-12)
    one_step = advantages_by_brute_force(shaped, VALUES, LENGTHS, 1.0, 0.0)
    assert_close(experience.advantages, one_step, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("lam_critic", [None, 1.0])
def test_the_policys_lambda_can_follow_the_length_and_the_critics_does_not(rollouts, lam_critic):
    """alpha 1/2: 1 − 2 / length is 0, 1/2 and 1/3 for 2, 4 and 3 tokens."""
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of(kl_coef=0.1))
    shaping = shaping_of(lam_alpha=0.5, lam_critic=lam_critic, gamma=0.9, whiten_advantages=False)
    experience = estimate_advantages(rollouts, scores, shaped, shaping)
    rows = [advantages_by_brute_force(shaped, VALUES, LENGTHS, 0.9, lam) for lam in (0.0, 0.5, 1 / 3)]
    expected = torch.stack([rows[row][row] for row in range(3)])
    assert_close(experience.advantages, expected, rtol=0.0, atol=1e-12)
    of_critic = advantages_by_brute_force(shaped, VALUES, LENGTHS, 0.9, 0.95 if lam_critic is None else 1.0)
    returns = torch.where(rollouts.mask, of_critic + VALUES[:, :-1], 0.0)
    assert_close(experience.returns, returns, rtol=0.0, atol=1e-12)


def test_the_length_that_lambda_follows_counts_only_the_policys_tokens(rollouts):
    """Row 1 has four tokens, the second of them the environment's: lambda is 1 − 2 / 3."""
    policy_mask = rollouts.responses.mask.clone()
    policy_mask[1, 1] = False
    turns = with_responses(rollouts, policy_mask=policy_mask)
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(turns, scores, shaping_of(kl_coef=0.1))
    actual, expected = (
        estimate_advantages(turns, scores, shaped, shaping_of(whiten_advantages=False, **lam)).advantages[1]
        for lam in ({"lam_alpha": 0.5}, {"lam": 1 / 3})
    )
    assert_close(actual, expected, rtol=0.0, atol=1e-12)
    assert actual[1] == 0.0


def test_masked_responses_count_in_no_whitening(rollouts):
    """Row 1 is cut off: mean and variance are those of rows 0 and 2, and its own advantages are 0."""
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of())
    settings = {"truncated_responses": "mask"}
    raw = estimate_advantages(rollouts, scores, shaped, shaping_of(whiten_advantages=False, **settings)).advantages
    white = estimate_advantages(rollouts, scores, shaped, shaping_of(**settings)).advantages
    numbers = torch.cat([raw[0, :2], raw[2, :3]])
    expected = (raw - numbers.mean()) / (numbers.var() + 1e-8).sqrt()
    assert_close(white[0, :2], expected[0, :2], rtol=0.0, atol=1e-12)
    assert_close(white[2, :3], expected[2, :3], rtol=0.0, atol=1e-12)
    assert white[1].tolist() == [0.0] * 4


def test_kl_that_is_in_the_loss_is_not_in_the_reward(rollouts):
    shaping = shaping_of(kl_coef=0.1, kl_in="loss", kl_estimator="k2")
    shaped = shape_rewards(rollouts, scores_of(3.0, -7.0, 1.0), shaping)
    assert shaped.tolist() == [[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, -7.0], [0.0, 0.0, 1.0, 0.0]]
    assert_close(rollouts.kl_penalty("k2"), 0.5 * KL.square(), rtol=0.0, atol=1e-12)


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet"])
def test_value_t_is_the_critics_output_at_the_token_before_response_token_t(make_run, kind):
    run = make_run(kind)
    rollouts = run.rollouts()
    values = rollouts.values
    assert values.shape == (12, 9)
    critic = run.state.learner.critic
    for row, (prompt, tokens) in enumerate(
        zip(rollouts.prompts.prompt_ids, rollouts.responses.token_lists(), strict=True)
    ):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            states = critic.backbone(ids, use_cache=False).last_hidden_state[0]
        expected = states @ critic.value_head.weight[0] + critic.value_head.bias
        assert len(set(expected.tolist())) > 1  # a constant would hide a shift
        actual = values[row, : len(tokens) + 1]
        assert_close(actual, expected[len(prompt) - 1 :].detach(), rtol=0.0, atol=1e-10)


def test_the_total_is_the_weighted_sum_and_components_are_kept_unweighted(make_run):
    by_length = [("length", 2.0, lambda batch: torch.tensor([float(len(ids)) for ids in batch.response_ids]))]
    stopped = [("stopped", -0.5, lambda batch: torch.tensor([float(stop) for stop in batch.terminated]))]
    run = make_run(scorer=RewardScorer(by_length + stopped))
    rollouts = run.rollouts()
    scores = score_responses(rollouts, run.scorer, run.state.sampler, run.state.progress)
    lengths, ended = rollouts.responses.lengths.double(), rollouts.responses.terminated.double()
    assert_close(scores.total, 2.0 * lengths - 0.5 * ended, rtol=0.0, atol=1e-6)
    assert torch.equal(scores.components["length"], lengths)
    assert torch.equal(scores.components["stopped"], ended)
    assert scores.total.dtype == torch.float64


def test_no_stage_before_the_update_changes_its_inputs(make_run, snapshot, same_tensors):
    run = make_run()
    models = (run.state.learner.policy, run.state.learner.critic, run.reference)
    before = [snapshot(model) for model in models]
    rollouts = run.rollouts()
    kept = [{k: v.clone() for k, v in vars(rollouts).items() if isinstance(v, torch.Tensor)}]
    scores = score_responses(rollouts, run.scorer, run.state.sampler, run.state.progress)
    kept.append({k: v.clone() for k, v in vars(scores).items() if isinstance(v, torch.Tensor)})
    shaped = shape_rewards(rollouts, scores, run.state.shaping)
    rewards = shaped.clone()
    estimate_advantages(rollouts, scores, shaped, run.state.shaping)
    for stage, tensors in zip((rollouts, scores), kept, strict=True):
        assert all(torch.equal(getattr(stage, name), tensor) for name, tensor in tensors.items())
    assert torch.equal(shaped, rewards)
    after = [snapshot(model) for model in models]
    assert all(same_tensors(*pair) for pair in zip(before, after, strict=True))
    assert (run.state.progress.iteration, run.state.progress.history) == (0, [])


# --- samples ---------------------------------------------------------------------------------------------------------


def test_completions_are_a_row_for_each_response(rollouts):
    scores = scores_of(3.0, -7.0, 1.0)
    shaped = shape_rewards(rollouts, scores, shaping_of())
    experience = estimate_advantages(rollouts, scores, shaped, shaping_of(whiten_advantages=False))
    rows = completion_rows(experience, build_tokenizer())
    assert [row["prompt"] for row in rows] == rollouts.prompts.texts
    assert [row["completion"] for row in rows] == [" a a", " a a a a", " a a a"]
    assert [row["score"] for row in rows] == [3.0, -7.0, 1.0]
    assert [row["kl"] for row in rows][:2] == [-0.5, 2.25]  # summed over the response, nats
    assert [row["stopped"] for row in rows][:2] == [True, False]
    assert {row["iteration"] for row in rows} == {rollouts.iteration}


def test_completions_have_the_columns_of_their_prompts_beside_their_own(rollouts):
    chats = ['[{"role": "user", "content": "a"}]', None, None]
    columns = {"topic": ["rain", "snow", "sun"], "score": [7, 8, 9], "tools": [None, None, None]}
    rollouts = replace(rollouts, prompts=replace(rollouts.prompts, columns=columns, chats=chats))
    scores = scores_of(3.0, -7.0, 1.0)
    experience = estimate_advantages(rollouts, scores, shape_rewards(rollouts, scores, shaping_of()), shaping_of())
    rows = completion_rows(experience, build_tokenizer())
    assert [row["topic"] for row in rows] == ["rain", "snow", "sun"]
    assert [(row["score"], row["prompts.score"]) for row in rows] == [(3.0, 7), (-7.0, 8), (1.0, 9)]
    assert [row["prompt_chat"] for row in rows] == chats
    assert [row["prompt"] for row in rows] == rollouts.prompts.texts


def test_a_completions_advantage_is_the_mean_over_its_own_tokens(rollouts):
    """Responses of 2, 4 and 3 tokens: 3 / 2, 8 / 4 and -3 / 3."""
    scores = scores_of(3.0, -7.0, 1.0)
    experience = estimate_advantages(rollouts, scores, shape_rewards(rollouts, scores, shaping_of()), shaping_of())
    advantages = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 5.0], [3.0, 0.0, -6.0, 0.0]]).double()
    rows = completion_rows(replace(experience, advantages=advantages), build_tokenizer())
    assert [row["advantage"] for row in rows] == [1.5, 2.0, -1.0]
    assert [row["tokens"] for row in rows] == [2, 4, 3]


# --- positive examples -----------------------------------------------------------------------------------------------


def test_a_response_whose_score_is_the_threshold_is_a_positive_example(rollouts):
    """Answers that are right (1) or wrong (0) with the threshold 1."""
    shaping, scores = shaping_of(positive_coef=0.1, positive_threshold=1.0), scores_of(1.0, 0.0, 1.0)
    experience = estimate_advantages(rollouts, scores, shape_rewards(rollouts, scores, shaping), shaping)
    expected = [[True, True, False, False], [False] * 4, [True, True, True, False]]
    assert experience.positive is not None
    assert experience.positive.tolist() == expected
