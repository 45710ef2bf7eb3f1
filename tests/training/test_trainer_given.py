"""What PPOTrainer takes: prompts as tokens, adapters merged, and a reward that is tried before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.training.test_trainer import PROMPTS, config, early_letters, repeatable

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
        [{"input_ids": ids} for ids in IDS],
        {"input_ids": IDS},
        pd.DataFrame({"input_ids": IDS}),
        IDS,
        [torch.tensor(ids) for ids in IDS],
        word_tokenizer()(PROMPTS, padding=True, return_tensors="pt"),
    ],
    ids=["dataset", "torch format", "rows", "columns", "pandas", "lists", "tensors", "a padded batch"],
)
def test_rows_of_token_ids_are_prompts(sft: str, prompts: Any):
    found = prompts_of(sft, prompts)
    assert found.prompt_ids == IDS
    assert found.texts == PROMPTS
    assert set(found.columns) <= {"lengths"}


def test_training_on_tokens_is_training_on_their_texts(sft: str):
    by_text, by_token = (PPOTrainer(config(), sft, reward=early_letters, prompts=p) for p in (PROMPTS, TOKENISED))
    assert repeatable(by_token.train()) == repeatable(by_text.train())


def test_a_table_with_a_column_prompt_is_read_by_it(sft: str):
    both = datasets.Dataset.from_dict({"prompt": ["a"], "input_ids": [[9, 9]]})
    found = prompts_of(sft, both)
    assert (found.prompt_ids, found.columns) == ([[4]], {"input_ids": [[9, 9]]})


def test_tokens_that_cannot_be_prompts_are_refused(sft: str):
    with pytest.raises(DataError, match=r"prompt 1: .* 0 to 24"):
        prompts_of(sft, [[4], [25]])
    with pytest.raises(DataError, match=r"prompt 1: .*at least one token"):
        prompts_of(sft, {"input_ids": [[4], []]})
    with pytest.raises(DataError, match=r"1 of 2 prompts \(the first in row 1\) are longer than 26 tokens"):
        prompts_of(sft, [[4], [4] * 27])  # the context has 32 tokens, a response 6
    assert prompts_of(sft, [[4], [4] * 27], overlong_prompts="drop").prompt_ids == [[4]]


ROWS = datasets.Dataset.from_list([{"prompt": "a"}])


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (datasets.DatasetDict(train=ROWS, test=ROWS), r"DatasetDict; .*splits, prompts\[\"train\"\]"),
        (datasets.IterableDatasetDict(train=ROWS.to_iterable_dataset()), r"IterableDatasetDict; .*\[\"train\"\]"),
        (ROWS.to_iterable_dataset(), r"IterableDataset.*Dataset\.from_list"),
        (datasets.Dataset.from_dict({"text": ["a"]}), "no column `prompt` or `input_ids`; the columns are text"),
    ],
    ids=["splits", "streamed splits", "stream", "other columns"],
)
def test_a_dataset_that_is_no_table_of_prompts_is_refused_in_one_line(sft: str, prompts: Any, named: str):
    with pytest.raises(DataError, match=f"^PPOTrainer: prompts .*{named}") as caught:
        prompts_of(sft, prompts)
    assert len(str(caught.value).splitlines()) == 1
    assert "prompts.column" not in str(caught.value)
