"""Pass@k against the average over all subsets of k responses."""

from itertools import combinations

import pytest
import torch

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.success_rates import pass_at_k


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 4), (6, 2), (7, 5)])
def test_it_is_the_share_of_subsets_with_a_right_response(n: int, k: int) -> None:
    expected = []
    for right in range(n + 1):
        subsets = list(combinations([True] * right + [False] * (n - right), k))
        expected.append(sum(map(any, subsets)) / len(subsets))
    found = pass_at_k(torch.arange(n + 1), n, k)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-12)


def test_many_responses_do_not_overflow() -> None:
    """One of 2,000 responses is right: 500 drawn responses include it with probability 500 / 2000."""
    assert pass_at_k(torch.tensor([1]), 2000, 500).item() == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_tries_than_responses_are_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=f"pass@{k}"):
        pass_at_k(torch.tensor([1]), 4, k)
