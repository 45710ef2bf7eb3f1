"""Policies as MLflow models: those whose code lies with them, too."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.datasets.checkpoints import CheckpointDataset
from ppo_rlhf.hooks import model_log
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.loading import PretrainedHandle
from tests.own_code import save_with_own_code


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that transformers can only load by running the Python file beside it."""
    return save_with_own_code(tmp_path / "own", monkeypatch)


@pytest.fixture
def own_adapter(own_model: Path, tmp_path: Path) -> Path:
    """A checkpoint of a LoRA run on that model: the adapter and the tokenizer."""
    settings = LoraSettings(rank=2, alpha=4, target_modules="all-linear")
    base = PretrainedHandle(str(own_model), trust_remote_code=True)
    save_adapter(with_adapter(base.causal_lm(), settings, torch.Generator()), tmp_path / "adapter", settings)
    base.tokenizer().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("best", ["own_model", "own_adapter"])
@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_policys_own_code_runs_just_where_the_catalog_trusts_it(
    own_model: Path,
    tmp_path: Path,
    migrated_database: Path,
    no_mlflow_left_over: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    is_trusted: bool,
    best: str,
):
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    monkeypatch.setattr(model_log, "best_checkpoint", lambda *_: (request.getfixturevalue(best), 3))
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


def test_the_best_checkpoint_is_the_best_evaluated_one_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_log, "run_directory", lambda root: root / "run")
    dataset = CheckpointDataset(str(tmp_path))
    assert model_log.best_checkpoint(dataset, kl_alarm=20.0) is None
    assert model_log.best_checkpoint(None, kl_alarm=20.0) is None
    rows = [  # the first was pruned, the third drifted too far
        {"iteration": 10.0, "eval/judge_score": 0.9, "eval/reward": 0.0, "eval/kl": 1.0},
        {"iteration": 20.0, "eval/judge_score": 0.6, "eval/reward": 0.0, "eval/kl": 2.0},
        {"iteration": 30.0, "eval/judge_score": 0.8, "eval/reward": 0.0, "eval/kl": 30.0},
        {"iteration": 40.0, "eval/judge_score": 0.5, "eval/reward": 0.0, "eval/kl": 3.0},
    ]
    for iteration in (20, 30, 40):
        (tmp_path / "run" / f"iteration_{iteration:06d}").mkdir(parents=True)
    (tmp_path / "run" / "evaluations.json").write_text(json.dumps(rows))
    assert model_log.best_checkpoint(dataset, kl_alarm=20.0) == (tmp_path / "run" / "iteration_000020" / "policy", 20)
