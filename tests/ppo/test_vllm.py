"""Rollouts by vLLM: a stand-in replaces vLLM below TRL, and runs must equal those of the project's engine."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from trl.generation.vllm_client import VLLMClient

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, TrainingError
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, ResolvedJudge
from ppo_rlhf.models.adapters import merged
from ppo_rlhf.ppo.rollouts import LOGPROB_GAP, check_weights
from ppo_rlhf.ppo.vllm import check_vllm
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.ppo import vllm_stand_in
from tests.ppo.test_lora import LORA, stir
from tests.ppo.vllm_stand_in import SERVER, StandIn
from tests.ppo_runs import MEASURED, Run, build_model, build_rollouts, build_run

VLLM = {"rollout_engine": "vllm"}


@pytest.fixture
def stand_in(monkeypatch) -> Callable[..., StandIn]:
    """Install a vLLM that holds a model of another seed."""
    return lambda kind="llama": StandIn(build_model(kind, dtype=torch.float32, seed=7)).install(monkeypatch)


def run_of(kind: str = "llama", **settings: Any) -> Run:
    return build_run(kind, **{"dtype": "float32", **settings})


def metrics_of(run: Run, iterations: int = 3) -> list[dict[str, float]]:
    return [
        {name: value for name, value in run.iteration().items() if not name.startswith(MEASURED)}
        for _ in range(iterations)
    ]


@pytest.mark.parametrize(
    ("kind", "settings", "close"),
    [
        ("llama", {}, 1e-5),
        ("llama", SERVER, 1e-5),
        ("gpt2", {**LORA, "vllm_enable_sleep_mode": True}, 1e-4),
        pytest.param("gpt2", {**LORA, **SERVER}, 1e-4, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, 1e-5, marks=pytest.mark.slow),
        pytest.param("llama", {"value_model": "shared", **SERVER}, 1e-5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_history_is_that_of_the_own_engine_with_weighed_tokens(stand_in, kind, settings, close):
    of_both = {name: value for name, value in settings.items() if not name.startswith("vllm")}
    expected = metrics_of(run_of(kind, **of_both, importance_cap=3.0))
    engine = stand_in(kind)
    actual = metrics_of(run_of(kind, **settings, **VLLM))
    assert actual == [pytest.approx(row, rel=close, abs=close) for row in expected]
    assert (engine.starts, engine.answers) == (1, 3)
    assert engine.pushes >= 3


def test_each_rollout_is_sampled_from_the_weights_that_the_update_before_left(stand_in):
    engine, run = stand_in("gpt2"), run_of("gpt2", **LORA, **VLLM)
    stir(run.state.learner.policy)
    before = [parameter.clone() for parameter in run.reference.parameters()]
    for _ in range(2):
        now = merged(run.state.learner.policy)
        run.iteration()
        for name, parameter in now.named_parameters():
            assert_close(engine.model.get_parameter(name), parameter, rtol=0.0, atol=1e-7, msg=name)
    assert all(map(torch.equal, run.reference.parameters(), before))  # nothing is merged in place


def test_what_is_asked_for_is_what_the_settings_say(stand_in):
    engine = stand_in()
    run_of(**VLLM, vllm_gpu_memory_utilization=0.5, vllm_max_model_length=40, temperature=0.6).iteration()
    own = {"gpu_memory_utilization": 0.5, "max_model_len": 40, "tensor_parallel_size": 1, "enable_sleep_mode": False}
    assert engine.options.items() >= {**own, "logprobs_mode": "processed_logprobs", "trust_remote_code": False}.items()
    expected = {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0}
    assert engine.asked.items() >= {**expected, "max_tokens": 8, "stop_token_ids": [2], "min_tokens": 0}.items()
    assert "logit_bias" not in engine.asked


@pytest.mark.parametrize("settings", [{}, SERVER], ids=["colocate", "server"])
def test_ids_without_a_token_are_asked_away(monkeypatch, settings):
    """The embedding has 26 rows for 23 tokens. vLLM's server takes no bias below -100."""
    engine = StandIn(build_model(dtype=torch.float32, vocab_size=26)).install(monkeypatch)
    run = run_of(**settings, **VLLM, model={"vocab_size": 26})
    run.rollouts()
    assert engine.asked["logit_bias"] == {23: -100.0, 24: -100.0, 25: -100.0}


@pytest.mark.parametrize("settings", [{}, SERVER], ids=["colocate", "server"])
def test_an_engine_that_lost_a_weight_stops_the_run_before_it_learns(stand_in, settings):
    engine, run = stand_in(), run_of(**settings, **VLLM)
    engine.loses = lambda push, name: name == "model.embed_tokens.weight"
    before = [parameter.clone() for parameter in run.state.learner.policy.parameters()]
    with pytest.raises(TrainingError, match=r"^iteration 1: .* weights\.") as stop:
        run.iteration()
    assert "\n" not in str(stop.value)
    assert all(map(torch.equal, run.state.learner.policy.parameters(), before))


def test_an_engine_that_keeps_the_weights_of_an_earlier_push_stops_the_run(stand_in):
    engine, run = stand_in(), run_of(**VLLM, learning_rate=1e-2)
    engine.loses = lambda push, name: push > 1
    metrics_of(run, iterations=2)
    with pytest.raises(TrainingError, match=r"^iteration 3: .* weights\."):
        run.iteration()
    assert run.state.progress.iteration == 2


@pytest.mark.parametrize(
    ("gap", "first", "is_fine"),
    [
        (0.09, None, True),
        (0.11, None, False),
        (0.009, 1e-7, True),
        (0.011, 1e-7, False),
        (0.14, 0.03, True),
        (0.16, 0.03, False),
        (torch.nan, None, False),
        (torch.nan, 0.03, False),
    ],
)
def test_a_gap_is_refused_above_a_bound_at_first_and_where_it_jumps_later(gap, first, is_fine):
    zeros, off = torch.zeros(2, 4).double(), torch.tensor([[gap, -gap, gap, 9.0], [-gap, gap, 9.0, 9.0]]).double()
    rollouts = build_rollouts([3, 2], [True, True], 4, old_logprobs=zeros, sampler_logprobs=off)
    history = [] if first is None else [{LOGPROB_GAP: first}, {LOGPROB_GAP: 10.0}]
    if is_fine:
        check_weights(rollouts, history)
        return
    with pytest.raises(TrainingError, match=r"^iteration 1: .* weights\."):
        check_weights(rollouts, history)


def failing(times: Iterator[bool]) -> Callable[[], None]:
    def fail() -> None:
        if next(times, False):
            raise Exception("Request failed: 500, gone")  # as TRL's client does

    return fail


def test_a_server_that_is_gone_is_asked_again_and_gets_the_weights_again(stand_in, caplog):
    expected = metrics_of(run_of(importance_cap=3.0))
    engine, run = stand_in(), run_of(**SERVER, **VLLM, vllm_server_timeout=5.0)
    actual = metrics_of(run, iterations=1)
    engine.fails = failing(iter([False, True, True, False]))  # the push passes, the answer fails, a start fails
    with caplog.at_level(logging.WARNING):
        actual += metrics_of(run, iterations=2)
    assert actual == [pytest.approx(row, rel=1e-5, abs=1e-5) for row in expected]
    assert engine.starts == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"http://nowhere:8000: .*500, gone.* 5 s", line)


def test_a_server_that_stays_away_stops_the_run_with_one_line(stand_in):
    engine, run = stand_in(), run_of(**SERVER, **VLLM, vllm_server_timeout=0.05)
    run.iteration()
    engine.fails = failing(iter(lambda: True, False))
    with pytest.raises(TrainingError, match=r"http://nowhere:8000: .*ppo\.vllm_server_timeout.*checkpoint") as stop:
        run.iteration()
    assert "\n" not in str(stop.value)
    assert run.state.progress.iteration == 1


def test_a_server_with_log_probabilities_of_another_kind_is_refused(stand_in):
    engine = stand_in()
    engine.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match=r"--logprobs-mode raw_logprobs.*processed_logprobs"):
        run_of(**SERVER, **VLLM).iteration()


def test_a_response_that_had_no_room_is_refused(stand_in):
    stand_in().room = 1
    with pytest.raises(TrainingError, match=r"after 1 tokens.*ppo\.vllm_max_model_length"):
        run_of(**VLLM).iteration()


def test_the_log_says_once_what_weighs_tokens_and_that_a_resumed_run_is_another(stand_in, caplog):
    stand_in()
    with caplog.at_level(logging.INFO):
        metrics_of(run_of(**VLLM), iterations=2)
    (line,) = [record.getMessage() for record in caplog.records if "vLLM" in record.getMessage()]
    assert "3 (ppo.importance_cap)" in line
    assert "resumed" in line


def test_an_evaluation_samples_by_the_same_engine_from_the_policy_that_it_is_given(stand_in):
    engine, run = stand_in(), run_of(**VLLM)
    run.iteration()
    sampling = EvaluationConfig(temperature=0.0).sampling(run.state.sampler.settings)
    given = run.prompts, run.scorer, ResolvedJudge(None, {}, "the reward"), run.config, sampling
    actual = Evaluator(run.state.sampler.tokenizer, *given, seed=1).evaluate(run.reference, None)
    assert (engine.starts, engine.answers, engine.asked["top_k"]) == (1, 2, 1)
    for name, parameter in run.reference.named_parameters():
        assert torch.equal(engine.model.get_parameter(name), parameter)
    own = Evaluator(
        run.state.sampler.tokenizer,
        *given[:3],
        run_of().config,
        EvaluationConfig(temperature=0.0).sampling(run_of().state.sampler.settings),
        seed=1,
    )
    assert actual.response_ids == own.evaluate(run.reference, None).response_ids


def test_importance_weights_are_on_by_default_with_this_engine_and_only_with_it():
    assert PPOConfig(**VLLM).importance_cap == 3.0
    assert PPOConfig(**VLLM, importance_cap=2.0).importance_cap == 2.0
    assert PPOConfig(**VLLM, importance_low=0.7, importance_high=6.0).importance_cap is None
    assert PPOConfig().importance_cap is None


def test_without_vllm_a_run_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"^ppo\.rollout_engine=vllm: .*ppo_rlhf\[vllm\]") as line:
        PPOTrainer(PPOConfig(**VLLM, device="cpu"), "a/directory/that/is/not/there")
    assert "\n" not in str(line.value)


def test_vllm_wants_a_gpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_vllm(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"^ppo\.rollout_engine=vllm.* cpu;"):
        check_vllm(torch.device("cpu"))


def test_the_stand_in_has_the_signatures_of_trls_client():
    for name, method in vars(vllm_stand_in.Client).items():
        if name == "__init__" or not name.startswith("_"):
            own, theirs = (
                list(inspect.signature(each).parameters.values()) for each in (method, getattr(VLLMClient, name))
            )
            own = [each for each in own if each.name != "engine"]
            assert [(e.name, e.default) for e in own] == [(e.name, e.default) for e in theirs], name
