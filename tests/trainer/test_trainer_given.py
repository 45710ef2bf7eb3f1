"""PPOTrainer's inputs: prompts as tokens, merged adapters, and reward functions that are tried before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import peft
import pyarrow
import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import ConfigError, DataError, ModelError, RewardError
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import PAD, save, tiny_model, word_tokenizer
from tests.trainer.test_trainer import PROMPTS, config, early_letters, repeatable

IDS = [word_tokenizer()(text)["input_ids"] for text in PROMPTS]


@pytest.fixture
def sft(tmp_path: Path) -> str:
    return save(tmp_path / "sft", tiny_model())


def prompts_of(sft: str, prompts: Any, **settings: Any) -> Any:
    return PPOTrainer(config(**settings), sft, prompts=prompts)._prompts


TOKENISED = datasets.Dataset.from_dict({"input_ids": IDS, "lengths": list(map(len, IDS))})  # as TRL's scripts make it


@pytest.mark.parametrize(
    "prompts",
    [
        TOKENISED,
        TOKENISED.with_format("torch"),
        pytest.param([{"input_ids": ids} for ids in IDS], marks=pytest.mark.slow),
        pytest.param({"input_ids": IDS}, marks=pytest.mark.slow),
        pytest.param(pd.DataFrame({"input_ids": IDS}), marks=pytest.mark.slow),
        pytest.param(IDS, marks=pytest.mark.slow),
        pytest.param([torch.tensor(ids) for ids in IDS], marks=pytest.mark.slow),
        pytest.param(word_tokenizer()(PROMPTS, padding=True, return_tensors="pt"), marks=pytest.mark.slow),
    ],
    ids=["dataset", "torch format", "rows", "columns", "pandas", "lists", "tensors", "a padded batch"],
)
def test_rows_of_token_ids_are_prompts(sft: str, prompts: Any):
    actual = prompts_of(sft, prompts)
    assert actual.prompt_ids == IDS
    assert actual.texts == PROMPTS
    assert set(actual.columns) <= {"lengths"}


@pytest.mark.slow
def test_training_on_tokens_is_training_on_their_texts(sft: str):
    by_text, by_token = (PPOTrainer(config(), sft, reward=early_letters, prompts=p) for p in (PROMPTS, TOKENISED))
    assert repeatable(by_token.train()) == repeatable(by_text.train())


def test_a_table_with_a_column_prompt_is_read_by_it(sft: str):
    both = datasets.Dataset.from_dict({"prompt": ["a"], "input_ids": [[9, 9]]})
    actual = prompts_of(sft, both)
    assert (actual.prompt_ids, actual.columns) == ([[4]], {"input_ids": [[9, 9]]})


def test_tokens_that_cannot_be_prompts_are_refused(sft: str):
    with pytest.raises(DataError, match=r"prompt 1: .* \[\]"):
        prompts_of(sft, {"input_ids": [[4], []]})
    with pytest.raises(DataError, match=r"1 of 2 prompts.*row 1.* 26 tokens"):
        prompts_of(sft, [[4], [4] * 27])  # the context has 32 tokens, a response 6
    assert prompts_of(sft, [[4], [4] * 27], overlong_prompts="drop").prompt_ids == [[4]]


TEXTS = datasets.Dataset.from_dict({"prompt": PROMPTS})


@pytest.mark.parametrize(
    "prompts",
    [TEXTS["prompt"], pd.Series(PROMPTS, index=[7] * len(PROMPTS)), np.array(PROMPTS)],
    ids=["column", "series", "array"],
)
def test_a_column_of_texts_is_prompts(sft: str, prompts: Any):
    actual = prompts_of(sft, prompts)
    assert (actual.texts[:], actual.prompt_ids[:]) == (PROMPTS, IDS)


def test_a_tensor_of_token_ids_is_prompts(sft: str):
    assert prompts_of(sft, torch.tensor([[4, 5], [6, 4]])).prompt_ids == [[4, 5], [6, 4]]


def test_what_a_trainer_says_once_each_trainer_of_a_process_says(sft: str, caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        prompts_of(sft, [{"prompt": text, "images": "x"} for text in PROMPTS])
    assert sum(line.startswith("prompts: the policy is not shown `images`.") for line in caplog.messages) == 2


ROWS = datasets.Dataset.from_list([{"prompt": "a"}])
BYTES = datasets.Dataset(pyarrow.table({"prompt": pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())}))


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (datasets.DatasetDict(train=ROWS, test=ROWS), "DatasetDict; "),
        (datasets.IterableDatasetDict(train=ROWS.to_iterable_dataset()), "IterableDatasetDict; "),
        (ROWS.to_iterable_dataset(), r"IterableDataset; .*Dataset\.from_list"),
        (BYTES, ": row 1, column `prompt`: .*UTF-8"),
        (datasets.Dataset.from_dict({"text": ["a"]}), "`prompt` or `input_ids`.* text$"),
        ({"prompt": "a film"}, "column `prompt`"),
        ({1: ["a"]}, "`prompt` or `input_ids`.* 1$"),
        ([{"prompt": "a"}, "b"], "'b'"),
        *(({"input_ids": [[4, 5]], "attention_mask": mask}, "`attention_mask`") for mask in ([[1]], [], [None])),
    ],
)
def test_a_dataset_that_is_no_table_of_prompts_is_refused_in_one_line(sft: str, prompts: Any, named: str):
    with pytest.raises(DataError, match=f"^PPOTrainer: prompts.*{named}") as caught:
        prompts_of(sft, prompts)
    assert len(str(caught.value).splitlines()) == 1
    assert "prompts.column" not in str(caught.value)


def recording(calls: list[dict[str, Any]], answer: Any) -> Any:
    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
        calls.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
        return answer(completion_ids)

    return reward


TABLE = pd.DataFrame({"prompt": PROMPTS, "genre": [f"g{row}" for row in range(7)]})


def test_the_reward_is_tried_with_two_prompts_or_the_only_one_before_the_run(sft: str):
    calls: list[dict[str, Any]] = []
    reward = recording(calls, lambda ids: [0.0 for _ in ids])
    for prompts in (TABLE, ["a b"]):
        PPOTrainer(config(), sft, reward=reward, prompts=prompts)
    call, of_one = calls
    assert of_one["prompts"] == ["a b"]
    assert call["prompts"] == call["completions"] == PROMPTS[:2]
    assert call["completion_ids"] == IDS[:2]
    assert call["genre"] == ["g0", "g1"]


def only_one_score(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0]


def one_number_a_token(prompts: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    return [[0.0] * len(ids) for ids in completion_ids]


@pytest.mark.parametrize("as_component", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_reward_that_would_fail_is_refused_before_anything_is_generated(
    sft: str, as_component: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.chdir(request.config.rootpath)

    def given(function: Any) -> Any:
        reference = f"tests.trainer.test_trainer_given:{function.__name__}"
        components: list[Any] = [{"type": "function", "function": reference}]
        return RewardConfig(components=components) if as_component else function

    with pytest.raises(RewardError, match=r"only_one_score .*1 .* 2 responses"):
        PPOTrainer(config(), sft, reward=given(only_one_score), prompts=PROMPTS)
    with pytest.raises(ConfigError, match=r"ppo\.reward_clip=2"):
        PPOTrainer(config(reward_clip=2.0), sft, reward=given(one_number_a_token), prompts=PROMPTS)
    PPOTrainer(config(), sft, reward=given(one_number_a_token), prompts=PROMPTS)


def test_a_reward_without_prompts_and_a_scorer_of_ones_own_are_not_tried(sft: str):
    calls: list[dict[str, Any]] = []
    reward = recording(calls, lambda ids: [])
    PPOTrainer(config(), sft, reward=reward)
    PPOTrainer(config(), sft, reward=RewardScorer([("own", 1.0, reward)]), prompts=PROMPTS)
    assert calls == []


def with_adapter(model: Any, task: str) -> Any:
    settings = peft.LoraConfig(target_modules="all-linear", task_type=task, init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def refusal(**given: Any) -> str:
    with pytest.raises(ModelError) as caught:
        PPOTrainer(config(), **{"tokenizer": word_tokenizer(), **given})
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.slow
def test_the_advice_on_an_adapter_works_at_once(sft: str, tmp_path: Path):
    """Both for the PeftModel itself and for the model that transformers loads from its folder."""
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(sft), "CAUSAL_LM")
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    lines = [refusal(policy=adapted), refusal(policy=loaded)]
    assert lines[0] == lines[1]
    for part in ("the policy has an adapter", "merge_and_unload().requires_grad_(True)", "AutoPeftModelForCausalLM"):
        assert part in lines[0]
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[4, 7, 9]])
    expected = adapted(ids).logits.detach()
    for model in (adapted, again):
        merged = model.merge_and_unload().requires_grad_(True)
        torch.testing.assert_close(merged(ids).logits, expected, rtol=0.0, atol=1e-5)
        trainer = PPOTrainer(config(), merged, None, word_tokenizer(), reward=early_letters, prompts=PROMPTS)
        assert abs(trainer.train()[0]["objective/kl"]) < 1e-5


@pytest.mark.slow
def test_the_advice_on_an_adapter_works_for_classifiers_and_the_reference_too(sft: str):
    classifier = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=PAD)
    for name in ("reward", "value_model", "reference_policy"):
        model, task = (tiny_model(), "CAUSAL_LM") if name == "reference_policy" else (classifier, "SEQ_CLS")
        adapted = with_adapter(model, task)
        assert "merge_and_unload().requires_grad_(True)" in refusal(policy=sft, **{name: adapted})
        PPOTrainer(config(), sft, **{name: adapted.merge_and_unload().requires_grad_(True)})


def test_a_reward_model_object_has_one_label_if_its_head_has_one_row(sft: str):
    classifier = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=PAD)
    classifier.config.num_labels = 2
    PPOTrainer(config(), sft, reward=classifier, prompts=PROMPTS)


def test_an_adapter_that_does_not_name_its_base_is_refused(tmp_path: Path):
    with_adapter(tiny_model(), "CAUSAL_LM").save_pretrained(tmp_path)
    assert "this adapter does not name its base" in refusal(policy=str(tmp_path))
