"""A run's first and newest samples, which another run's do not mix with."""

from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from ppo_rlhf.datasets import TokenSamplesDataset


def iterations(dataset: TokenSamplesDataset) -> list[int]:
    return [shown["iteration"] for shown in dataset.load()]


def shown(iteration: int) -> dict:
    return {"iteration": iteration, "responses": 8, "samples": []}


def test_a_run_keeps_its_first_and_its_newest_samples_if_another_run_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def in_run(name: str) -> None:
        monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id=name)))

    dataset = TokenSamplesDataset(str(tmp_path / "token_samples.json"))
    in_run("first")
    assert dataset.exists()
    assert dataset.load() == []
    for iteration in (1, 5, 10):
        dataset.save(shown(iteration))
        dataset.save({})  # not due
    assert iterations(dataset) == [1, 10]
    in_run("second")
    dataset.save(shown(1))
    assert iterations(dataset) == [1]
    in_run("first")  # goes on from a checkpoint of iteration 3
    assert iterations(dataset) == [1, 10]
    dataset.save(shown(5))
    assert iterations(dataset) == [1, 5]
    in_run("report alone")
    assert iterations(dataset) == [1, 5]
