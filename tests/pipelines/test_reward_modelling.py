from pathlib import Path

import pandas as pd
import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner
from kedro_datasets.pandas import ParquetDataset

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompts import PromptsConfig, split_held_out
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset
from ppo_rlhf.pipelines.reward_modelling import create_pipeline
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from tests.tiny_models import save, tiny_model

PROMPTS = pd.DataFrame({"prompt": [f"{a} {b}" for a in "abcdef" for b in "ghij"], "number": range(24)})
GIVEN = pd.DataFrame({"good": ["a b", "b a c", "c"] * 8, "bad": ["d e", "e f d", "f"] * 8})


def length(prompts, completions, **columns):
    assert len(columns["number"]) == len(prompts)
    return [float(len(completion.split())) for completion in completions]


def catalog_for(tmp_path: Path, given: pd.DataFrame | None, **settings) -> DataCatalog:
    policy = save(tmp_path / "own_policy", tiny_model())
    raw_preferences = tmp_path / "given.csv"
    if given is not None:
        given.to_csv(raw_preferences, index=False)
    catalog = DataCatalog(
        {
            "raw_preferences": RecordsDataset(None if given is None else str(raw_preferences)),
            "raw_prompts": MemoryDataset(table_of(PROMPTS.to_dict("list"))),
            "raw_evaluation_prompts": RecordsDataset(None),
            "sft_policy": PretrainedModelDataset(policy),
            "preferences": ParquetDataset(filepath=str(tmp_path / "preferences.parquet")),
            "reward_model": PretrainedModelDataset(str(tmp_path / "reward_model")),
        }
    )
    defaults = {"pairs": 30, "num_train_epochs": 1, "logging_steps": 1, "minimum_accuracy": 0.0, "device": "cpu"}
    catalog["params:reward_modelling"] = RewardModellingConfig(**{**defaults, **settings})
    catalog["params:ppo"] = PPOConfig(response_length=5, temperature=1.0, device="cpu")
    catalog["params:prompts"] = PromptsConfig(held_out_share=0.25)
    return catalog


def test_pairs_are_sampled_from_the_policy_for_training_prompts_and_a_reward_model_is_trained(tmp_path):
    catalog = catalog_for(tmp_path, None, labeller=f"{__name__}:length")
    metrics = SequentialRunner().run(create_pipeline(), catalog)["reward_model_metrics"].load()
    preferences = catalog["preferences"].load()
    _, held_out = split_held_out(table_of(PROMPTS.to_dict("list")), None, PromptsConfig(held_out_share=0.25))
    assert 20 < len(preferences) <= 30
    assert set(preferences["prompt"]).isdisjoint(PROMPTS["prompt"][held_out])
    model = catalog["reward_model"].load().reward_model()
    assert model(torch.tensor([[4, 5], [6, 7]])).logits.shape == (2, 1)
    assert metrics[-1].keys() == {
        "step",
        *(f"reward_model/{name}" for name in ("loss", "learning_rate", "eval_accuracy")),
    }


def test_given_pairs_without_prompts_train_a_reward_model(tmp_path):
    columns = {"chosen_column": "good", "rejected_column": "bad"}
    catalog = catalog_for(tmp_path, GIVEN, **columns)
    SequentialRunner().run(create_pipeline(), catalog)
    assert len(catalog["preferences"].load()) == len(GIVEN)
    assert catalog["reward_model"].load().config().num_labels == 1


def test_given_pairs_are_checked_before_any_node_that_needs_the_policy(tmp_path):
    catalog = catalog_for(tmp_path, GIVEN)
    names = [node.name for node in create_pipeline().nodes]
    assert names[0] == "reward_modelling.check_preferences"
    with pytest.raises(DataError, match=r"`chosen`.* good, bad"):
        SequentialRunner().run(create_pipeline().only_nodes(names[0]), catalog)


def test_without_pairs_and_prompts_there_is_nothing_to_learn_from(tmp_path):
    catalog = catalog_for(tmp_path, None, labeller=f"{__name__}:length")
    catalog["raw_prompts"] = RecordsDataset(None)
    with pytest.raises(DataError, match=r"preferences_path.*reward_modelling.labeller"):
        SequentialRunner().run(create_pipeline(), catalog)
