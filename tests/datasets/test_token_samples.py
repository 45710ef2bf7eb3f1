"""The token samples of a run's first and newest iteration."""

from pathlib import Path

from ppo_rlhf.datasets import TokenSamplesDataset


def shown(iteration: int) -> dict:
    return {"iteration": iteration, "responses": 8, "samples": []}


def test_a_run_keeps_its_first_and_its_newest_samples(tmp_path: Path):
    dataset = TokenSamplesDataset(str(tmp_path / "token_samples.json"))

    def iterations() -> list[int]:
        return [shown["iteration"] for shown in dataset.load()]

    assert dataset.exists()
    assert dataset.load() == []
    for iteration in (1, 5, 10):
        dataset.save(shown(iteration))
        dataset.save({})  # no samples were due
    assert iterations() == [1, 10]
    dataset.save(shown(5))  # the run resumes from a checkpoint of iteration 3
    assert iterations() == [1, 5]
    dataset.save(shown(1))
    assert iterations() == [1]
