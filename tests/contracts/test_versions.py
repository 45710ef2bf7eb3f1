"""The README's commands install the versions that were tested, and CI tests those, with each Python that is named."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "changed_versions.py"))


def test_ci_runs_the_readmes_two_commands_and_both_install_the_pinned_versions() -> None:
    searches = re.findall(r"^\w+=\$\((grep .* README\.md)\)$", CI, flags=re.M)
    found = [subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True).stdout for line in searches]
    assert found == [
        "pip install -e . -c constraints.txt && kedro run --env demo\n",
        'pip install -e ".[dev]" -c constraints.txt && pytest -n auto\n',
    ]


def run_ci(option: str, stubs: Path) -> subprocess.CompletedProcess[str]:
    """Run CI's script with commands that only say what they are given; its tests fail."""
    commands = {
        "pip": 'echo "pip $*"',
        "pytest": 'echo "pytest $*"; exit 1',
        "python3": 'mkdir -p "$3/bin"; >"$3/bin/activate"',
    }
    for name, command in commands.items():
        (stubs / name).write_text(f"#!/bin/bash\n{command}\n")
        (stubs / name).chmod(0o755)
    (stubs / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}"}
    return subprocess.run([ROOT / ".ci" / "run", option], env=environment, capture_output=True, text=True)


def test_ci_tries_what_pip_chooses_today_and_names_the_versions_of_a_failure(tmp_path: Path) -> None:
    told = run_ci("--newest", tmp_path)
    installed, tested, heading, *_ = told.stdout.splitlines()
    assert installed == "pip install -e .[dev] --quiet"
    assert tested == "pytest -n auto -q -p no:cacheprovider"
    assert heading == "== versions that are not those of constraints.txt"
    assert told.returncode == 1, told.stderr


def test_ci_tries_the_lowest_versions_with_the_rooms_that_depend_on_them(tmp_path: Path) -> None:
    told = run_ci("--lowest", tmp_path)
    installed, tested = told.stdout.splitlines()
    assert installed == "pip install -e .[dev] -c constraints-lowest.txt --quiet"
    assert tested.startswith("pytest -n auto -q -p no:cacheprovider tests/core tests/models ")
    assert told.returncode == 1, told.stderr


def test_ci_runs_slow_tests_too_with_the_pinned_versions_if_it_is_asked_for_all(tmp_path: Path) -> None:
    told = run_ci("--all", tmp_path)
    installed, tested = told.stdout.splitlines()
    assert installed == "pip install -e .[dev] -c constraints.txt --quiet"
    assert tested == "pytest -n auto -q -p no:cacheprovider -m not gpu --durations=15"
    assert told.returncode == 1, told.stderr


def test_ci_refuses_an_option_that_it_does_not_have(tmp_path: Path) -> None:
    told = run_ci("--newer", tmp_path)
    assert told.stderr == ".ci/run: there is no --newer; it takes --all, --newest, --lowest or nothing\n"
    assert (told.returncode, told.stdout) == (2, "")


@pytest.mark.parametrize(("file", "extra"), [("constraints.txt", ["dev"]), ("constraints-lowest.txt", [])])
def test_each_dependency_is_pinned_to_a_version_that_pyproject_allows(
    script: dict[str, Any], file: str, extra: list[str]
) -> None:
    pinned = script["pins"]((ROOT / file).read_text(encoding="utf-8"))
    extras = [line for name in extra for line in PROJECT["optional-dependencies"][name]]
    asked = [Requirement(line) for line in (*PROJECT["dependencies"], *extras)]
    wrong = []
    for needed in asked:
        pin = pinned.get(canonicalize_name(needed.name))
        if pin is None or not needed.specifier.contains(str(pin.specifier).removeprefix("==")):
            wrong.append(f"{needed}: {pin}")
    assert wrong == []


def test_the_workflow_tests_each_python_that_the_classifiers_name_and_fails_with_any() -> None:
    named = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language")]
    check = JOBS["check"]
    assert check["strategy"]["matrix"] == {"python": named}
    assert "continue-on-error" not in check
    first, *_, last = named
    assert PROJECT["requires-python"] == f">={first}"
    assert f"Python ≥ {first} (tested with {first} to {last})." in README


def test_the_workflow_runs_what_plain_pytest_leaves_out_in_a_job_of_its_own_at_each_push() -> None:
    assert "if" not in JOBS["slow"]
    assert JOBS["slow"]["steps"][-1]["run"].endswith(' pytest -n auto -m "slow and not gpu"')


def test_the_readme_names_the_torch_that_is_pinned(script: dict[str, Any]) -> None:
    pin = script["pins"]((ROOT / "constraints.txt").read_text(encoding="utf-8"))["torch"]
    version = str(pin.specifier).removeprefix("==")
    assert f"the CPU build of torch {version}," in README
    assert f"replaces it by torch {version.rpartition('.')[0]}." in README


def test_versions_that_changed_are_named_with_both_and_a_cpu_build_is_no_other_version(script: dict[str, Any]) -> None:
    pinned = script["pins"]("# a comment\ntorch==2.13.0\ntransformers==5.23.0\nkedro_mlflow==2.0.3\ngone==1.0\n")
    installed = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "kedro-mlflow": "2.0.3", "nvidia-nccl-cu13": "2.29"}
    assert list(script["changes"](pinned, installed)) == [
        "nvidia-nccl-cu13: not pinned -> 2.29",
        "transformers: 5.23.0 -> 5.24.0",
    ]
