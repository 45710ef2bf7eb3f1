"""Several processes give the tokens, losses and weights of one process in float64; torchrun with gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.passes import prefixes
from ppo_rlhf.ppo.micro_batches import cut_batch
from tests.launch import REPOSITORY, launch
from tests.ppo import process_cases
from tests.ppo_runs import weight_sums
from tests.supervised import process_case

CLOSE = 1e-9
CLOSE_FOR_THREE = 1e-12
CLOSE_IN_FLOAT32 = 1e-4


def by_processes(number: int, folder: Path) -> dict[str, Any]:
    """Run all cases on the given number of processes."""
    results = folder / f"results_{number}.json"
    launch("tests.ppo.process_cases", str(results), str(folder), processes=number, folder=REPOSITORY)
    actual: dict[str, Any] = json.loads(results.read_text())
    return actual


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    process_cases.resumed(folder)  # its checkpoint, which the others resume from
    return folder


@pytest.fixture(scope="module")
def by_two(folder: Path) -> dict[str, Any]:
    return by_processes(2, folder)


def differences(actual: Any, expected: Any, path: str = "", close: float = CLOSE) -> list[str]:
    """Return the differences of two results: texts and integers must be equal, other numbers within `close`."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        return [line for key in expected for line in differences(actual[key], expected[key], f"{path}/{key}", close)]
    if isinstance(expected, list):
        return [
            line for i in range(len(expected)) for line in differences(actual[i], expected[i], f"{path}[{i}]", close)
        ]
    if isinstance(expected, float):
        return [] if actual == pytest.approx(expected, rel=close, abs=close) else [f"{path}: {actual} {expected}"]
    return [] if actual == expected else [f"{path}: {actual} {expected}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", process_cases.BY_TWO)
def test_two_processes_give_the_tokens_losses_and_weights_of_one(by_two, name, monkeypatch):
    shares = name == "a shared prefix"
    if shares:  # the one process computes whole rows
        monkeypatch.setattr(prefixes, "LEAST_SHARED", 99)
    expected = json.loads(json.dumps(process_cases.results(process_cases.CASES[name])))
    assert not differences(by_two[name], expected)
    if shares:  # not of the weights: AdamW enlarges the rounding of the key's bias, whose gradient is 0
        two, one = ({key: value for key, value in of.items() if key != "weights"} for of in (by_two[name], expected))
        assert not differences(two, one, close=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", process_cases.BY_VLLM)
def test_two_processes_learn_from_the_responses_of_one_server_or_of_two_colocated_vllms_as_one_does(by_two, mode):
    expected = json.loads(json.dumps(process_cases.by_vllm(process_cases.BY_VLLM[mode])))
    assert not differences(by_two["vLLM"][mode], expected, close=CLOSE_IN_FLOAT32)


@pytest.mark.slow
def test_two_processes_with_unequal_memory_settle_on_the_tokens_that_fit_both(by_two):
    actual, on_one = by_two["settled"], process_cases.build({"max_tokens_per_micro_batch": 20})
    on_one.iteration()
    assert not differences(actual, {"tokens": 20, "weights": weight_sums(on_one)})


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*process_cases.SHORT, process_cases.LATER])
def test_the_process_whose_memory_runs_out_halves_alone_and_then_all_do(by_two, phase):
    actual, expected = by_two["short memory"][phase], process_cases.short_memory(phase)
    of_rollouts = phase in ("sampling", "reference", "scoring")
    assert actual.pop("halvings") == {"rollout_halvings": of_rollouts, "update_halvings": not of_rollouts}
    expected.pop("halvings")
    assert not differences(actual, json.loads(json.dumps(expected)))


@pytest.mark.slow  # tests/ppo/test_halvings.py is not
@pytest.mark.parametrize("phase", ["policy's backward pass", "policy's gradient", "critic's update"])
def test_memory_that_runs_out_while_processes_exchange_gradients_ends_the_run_in_one_line(tmp_path, phase):
    """A second backward pass would exchange the gradients twice."""
    answer = tmp_path / "answer"
    with pytest.raises(AssertionError):  # torchrun's status is not 0
        launch("tests.ppo.short_memory_case", phase, str(answer), processes=2, folder=REPOSITORY)
    line = answer.read_text()
    assert line.startswith("process 1 ran out of memory in an update with 8 responses at a time: CUDA out of memory.")
    assert line.endswith("it cannot begin again: lower ppo.per_device_train_batch_size")


@pytest.mark.slow
def test_two_processes_share_an_evaluation_of_a_number_of_prompts_that_two_does_not_divide(by_two):
    assert not differences(by_two["evaluation"], process_cases.evaluation(process_cases.build({})))


@pytest.mark.slow
def test_two_processes_train_sample_and_score_as_one(by_two, folder):
    expected = json.loads(json.dumps(process_case.results(folder)))
    assert not differences(by_two["supervised"], expected, close=CLOSE_IN_FLOAT32)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_processes(by_two, folder):
    on_one = process_cases.resumed(folder)  # from the checkpoint of two
    assert on_one
    assert not differences(by_two["resumed"], on_one)
    files = [sorted(path.name for path in (folder / f"by_{number}").rglob("*")) for number in (1, 2)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_three_processes_give_what_one_does_to_the_last_digits(folder):
    """Llama's norms compute in float32, where three times a gradient rounds differently from the gradient itself."""
    actual = by_processes(3, folder)
    for name in process_cases.BY_THREE:
        expected = json.loads(json.dumps(process_cases.results(process_cases.CASES[name], responses=12)))
        assert not differences(actual[name], expected, close=CLOSE_FOR_THREE), name


@pytest.mark.slow
def test_four_processes_give_the_tokens_losses_and_weights_of_one(folder):
    actual = by_processes(4, folder)
    for name, settings in process_cases.CASES.items():
        assert not differences(actual[name], json.loads(json.dumps(process_cases.results(settings)))), name


def test_all_processes_cut_their_rows_into_as_many_micro_batches_as_the_one_that_needs_most(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = PPOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=8,
    )

    def micro_batches_of(rank: int, lengths: list[int]) -> list[list[int]]:
        monkeypatch.setenv("RANK", str(rank))
        [[minibatch]] = cut_batch(config, 1, [[0]] * 8, [length - 1 for length in lengths], 10, padded=False)
        assert sorted(row for piece in minibatch.micro_batches for row in piece) == sorted(minibatch.shards[rank])
        return minibatch.micro_batches

    # dealt 9 2 2 2 and 9 9 2 2: by the budget alone 2 micro-batches, and 3
    first, second = (micro_batches_of(rank, [9, 9, 9, 2, 2, 2, 2, 2]) for rank in (0, 1))
    assert [sorted(map(len, pieces)) for pieces in (first, second)] == [[1, 1, 2], [1, 1, 2]]
