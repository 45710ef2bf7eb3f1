"""The shipped demo with other critics, LoRA and an adaptive penalty, on three seeds. Minutes a seed: marked slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from tests.benchmarks import options

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = [42, 1, 2]
Runs = Callable[[str], list[Path]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that gives the finished runs of an option, a seed each; none is made twice."""
    folder = tmp_path_factory.mktemp("options")
    return lambda name: options.run_all(folder, [name], SEEDS, jobs=2)[name]


def gain(runs: list[Path]) -> float:
    return mean(options.summary(folder)["gain"] for folder in runs)


def test_the_demo_as_it_is_gains_by_the_gold_judge(runs: Runs) -> None:
    """A share of next to nothing would say nothing; these are also the models that the other tests start from."""
    assert gain(runs("default")) >= 0.4


@pytest.mark.parametrize("option", ["separate", "shared", "lora"])
def test_the_option_reaches_85_percent_of_the_default_gain(option: str, runs: Runs) -> None:
    share = gain(runs(option)) / gain(runs("default"))
    print(f"{option}: {share:.3f} of the default's gain")
    assert share >= 0.85


def test_adaptive_kl_from_ten_times_too_much_penalty_ends_at_its_target(runs: Runs) -> None:
    ends = [options.history(folder)["objective/kl"].tail(10).mean() / 6.0 for folder in runs("kl_from_0.8")]
    print("KL of the last 10 iterations over the target:", ends)
    assert all(0.75 <= end <= 1.25 for end in ends)


def test_adaptive_kl_from_ten_times_too_little_penalty_overshoots_and_comes_back(runs: Runs) -> None:
    curves = [options.history(folder)["objective/kl"] for folder in runs("kl_from_0.008")]
    ends, peaks = ([f(curve) / 6.0 for curve in curves] for f in (lambda curve: curve.tail(10).mean(), max))
    print("KL of the last 10 iterations over the target:", ends, "at its peak:", peaks)
    assert all(peak > 1.25 for peak in peaks)
    assert all(end < 1.25 for end in ends)
