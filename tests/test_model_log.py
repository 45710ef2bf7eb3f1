"""Policies as MLflow models: those whose code lies with them, too."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline
from transformers import dynamic_module_utils

from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.hooks import model_log
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.training.config import PPOConfig
from tests.tiny_models import save, tiny_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that transformers can only load by running the Python file beside it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(save(tmp_path / "own", tiny_model()))
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own_llama",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_policys_own_code_runs_just_where_the_catalog_trusts_it(
    own_model: Path,
    tmp_path: Path,
    migrated_database: Path,
    no_mlflow_left_over: None,
    monkeypatch: pytest.MonkeyPatch,
    is_trusted: bool,
):
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    monkeypatch.setattr(model_log, "best_checkpoint", lambda *_: (own_model, 3))
    policy = PretrainedModelDataset(str(own_model), trust_remote_code=is_trusted)
    catalog = DataCatalog({"ppo_policy": policy, "params:ppo": MemoryDataset(PPOConfig())})
    with mlflow.start_run(experiment_id=experiment) as run:
        log = RunLog(run.info.run_id, Pipeline([]), catalog)
        if not is_trusted:
            with pytest.raises(ValueError, match="trust_remote_code"):
                log.saved("ppo_policy")
        else:
            log.saved("ppo_policy")
        log.close(is_finished=False)
    models = mlflow.search_logged_models([experiment], output_format="list")
    assert sorted(model.name for model in models) == (["best_checkpoint", "ppo_policy"] if is_trusted else [])
