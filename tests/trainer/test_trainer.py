"""PPOTrainer gives the pipeline's results bit for bit, and has the calls of TRL's first PPOTrainer."""

from __future__ import annotations

import logging
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, T5Config, T5ForConditionalGeneration

from ppo_rlhf.compat import from_trl
from ppo_rlhf.core.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError
from ppo_rlhf.core.randomness import episode_prompts
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.datasets import CheckpointDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.tokenizers import continuations, train_word_tokenizer
from ppo_rlhf.pipelines.ppo.pipeline import create_pipeline
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runner import LoopRunner
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.ppo_runs import MEASURED
from tests.tiny_models import END, PAD, VOCABULARY, not_causal_models, save, tiny_model, word_tokenizer

PROMPTS = ["a b c", "d", "e f", "g h i j", "k l", "m", "n o p"]
TABLE = {"prompt": PROMPTS, "answer": PROMPTS[::-1]}
SETTINGS = {
    "total_episodes": 12,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "local_rollout_forward_batch_size": 3,
    "response_length": 6,
    "learning_rate": 1e-3,
    "temperature": 0.8,
    "missing_eos_penalty": 0.5,
    "device": "cpu",
}


def early_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Score a response by its share of letters before k, plus a little for length."""
    return [sum(c < "k" for c in text.split()) / (1 + len(text.split())) + 0.01 * len(text) for text in completions]


def config(**settings: Any) -> PPOConfig:
    return PPOConfig(**{**SETTINGS, **settings})


@pytest.fixture
def sft(tmp_path: Path) -> str:
    return save(tmp_path / "sft", tiny_model())


def trainer_of(sft: str, settings: PPOConfig | None = None, **given: Any) -> PPOTrainer:
    return PPOTrainer(settings or config(), sft, **{"reward": early_letters, "prompts": PROMPTS, **given})


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def repeatable(history: Any, *without: str) -> list[dict[str, float]]:
    return [{key: row[key] for key in row if not key.startswith((*MEASURED, *without))} for row in history]


def pipeline_run(
    sft: str,
    ppo: PPOConfig,
    reward: dict[str, Any],
    reward_model: str | None = None,
    *,
    resume: Path | None = None,
    checkpoints: Path | None = None,
) -> Any:
    """The pipeline's own nodes under its runner, up to the exported policy; evaluation trains nothing."""
    given = {
        "params:ppo": ppo,
        "params:prompts": PromptsConfig(),
        "params:reward": RewardConfig(components=[reward]),
        "params:evaluation": EvaluationConfig(),
        "raw_prompts": table_of(TABLE),
        "raw_evaluation_prompts": table_of({"prompt": ["q"]}),  # so that no training prompt is held out
        "sft_policy": PretrainedHandle(sft),
        "reward_model": reward_model and PretrainedHandle(reward_model),
        "resume_checkpoint": resume,
    }
    pipeline = create_pipeline().to_nodes("ppo.export_policy")
    names = pipeline.datasets() | given.keys()
    catalog = DataCatalog({name: MemoryDataset(given.get(name), copy_mode="assign") for name in names - given.keys()})
    for name, value in given.items():
        catalog[name] = MemoryDataset(value, copy_mode="assign")
    if checkpoints is not None:
        catalog["checkpoint"] = CheckpointDataset(str(checkpoints))
    return LoopRunner().run(pipeline, catalog)


OPTIONS = [
    {},
    {"value_model": "shared", "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": 8.0, "ema_decay": 0.9},
    {"use_peft": True, "lora_r": 2, "dtype": "bfloat16"},
]
FUNCTION = {"type": "function", "function": "tests.trainer.test_trainer:early_letters"}


@pytest.mark.parametrize(
    "settings",
    [*OPTIONS[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in OPTIONS[1:])],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_training_is_the_pipelines_bit_for_bit(sft: str, tmp_path: Path, settings: dict[str, Any]):
    """Models come from paths, and with the default settings also from objects."""
    outputs = pipeline_run(sft, config(**settings), FUNCTION)
    outputs["ppo_policy"].load().save(tmp_path / "pipeline")
    expected = repeatable(outputs["checkpoint"].load().progress.history)
    given: list[tuple[Any, ...]] = [(sft,)]
    if not settings:
        given.append((PretrainedHandle(sft).causal_lm(), None, PretrainedHandle(sft).tokenizer()))
    for number, models in enumerate(given):
        trainer = PPOTrainer(config(**settings), *models, reward=early_letters, prompts=TABLE)
        assert repeatable(trainer.train()) == expected
        assert len(expected) == 3
        trainer.save_pretrained(tmp_path / str(number))
        for folder in ("", "ema") if "ema_decay" in settings else ("",):
            actual, wanted = (exported(tmp_path / name / folder) for name in (str(number), "pipeline"))
            assert_same_bits(actual, wanted)
            assert any(not torch.equal(wanted[name], before) for name, before in exported(sft).items())


def exported(folder: str | Path) -> dict[str, Tensor]:
    return weights(PretrainedHandle(str(folder)).causal_lm())


@pytest.fixture
def reward_model(tmp_path: Path) -> str:
    model = CausalLMRewardModel.from_causal_lm(tiny_model(seed=5))
    with torch.no_grad():
        model.score.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(6))
    return save(tmp_path / "reward", model)


@pytest.mark.slow
def test_with_a_reward_model_training_is_the_pipelines_bit_for_bit(sft: str, reward_model: str):
    """The reward model is given as a path, as an object, and by the configuration."""
    settings = {"value_model": "reward_init"}
    outputs = pipeline_run(sft, config(**settings), {"type": "model"}, reward_model)
    expected = repeatable(outputs["checkpoint"].load().progress.history)
    as_object = (CausalLMRewardModel.from_pretrained(reward_model), PretrainedHandle(reward_model).tokenizer())
    by_configuration = config(**settings, sft_model_path=sft, reward_model_path=reward_model)
    for trainer in (
        trainer_of(sft, config(**settings), reward=reward_model),
        trainer_of(sft, config(**settings), reward=as_object),
        PPOTrainer(by_configuration, prompts=PROMPTS),
    ):
        assert repeatable(trainer.train()) == expected
        assert_same_bits(weights(trainer.policy), weights(outputs["ppo_policy"].load().model))


@pytest.mark.slow
def test_a_reward_model_without_a_tokenizer_reads_the_policys_ids(sft: str, reward_model: str):
    alone = trainer_of(sft, reward=CausalLMRewardModel.from_pretrained(reward_model))
    assert repeatable(alone.train()) == repeatable(trainer_of(sft, reward=reward_model).train())
    with pytest.raises(ModelError, match="vocabulary"):
        trainer_of(sft, reward=CausalLMRewardModel.from_causal_lm(tiny_model(vocab_size=30)))


def test_a_critic_cannot_start_as_a_reward_model_that_reads_other_ids(sft: str, tmp_path: Path):
    """Both models have 25 ids, but the same id is another word."""
    model, other = CausalLMRewardModel.from_causal_lm(tiny_model(seed=5)), train_word_tokenizer(PROMPTS, 32)
    path = save(tmp_path / "reward", model, other)
    for reward in (path, (model, other)):
        with pytest.raises(ModelError, match="reward_init"):
            trainer_of(sft, config(value_model="reward_init"), reward=reward)
        trainer_of(sft, reward=reward)


@pytest.mark.slow
def test_dropout_of_a_model_object_is_switched_off(tmp_path: Path):
    model = tiny_model("gpt2")
    assert model.config.resid_pdrop == 0.1
    path = save(tmp_path / "gpt2", model)
    checkpointed = config(gradient_checkpointing=True)  # which puts the models into training mode
    as_object = PPOTrainer(checkpointed, model, None, word_tokenizer(), reward=early_letters, prompts=PROMPTS)
    assert repeatable(as_object.train()) == repeatable(trainer_of(path).train())


def in_order(trainer: PPOTrainer, iteration: int, prompts: list[str]) -> list[Tensor]:
    chosen = episode_prompts(trainer.config.seed, iteration, trainer.config.batch_size, len(prompts))
    return [trainer.tokenizer(prompts[index], return_tensors="pt")["input_ids"] for index in chosen]


@pytest.mark.slow
def test_generate_and_step_over_the_same_prompts_are_the_loop(sft: str):
    settings = config(dtype="float64")
    loop, whole, one_by_one = trainer_of(sft, settings), PPOTrainer(settings, sft), PPOTrainer(settings, sft)
    loop.train()
    for iteration in (1, 2, 3):
        queries = in_order(whole, iteration, PROMPTS)
        answers = whole.generate(queries, return_prompt=False)
        single = [one_by_one.generate(query[0], return_prompt=False) for query in queries]
        assert [row[0].tolist() for row in single] == [row.tolist() for row in answers]
        tokens = [row[0].tolist() for row in queries], [row.tolist() for row in answers]
        scores = early_letters([], continuations(whole.tokenizer, *tokens))  # with the space after the prompt
        whole.step(queries, answers, scores)
        one_by_one.step(queries, single, [torch.tensor(score, dtype=torch.float64) for score in scores])
    without = ("reward/", "policy/rollout_logprob_gap")
    for actual, expected in zip(repeatable(whole.history, *without), repeatable(loop.history, *without), strict=True):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert_same_bits(weights(whole.policy), weights(loop.policy))
    assert_same_bits(weights(one_by_one.policy), weights(loop.policy))


QUERIES = [torch.tensor([4, 5, 6]), torch.tensor([7]), torch.tensor([8, 9]), torch.tensor([10])]


def test_responses_come_with_their_queries_in_front_unless_asked_otherwise(sft: str):
    with_queries = PPOTrainer(config(), sft).generate(QUERIES)
    alone = PPOTrainer(config(), sft).generate(QUERIES, return_prompt=False)
    assert all(row.dim() == 1 and row.dtype == torch.long for row in with_queries)
    for query, whole, response in zip(QUERIES, with_queries, alone, strict=True):
        assert whole.tolist() == [*query.tolist(), *response.tolist()]
        assert 1 <= len(response) <= 6


def test_the_noise_is_a_function_of_iteration_and_row_not_of_the_calls(sft: str):
    whole = PPOTrainer(config(), sft).generate([QUERIES[0]] * 6)
    pieces = PPOTrainer(config(), sft)
    cut = [*pieces.generate([QUERIES[0]] * 3), *pieces.generate([QUERIES[0]] * 3, batch_size=1)]
    assert [row.tolist() for row in cut] == [row.tolist() for row in whole]
    assert len({tuple(row.tolist()) for row in whole}) > 3
    pieces.step(QUERIES, QUERIES, [0.0, 1.0, 0.0, 1.0])
    assert [row.tolist() for row in pieces.generate([QUERIES[0]] * 6)] != [row.tolist() for row in whole]


def test_fewer_tokens_are_the_beginning_of_more_tokens(sft: str):
    more = PPOTrainer(config(), sft).generate(QUERIES, return_prompt=False)
    fewer = PPOTrainer(config(), sft).generate(QUERIES, return_prompt=False, max_new_tokens=2)
    assert [row.tolist() for row in fewer] == [row[:2].tolist() for row in more]
    sampled = PPOTrainer(config(), sft).generate(QUERIES, return_prompt=False, length_sampler=lambda: 2)
    assert [row.tolist() for row in sampled] == [row.tolist() for row in fewer]


def test_the_arguments_of_the_legacy_example_work(sft: str):
    legacy = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": END}
    actual = PPOTrainer(config(), sft).generate(QUERIES, **legacy)
    assert [row.tolist() for row in actual] == [row.tolist() for row in PPOTrainer(config(), sft).generate(QUERIES)]
    actual = PPOTrainer(config(), sft).generate(QUERIES, do_sample=False)
    model = PretrainedHandle(sft).causal_lm()
    for query, row in zip(QUERIES, actual, strict=True):
        greedy = model.generate(query[None], do_sample=False, max_new_tokens=6, eos_token_id=END, pad_token_id=PAD)
        assert row.tolist() == greedy[0].tolist()


def test_stop_tokens_and_least_lengths_can_be_given(sft: str):
    trainer = PPOTrainer(config(), sft)
    queries = [QUERIES[0]] * 40
    anything = list(range(len(VOCABULARY)))
    assert {len(row) for row in trainer.generate(queries, return_prompt=False, eos_token_id=anything)} == {1}
    assert {len(row) for row in trainer.generate(queries, return_prompt=False, eos_token_id=100_000)} == {6}
    assert min(len(row) for row in trainer.generate(queries, return_prompt=False)) < 4
    both = trainer.generate(queries, return_prompt=False, min_new_tokens=4, min_length=-1)
    assert min(map(len, both)) >= 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_new_token": 3}, "Did you mean `max_new_tokens`"),
        ({"max_new_tokens": 7}, r"max_new_tokens=7 .* ppo\.response_length=6"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"min_length": 5}, "min_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5"),
        ({"temperature": 0.0}, "temperature=0"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, r"batch_size=2\.5"),
        ({"min_length": "a"}, "min_length='a'"),
        ({"max_new_tokens": math.inf}, "max_new_tokens=inf"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_k": -1}, "top_k=-1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used_are_refused_by_name(sft: str, arguments: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=f"^generate: .*{named}"):
        PPOTrainer(config(), sft).generate(QUERIES, **arguments)


def test_another_temperature_than_that_of_training_is_warned_of_once(sft: str, caplog):
    trainer = PPOTrainer(config(), sft)
    caplog.clear()
    for temperature in (0.8, 1.0, 1.1):
        trainer.generate(QUERIES, temperature=temperature)
    (record,) = caplog.records
    assert "generate(temperature=1)" in record.message
    assert "ppo.temperature=0.8" in record.message


@pytest.mark.parametrize(
    ("queries", "named"),
    [
        ([], "no query"),
        ([torch.tensor([], dtype=torch.long)], "query 0"),
        ([torch.tensor([1.0])], "query 0"),
        ([torch.tensor([[4], [5]])], "query 0"),
        ([torch.tensor([4]), torch.tensor([25])], "query 1: .* 0 .*24"),
        ([torch.full((27,), 4)], "27 tokens .* context of 32"),
        (["a"], "query 0: .* got 'a'"),
    ],
    ids=["none", "empty", "floats", "a batch", "out of range", "too long", "texts"],
)
def test_queries_that_cannot_be_used_are_refused(sft: str, queries: list[Tensor], named: str):
    with pytest.raises(DataError, match=named):
        PPOTrainer(config(), sft).generate(queries)


def test_a_step_trains_towards_the_scores_that_it_is_given(sft: str):
    """Of two responses to a query the rewarded one becomes more probable, the other less probable."""
    trainer = PPOTrainer(config(kl_coef=0.0, missing_eos_penalty=None, total_episodes=4), sft)
    query, good, bad = torch.tensor([4, 5]), torch.tensor([6, END]), torch.tensor([9, END])

    def first_token_logprobs() -> Tensor:
        with torch.no_grad():
            return trainer.policy(query[None]).logits[0, -1].log_softmax(-1)

    before = first_token_logprobs()
    trainer.step([query] * 4, [good, good, bad, bad], torch.tensor([1.0, 1.0, -1.0, -1.0]))
    moved = first_token_logprobs() - before
    assert moved[6] > 0.01
    assert moved[9] < -0.01


def test_a_step_with_given_prompts_refuses_the_replacement_of_prompts(sft: str):
    trainer = PPOTrainer(config(responses_per_prompt=2, drop_uniform_prompts=1), sft)
    with pytest.raises(ConfigError, match=r"^step: ppo\.drop_uniform_prompts"):
        trainer.step(QUERIES, [torch.tensor([6, END])] * 4, [1.0] * 4)


def test_a_response_ends_at_its_first_stop_token_and_a_pad_that_stops_ends_none(sft: str):
    trainer = PPOTrainer(config(missing_eos_penalty=None), sft, tokenizer=word_tokenizer(pad_token="</s>"))
    answers = [torch.tensor(row) for row in ([6, END, 7, 8], [6, 7], [6, 7, END], [END])]
    stats = trainer.step(QUERIES, answers, [1.0, 2.0, 3.0, 6.0])
    assert stats["response/length"] == (2 + 2 + 3 + 1) / 4
    assert stats["val/num_eos_tokens"] == 3.0
    assert stats["objective/scores"] == stats["reward/given"] == 3.0


def test_metrics_that_only_the_sampler_could_tell_are_left_out(sft: str):
    trainer = PPOTrainer(config(), sft)
    stats = trainer.step(QUERIES, QUERIES, [0.0] * 4)
    assert not {"policy/rollout_logprob_gap", "throughput/generated_tokens_per_s"} & stats.keys()
    trainer.generate(QUERIES)
    assert trainer.step(QUERIES, QUERIES, [0.0] * 4)["throughput/generated_tokens_per_s"] > 0.0
    assert all(math.isfinite(value) for value in stats.values())


GOOD_STEP: dict[str, Any] = {"queries": QUERIES, "responses": QUERIES, "scores": [0.0] * 4}


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"queries": QUERIES[:3]}, DataError, "3 queries .*batch_size is 4"),
        ({"scores": [0.0] * 3}, RewardError, "3 scores for 4"),
        ({"scores": [0.0, 0.0, math.nan, 0.0]}, RewardError, "response 2"),
        ({"scores": [0.0, 1e39, 0.0, 0.0]}, RewardError, "response 1"),
        ({"scores": 1.0}, RewardError, "scores"),
        ({"scores": torch.ones(4, 3)}, RewardError, "scores"),
        ({"responses": [*QUERIES[:3], torch.full((7,), 4)]}, DataError, r"ppo\.response_length is 6"),
        ({"responses": [*QUERIES[:3], torch.tensor([-100])]}, DataError, "response 3"),
        ({"queries": [torch.full((30,), 4), *QUERIES[1:]]}, DataError, "30 tokens .* response of 3"),
    ],
    ids=["queries", "scores", "nan", "huge", "scalar", "two axes", "too long", "out of range", "no room"],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(sft: str, change: dict[str, Any], kind: type, named: str):
    trainer = PPOTrainer(config(), sft)
    with pytest.raises(kind, match=named):
        trainer.step(**{**GOOD_STEP, **change})
    assert trainer.state.progress.iteration == 0


def test_each_query_needs_room_only_for_its_own_response(sft: str):
    queries = [torch.full((29,), 4), *QUERIES[1:]]
    responses = [torch.tensor([5, END]), torch.full((6,), 4), *QUERIES[2:]]
    trainer = PPOTrainer(config(), sft)  # its context has 32 tokens
    trainer.step(**{**GOOD_STEP, "queries": queries, "responses": responses})
    assert trainer.state.progress.iteration == 1


def test_a_step_after_the_last_iteration_and_one_that_needs_the_sampler_are_refused(
    sft: str, monkeypatch: pytest.MonkeyPatch
):
    trainer = PPOTrainer(config(total_episodes=4), sft)
    trainer.step(**GOOD_STEP)
    with pytest.raises(ConfigError, match=r"ppo\.total_episodes=4"):
        trainer.step(**GOOD_STEP)
    with pytest.raises(ConfigError, match=r"ppo\.importance_cap=2"):
        PPOTrainer(config(importance_cap=2.0), sft).step(**GOOD_STEP)
    with pytest.raises(ConfigError, match=r"ppo\.importance_low=0\.7 .*PPOTrainer\.train\(\) sample"):
        PPOTrainer(config(importance_low=0.7, importance_high=6.0), sft).step(**GOOD_STEP)
    monkeypatch.setattr("ppo_rlhf.ppo.run_setup.check_vllm", lambda device: None)
    with pytest.raises(ConfigError, match=r"ppo\.importance_cap=3 .*PPOTrainer\.train\(\) sample"):
        PPOTrainer(config(rollout_engine="vllm", dtype="float32"), sft).step(**GOOD_STEP)


def end_now(prompts: list[str], completions: list[str]) -> list[None]:
    return [None] * len(prompts)


def test_an_environment_is_only_for_train(sft: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.chdir(request.config.rootpath)
    turns = {"environment": "tests.trainer.test_trainer:end_now", "turn_length": 4}
    trainer = trainer_of(sft, config(total_episodes=4, **turns))
    with pytest.raises(ConfigError, match=r"ppo\.environment"):
        trainer.step(**GOOD_STEP)
    with pytest.raises(ConfigError, match=r"ppo\.environment"):
        trainer.generate(GOOD_STEP["queries"])
    assert [metrics["response/turns"] for metrics in trainer.train()] == [1.0]


def test_log_stats_logs_one_line_with_the_first_pair(sft: str, caplog):
    trainer = PPOTrainer(config(), sft)
    stats = trainer.step(**GOOD_STEP)
    assert trainer.history[0] == {"iteration": 1.0, **stats}
    batch = {"query": ["a", "b"], "response": ["c d", "e"]}
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        caplog.clear()
        trainer.log_stats(stats, batch, [torch.tensor(0.5), torch.tensor(1.5)])
        trainer.log_stats({}, {"query": [], "response": []}, [])
    full, empty = [record.message for record in caplog.records]
    assert full.startswith("Iteration 1/3, score 0.000, KL ")
    assert full.endswith("mean reward 1; 'a' -> 'c d'")
    assert empty == "Iteration 1/3, mean reward nan"


@pytest.mark.slow
def test_the_reference_stays_as_the_policy_was(sft: str):
    for settings in ({}, {"use_peft": True}):
        model = PretrainedHandle(sft).causal_lm()
        before = weights(model)
        trainer = PPOTrainer(config(**settings), model, None, word_tokenizer(), reward=early_letters, prompts=PROMPTS)
        trainer.train()
        assert_same_bits(weights(trainer.reference_policy), before)
        assert (trainer.policy is model) == (not settings)
        assert not any(parameter.requires_grad for parameter in trainer.reference_policy.parameters())
        assert abs(trainer.history[2]["objective/kl"]) > 1e-4


def test_the_kl_is_measured_from_the_reference_that_is_given(sft: str):
    trainer = trainer_of(sft, reference_policy=tiny_model(seed=3))
    trainer.train()
    assert abs(trainer.history[0]["objective/kl"]) > 0.1
    assert_same_bits(weights(trainer.reference_policy), weights(tiny_model(seed=3)))


def test_a_reference_that_cannot_be_is_refused(sft: str):
    model = tiny_model()
    with pytest.raises(ConfigError, match="policy and reference_policy"):
        PPOTrainer(config(), model, model, word_tokenizer())
    assert PPOTrainer(config(use_peft=True), model, model, word_tokenizer()).reference_policy is model
    with pytest.raises(ModelError, match=r"reference policy.*vocabulary"):
        PPOTrainer(config(), sft, tiny_model(vocab_size=20))


SHORT = {"n_positions": 12}  # the policy reads 32


SHORT_REWARD_MODEL = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=PAD, **SHORT)


@pytest.mark.parametrize(
    ("whose", "settings", "given"),
    [
        ("reference policy", {}, {"reference_policy": tiny_model("gpt2", **SHORT)}),
        ("critic", {}, {"value_model": tiny_model("gpt2", **SHORT)}),
        ("critic", {"value_model": "reward_init"}, {"reward": SHORT_REWARD_MODEL}),
    ],
    ids=["reference", "value model", "reward model"],
)
def test_the_shortest_context_of_all_models_is_the_limit(
    sft: str, whose: str, settings: dict[str, Any], given: dict[str, Any]
):
    """A response has 6 tokens, so a query may have 6 of the 12."""

    def trainer(prompts: Any) -> PPOTrainer:
        return PPOTrainer(config(**settings), sft, **given, prompts=prompts)

    for prompts in (["a b c d e f g"], PromptDataset([[4] * 7], ["a"], {})):
        with pytest.raises(DataError, match=f"context of 12.* {whose}"):
            trainer(prompts)
    ready = trainer(["a b c d e f"])
    with pytest.raises(DataError, match=f"query of 7 tokens .* {whose}"):
        ready.generate([torch.full((7,), 4)])
    queries, responses = [torch.full((6,), 4)] * 4, [torch.full((6,), 5)] * 4
    with pytest.raises(DataError, match=f"query of 7 tokens .* {whose}"):
        ready.step([*queries[:3], torch.full((7,), 4)], responses, [0.0, 1.0, 2.0, 3.0])
    ready.step(queries, responses, [0.0, 1.0, 2.0, 3.0])
    assert ready.state.progress.iteration == 1


def test_a_model_of_which_no_weight_trains_is_refused():
    policy = tiny_model().requires_grad_(False)
    with pytest.raises(ModelError, match=r"policy.*requires_grad"):
        PPOTrainer(config(), policy, None, word_tokenizer())
    PPOTrainer(config(use_peft=True), policy, None, word_tokenizer())


def wrapped(model: Any) -> Any:
    model.forward = model.forward  # as accelerate and Trainers leave it
    return model


def adapted(model: Any) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules="all-linear"), model)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(wrapped, "wrapped"), (adapted, "adapter"), (lambda _: torch.nn.Linear(1, 1), "Linear")],
    ids=["wrapped", "adapter", "no model"],
)
def test_models_that_cannot_be_trained_are_refused(spoil: Any, named: str):
    with pytest.raises(ModelError, match=f"^PPOTrainer: the policy .*{named}"):
        PPOTrainer(config(), spoil(tiny_model()), None, word_tokenizer())


def test_a_model_that_reads_later_tokens_can_be_neither_policy_nor_reference_nor_critic(sft: str):
    shape = {"vocab_size": len(VOCABULARY), "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    encoder_decoder = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=PAD))
    for model in (*not_causal_models().values(), encoder_decoder):
        for role in ("policy", "reference_policy", "value_model"):
            given = {"policy": tiny_model(), "tokenizer": word_tokenizer(), role: model}
            with pytest.raises(ModelError, match=rf"{role.split('_')[0]}.*(later|encoder)") as refused:
                PPOTrainer(config(), **given)
            assert "\n" not in str(refused.value)


def test_a_missing_or_unknown_argument_is_named(sft: str):
    with pytest.raises(ConfigError, match="no policy"):
        PPOTrainer(config(), None, None, word_tokenizer())
    with pytest.raises(ConfigError, match="tokenizer"):
        PPOTrainer(config(), tiny_model())
    with pytest.raises(ConfigError, match=r"builtins\.dict"):
        PPOTrainer({"kl_coef": 0.1}, sft)
    with pytest.raises(ConfigError, match="float"):
        trainer_of(sft, reward=1.0)
    for prompts in ("a b", (text for text in PROMPTS), 3):
        with pytest.raises(DataError, match=type(prompts).__name__):
            PPOTrainer(config(), sft, prompts=prompts)
    with pytest.raises(ConfigError, match=r"no reward.*no prompts"):
        PPOTrainer(config(), sft).train()
    with pytest.raises(ConfigError, match="no prompts"):
        PPOTrainer(config(), sft, reward=early_letters).train()


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_reward_model_without_a_pad_token_scores(sft: str, with_tokenizer: bool):
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=25, n_embd=16, n_layer=1, n_head=2, num_labels=1))
    assert model.config.pad_token_id is None
    reward = (model, word_tokenizer(pad_token=None)) if with_tokenizer else model
    history = trainer_of(sft, reward=reward).train()
    assert all(math.isfinite(actual["objective/scores"]) for actual in history)


def values(critic: Any) -> Tensor:
    ids = torch.tensor([[4, 7, 9, 12]])
    with torch.no_grad():
        return critic(ids, torch.ones_like(ids), torch.arange(4)[None])


@pytest.mark.parametrize("settings", [{}, {"use_peft": True}], ids=str)
def test_the_critic_starts_from_the_model_that_is_given(sft: str, settings: dict[str, Any]):
    model = CausalLMRewardModel.from_causal_lm(tiny_model(seed=7))
    ids = torch.tensor([[4, 7, 9, 12]])
    expected = model(ids).logits[0, 0].detach()
    trainer = trainer_of(sft, config(**settings), value_model=model)
    torch.testing.assert_close(values(trainer.state.learner.critic)[0, -1], expected, rtol=0.0, atol=1e-5)
    before = weights(model)
    trainer.train()
    assert_same_bits(weights(model), before)
    assert abs(values(trainer.state.learner.critic)[0, -1] - expected) > 1e-4


def test_the_critic_may_start_from_a_language_model(sft: str):
    other = tiny_model(seed=7)
    trainer = PPOTrainer(config(), sft, value_model=other)
    assert_same_bits(weights(trainer.state.learner.critic.backbone), weights(other.base_model))


def test_a_script_of_trls_gives_its_value_model_beside_the_converted_settings(sft: str):
    model = CausalLMRewardModel.from_causal_lm(tiny_model(seed=7))
    settings = {"kl_coef": 0.05, "response_length": 6, "total_episodes": 8, "bf16": False, "stop_token": "eos"}
    converted = from_trl(settings).ppo_config()
    assert converted.value_model == "reward_init"
    trainer = PPOTrainer(converted, sft, value_model=model)
    assert_same_bits(weights(trainer.state.learner.critic.backbone), weights(model.base_model))


def test_a_critic_that_cannot_be_is_refused(sft: str):
    for setting in ("shared", "reward_init"):
        with pytest.raises(ConfigError, match=rf"ppo\.value_model={setting}"):
            PPOTrainer(config(value_model=setting), sft, value_model=tiny_model())
    larger = tiny_model(vocab_size=30)
    refused = {
        "num_labels": sft,
        "vocabulary": larger,
        "adapter": adapted(tiny_model()).base_model,
        "Critic.*transformers": Critic.from_policy(tiny_model()),
        "score": tiny_model("gpt2", reward=True, num_labels=2),
    }
    for named, value_model in refused.items():
        with pytest.raises(ModelError, match=f"value model.*{named}"):
            PPOTrainer(config(), sft, value_model=value_model)


@pytest.mark.slow
def test_prompts_may_come_in_any_table(sft: str):
    rows = [{"prompt": text, "genre": f"g{i}"} for i, text in enumerate(PROMPTS)]
    frame = pd.DataFrame(rows)
    trainers = [
        PPOTrainer(config(), sft, prompts=prompts)
        for prompts in (rows, frame, datasets.Dataset.from_list(rows), dict(frame.items()), PROMPTS)
    ]
    tokens = [PretrainedHandle(sft).tokenizer()(text)["input_ids"] for text in PROMPTS]
    assert [trainer._prompts.prompt_ids for trainer in trainers] == [tokens] * 5
    assert [trainer._prompts.columns for trainer in trainers[:4]] == [{"genre": [f"g{i}" for i in range(7)]}] * 4
    ready = PromptDataset(tokens, PROMPTS, {})
    assert PPOTrainer(config(), sft, prompts=ready)._prompts is ready


def test_chats_in_a_list_are_prompts(sft: str):
    from tests.tiny_models import CHAT_TEMPLATE

    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    chat = [{"role": "user", "content": "a b"}]
    (ids,) = PPOTrainer(config(), sft, tokenizer=tokenizer, prompts=[chat])._prompts.prompt_ids
    assert tokenizer.decode(ids) == "<unk> a b <s> a"


def test_columns_go_to_the_reward_function(sft: str):
    seen = []

    def wanted(completions: list[str], genre: list[str]) -> list[float]:
        seen.extend(genre)
        return [float(g == "good") for g in genre]

    frame = pd.DataFrame({"prompt": PROMPTS, "genre": ["good"] * 7})
    assert trainer_of(sft, reward=wanted, prompts=frame).train()[0]["reward/wanted"] == 1.0
    assert seen == ["good"] * (2 + 12)  # two prompts are tried before the run


def test_columns_that_reward_functions_could_not_be_given_are_refused(sft: str, reward_model: str):
    table = [{"prompt": text, "completions": "z"} for text in PROMPTS]
    for prompts in (table, PromptDataset([[4]], ["a"], {"completions": ["z"]})):
        for reward in (early_letters, RewardConfig(components=[FUNCTION])):
            with pytest.raises(DataError, match="`completions`"):
                trainer_of(sft, reward=reward, prompts=prompts)
        trainer_of(sft, reward=reward_model, prompts=prompts)  # with a reward model no function is tried


def test_a_column_with_a_gap_goes_to_the_reward_function_as_it_was_given(sft: str):
    def reward(prompts, completions, answer):
        seen.extend(answer)
        return [0.0 for _ in completions]

    seen, rows = [], [{"prompt": "a b c", "answer": 3}, {"prompt": "d e"}, {"prompt": "f", "answer": 4}]
    trainer_of(sft, reward=reward, prompts=rows).train()
    assert set(map(type, seen)) == {int, type(None)}


@pytest.mark.parametrize(("stop_token", "needed"), [("period", 29), ("eos", 28)])
def test_prompts_whose_responses_the_reward_model_could_not_read_are_refused_before_training(
    sft: str, stop_token: str, needed: int
):
    """The reward model's end-of-text token follows a full stop, and replaces a special stop token."""
    shape = {"vocab_size": len(VOCABULARY), "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 1}
    length = config().response_length

    def trainer(context: int) -> PPOTrainer:
        reward = GPT2ForSequenceClassification(GPT2Config(**shape, n_positions=context))
        prompts = [" ".join("a" for _ in range(28 - length))]
        return PPOTrainer(config(stop_token=stop_token), sft, reward=reward, prompts=prompts)

    trainer(needed)
    with pytest.raises(ModelError, match=f"{needed}.*{needed - 1}"):
        trainer(needed - 1)


def test_a_reward_scorer_is_taken_as_it_is(sft: str):
    scorer = RewardScorer([("half", 2.0, lambda batch: torch.full((len(batch),), 0.5))])
    history = trainer_of(sft, reward=scorer).train()
    assert [(row["objective/scores"], row["reward/half"]) for row in history] == [(1.0, 0.5)] * 3


def test_settings_of_accelerate_that_would_change_the_gradients_are_refused(sft: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ConfigError, match=r"_STEPS=4: .*ppo\.gradient_accumulation_steps"):
        trainer_of(sft)
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match=r"_PRECISION=bf16: .*ppo\.dtype"):
        trainer_of(sft)


def test_warnings_are_given_when_the_trainer_is_made_and_not_again_at_the_end(sft: str, caplog, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.trainer.bookkeeping.precision_warning", lambda *_: "slow")
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        trainer_of(sft, config(vf_coef=0.5, eval_interval=5)).train()
    said = [record.getMessage() for record in caplog.records]
    for part in ("ppo.vf_coef=0.5", "slow", "ppo.eval_interval: no effect"):
        assert [part in line for line in said].count(True) == 1
    assert said[-1].startswith("3 iterations of the policy")


def test_only_the_main_process_warns_logs_and_writes(sft: str, tmp_path: Path, caplog, monkeypatch):
    places = ("trainer", "bookkeeping", "output_folder", "query_sampler")
    for place in (
        *(f"trainer.{name}" for name in places),
        "checkpoints.restore",
        "ppo.checkpointer",
        "runtime.progress_display",
    ):
        monkeypatch.setattr(f"ppo_rlhf.{place}.is_main_process", lambda: False)
    for place in ("output_folder", "trainer"):  # locks and looks for checkpoints, and writes a policy
        monkeypatch.setattr(f"ppo_rlhf.trainer.{place}.on_main", lambda work: [])
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        trainer = trainer_of(sft, config(vf_coef=0.5, save_interval=1))
        trainer.train(output_dir=tmp_path / "run")
        trainer.generate(QUERIES, temperature=1.0)
        trainer.log_stats({}, {}, [1.0])
        trainer.save_pretrained(tmp_path / "policy")
    said_by = ("ppo_rlhf.trainer", "ppo_rlhf.runtime.progress_display")
    assert [record.name for record in caplog.records if record.name.startswith(said_by)] == []
    assert not any((tmp_path / name).exists() for name in ("run", "policy"))


def test_all_processes_resume_from_the_main_processs_checkpoint(sft: str, tmp_path: Path, monkeypatch):
    settings = config(save_interval=1, save_total_limit=3)
    trainer_of(sft, settings).train(output_dir=tmp_path)
    monkeypatch.setattr("ppo_rlhf.trainer.output_folder.on_main", lambda _: str(tmp_path / "iteration_000002"))
    monkeypatch.setattr(
        "ppo_rlhf.trainer.trainer.on_main", lambda work: None
    )  # the main process has claimed the folder
    trainer = trainer_of(sft, settings)
    monkeypatch.setattr("ppo_rlhf.trainer.trainer.loop.train", lambda *_: None)
    trainer.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert trainer.state.progress.iteration == 2


HOLDS_THE_LOCK = """
import pathlib, sys
from ppo_rlhf.runtime.locks import lock_run
lock = lock_run(pathlib.Path(sys.argv[1]))
print(flush=True)
input()
"""


def test_a_second_trainer_in_one_directory_ends_in_one_line_before_it_trains(sft: str, tmp_path: Path):
    first = subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, tmp_path / "run"], stdin=PIPE, stdout=PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    second = trainer_of(sft, config(save_interval=1))
    with pytest.raises(CheckpointError, match=r"^output_dir=\S+/run: [^\n]*$"):
        second.train(output_dir=tmp_path / "run")
    assert second.history == []
    first.communicate(b"")
    second.train(output_dir=tmp_path / "run")
    assert len(second.history) == 3


@pytest.mark.parametrize("newest", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_resumes_from_a_checkpoint_bit_for_bit(sft: str, tmp_path: Path, newest: bool):
    settings = config(save_interval=1, save_total_limit=2, kl_controller="adaptive", kl_target=1.0, kl_horizon=8.0)
    whole = trainer_of(sft, settings)
    whole.train(output_dir=tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == ["completions", "iteration_000002", "iteration_000003", "metrics.jsonl", "run.lock"]
    interrupted = trainer_of(sft, settings)
    if newest:
        (tmp_path / "run" / "iteration_000003" / "state.json").unlink()
        interrupted.train(resume_from_checkpoint=True, output_dir=tmp_path / "run")
    else:
        interrupted.train(resume_from_checkpoint=tmp_path / "run" / "iteration_000002")
    assert repeatable(interrupted.history) == repeatable(whole.history)
    assert_same_bits(weights(interrupted.policy), weights(whole.policy))
    assert_same_bits(weights(interrupted.state.learner.critic), weights(whole.state.learner.critic))


@pytest.mark.parametrize(
    "settings",
    [OPTIONS[0], *(pytest.param(settings, marks=pytest.mark.slow) for settings in OPTIONS[1:])],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_trainer_and_pipeline_go_on_from_each_others_checkpoints_bit_for_bit(
    sft: str, tmp_path: Path, settings: dict[str, Any]
):
    saved = config(**settings, save_interval=1, save_total_limit=3)
    pipelines = pipeline_run(sft, saved, FUNCTION, checkpoints=tmp_path / "checkpoints")["ppo_policy"].load()
    [run] = (tmp_path / "checkpoints").iterdir()
    trainer = trainer_of(sft, saved, prompts=TABLE)
    trainer.train(resume_from_checkpoint=run / "iteration_000001", output_dir=tmp_path / "run")
    resumed = pipeline_run(sft, saved, FUNCTION, resume=tmp_path / "run" / "iteration_000002")
    state, whole = resumed["checkpoint"].load(), read_back(sft, saved, run / "iteration_000003")
    assert repeatable(trainer.history) == repeatable(state.progress.history) == repeatable(whole.progress.history)
    assert len(whole.progress.history) == 3
    for actual in (trainer.state, state):
        assert_same_bits(weights(actual.learner.policy), weights(whole.learner.policy))
        assert_same_bits(weights(actual.learner.critic), weights(whole.learner.critic))
    trainer.save_pretrained(tmp_path / "trainer")
    for name, policy in {"pipeline": pipelines, "resumed": resumed["ppo_policy"].load()}.items():
        policy.save(tmp_path / name)
        assert_same_bits(exported(tmp_path / name), exported(tmp_path / "trainer"))


def read_back(sft: str, settings: PPOConfig, checkpoint: Path) -> Any:
    """Load a checkpoint's state into new models."""
    trainer = PPOTrainer(settings, sft)
    trainer.load_checkpoint(checkpoint)
    return trainer.state


@pytest.mark.slow
def test_a_path_that_the_pipeline_has_among_its_globals_does_not_count_as_changed(sft: str, tmp_path: Path):
    pipeline_run(sft, config(), FUNCTION, checkpoints=tmp_path / "checkpoints")
    [run] = (tmp_path / "checkpoints").iterdir()
    trainer = PPOTrainer(config(sft_model_path=sft))
    trainer.load_checkpoint(run / "iteration_000003")
    pipeline_run(sft, config(), FUNCTION, resume=trainer.save_checkpoint(tmp_path / "run"))


def test_a_checkpoint_is_not_resumed_with_another_model_path(sft: str, reward_model: str, tmp_path: Path):
    other = save(tmp_path / "other", tiny_model(seed=3))
    PPOTrainer(config(sft_model_path=sft), reward=early_letters, prompts=PROMPTS).train(output_dir=tmp_path / "run")
    trainer = PPOTrainer(config(sft_model_path=other), reward=early_letters, prompts=PROMPTS)
    with pytest.raises(ConfigError, match=r"^ppo\.sft_model_path: \S+/sft in \S+_000003, \S+/other now"):
        trainer.load_checkpoint(tmp_path / "run" / "iteration_000003")


@pytest.mark.slow
def test_a_loop_of_steps_can_be_saved_and_loaded(sft: str, tmp_path: Path):
    whole, first, second = (PPOTrainer(config(), sft) for _ in range(3))
    for trainer in (whole, whole, first):
        answers = trainer.generate(QUERIES, return_prompt=False)
        trainer.step(QUERIES, answers, [0.0, 1.0, 2.0, 3.0])
    second.generate(QUERIES)
    second.load_checkpoint(first.save_checkpoint(tmp_path / "run"))
    second.step(QUERIES, second.generate(QUERIES, return_prompt=False), [0.0, 1.0, 2.0, 3.0])
    assert_same_bits(weights(second.policy), weights(whole.policy))


def test_what_is_no_checkpoint_is_refused(sft: str, tmp_path: Path):
    trainer = trainer_of(sft)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        trainer.train(resume_from_checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: "):
        trainer.train(resume_from_checkpoint=True, output_dir=tmp_path)
    (tmp_path / "iteration_000001").mkdir()
    with pytest.raises(CheckpointError, match=r"True.*output_dir"):
        trainer.train(resume_from_checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="output_dir"):
        trainer.train(resume_from_checkpoint=True)


def test_the_exported_policy_follows_the_umask(sft: str, tmp_path: Path):
    before = os.umask(0o027)
    try:
        PPOTrainer(config(ema_decay=0.9), sft).save_pretrained(tmp_path / "policy")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "policy").rglob("*") if path.is_file()]
    assert "ema" in {path.parent.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_a_policy_is_not_saved_where_it_would_be_read_as_another_one(sft: str, tmp_path: Path):
    """transformers loads an adapter in a folder onto whole weights in the same folder, whichever was saved last."""
    whole, adapter = PPOTrainer(config(), sft), PPOTrainer(config(use_peft=True, export="adapter"), sft)
    whole.save_pretrained(tmp_path / "whole")
    adapter.save_pretrained(tmp_path / "adapter")
    whole.save_pretrained(tmp_path / "whole")
    for trainer, place, other in ((whole, "adapter", "adapter_config.json"), (adapter, "whole", "config.json")):
        before = sorted((tmp_path / place).iterdir())
        with pytest.raises(ModelError, match=rf"^\S+/{place} .*{other}"):
            trainer.save_pretrained(tmp_path / place)
        assert sorted((tmp_path / place).iterdir()) == before
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="/file is a file"):
        whole.save_pretrained(tmp_path / "file")


def test_the_pipelines_card_names_the_command_that_evaluates_and_the_trainers_none(sft: str, tmp_path: Path):
    settings = config(total_episodes=4)
    assert "`kedro run --pipelines evaluation`" in pipeline_run(sft, settings, FUNCTION)["ppo_policy"].load().card
    PPOTrainer(settings, sft).save_pretrained(tmp_path / "policy")
    assert "kedro" not in (tmp_path / "policy" / "README.md").read_text()


def test_the_models_directory_is_only_read(sft: str):
    before = {path.name: path.read_bytes() for path in Path(sft).iterdir()}
    trainer_of(sft).train()
    assert {path.name: path.read_bytes() for path in Path(sft).iterdir()} == before
