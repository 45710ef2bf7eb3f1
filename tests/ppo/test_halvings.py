"""A run whose memory runs out computes half as many responses at a time, with the numbers of a run that began so."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.evaluation.during_training import evaluator_of
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, ResolvedJudge
from ppo_rlhf.passes import engines, halvings
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo import learner
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.micro_batches import cut_batch
from ppo_rlhf.rewards.scoring import RewardScorer, Scoring
from tests.memory_errors import KINDS
from tests.ppo.short_memory import ERROR, PHASES, ShortMemory
from tests.ppo_runs import MEASURED, Run, build_run, first_letters, learn_from, model_scorer

SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "local_rollout_forward_batch_size": 6}
"""16 responses an iteration, in minibatches of two micro-batches."""
SMALLER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "local_rollout_forward_batch_size": 3}
OF_ROLLOUTS = ("sampling", "reference", "scoring")


def build(**settings: Any) -> Run:
    return build_run("gpt2", **{"total_episodes": 48, **SIZES, **settings})


def reward(function: Scoring = first_letters, batch_size: int = 6) -> RewardScorer:
    """Return the reward of a function and a reward model."""
    return RewardScorer([("letters", 1.0, function), ("model", 0.1, model_scorer("gpt2", batch_size))])


def train(run: Run) -> Run:
    while not run.state.progress.finished:
        run.iteration()
    return run


def assert_same_run(actual: Run, expected: Run) -> None:
    for row, other in zip(actual.state.progress.history, expected.state.progress.history, strict=True):
        for name in other:
            if not name.startswith(MEASURED):
                assert row[name] == pytest.approx(other[name], rel=1e-10, abs=1e-10), name
    for model in ("policy", "critic"):
        wanted = getattr(expected.state.learner, model).state_dict()
        for name, tensor in getattr(actual.state.learner, model).state_dict().items():
            assert_close(tensor, wanted[name], rtol=0.0, atol=1e-10, msg=name)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == halvings.__name__]


@cache
def begun_with_half(shared: bool) -> Run:
    return train(build(**SMALLER, **({"value_model": "shared"} if shared else {}), scorer=reward(batch_size=3)))


# A shared critic has no passes of its own
@pytest.mark.parametrize(
    ("phase", "shared"),
    [
        *((phase, False) for phase in PHASES),
        *(pytest.param(each, True, marks=pytest.mark.slow) for each in PHASES if not each.startswith("critic")),
    ],
)
def test_a_run_whose_memory_runs_out_has_the_numbers_of_one_that_began_with_half(monkeypatch, caplog, phase, shared):
    settings = {"value_model": "shared"} if shared else {}
    scored: list[int] = []
    expected = begun_with_half(shared)

    def score(batch):
        scored.append(len(batch.prompt_ids))
        return first_letters(batch)

    run = build(**settings, scorer=reward(score))
    memory = ShortMemory(monkeypatch, phase, most=3 if phase in OF_ROLLOUTS else 2)
    train(run)
    assert_same_run(run, expected)
    assert scored == [16, 16, 16]
    name = "rollout_halvings" if phase in OF_ROLLOUTS else "update_halvings"
    assert {key: halving.count for key, halving in run.state.halvings.items() if halving.count} == {name: 1}
    assert [row.get(f"memory/{name}") for row in run.state.progress.history] == [1.0, 1.0, 1.0]
    assert sum(rows > memory.most for rows in memory.tried) == 1
    (line,) = lines(caplog)
    passes, like = "a rollout", " (ppo.local_rollout_forward_batch_size)"
    if phase not in OF_ROLLOUTS:
        like = ", as with half of ppo.per_device_train_batch_size and twice ppo.gradient_accumulation_steps"
        passes = "an update"
    begin = f"Ran out of memory in {passes} with {2 * memory.most} responses at a time; from here on half of them{like}"
    assert line.startswith(f"{begin}: CUDA out of memory.")
    assert "\n" not in line


@pytest.mark.parametrize(
    "kind", [name if name == "CUDA" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)  # tests/core/test_memory_errors.py tells them all from other errors
def test_each_kind_of_error_halves_in_each_pass(monkeypatch, kind):
    """Each phase's memory fits half of the responses that the phase before left at a time."""
    one_pass = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    short = {"total_episodes": 64, "num_ppo_epochs": 1, "response_length": 2}
    run = build(**one_pass, **short, local_rollout_forward_batch_size=64, scorer=reward(batch_size=64))
    fits = dict.fromkeys(("rollout_halvings", "update_halvings"), 64)
    for phase in PHASES:
        name = "rollout_halvings" if phase in OF_ROLLOUTS else "update_halvings"
        fits[name] //= 2
        ShortMemory(monkeypatch, phase, fits[name], KINDS[kind])
    run.iteration()
    assert {name: halving.count for name, halving in run.state.halvings.items()} == {
        "rollout_halvings": 3,
        "update_halvings": 6,
    }
    assert run.state.learner.optimiser_steps == 1


def test_an_optimiser_step_without_memory_ends_the_run(monkeypatch):
    """Adam has moved some weights by then, and the same step needs as much memory again."""
    run = build()
    monkeypatch.setattr(run.state.learner.critic_optimizer, "step", raising(KINDS["CUDA"]))
    with pytest.raises(torch.OutOfMemoryError):
        run.iteration()
    assert [halving.count for halving in run.state.halvings.values()] == [0, 0]


def test_memory_that_suffices_leaves_no_trace(caplog, tmp_path):
    run = build()
    metrics = run.iteration()
    assert not [name for name in metrics if "halvings" in name]
    assert not lines(caplog)
    saved = json.loads((write_checkpoint(tmp_path, run.state) / "state.json").read_text())
    assert (saved["rollout_halvings"], saved["update_halvings"]) == (0, 0)


def test_memory_may_run_out_more_than_once(monkeypatch, caplog):
    run = build()
    memory = ShortMemory(monkeypatch, "policy's update", most=1)
    train(run)
    assert run.state.learner.halving.count == 2
    assert [rows for rows in memory.tried if rows > 1] == [4, 2]
    assert len(lines(caplog)) == 2
    assert_same_run(run, train(build(per_device_train_batch_size=1, gradient_accumulation_steps=16)))


def test_a_later_minibatch_is_halved_where_memory_ran_out_in_an_earlier_one(monkeypatch):
    """Memory runs out in the second minibatch of the first epoch; the first one is not computed again."""
    run, taken = build(num_mini_batches=2, num_ppo_epochs=2), []
    sizes, original, calls = [], Learner.add_gradients, itertools.count(1)

    def short(learner, micro_batch, *how):
        sizes.append(micro_batch.mask.shape[0])
        if next(calls) == 3:
            raise ERROR
        return original(learner, micro_batch, *how)

    monkeypatch.setattr(Learner, "add_gradients", short)
    step = Learner.take_step
    monkeypatch.setattr(Learner, "take_step", lambda of, sums, *at: (taken.append(sums.tokens), step(of, sums, *at)))
    run.iteration()
    assert sizes == [4, 4, 4, *[2] * 4, *[2] * 8]
    assert len(taken) == 4


@pytest.mark.parametrize(
    ("others", "sizes"),
    [
        ([0, 0, 1, 1, 1, 1], [4, 4, *[2] * 12]),  # of the rollout, as the update begins, after each of four minibatches
        ([0, 0, 0, 0, 1, 1], [4] * 6 + [2] * 4),
        ([0, 1, 1, 1, 1, 1], [2] * 16),
    ],
)
def test_what_another_process_had_to_halve_is_halved_from_the_next_minibatch_on(monkeypatch, others, sizes):
    """Memory suffices here. Equal micro-batches let the processes' passes meet."""
    run, computed, answers = build(num_mini_batches=2, num_ppo_epochs=2), [], iter(others)
    original = Learner.add_gradients
    monkeypatch.setattr(halvings, "from_all", lambda own: [own, next(answers)])

    def noting(learner, micro_batch, *how):
        computed.append(micro_batch.mask.shape[0])
        return original(learner, micro_batch, *how)

    monkeypatch.setattr(Learner, "add_gradients", noting)
    run.iteration()
    assert computed == sizes


@pytest.mark.parametrize("settings", [{"max_tokens_per_micro_batch": 40}, {"kl_in": "loss", "kl_estimator": "full"}])
def test_other_plans_of_an_update_are_halved_too(monkeypatch, settings):
    expected = train(build(**settings))
    run = build(**settings)
    memory = ShortMemory(monkeypatch, "policy's update", most=2)
    train(run)
    assert max(memory.tried) > 2
    assert run.state.learner.halving.count >= 1
    assert_same_run(run, expected)


def test_in_16_bits_the_reference_reads_the_policys_halved_batches(monkeypatch):
    run = build(dtype="bfloat16")
    ShortMemory(monkeypatch, "policy's passes", most=2)
    experience = run.before_update()[-1]
    metrics = learn_from(run.state, experience)
    assert metrics["objective/kl"] == 0.0
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-2)
    assert max(map(len, experience.rollouts.cut.first_micro_batches)) == 2


def test_an_environment_is_not_asked_again(monkeypatch):
    turns = {"environment": "tests.ppo.test_episodes:reply_twice", "turn_length": 2, "stop_token_id": 22}
    expected, run = build(**turns), build(**turns)
    wanted, asked = expected.rollouts(), []
    environment = run.state.sampler.settings.environment
    run.state.sampler.settings = replace(
        run.state.sampler.settings,
        environment=lambda prompts, *turns: (asked.append(len(prompts)), environment(prompts, *turns))[1],
    )
    ShortMemory(monkeypatch, "sampling", most=3)
    actual = run.rollouts()
    assert torch.equal(actual.responses.response_ids, wanted.responses.response_ids)
    assert run.state.sampler.halving.count == 1
    assert len(asked) <= 2


def test_one_response_that_does_not_fit_ends_the_run_with_what_would_take_less(monkeypatch):
    run = build()
    ShortMemory(monkeypatch, "policy's update", most=0)
    with pytest.raises(TrainingError, match=r"^ran out of memory in an update with 1 response at .*checkpointing"):
        run.iteration()


@pytest.mark.parametrize(("count", "rows"), [(0, 16), (1, 8), (2, 4), (4, 1), (9, 1)])
def test_each_halving_halves_the_responses_down_to_one(count, rows):
    assert Halving("a pass", "x", count=count).of(16) == rows


@pytest.mark.parametrize("others", [[0, 2], [2, 0]])
def test_every_process_halves_as_often_as_the_one_whose_memory_ran_out_most_often(monkeypatch, others):
    monkeypatch.setattr(halvings, "from_all", lambda own: [own, *others])
    halving = Halving("an update", count=1)
    halving.agree()
    assert halving.count == 2


def test_a_pass_that_has_begun_a_collective_is_not_begun_again():
    halving = Halving("an update", "ppo.x")
    refused = pytest.raises(TrainingError, match=r"with 4 responses .*cannot begin again: lower ppo\.x$")
    with refused, halving.catching(4, is_shared=lambda: True):
        raise ERROR
    assert halving.count == 0


def test_the_responses_there_are_and_not_the_setting_are_halved(make_model, monkeypatch):
    """Six prompts with a setting of 64: half of six, not of 64, is tried next."""
    memory, halving = ShortMemory(monkeypatch, "sampling", most=3), Halving("a rollout", "ppo.x")
    how = SamplingSettings(response_length=2, temperature=1.0, top_k=0, top_p=1.0, stop_token_ids=(), pad_token_id=0)
    uniforms = torch.full((6, 2), 0.5, dtype=torch.float64)
    engines.generate_responses(make_model("gpt2"), [[3, 4]] * 6, uniforms, how, batch_size=64, halving=halving)
    assert memory.tried == [6, 3, 3]
    assert halving.count == 1


def test_of_several_processes_the_second_minibatch_of_the_run_cannot_begin_again(monkeypatch):
    """In it DDP rebuilds its buckets, which all processes must do together."""
    monkeypatch.setattr(learner, "process_count", lambda: 2)
    run, shared = build(num_mini_batches=2, total_episodes=32), []
    original = Learner.add_gradients

    def noting(of, micro_batch, inputs, *given):
        if micro_batch is inputs.micro_batches[0]:
            shared.append(of.is_exchanging)
        return original(of, micro_batch, inputs, *given)

    monkeypatch.setattr(Learner, "add_gradients", noting)
    run.iteration()
    run.iteration()
    assert shared == [False, True, *[False] * (len(shared) - 2)]
    assert len(shared) >= 4


def test_shards_end_the_run_with_the_setting_to_lower(monkeypatch):
    monkeypatch.setattr(halvings, "shards_models", lambda: True)
    run = build()
    ShortMemory(monkeypatch, "sampling", most=3)
    with pytest.raises(TrainingError, match=r"lower ppo\.local_rollout_forward_batch_size$"):
        run.iteration()


def test_other_errors_are_raised_as_they_are():
    error, halving = RuntimeError("CUDA error: unspecified launch failure"), Halving("a pass", "x")
    with pytest.raises(RuntimeError) as raised, halving.catching(4):
        raise error
    assert raised.value is error
    assert halving.count == 0


def test_a_resumed_run_keeps_its_halvings_to_the_bit(tmp_path, monkeypatch, snapshot, same_tensors, caplog):
    with monkeypatch.context() as patch:
        run = build()
        for phase, most in (("sampling", 3), ("policy's update", 2)):
            ShortMemory(patch, phase, most)
        run.iteration()
    saved = write_checkpoint(tmp_path, run.state)
    again = build()
    with caplog.at_level(logging.INFO):
        restore(again.state, saved)
    assert "ppo.per_device_train_batch_size stays divided by 2" in caplog.text
    for each in (run, again):
        train(each)
        assert [halving.count for halving in each.state.halvings.values()] == [1, 1]
    assert same_tensors(snapshot(run.state.learner.policy), snapshot(again.state.learner.policy))
    assert same_tensors(snapshot(run.state.learner.critic), snapshot(again.state.learner.critic))
    changed = build(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    restore(changed.state, saved)
    assert [halving.count for halving in changed.state.halvings.values()] == [1, 0]


def test_an_evaluation_halves_its_batches(monkeypatch, caplog):
    run = build()
    given = run.prompts, run.scorer, ResolvedJudge(None, {}, "the reward"), run.config, run.state.sampler.settings
    plain, short = (Evaluator(run.state.sampler.tokenizer, *given, seed=1, batch_size=4) for _ in range(2))
    expected = plain.evaluate(run.state.learner.policy, run.reference)
    ShortMemory(monkeypatch, "sampling", most=2)
    actual = short.evaluate(run.state.learner.policy, run.reference)
    assert actual.completions == expected.completions
    assert "Ran out of memory in an evaluation with 4 responses" in caplog.text


def test_the_next_evaluation_of_a_run_begins_with_the_halved_batches(monkeypatch):
    run, halving = build(), halvings.of_evaluations()
    judge, evaluation = ResolvedJudge(None, {}, "the reward"), EvaluationConfig(batch_size=4)
    memory = ShortMemory(monkeypatch, "sampling", most=2)
    for _ in range(2):
        given = run.prompts, run.scorer, run.config, run.state.sampler.settings, evaluation, judge, halving
        evaluator_of(run.state.sampler.tokenizer, *given).evaluate(run.state.learner.policy, run.reference)
    assert [rows for rows in memory.tried if rows > 2] == [4]


@pytest.mark.parametrize("halved", [0, 1, 2, 3])
def test_halved_micro_batches_have_the_same_rows_and_at_most_half_of_them(halved):
    config = PPOConfig(per_device_train_batch_size=5, gradient_accumulation_steps=2, total_episodes=10)
    lengths = [[0] * 3] * 10, [4] * 10
    (whole,), (cut,) = (cut_batch(config, 1, *lengths, None, padded=False, halvings=n)[0] for n in (0, halved))
    assert [row for rows in cut.micro_batches for row in rows] == [row for rows in whole.micro_batches for row in rows]
    most = 5
    for _ in range(halved):
        most = math.ceil(most / 2)
    assert cut.most_rows == most
    assert cut.shards == whole.shards
