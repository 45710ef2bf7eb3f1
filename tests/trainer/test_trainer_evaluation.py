"""PPOTrainer evaluates on held-out prompts as the pipeline does, and a failing evaluation loses no iteration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kedro.io import DataCatalog, MemoryDataset

from ppo_rlhf.checkpoints.evaluations import read_evaluations
from ppo_rlhf.core.errors import ConfigError, DataError, RewardError
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.evaluation import during_training
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.judge.llm_judge import LLMJudge
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.ppo.pipeline import create_pipeline
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runner import LoopRunner
from ppo_rlhf.runtime.metrics_file import EVALUATION, metrics_of
from ppo_rlhf.trainer.evaluation import is_reward
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.trainer.test_trainer import FUNCTION, PROMPTS, config, early_letters, repeatable

HELD_OUT = ["q r", "s", "a b", "c d e", "f", "g h", "i", "j k", "l m n", "o p", "q", "r s"]


def brevity(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text.split())) for text in completions]


def by_label(completions: list[str], label: list[float]) -> list[float]:
    return label


def trainer_of(**given: Any) -> PPOTrainer:
    given = {"reward": early_letters, "prompts": PROMPTS, "evaluation_prompts": HELD_OUT, **given}
    settings = given.pop("config", config(eval_interval=2, save_interval=1))
    return PPOTrainer(settings, tiny_model(), None, word_tokenizer(), **given)


def pipelines_rows(sft: str, judge: str | None, resume: Path | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Return the rows of the pipeline's node `evaluate_iteration` for the same run."""
    given = {
        "params:ppo": config(**settings),
        "params:prompts": PromptsConfig(),
        "params:reward": RewardConfig(components=[FUNCTION]),
        "params:evaluation": EvaluationConfig(judge=judge, prompts_path="mine"),
        "raw_prompts": table_of({"prompt": PROMPTS}),
        "raw_evaluation_prompts": table_of({"prompt": HELD_OUT}),
        "sft_policy": PretrainedHandle(sft),
        "resume_checkpoint": resume,
        "audited_holes": {},
    }
    rows: list[dict[str, Any]] = []

    class Log(MemoryDataset):
        def save(self, data: dict[str, Any]) -> None:
            rows.extend([data] if data else [])

        def load(self) -> list[dict[str, Any]]:
            return rows

    pipeline = create_pipeline().to_nodes("ppo.summarise_training")
    catalog = DataCatalog(
        {name: MemoryDataset(given.get(name), copy_mode="assign") for name in pipeline.datasets() | given.keys()}
    )
    catalog["evaluation_metrics"] = catalog["earlier_evaluations"] = Log()
    LoopRunner().run(pipeline, catalog)
    return rows


@pytest.mark.parametrize("judge", [None, "tests.trainer.test_trainer_evaluation:brevity"])
def test_rows_are_the_pipelines(tmp_path: Path, judge: str | None):
    sft = save(tmp_path / "sft", tiny_model())
    expected = pipelines_rows(sft, judge, eval_interval=2)
    trainer = trainer_of(judge=judge)
    trainer.train()
    assert trainer.held_out is not None
    assert [row["iteration"] for row in trainer.held_out.rows] == [2.0, 3.0]
    assert trainer.held_out.rows == expected
    assert ("eval/judge_score" in expected[0]) is (judge is not None)


def test_evaluate_returns_the_metrics_and_a_table_of_completions():
    trainer = trainer_of(judge=brevity)
    metrics, table = trainer.evaluate()
    assert metrics["eval/win_rate"] == 0.5  # the policy is still the reference
    assert metrics["eval/kl"] == pytest.approx(0.0, abs=1e-6)  # a step of decoding rounds unlike a whole pass
    assert table["prompt"].tolist() == HELD_OUT
    assert (table["response"] == table["sft_response"]).all()
    trainer.train()
    metrics, table = trainer.evaluate()
    assert metrics["eval/reward"] == pytest.approx(table["reward"].mean())
    assert table["reward"].tolist() == early_letters(HELD_OUT, table["response"].tolist())
    assert table["judge_score"].tolist() == brevity(HELD_OUT, table["response"].tolist())
    wins = np.sign(table["judge_score"] - table["sft_score"])
    assert metrics["eval/win_rate"] == pytest.approx(((wins + 1) / 2).mean())


def test_evaluation_changes_no_bit_of_training():
    without = trainer_of(evaluation_prompts=None).train()
    assert repeatable(trainer_of(judge=brevity).train()) == repeatable(without)


def test_with_lora_the_policy_is_compared_with_its_frozen_weights():
    trainer = trainer_of(config=config(use_peft=True, lora_r=2, learning_rate=0.05))
    trainer.train()
    (row,) = trainer.held_out.rows  # type: ignore[union-attr]
    _, table = PPOTrainer(
        config(), tiny_model(), None, word_tokenizer(), reward=early_letters, evaluation_prompts=HELD_OUT
    ).evaluate()
    assert row["eval/reward_sft"] == table["reward"].mean()
    assert row["eval/kl"] != 0.0


def test_a_resumed_run_has_the_same_evaluations_and_keeps_the_best_checkpoint(tmp_path: Path):
    settings = config(eval_interval=1, save_interval=1, save_total_limit=1, total_episodes=20, kl_alarm=1e9)
    whole = trainer_of(config=settings)
    whole.train(output_dir=tmp_path / "whole")
    rows = whole.held_out.rows  # type: ignore[union-attr]
    best = int(max(rows, key=lambda row: (row["eval/reward"], row["iteration"]))["iteration"])
    saved = sorted(path.name for path in (tmp_path / "whole").glob("iteration_*"))
    assert saved == sorted({f"iteration_{best:06d}", "iteration_000005"})
    assert read_evaluations(tmp_path / "whole") == rows

    class StopError(Exception):
        pass

    first = trainer_of(config=settings, judge=None)
    evaluate = first.held_out.evaluate  # type: ignore[union-attr]

    def evaluate_once(*given: Any) -> Any:
        if first.state.progress.iteration == 3:
            raise StopError
        return evaluate(*given)

    first.held_out.evaluate = evaluate_once  # type: ignore[union-attr, method-assign]
    with pytest.raises(StopError):
        first.train(output_dir=tmp_path / "halves")
    assert (tmp_path / "halves" / "iteration_000003").is_dir()  # the evaluation failed after it was saved
    second = trainer_of(config=settings)
    second.train(resume_from_checkpoint=True, output_dir=tmp_path / "halves")
    assert second.held_out.rows == rows  # type: ignore[union-attr]
    assert repeatable(second.history) == repeatable(whole.history)


@pytest.mark.parametrize(
    ("given", "error", "line"),
    [
        ({"evaluation_prompts": None, "judge": brevity}, ConfigError, "judge.*evaluation_prompts"),
        ({"reward": None, "prompts": None}, ConfigError, "evaluation_prompts.*reward"),
        ({"judge": 3}, ConfigError, "judge.* int"),
        ({"judge": tiny_model()}, ConfigError, "judge.*LlamaForCausalLM"),
        ({"judge": "no_such_module:judge"}, RewardError, "no_such_module"),
        ({"judge": lambda completions: ["a"] * len(completions)}, RewardError, "judge"),
        ({"judge": lambda completion_ids: [1.0] * len(completion_ids)}, RewardError, "judge cannot be called"),
        ({"reward": by_label, "prompts": {"prompt": ["a"], "label": [1.0]}}, RewardError, "by_label"),
        ({"evaluation_prompts": ["a " * 200]}, DataError, "200"),
        ({"evaluation_prompts": {"text": HELD_OUT}}, DataError, "no column `prompt`"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(given: dict[str, Any], error: type, line: str):
    with pytest.raises(error, match=line):
        trainer_of(**given)


def test_without_prompts_evaluate_is_refused_and_eval_interval_warned_of(caplog):
    trainer = trainer_of(evaluation_prompts=None)
    assert re.search(r"ppo\.eval_interval.*evaluation_prompts", caplog.text)
    with pytest.raises(ConfigError, match=r"^evaluate: .*evaluation_prompts"):
        trainer.evaluate()
    caplog.clear()
    trainer_of()
    assert "eval_interval" not in caplog.text


def test_prompts_that_are_trained_on_are_counted_in_a_warning(caplog):
    trainer_of(evaluation_prompts=[*HELD_OUT, PROMPTS[0]])
    assert re.search("1 of the 13 evaluation_prompts", caplog.text)


@pytest.mark.parametrize("prompts", [[], "a b", [""], {"x": ["a"]}, ["a " * 40]])
def test_a_problem_of_evaluation_prompts_names_them(prompts: Any):
    with pytest.raises(DataError, match=r"^(PPOTrainer: )?evaluation_prompts"):
        trainer_of(evaluation_prompts=prompts)


def test_a_resumed_run_keeps_the_evaluation_of_the_iteration_that_it_resumes(tmp_path: Path):
    trainer_of(config=config(eval_interval=2, save_interval=1, total_episodes=12)).train(output_dir=tmp_path)
    longer = config(eval_interval=2, save_interval=1, total_episodes=20)
    resumed = trainer_of(config=longer)
    resumed.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert [row["iteration"] for row in resumed.held_out.rows] == [2.0, 3.0, 4.0, 5.0]  # type: ignore[union-attr]


def test_a_resumed_run_keeps_its_evaluation_prompts(tmp_path: Path):
    trainer_of(config=config(eval_interval=2, save_interval=1, total_episodes=8)).train(output_dir=tmp_path)
    other = trainer_of(config=config(eval_interval=2, save_interval=1), evaluation_prompts=HELD_OUT[:5])
    with pytest.raises(ConfigError, match=r"^evaluation_prompts: differs from the run of"):
        other.train(resume_from_checkpoint=True, output_dir=tmp_path)


def test_scores_of_another_number_of_prompts_are_not_compared(tmp_path: Path):
    """A run of the pipeline has its own prompts, and its checkpoint does not name them."""
    rows = [{"iteration": 1.0, "scores": [0.5] * 3}, {"iteration": 2.0, "scores": [0.5] * len(HELD_OUT)}]
    for row in rows:
        metrics_of(tmp_path).append(EVALUATION, int(row["iteration"]), row)
    held_out = trainer_of().held_out
    held_out.resume(tmp_path, 2)  # type: ignore[union-attr]
    assert held_out.rows == [{"iteration": 1.0}, rows[1]]  # type: ignore[union-attr]
    assert read_evaluations(tmp_path) == rows


NAMED = f"{early_letters.__module__}:early_letters"
OF_A_CONFIGURATION = {"reward": RewardConfig(components=[FUNCTION])}
LLM = {"model": "judge", "base_url": "http://localhost:8000/v1", "criteria": "Is it brief?"}
OTHER_LLM = LLM | {"criteria": "Is it true?"}


@pytest.mark.parametrize(
    ("judge", "is_reward", "given"),
    [
        (None, True, {}),
        (early_letters, True, {}),
        (brevity, False, {}),
        (NAMED, True, {}),
        (NAMED, True, OF_A_CONFIGURATION),
        (early_letters, True, OF_A_CONFIGURATION),
        (brevity, False, OF_A_CONFIGURATION),
    ],
)
def test_a_judge_that_is_the_reward_shows_only_a_higher_reward(monkeypatch, judge: Any, is_reward: bool, given: Any):
    told: list[bool] = []

    def conclude(*_: Any, by_trained_reward: bool) -> dict[str, float]:
        told.append(by_trained_reward)
        return {"eval/verdict": 0.0}

    monkeypatch.setattr(during_training, "conclude", conclude)
    trainer_of(judge=judge, **given).evaluate()
    assert told == [is_reward]


@pytest.mark.parametrize("judge", [LLM | {"concurrency": 3}, OTHER_LLM])
@pytest.mark.parametrize("as_object", [False, True])
def test_a_language_model_that_is_asked_the_same_as_the_reward_is_the_reward(judge: dict[str, Any], as_object: bool):
    component = {"type": "llm", "llm": LLM}
    rewards = LLMJudge(LLMJudgeConfig(**LLM)) if as_object else RewardConfig(components=[component])
    assert is_reward(LLMJudge(LLMJudgeConfig(**judge)), rewards) is (judge is not OTHER_LLM)
