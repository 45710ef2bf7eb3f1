"""Each model names the models and tables that it was made from, through all stages."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.io import DataCatalog
from kedro.runner import SequentialRunner

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset, TableDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines import data_preparation, reward_modelling, supervised_finetuning
from ppo_rlhf.pipelines.ppo import nodes
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig
from tests.tiny_models import write_gguf

TABLES: dict[str, list[dict[str, Any]]] = {
    "demonstrations": [{"prompt": "a b", "completion": f" {word}"} for word in "abcdefgh"],
    "preferences": [{"prompt": f"{a} b", "chosen": " c", "rejected": " d"} for a in "abcdefgh"],
    "prompts": [{"prompt": f"{a} {b}"} for a in "abcd" for b in "efgh"],
}
TRAINING: dict[str, Any] = {"max_steps": 1, "logging_steps": 1, "device": "cpu"}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_stage(catalog: DataCatalog, stage: Any) -> None:
    """Run one stage alone, as `kedro run --pipelines` does: it reads what the stages before it have written."""
    SequentialRunner().run(stage.create_pipeline(), catalog)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project after the stages before PPO, each run alone, from a GGUF file that names its license."""
    folder = tmp_path_factory.mktemp("project")
    write_gguf(folder / "base.gguf", keys={"general.license": "mit"})
    for name, rows in TABLES.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        catalog = DataCatalog(
            {
                "base_model": PretrainedModelDataset(str(folder / "base.gguf")),
                **{f"raw_{name}": RecordsDataset(str(folder / f"{name}.jsonl")) for name in TABLES},
                "raw_evaluation_prompts": RecordsDataset(None),
                **{
                    name: TableDataset(filepath=str(folder / f"{name}.parquet"))
                    for name in ("demonstrations", "evaluation_demonstrations", "preferences")
                },
                "sft_policy": PretrainedModelDataset(str(folder / "sft_policy")),
                "reward_model": PretrainedModelDataset(str(folder / "reward_model")),
            }
        )
        catalog["params:data_preparation"] = DataPreparationConfig()
        catalog["params:supervised_finetuning"] = SupervisedFinetuningConfig(**TRAINING)
        catalog["params:reward_modelling"] = RewardModellingConfig(
            **TRAINING, minimum_accuracy=0.0, preferences_path="preferences.jsonl"
        )
        catalog["params:ppo"], catalog["params:prompts"] = PPOConfig(device="cpu"), PromptsConfig()
        for stage in (data_preparation, supervised_finetuning, reward_modelling):
            run_stage(catalog, stage)
    return folder


def newest(folder: Path) -> Path:
    return max(path for path in folder.iterdir() if path.is_dir())


def parts(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata and the text of a model's card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_the_sft_policy_has_a_card_with_its_base_model_license_and_demonstrations(project: Path) -> None:
    _, text = parts(newest(project / "sft_policy"))
    base = PretrainedHandle(str(project / "base.gguf")).fingerprint()
    assert f"- start model `base.gguf` (digest `{base}`; license, as the file names it: 'mit')\n" in text
    assert f"- demonstrations `demonstrations.jsonl` (digest `{sha256(project / 'demonstrations.jsonl')}`)\n" in text
    assert "Loss: " in text


def test_the_reward_model_names_the_chain_of_the_policy_and_its_preferences(project: Path) -> None:
    sft = newest(project / "sft_policy")
    _, text = parts(newest(project / "reward_model"))
    _, _, section = text.partition("## Made from\n\n")
    section, _, _ = section.partition("\n\n## ")
    assert section.splitlines() == [
        f"- start model `sft_policy/{sft.name}` (digest `{PretrainedHandle(str(sft)).fingerprint()}`)",
        f"  - start model `base.gguf` (digest `{PretrainedHandle(str(project / 'base.gguf')).fingerprint()}`; "
        "license, as the file names it: 'mit')",
        f"  - demonstrations `demonstrations.jsonl` (digest `{sha256(project / 'demonstrations.jsonl')}`)",
        f"- preferences `preferences.jsonl` (digest `{sha256(project / 'preferences.jsonl')}`)",
    ]


@pytest.fixture
def exported(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy and the critic that PPO exports, on the models of the project."""
    monkeypatch.chdir(project)
    config = PPOConfig(device="cpu", response_length=4, export_critic=True)
    sft, reward_model = (PretrainedHandle(str(newest(project / name))) for name in ("sft_policy", "reward_model"))
    reward = RewardConfig([RewardComponentConfig(type="model")])
    raw_prompts = RecordsDataset(str(project / "prompts.jsonl")).load()
    prompts: Any = nodes.prepare_prompts(raw_prompts, None, sft, config, PromptsConfig())["prompt_dataset"]
    scorer = nodes.load_reward_model(reward_model, sft, reward, config)
    models = nodes.load_sft_policy(sft, config)
    state = nodes.initialise_training_state(*models, scorer, prompts, config, None, None)
    arguments = state, reward_model, reward, EvaluationConfig(prompts_path=str(project / "prompts.jsonl"))
    nodes.export_policy(*arguments).save(tmp_path / "policy")
    nodes.export_critic(*arguments).save(tmp_path / "critic")  # type: ignore[union-attr]
    return tmp_path


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_what_ppo_exports_names_base_model_demonstrations_preferences_and_prompts(
    project: Path, exported: Path, model: str
) -> None:
    _, text = parts(exported / model)
    for name in TABLES:
        assert f"`{name}.jsonl` (digest `{sha256(project / f'{name}.jsonl')}`)" in text
    assert "license, as the file names it: 'mit'" in text
    assert text.count("`base.gguf`") == 1, "the reward model's start model is listed above, with its chain"
    assert "made from what is listed above" in text
    assert str(project) not in text + (exported / model / "made_from.json").read_text()


def test_the_chain_goes_on_from_an_exported_policy(exported: Path) -> None:
    after = PretrainedHandle(str(exported / "policy")).origin("start model")
    assert [origin.role for origin in after.made_from] == ["start model", "reward model", "prompts"]
    sft, reward_model, _ = after.made_from
    assert [origin.role for origin in sft.made_from] == ["start model", "demonstrations"]
    assert [origin.role for origin in reward_model.made_from] == ["start model", "preferences"]
    assert replace(reward_model.made_from[0]) == sft
