"""A relative path of a setting is below the project, wherever the command was typed."""

from pathlib import Path

import pytest

from ppo_rlhf.runtime import paths
from ppo_rlhf.runtime.paths import below_project, in_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, in whose sub-folder the command was typed."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("HOME", "/home/anna")
    return tmp_path


def test_a_relative_path_is_below_the_project_and_other_paths_stay(project: Path):
    assert in_project("pairs.jsonl") == project / "pairs.jsonl"
    assert in_project("~/pairs.jsonl") == Path("/home/anna/pairs.jsonl")
    assert in_project("/data/pairs.jsonl") == Path("/data/pairs.jsonl")


def test_a_run_has_its_project_also_from_the_folder_of_another_one(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths.running, "project", Path("/projects/mine"))
    assert in_project("pairs.jsonl") == Path("/projects/mine/pairs.jsonl")


def test_a_model_beside_the_command_does_not_stand_in_for_one_of_the_project(project: Path):
    Path("models").mkdir()
    assert below_project("models") == str(project / "models")  # which does not exist
    assert below_project("owner/model@main") == "owner/model@main"
