"""The catalog entry of the checkpoint that a run resumes from."""

from pathlib import Path

import pytest
from kedro.io import DatasetError

from ppo_rlhf.datasets import ResumeCheckpointDataset


def entry(tmp_path: Path, resume: object = None) -> ResumeCheckpointDataset:
    return ResumeCheckpointDataset(str(tmp_path / "checkpoints"), resume)


def test_a_run_that_is_not_resumed_loads_none(tmp_path):
    dataset = entry(tmp_path)
    assert dataset.load() is None
    assert not dataset.exists()


@pytest.mark.parametrize("resume", ["latest", "0123abcd", 12345])
def test_what_a_hook_resolved_is_loaded(tmp_path, resume):
    dataset = entry(tmp_path, resume)
    assert dataset.requested == str(resume)
    dataset.resolve(tmp_path / "checkpoints" / "run" / "iteration_000010")
    assert dataset.load() == dataset.checkpoint == tmp_path / "checkpoints" / "run" / "iteration_000010"
    dataset.resolve(None)
    assert dataset.load() is None


def test_without_a_hook_only_the_directory_of_a_checkpoint_is_loaded(tmp_path):
    directory = tmp_path / "iteration_000010"
    directory.mkdir()
    for resume in ("latest", str(directory)):
        with pytest.raises(DatasetError, match=f"resume={resume}: "):
            entry(tmp_path, resume).load()
    (directory / "manifest.json").write_text("{}")
    assert entry(tmp_path, str(directory)).load() == directory


def test_it_cannot_be_saved(tmp_path):
    with pytest.raises(DatasetError, match="only read"):
        entry(tmp_path).save("anything")
