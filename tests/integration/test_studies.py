"""The audit of the reward, the KL study and a sweep, as a user runs them after the demo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from ppo_rlhf.pipelines.audit_reward.reward_audit import RULES
from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run

pytestmark = pytest.mark.slow
UNJUDGED = {"audit/reward_gain", "audit/attacks", "audit/largest_margin", "audit/pair_accuracy"}
"""Metrics of the audit that no rule reads."""


@pytest.fixture(scope="module")
def studied(chain: Run, make_project: Callable[[], Path]) -> Path:
    project = make_project()
    shutil.copytree(chain.project / "data/test/06_models", project / "data/test/06_models")
    finished = kedro_run(project, "--env", "test", "--pipelines", "audit_reward,kl_study")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return project / "data/test"


def test_the_audit_ends_with_a_verdict_and_its_numbers(studied: Path) -> None:
    audit = json.loads((studied / "08_reporting/reward_audit.json").read_text())
    assert audit["verdict"] == ("not fit for PPO" if audit["reasons"] else "fit for PPO by 9 of 9 measures")
    assert {name for rule in RULES for name in rule.reads} == audit["metrics"].keys() - UNJUDGED
    assert (studied / "08_reporting/reward_audit_plot.json").stat().st_size > 0
    attacks = pd.read_csv(studied / "08_reporting/reward_attacks.csv")
    assert {"attack", "share", "margin", "hole"} <= {*attacks}
    assert [hole["attack"] for hole in audit["holes"]] == attacks[attacks["hole"]]["attack"].tolist()


def test_the_study_trains_once_for_each_penalty_in_a_run_below_its_own(studied: Path) -> None:
    results = pd.read_csv(studied / "08_reporting/kl_study_results.csv")
    assert results["setting"].tolist() == ["beta 0", "beta 5", "adaptive, target 3"]
    assert (studied / "08_reporting/kl_study_frontier_plot.json").stat().st_size > 0
    client = mlflow.MlflowClient(f"sqlite:///{studied.parents[1]}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    [parent] = client.search_runs(experiments, "tags.pipeline = 'audit_reward,kl_study'")
    children = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {run.info.run_name: run.data.metrics["eval/kl"] for run in children} == dict(
        zip(results["setting"], results["kl"], strict=True)
    )
    assert all(run.info.status == "FINISHED" for run in [parent, *children])
    betas = {run.info.run_name: client.get_metric_history(run.info.run_id, "objective/kl_coef") for run in children}
    assert betas["beta 5"][0].value == 5.0
    assert len({len(history) for history in betas.values()}) == 1
    assert len(betas["beta 5"]) > 1


FLAKY = """
from pathlib import Path

def flaky(prompts, completions):
    if len(completions) > 2 and Path("fail").exists():  # two are tried before the run
        raise ValueError("broken")
    return [0.0] * len(completions)
"""
SWEEP = """
sweep:
  grid:
    reward.components:
      - [{type: model}]
      - [{type: model}, {type: function, function: "flaky:flaky"}]
"""


def test_a_failed_training_of_a_sweep_leaves_the_others_and_a_resumed_sweep_trains_only_it(
    chain: Run, make_project: Callable[[], Path]
) -> None:
    project = make_project()
    shutil.copytree(chain.project / "data/test/06_models", project / "data/test/06_models")
    (project / "src/flaky.py").write_text(FLAKY)
    (project / "conf/test/parameters_sweep.yml").write_text(SWEEP + "  seeds: [1, 2]\n")
    (project / "fail").touch()
    finished = kedro_run(project, "--env", "test", "--pipelines", "sweep")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [whole, half] = pd.read_csv(project / "data/test/08_reporting/sweep_results.csv").to_dict("records")
    assert (whole["trainings"], half["trainings"]) == (2, 0)
    assert half["failed"].count("broken") == 2
    assert pd.isna(whole["failed"])
    assert whole["kl_sd"] > 0.0
    assert (project / "data/test/08_reporting/sweep_plot.json").stat().st_size > 0
    client = mlflow.MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    [parent] = client.search_runs(experiments, "tags.pipeline = 'sweep'")
    below = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    assert sorted(run.info.status for run in client.search_runs(experiments, below)) == [
        *["FAILED"] * 2,
        *["FINISHED"] * 2,
    ]
    (project / "fail").unlink()
    resumed = kedro_run(project, "--env", "test", "--pipelines", "sweep", "--params", f"resume={parent.info.run_id}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (resumed.stdout + resumed.stderr).count("was finished before") == 2
    [again, other] = pd.read_csv(project / "data/test/08_reporting/sweep_results.csv").to_dict("records")
    assert again == pytest.approx(whole, nan_ok=True)
    assert other["kl"] == whole["kl"]  # the other reward adds nothing
    assert len(client.search_runs(experiments, below)) == 6
