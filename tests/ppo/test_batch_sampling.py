"""Prompts whose responses all score alike are replaced; the oracle samples one prompt at a time."""

import time

import pytest
import torch

from ppo_rlhf.core import randomness
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.ppo.progress import REWARDS, SAMPLING
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo_runs import batch_of, build_prompts

SETTINGS = {"responses_per_prompt": 3, "dtype": "float64"}  # four prompts an iteration
WITHOUT_SIGNAL = "abc"  # the word `wanted` of the first three of six prompts


def by_prompt(batch):
    """Score 1 for each response to a prompt without a signal, and a unique number for every other response."""
    weights = [1.0 + 0.37**place for place in range(8)]
    numbers = [sum(w * i for w, i in zip(weights, ids, strict=False)) for ids in batch.response_ids]
    wanted = batch.columns["wanted"]
    return torch.tensor([1.0 if word in WITHOUT_SIGNAL else n for word, n in zip(wanted, numbers, strict=True)])


def build(make_run, scoring=by_prompt, **settings):
    calls = []
    scorer = RewardScorer([("given", 1.0, lambda batch: calls.append(batch) or scoring(batch))])
    return make_run(scorer=scorer, **{**SETTINGS, **settings}), calls


def answers(run, prompt: list[int], place: int, stream: str) -> list[list[int]]:
    """Sample three responses to one prompt, one at a time, with the noise of the prompt's rows in the batch."""
    noise = randomness.episode_uniforms(run.config.seed, stream, 1, 12, 8)[3 * place : 3 * place + 3]
    return [
        generate_responses(run.state.learner.policy, [prompt], row[None], run.state.sampler.settings).token_lists()[0]
        for row in noise
    ]


def expected_batch(run, limit: int) -> tuple[list[int], list[list[int]], int]:
    """Compute the four prompts, their responses and the redraws in plain Python."""
    size, ids = len(run.prompts), run.prompts.prompt_ids
    chosen = randomness.permutation(size, run.config.seed, "prompts", 0).tolist()[:4]
    texts = [answers(run, ids[index], place, "rollout") for place, index in enumerate(chosen)]
    redraws = 0
    while redraws < limit and any(run.prompts.columns["wanted"][index] in WITHOUT_SIGNAL for index in chosen):
        redraws += 1
        drawn = randomness.permutation(size, run.config.seed, "redrawn prompts", 1, redraws).tolist()
        order = [index for index in drawn if index not in chosen] or drawn
        dropped = [p for p, index in enumerate(chosen) if run.prompts.columns["wanted"][index] in WITHOUT_SIGNAL]
        for number, place in enumerate(dropped):
            if run.prompts.columns["wanted"][order[number]] not in WITHOUT_SIGNAL:
                chosen[place] = order[number]
                texts[place] = answers(run, ids[order[number]], place, f"redraw {redraws}")
    return chosen, [text for place in texts for text in place], redraws


def test_the_seconds_of_a_slow_reward_are_of_scoring_and_not_of_sampling(make_run):
    def slowly(batch):
        time.sleep(0.2)
        return by_prompt(batch)

    run, calls = build(make_run, slowly, drop_uniform_prompts=2)
    run.rollouts()
    seconds = run.state.progress.clock.seconds
    assert seconds[REWARDS] >= 0.2 * len(calls)
    assert seconds[SAMPLING] + seconds[REWARDS] <= time.perf_counter() - run.state.progress.clock.started


@pytest.mark.parametrize("limit", [1, 10])
def test_prompts_without_a_signal_are_replaced_by_others_with_noise_of_their_own(make_run, limit):
    run, calls = build(make_run, drop_uniform_prompts=limit)
    rollouts = run.rollouts()
    chosen, texts, redraws = expected_batch(run, limit)
    assert rollouts.prompts.prompt_ids == [run.prompts.prompt_ids[index] for index in chosen for _ in range(3)]
    assert rollouts.prompts.columns["wanted"] == [run.prompts.columns["wanted"][i] for i in chosen for _ in range(3)]
    assert rollouts.responses.token_lists() == texts
    assert rollouts.redraws == redraws > 0
    assert len(calls) == 1 + redraws
    assert len(calls[0]) == 12 > len(calls[1])  # only the new ones are sampled and scored
    metrics = run.iteration()
    left = sum(run.prompts.columns["wanted"][index] in WITHOUT_SIGNAL for index in chosen)
    assert (metrics["response/redraws"], metrics["response/uniform_prompts"]) == (redraws, left / 4)
    assert metrics["objective/scores"] == pytest.approx(
        float(by_prompt(batch_of(rollouts, run)).double().mean()), rel=1e-6
    )
    assert metrics["episode"] == 12.0
    assert len(calls) == 2 * (1 + redraws)  # no response is scored twice: training uses the scores that decided


def test_past_the_limit_the_dropped_prompts_come_back_with_their_first_responses(make_run):
    run, calls = build(make_run, lambda batch: torch.ones(len(batch)), drop_uniform_prompts=2)
    plain, _ = build(make_run)
    actual, expected = run.rollouts(), plain.rollouts()
    assert actual.prompts == expected.prompts
    assert torch.equal(actual.responses.response_ids, expected.responses.response_ids)
    assert torch.equal(actual.old_logprobs, expected.old_logprobs)
    assert (actual.redraws, len(calls)) == (2, 3)
    assert run.iteration()["response/uniform_prompts"] == 1.0


def test_a_batch_with_a_signal_everywhere_is_that_of_a_run_without_the_option(make_run):
    prompts = build_prompts()
    with_signal = {"prompts": prompts.select([3, 4, 5, 3])}
    run, calls = build(make_run, drop_uniform_prompts=5, **with_signal)
    plain, _ = build(make_run, **with_signal)
    actual, expected = run.rollouts(), plain.rollouts()
    assert torch.equal(actual.responses.response_ids, expected.responses.response_ids)
    assert (actual.redraws, len(calls)) == (0, 1)


def test_rewards_by_token_go_with_their_responses(make_run):
    """Return rewards per token: the token's id, or 1 / length for prompts without a signal, whose score is then 1."""

    def by_token(batch):
        width = max(map(len, batch.response_ids))
        rows = [
            [1.0 / len(ids)] * len(ids) if word in WITHOUT_SIGNAL else [float(i) for i in ids]
            for ids, word in zip(batch.response_ids, batch.columns["wanted"], strict=True)
        ]
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])

    run, _ = build(make_run, by_token, drop_uniform_prompts=10, min_response_length=1)
    rollouts, scores, _, _ = run.before_update()
    width = int(rollouts.responses.lengths.max())
    assert rollouts.redraws > 0
    batch = batch_of(rollouts, run)
    for row, (ids, word) in enumerate(zip(batch.response_ids, batch.columns["wanted"], strict=True)):
        if word not in WITHOUT_SIGNAL:
            assert scores.token_rewards[row].tolist() == [float(i) for i in ids] + [0.0] * (width - len(ids))
            assert float(scores.total[row]) == sum(ids)


def test_several_turns_are_drawn_anew_as_a_whole(make_run):
    turns = {"environment": "tests.ppo.test_episodes:reply_twice", "turn_length": 3, "stop_token_id": 22}
    run, _ = build(make_run, drop_uniform_prompts=10, **turns)
    rollouts = run.rollouts()
    assert rollouts.redraws > 0
    for row in range(12):
        place = rollouts.responses.policy_mask[row]
        assert int(place.sum()) == int(rollouts.mask[row].sum()) > 0
        assert not place[int(rollouts.responses.lengths[row]) :].any()
