"""Episodes of several turns: the environment's tokens are context, never trained on, scored or counted."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.evaluation.policy import Evaluator, ResolvedJudge
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo.support import ONE_STEP, freeze
from tests.ppo_runs import MEASURED, VOCABULARY, Run, batch_of, build_run, learn_from, with_responses

REPLY = ["s", "t", "r"]
REPLY_IDS = [VOCABULARY.index(word) for word in REPLY]
STOP, MOST_TURNS = 22, 3
HERE = "tests.ppo.test_episodes"
SETTINGS: dict[str, Any] = {
    "environment": f"{HERE}:reply_twice",
    "turn_length": 5,
    "response_length": 14,
    "stop_token_id": STOP,
    "num_mini_batches": 1,
}


def reply_twice(prompts: list[str], completions: list[str], turns: list[list[str]], wanted: list[str]) -> list[Any]:
    assert len(prompts) == len(completions) == len(turns) == len(wanted)
    return [" ".join(REPLY) if len(texts) < 2 * MOST_TURNS - 1 else None for texts in turns]


def never_reply(prompts: list[str], completions: list[str]) -> list[None]:
    return [None] * len(prompts)


def reply_nothing(prompts: list[str], completions: list[str]) -> list[str]:
    return [""] * len(prompts)


def reply_a_number(prompts: list[str], completions: list[str]) -> list[int]:
    return [7] * len(prompts)


def reply_to_one(prompts: list[str], completions: list[str]) -> list[None]:
    return [None, *[None] * len(prompts)]


def fail(prompts: list[str], completions: list[str]) -> list[None]:
    raise KeyError("gone")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(request.config.rootpath)


class Episode(NamedTuple):
    parts: list[list[int]]  # the policy's turns, and the replies between them
    terminated: bool

    @property
    def ids(self) -> list[int]:
        return [token for part in self.parts for token in part]

    @property
    def is_policy(self) -> list[bool]:
        return [number % 2 == 0 for number, part in enumerate(self.parts) for _ in part]


def by_hand(run: Run, iteration: int = 1) -> list[Episode]:
    """Every episode by itself, turn by turn, without a cache."""
    rollouts, config = run.rollouts(), run.config
    noise = episode_uniforms(config.seed, "rollout", iteration, config.batch_size, config.response_length)
    sampling = dataclasses.replace(run.state.sampler.settings, response_length=config.turn_length)
    actual = []
    for row, prompt in enumerate(rollouts.prompts.prompt_ids):
        parts: list[list[int]] = []
        while True:
            so_far = [token for part in parts for token in part]
            here = noise[row : row + 1, len(so_far) : len(so_far) + config.turn_length]
            turn = generate_responses(run.state.learner.policy, [prompt + so_far], here, sampling, engine="hf")
            parts.append(turn.token_lists()[0])
            has_room = len(so_far) + len(parts[-1]) + len(REPLY_IDS) + config.turn_length <= config.response_length
            is_over = len(parts) == 2 * MOST_TURNS - 1
            if not turn.terminated or is_over or not has_room:
                actual.append(Episode(parts, bool(turn.terminated) and is_over))
                break
            parts.append(REPLY_IDS)
    return actual


def as_mask(rows: list[list[bool]], width: int) -> torch.Tensor:
    return torch.tensor([row + [False] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"response_length": 30}, marks=pytest.mark.slow)],
    ids=["little room", "room for all turns"],
)
def test_episodes_are_those_of_single_rows_sampled_turn_by_turn(kind: str, settings: dict[str, int]) -> None:
    run = build_run(kind, **{**SETTINGS, **settings})
    rollouts, expected = run.rollouts(), by_hand(run)
    assert {len(episode.parts) for episode in expected} >= {1, 3}
    assert any(episode.terminated for episode in expected) == bool(settings)
    assert rollouts.responses.token_lists() == [episode.ids for episode in expected]
    assert rollouts.responses.terminated.tolist() == [episode.terminated for episode in expected]
    width = run.config.response_length
    assert torch.equal(rollouts.mask, as_mask([episode.is_policy for episode in expected], width))
    words = [[" ".join(VOCABULARY[i] for i in part) for part in episode.parts] for episode in expected]
    special = ("<pad>", "<unk>", "</s>")
    without = [["".join(f" {w}" for w in text.split() if w not in special) for text in texts] for texts in words]
    assert batch_of(rollouts, run).turns == without


def test_logprobs_are_those_of_the_policys_tokens_in_single_unpadded_rows() -> None:
    run = build_run(**SETTINGS)
    rollouts = run.rollouts()
    for actual, model in (
        (rollouts.old_logprobs, run.state.learner.policy),
        (rollouts.reference_logprobs, run.reference),
    ):
        expected = torch.zeros_like(actual)
        for row, (prompt, ids) in enumerate(
            zip(rollouts.prompts.prompt_ids, rollouts.responses.token_lists(), strict=True)
        ):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            table = torch.log_softmax(logits / run.config.temperature, dim=-1)
            expected[row, : len(ids)] = table[torch.arange(len(ids)), ids]
        assert_close(actual, torch.where(rollouts.mask, expected, 0.0), rtol=0.0, atol=1e-10)
    assert_close(rollouts.responses.sampler_logprobs, rollouts.old_logprobs, rtol=0.0, atol=1e-10)
    assert not rollouts.entropy[~rollouts.mask].any()
    assert bool((rollouts.entropy[rollouts.mask] > 0).all())


def test_the_first_update_has_ratio_one_and_kl_is_that_of_the_policys_tokens() -> None:
    run = build_run(**SETTINGS, num_ppo_epochs=1)
    run.reference = build_run(model={"seed": 7}, **SETTINGS).reference
    rollouts, _, rewards, experience = run.before_update()
    metrics = learn_from(run.state, experience)
    gaps = (rollouts.old_logprobs - rollouts.reference_logprobs)[rollouts.mask]
    assert metrics["val/ratio"] == 1.0
    assert metrics["objective/kl"] == pytest.approx(float(gaps.sum()) / 12)
    assert metrics["response/length"] == float(rollouts.mask.sum()) / 12
    assert metrics["response/turns"] == np.mean([(len(turns) + 1) / 2 for turns in batch_of(rollouts, run).turns])
    assert not rewards[~rollouts.mask].any()


def test_nothing_between_the_turns_changes_a_gradient() -> None:
    """Log-probabilities, values, rewards and advantages of the environment's tokens are replaced by NaN."""
    run = build_run(**{**SETTINGS, **ONE_STEP}, entropy_coef=0.1, importance_cap=2.0)
    experience = run.before_update()[-1]
    mask, rollouts = experience.rollouts.mask, experience.rollouts
    between = ~mask & (torch.arange(mask.shape[1]) < rollouts.responses.lengths[:, None])
    assert int(between.sum()) >= len(REPLY_IDS)

    def poisoned(values: torch.Tensor) -> torch.Tensor:
        spoilt = values.clone()
        spoilt[:, : mask.shape[1]][between] = torch.nan
        return spoilt

    names = ("old_logprobs", "reference_logprobs", "entropy", "values")
    sampled = with_responses(rollouts, sampler_logprobs=poisoned(rollouts.responses.sampler_logprobs))
    spoilt = dataclasses.replace(
        experience,
        rollouts=dataclasses.replace(sampled, **{name: poisoned(getattr(rollouts, name)) for name in names}),
        advantages=poisoned(experience.advantages),
        returns=poisoned(experience.returns),
    )
    seen, others = freeze(run), build_run(**{**SETTINGS, **ONE_STEP}, entropy_coef=0.1, importance_cap=2.0)
    learn_from(run.state, experience)
    seen_spoilt = freeze(others)
    learn_from(others.state, spoilt)
    assert seen[0].keys() == seen_spoilt[0].keys()
    for name, gradient in seen[0].items():
        assert torch.equal(gradient, seen_spoilt[0][name]), name


def test_a_reward_by_token_leaves_out_what_the_environment_wrote() -> None:
    def by_token(prompts: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
        return [[1.0 + column for column in range(len(ids))] for ids in completion_ids]

    scorer = RewardScorer([("by_token", 2.0, lambda batch: score_by_function(by_token, "by_token", batch))])
    run = build_run(scorer=scorer, **SETTINGS)
    rollouts, scores, *_ = run.before_update()
    counted = torch.where(rollouts.mask, 2.0 * (1.0 + torch.arange(14)), 0.0).double()
    assert bool((rollouts.mask.sum(1) < rollouts.responses.lengths).any())
    assert torch.equal(scores.token_rewards, counted[:, : scores.token_rewards.shape[1]])
    assert torch.equal(scores.total, counted.sum(-1))


def test_a_reward_function_that_names_turns_gets_them_and_one_that_does_not_gets_the_whole_episode() -> None:
    seen: dict[str, Any] = {}

    def of_turns(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[float]:
        seen.update(completions=completions, turns=turns)
        return [float(len(texts)) for texts in turns]

    def of_all(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        seen["columns"] = set(columns)
        return [0.0] * len(prompts)

    functions = {"of_turns": of_turns, "of_all": of_all}
    scorer = RewardScorer(
        [(name, 1.0, lambda batch, f=f, name=name: score_by_function(f, name, batch)) for name, f in functions.items()]
    )
    run = build_run(scorer=scorer, **SETTINGS)
    rollouts, scores, *_ = run.before_update()
    turns = batch_of(rollouts, run).turns
    assert seen["turns"] == turns
    assert ["".join(texts) for texts in turns] == seen["completions"]
    assert seen["columns"] == {"wanted"}
    assert scores.total.tolist() == [len(texts) for texts in turns]
    build_run(scorer=scorer).before_update()
    assert seen["turns"] == [[text] for text in seen["completions"]]  # without an environment


def test_an_environment_that_never_replies_gives_what_one_turn_gives() -> None:
    one = build_run(**{**SETTINGS, "response_length": 5, "environment": f"{HERE}:never_reply"})
    alone = build_run(**{**SETTINGS, "response_length": 5, "environment": None, "turn_length": None})
    actual, expected = one.iteration(), alone.iteration()
    assert actual.pop("response/turns") == 1.0
    same = {name for name in expected if not name.startswith(MEASURED)}
    assert {name: actual[name] for name in same} == {name: expected[name] for name in same}


def test_evaluation_plays_the_episodes_and_counts_only_the_policys_tokens() -> None:
    run = build_run(**SETTINGS)
    other = build_run(model={"seed": 7}, **SETTINGS).reference
    judge = ResolvedJudge(lambda prompts, completions, turns: [float(len(t)) for t in turns], {}, "turns")
    given = run.prompts, run.scorer, judge, run.config, run.state.sampler.settings
    evaluated = Evaluator(run.state.sampler.tokenizer, *given, seed=3, batch_size=4).evaluate(
        run.state.learner.policy, other
    )
    assert evaluated.judges["judge_score"].max() >= 3
    replies = [(int(turns) - 1) // 2 for turns in evaluated.deciding_scores]
    for text, length, count in zip(evaluated.completions, evaluated.lengths, replies, strict=True):
        assert text.count(" ".join(REPLY)) == count
        assert length <= 14 - count * len(REPLY_IDS)
    assert (evaluated.kl != 0).all()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("reply_nothing", "''.*tokens"),
        ("reply_a_number", r"\b7\b"),
        pytest.param("reply_to_one", "values for", marks=pytest.mark.slow),
        pytest.param("fail", "KeyError", marks=pytest.mark.slow),
        pytest.param("absent", "absent", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_does_not_do_its_part_is_told_by_name(function: str, told: str) -> None:
    with pytest.raises(RewardError, match=told) as error:
        build_run(**{**SETTINGS, "environment": f"{HERE}:{function}"}).rollouts()
    assert f"{HERE}:{function}" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"turn_length": None}, "turn_length"),
        ({"environment": None}, "environment"),
        ({"turn_length": 15}, "response_length"),
        ({"min_response_length": 6}, "min_response_length"),
        ({"stop_token": "none", "stop_token_id": None}, "stop_token"),
        ({"truncated_responses": "bootstrap"}, "truncated_responses"),
        ({"overlong_buffer": 2}, "overlong_buffer"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PPOConfig(**{**SETTINGS, **settings})
