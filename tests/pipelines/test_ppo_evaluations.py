"""The evaluations of a run while it trains: what a row holds, and what the next one makes of it."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ppo_rlhf.checkpoints.evaluations import best_iteration
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation import during_training
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.evaluation.since_best import SCORES
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.pipelines.ppo import nodes
from ppo_rlhf.ppo.stop_requests import RunRequests
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.runtime.names import TRAINING_KL
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate
from tests.bare_state import bare_state
from tests.evaluation.test_since_best import evaluation

HALVING = Halving("an evaluation", "evaluation.batch_size")
SFT = evaluation(np.zeros(8))
REWARD = RewardConfig(components=[RewardComponentConfig(type="function", function="mine:reward")])
SCORES_AT = {10: np.full(8, 2.0), 20: np.full(8, 1.0), 30: np.full(8, 3.0)}


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluate an iteration after a log of earlier ones; the policy's scores are SCORES_AT, its greedy KL is 1."""

    def evaluator(*given: Any, halving: Any, **named: Any) -> SimpleNamespace:
        halvings.append(halving)
        return SimpleNamespace(evaluate=lambda *_, **__: measured_now[-1], scorer=None, prompts=None)

    measured_now: list[Any] = []
    halvings: list[Any] = []
    monkeypatch.setattr(nodes, "evaluator_of", evaluator)
    monkeypatch.setattr(nodes, "resolve_judge", lambda config: SimpleNamespace(reference=config.judge))

    def evaluated(iteration: int, log: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        measured = evaluation(SCORES_AT[iteration])
        measured.kl = np.ones(len(SCORES_AT[iteration]))
        measured_now.append(measured)
        state = bare_state(99, iteration, eval_interval=1)
        state.learner = SimpleNamespace(policy=None)
        state.sampler = SimpleNamespace(tokenizer=None, settings=None, evaluation_halving=HALVING)
        state.shaping = SimpleNamespace(reward_moments=None, component_moments={})
        state.progress.history = [{"iteration": float(iteration), "objective/kl": 2.0 * iteration}]
        config = EvaluationConfig(**settings)
        row = nodes.evaluate_iteration(state, None, SFT, log, [], None, None, REWARD, config)
        assert halvings[-1] is HALVING  # a smaller batch is kept
        return dict(json.loads(json.dumps(row)))  # as it is beside the checkpoints

    return evaluated


def test_a_row_keeps_each_prompts_score_only_if_it_is_the_best_so_far(evaluate):
    log: list[dict[str, Any]] = []
    for iteration in SCORES_AT:
        log.append(evaluate(iteration, log))
    assert [SCORES in row for row in log] == [True, False, True]
    assert [row["eval/since_best_score"] for row in log] == [2.0, -1.0, 1.0]
    assert log[1]["eval/since_best_p"] == pytest.approx(2 / 2**8)  # chosen from SFT's and the first


@pytest.mark.parametrize(
    ("prompts", "judge", "level"), [(5, "mine:judge", 0), (10, "mine:judge", 1), (10, "mine:reward", 0.5)]
)
def test_a_row_has_the_verdict_of_the_final_evaluation_and_no_other(evaluate, monkeypatch, prompts, judge, level):
    """Five of five prompts won have an interval above one half, and are too few for a verdict."""
    monkeypatch.setitem(SCORES_AT, 10, np.ones(prompts))
    sft = replace(evaluation(np.zeros(prompts)), response_ids=[[3]] * prompts)  # the same tokens would be ties
    monkeypatch.setattr(sys.modules[__name__], "SFT", sft)
    row = evaluate(10, [], judge=judge)
    assert row["eval/win_rate_low"] > 0.5
    assert row["eval/verdict"] == level


def test_a_row_counts_the_answers_that_do_what_an_audit_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = evaluation(np.ones(8))
    ours.completions = ["why do people like it so much"] * 8
    prompts = PromptDataset([[1]] * 8, ["Why do people like it so much?"] * 8, {})
    evaluator = SimpleNamespace(evaluate=lambda *_, **__: ours, scorer=None, prompts=prompts)
    state = bare_state(99, 10, eval_interval=1)
    state.learner = SimpleNamespace(policy=None)
    shaping = SimpleNamespace(reward_moments=None, component_moments={})
    parts = state.learner, shaping, state.progress, None, evaluator, SFT, []
    row, _ = during_training.evaluate_iteration(*parts, by_trained_reward=True, holes=["echo"])
    assert (row["eval/attack_share"], row["eval/attack_share_sft"]) == (1.0, 0.0)
    assert "100% of the answers do what the audit of the reward found to be a hole (echo 100%)" in caplog.text
    row, _ = during_training.evaluate_iteration(*parts, by_trained_reward=True)
    assert not {key for key in row if "attack" in key}


def test_an_evaluation_stops_where_the_processes_meet(evaluate, monkeypatch):
    """`RunControl.ask` promises it to a run of several processes."""
    monkeypatch.setattr(RunRequests, "meet", lambda self: (_ for _ in ()).throw(StopBeforeUpdate(signal.SIGTERM)))
    evaluator = SimpleNamespace(evaluate=lambda *_, meet, **__: meet())
    monkeypatch.setattr(nodes, "evaluator_of", lambda *_, **__: evaluator)
    with pytest.raises(StopBeforeUpdate):
        evaluate(10, [])


def test_a_run_resumed_from_an_earlier_checkpoint_evaluates_as_it_did_the_first_time(evaluate):
    log: list[dict[str, Any]] = []
    for iteration in SCORES_AT:
        log.append(evaluate(iteration, log))
    assert evaluate(20, log) == log[1]  # the log has what came after it, and itself


def test_a_greedy_evaluation_is_gated_by_the_kl_of_its_iterations_rollouts(evaluate):
    rows = [evaluate(iteration, [], temperature=0.0) for iteration in (10, 20, 30)]
    assert [row["eval/kl"] for row in rows] == [1.0, 1.0, 1.0]
    assert [row[TRAINING_KL] for row in rows] == [20.0, 40.0, 60.0]
    assert best_iteration(rows, kl_alarm=20.0) == 10
    assert TRAINING_KL not in evaluate(10, [])


def test_the_history_has_the_metrics_of_evaluations_and_nothing_else_of_their_log(evaluate):
    rows = [evaluate(10, [], temperature=0.0)]
    state = bare_state(10, 10)
    state.progress.history = [{"iteration": float(i), "objective/kl": float(i)} for i in (9, 10)]
    table = nodes.summarise_training(state, rows)
    assert {"scores", TRAINING_KL}.isdisjoint(table.columns)
    assert table["objective/kl"].tolist() == [9.0, 10.0]
    assert table["eval/since_best_score"].tolist()[1] == 2.0
