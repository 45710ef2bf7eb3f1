"""What docs/deployment.md says of packaging and Airflow, as far as it can be checked without either."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ppo_rlhf.cli import cli
from ppo_rlhf.cli.init import project_files
from ppo_rlhf.hooks.resume import can_resume
from ppo_rlhf.pipeline_registry import STAGES, register_pipelines

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ppo_rlhf"
ARGUMENTS = ["--conf-source", "conf", "--env", "test", "--pipelines", "data_preparation"]
PAGE = (ROOT / "docs" / "deployment.md").read_text()


@pytest.mark.slow
def test_the_packaged_project_runs_in_a_plain_folder(tmp_path: Path) -> None:
    """The folder has no pyproject.toml, only `conf` and the data, as the page unpacks them."""
    for folder in ("conf", "data/01_raw"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("local"))
    finished = subprocess.run(
        [sys.executable, "-m", "ppo_rlhf", "run", *ARGUMENTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "mlflow.db").is_file()
    assert list((tmp_path / "data/test/03_primary").rglob("*.parquet"))


def test_every_file_of_the_package_gets_into_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ppo_rlhf"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others
    assert others <= packaged


def test_the_commands_and_pipelines_of_the_page_exist() -> None:
    runs = re.findall(r"ppo_rlhf (\w+) (--conf-source \S+.*)", PAGE)
    assert runs
    options = {option for parameter in cli.commands["run"].params for option in parameter.opts}
    for command, arguments in runs:
        assert command == "run"
        assert set(re.findall(r"--[\w-]+", arguments)) <= options
    named = set(re.findall(r"--pipelines ([\w,]+)", PAGE))
    assert named
    assert named <= set(register_pipelines())


def test_the_container_and_the_job_of_the_page_fit_a_project_of_ones_own() -> None:
    """Docker and a cluster are not run: the files that they copy, mount and start are compared with the project."""
    (container,), jobs = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("dockerfile", "yaml"))
    steps = [line.split(maxsplit=1) for line in container.splitlines()]
    files = {Path(path).parts[0] for path in project_files("own", {}, "{type: model}")}
    copied = [name for step, rest in steps if step == "COPY" for name in rest.split()[:-1]]
    assert copied == ["ppo_rlhf-*.whl", "pyproject.toml", ".telemetry", "conf", "src"]
    assert set(copied[1:]) <= files
    (command,) = (json.loads(rest) for step, rest in steps if step == "CMD")
    (job,) = (found for found in map(yaml.safe_load, jobs) if found.get("kind") == "Job")
    (pod,) = job["spec"]["template"]["spec"]["containers"]
    assert pod["args"] == command
    assert pod["volumeMounts"][0]["mountPath"] == f"{dict(steps[:2])['WORKDIR']}/data"
    options = cli.commands["run"].make_context("run", command[1:]).params
    assert options["params"] == {"resume": "latest"}


def test_a_stage_is_one_namespace_and_hands_nothing_on_in_memory() -> None:
    """Each slice can then be a process or an Airflow task of its own, and no slice cuts the loop open."""
    catalog: dict[str, Any] = {}
    for path in (ROOT / "conf/base").glob("catalog_*.yml"):
        catalog |= yaml.safe_load(path.read_text())
    whole = register_pipelines()["__default__"]
    groups = {group.name: group for group in whole.group_nodes_by("namespace")}
    assert set(groups) == {stage.__name__.rpartition(".")[2] for stage in STAGES}
    assert {node.namespace for node in whole.only_nodes_with_tags("iteration").nodes} == {"ppo"}
    made = {name: node.namespace for node in whole.nodes for name in node.outputs}
    crossing = {
        name for node in whole.nodes for name in node.inputs if made.get(name, node.namespace) != node.namespace
    }
    assert {"sft_policy", "reward_model", "ppo_policy"} <= crossing
    assert [name for name in crossing if catalog[name]["type"].endswith("MemoryDataset")] == []


def test_the_dag_of_the_page_runs_the_whole_chain_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for Airflow's three names."""
    tasks: list[dict[str, Any]] = []
    chained: list[Any] = []

    class Dag:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def operator(**given: Any) -> str:
        tasks.append(given)
        return str(given["task_id"])

    bash = "airflow.providers.standard.operators.bash"
    monkeypatch.setitem(sys.modules, "airflow.sdk", SimpleNamespace(DAG=Dag, chain=lambda *each: chained.extend(each)))
    for name in ("airflow", "airflow.providers", "airflow.providers.standard", "airflow.providers.standard.operators"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, bash, SimpleNamespace(BashOperator=operator))
    (code,) = re.findall(r"```python\n(from airflow.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    pipelines = register_pipelines()
    assert chained == ["data_preparation", "supervised_finetuning", "reward_modelling", "align"]
    assert {node for name in chained for node in pipelines[name].nodes} == set(pipelines["__default__"].nodes)
    for task in tasks:
        _, arguments = task["bash_command"].split(" run ")
        options = cli.commands["run"].make_context("run", arguments.split()).params
        assert options["pipelines"] == [task["task_id"]]
        # A run of a pipeline that cannot be resumed refuses `resume`, which nothing would read
        assert ("resume" in options["params"]) == can_resume(pipelines[task["task_id"]])
