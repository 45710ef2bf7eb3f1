"""The benchmark's own side and arithmetic, on a toy shape and without TRL."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for name in ("compare", "inputs", "invariances", "invariances_ours", "our_side", "walks", "walks_ours", "workload"):
        sys.modules.pop(name, None)


def toy():
    from workload import Preset

    return Preset(2, 64, 4, 500, batch=16, minibatch=8, prompt_length=8, response_length=12, epochs=2)


def test_our_side_does_the_work_that_the_comparison_expects(tmp_path):
    import compare
    import inputs
    import our_side
    from workload import Job

    policy, reward = inputs.make_models(toy(), "mixed", tmp_path)
    prompts = inputs.make_prompts(toy(), "mixed", 3 * 16)
    seed = inputs.find_noise_seed(toy(), 1, 3)
    Job(toy(), "mixed", "float32", "cpu", 3, policy, reward, prompts, seed, {"vf_coef": 0.2}).write(tmp_path / "job")
    job = Job.read(tmp_path / "job")
    result = our_side.run(job)
    compare.check_work(job, "ours", result)
    assert len({iteration["tokens"] for iteration in result["iterations"]}) > 1  # responses end unevenly
    rows = compare.rows_of({"preset": "toy", "lengths": "mixed", "precision": "float32"}, [(result, result)])
    assert [row["ratio"] for row in rows] == [1.0] * 3
    assert len(compare.table(rows).splitlines()) == 5
    with pytest.raises(SystemExit, match="optimiser steps"):
        compare.check_work(job, "trl", result | {"steps": 1})
    with pytest.raises(SystemExit, match="response tokens"):
        compare.check_work(job, "trl", result | {"iterations": [{"tokens": 16 * 12}] * 3})


def test_a_ratio_is_the_median_of_the_pairs_without_the_warm_up():
    """By hand: the pairs' ratios are 4, 5 and 9/8."""
    import compare

    def result(seconds):
        times = dict.fromkeys(compare.PHASES, seconds)
        return {"iterations": [dict.fromkeys((*times, "tokens"), 99.0), {**times, "tokens": 1.0}], "memory_mib": 1.0}

    pairs = [(result(ours), result(trl)) for ours, trl in ((1, 4), (10, 50), (8, 9))]
    assert [row["ratio"] for row in compare.rows_of({}, pairs)] == [4.0] * 3


def test_this_project_keeps_the_rules_for_any_trainer(tmp_path):
    import invariances
    import invariances_ours

    rows = list(invariances.check(invariances_ours, tmp_path))
    assert len(rows) == 12
    assert [rule for rule, holds, _ in rows if not holds] == []
    assert len(invariances.table(rows).splitlines()) == 14


def test_a_trainer_that_breaks_a_rule_is_noticed(tmp_path):
    """Hand-made: a score one token late, a token that is not counted, a gradient and steps that follow the cut."""
    from types import SimpleNamespace

    import torch

    import invariances

    def observe(case):
        counted = torch.tensor([[True, True, not case.pad_is_stop], [True, True, False]])
        late = case.lam * torch.tensor([[0.81, 0.9, 1.0], [0.9, 1.0, 0.0]])
        gradient, off = torch.tensor([1.0, case.micro_batch]), 0.01 * (case.precision != "float32")
        seen = [[5, 6, 0], [7, 0]], torch.ones(2), counted, late, torch.tensor([1.0 + off]), gradient
        return invariances.Seen(*seen, steps=case.accumulated)

    rows = list(invariances.check(SimpleNamespace(observe=observe, FUNCTIONS={}), tmp_path))
    assert [holds for _, holds, _ in rows] == [*[None] * 4, True, *[False] * 7]
    measured = [text for _, _, text in rows]
    assert measured[5:9] == [
        "off by at most 1e-02",
        "the last token has 0.90 of it",
        "differs by up to 86.8%",
        "4 of 5 tokens count, the gradient differs by 0.0%",
    ]


def test_the_walks_benchmark_counts_iterations_and_seconds_to_the_target():
    """By hand: the second iteration is the first with 0.95."""
    import walks

    curve = [
        {"score": score, "seconds": second} for score, second in ((0.8, 1.5), (0.95, 2.0), (0.9, 2.5), (0.97, 4.0))
    ]
    assert walks.first_at(curve) == 2
    never = [{"score": 0.5, "seconds": 1.0}]
    *_, row = walks.summary_table({"ours": [curve, never]}).splitlines()
    assert row == "| ours | 2, – | 2.0, – | 1.00 | 0.905, 0.500 |"
    lines = walks.curves_table({"ours": [curve, never]}, [1, 2]).splitlines()
    assert lines[2].startswith("| ours, seed 1 | 0.800 | 0.950 | 0.900 |  |")
