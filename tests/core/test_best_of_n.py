"""Best-of-n against all subsets, and against distributions whose maximum is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ppo_rlhf.core.best_of_n import best_of_n_kl, best_of_n_mean
from ppo_rlhf.core.errors import ConfigError, ShapeError


def over_all_subsets(rewards: list[float], values: list[float], n: int) -> float:
    """Mean over all subsets of the mean value of the rows with the subset's highest reward."""
    means = []
    for subset in itertools.combinations(range(len(rewards)), n):
        highest = max(rewards[i] for i in subset)
        best = [values[i] for i in subset if rewards[i] == highest]
        means.append(sum(best) / len(best))
    return sum(means) / len(means)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("ties", [False, True])
def test_best_of_n_is_the_mean_over_all_subsets(n: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    rewards, values = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    if ties:
        rewards = rewards.round()
        rewards[2] = 1.0  # all rewards are equal
    found = best_of_n_mean(rewards, values, n)
    expected = [over_all_subsets(r, v, n) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_kl_is_that_of_the_best_of_n_many_equally_likely_responses() -> None:
    """Of K equal responses best-of-n takes rank i with (i/K)^n - ((i-1)/K)^n; for large K its KL goes to the bound."""
    count = 100_000
    upper = torch.arange(1, count + 1, dtype=torch.float64) / count
    for n in (1, 2, 16):
        p = upper**n - (upper - 1 / count) ** n
        exact = torch.special.xlogy(p, p * count).sum().item()
        assert best_of_n_kl(n) == pytest.approx(exact, abs=2e-3)
        assert exact <= best_of_n_kl(n) + 1e-9
    assert best_of_n_kl(64) == pytest.approx(math.log(64) - 63 / 64, rel=1e-12)


def test_more_picks_than_samples_and_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="best_of_n_mean"):
        best_of_n_mean(torch.zeros(2, 3), torch.zeros(2, 3), 4)
    with pytest.raises(ConfigError, match="n"):
        best_of_n_kl(0)
    with pytest.raises(ShapeError):
        best_of_n_mean(torch.zeros(2, 3), torch.zeros(2, 4), 1)
