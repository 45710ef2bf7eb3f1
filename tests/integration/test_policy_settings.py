"""A policy whose training settings differ from conf's is evaluated, reported and sampled with its own settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from click.testing import Result
from mlflow import MlflowClient

from tests.integration.outcomes import Run
from tests.tiny_models import save, tiny_model

TABLES = ("sft_evaluation", "ppo_evaluation")


@pytest.fixture
def edited(chain: Run, tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> Path:
    """A copy of a project after its run, in which conf was edited: shorter responses, colder, a stronger penalty."""
    project = Path(shutil.copytree(chain.project, tmp_path / "project", ignore=shutil.ignore_patterns("mlruns")))
    shutil.copy(migrated_database, project / "mlflow.db")  # an experiment holds the absolute path of its artifacts
    conf = project / "conf/test/parameters_ppo.yml"
    groups = yaml.safe_load(conf.read_text())
    assert groups["ppo"]["response_length"] == 16
    groups["ppo"] |= {"response_length": 5, "temperature": 0.3, "gamma": 0.97}
    conf.write_text(yaml.safe_dump(groups))
    return project


def tables(project: Path) -> dict[str, pd.DataFrame]:
    return {name: pd.read_parquet(project / f"data/test/07_model_output/{name}.parquet") for name in TABLES}


@pytest.mark.slow
def test_an_evaluation_after_conf_was_edited_repeats_that_of_the_training_and_names_what_differs(
    edited: Path, kedro: Callable[..., Result], caplog: pytest.LogCaptureFixture
) -> None:
    before = tables(edited)
    for name in TABLES:
        (edited / f"data/test/07_model_output/{name}.parquet").unlink()
    result = kedro(edited, "run", "--env", "test", "--pipelines", "evaluation")
    assert result.exit_code == 0, result.output
    for name, table in tables(edited).items():
        pd.testing.assert_frame_equal(table, before[name], check_exact=True)
    [said] = [line for line in caplog.messages if "settings are used" in line]
    for differs in ("response_length=16 (conf: 5)", "temperature=1.0 (conf: 0.3)"):
        assert f"ppo.{differs}" in said
    report = (edited / "data/test/08_reporting/report.html").read_text()
    assert "ppo.gamma" not in report, "it is the default in the run"
    summary = json.loads((edited / "data/test/08_reporting/evaluation_summary.json").read_text())
    assert "response_length=16" in summary["conditions"]["sampling"]


@pytest.mark.slow
def test_a_typed_length_wins_in_an_evaluation_and_among_answers(edited: Path, kedro: Callable[..., Result]) -> None:
    typed = ("--env", "test", "--params", "ppo.response_length=7")
    assert kedro(edited, "run", "--pipelines", "evaluation", *typed).exit_code == 0
    for table in tables(edited).values():
        assert table["length"].max() == 7
    asked = kedro(edited, "generate", "the film", *typed)
    assert asked.stdout.startswith("At most 7 tokens, temperature 1, ")
    own = kedro(edited, "generate", "the film", "--env", "test")
    assert own.stdout.startswith("At most 16 tokens, temperature 1, ")
    assert "ppo.response_length=16 (conf: 5)" in own.stderr
    assert "gamma" not in own.stderr


@pytest.mark.slow
def test_a_policy_with_another_vocabulary_is_refused_by_doctor_and_run_alike_and_leaves_no_run(
    edited: Path, kedro: Callable[..., Result], tmp_path: Path
) -> None:
    other = save(tmp_path / "other", tiny_model())
    asked = ("--env", "test", "--pipelines", "evaluation", "--params", f"policy_path={other}")
    for command in ("doctor", "run"):
        refused = kedro(edited, command, *asked)
        assert refused.exit_code == 1
        assert "have different vocabularies" in refused.output, command
    client = MlflowClient(f"sqlite:///{edited}/mlflow.db")
    assert [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])] == []
