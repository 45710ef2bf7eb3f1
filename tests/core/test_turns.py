"""Tokens of several turns: compacting, spreading back, and GAE over compacted tokens."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.advantages import generalized_advantage_estimate
from ppo_rlhf.core.errors import ShapeError
from ppo_rlhf.core.rewards import shape_rewards
from ppo_rlhf.core.statistics import masked_whiten
from ppo_rlhf.core.turns import compact, compact_mask, spread
from tests.core.support import Case, cases, poison

# rows: two turns, a hole at the start, only padding
MASK = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 1], [0] * 6], dtype=torch.bool)
VALUES = torch.arange(18.0).reshape(3, 6) + 1


def test_the_kept_tokens_move_to_the_front_in_their_order() -> None:
    expected = torch.tensor([[1.0, 2, 5, 0, 0, 0], [8, 10, 11, 12, 0, 0], [0] * 6])
    assert torch.equal(compact(poison(VALUES, MASK), MASK), expected)
    assert compact_mask(MASK).long().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6]


def test_spreading_undoes_it_and_reads_nothing_after_the_kept_tokens() -> None:
    moved = poison(compact(VALUES, MASK), compact_mask(MASK))
    assert torch.equal(spread(moved, MASK), torch.where(MASK, VALUES, 0.0))


@pytest.mark.parametrize("function", [compact, spread])
def test_shapes_that_do_not_fit_are_refused(function) -> None:
    with pytest.raises(ShapeError):
        function(VALUES, MASK[:2])


def _over_turns(rewards, values, mask, gamma, lam):
    given = (compact(poison(x, mask), mask) for x in (rewards, values))
    return (spread(x, mask) for x in generalized_advantage_estimate(*given, compact_mask(mask), gamma, lam))


@cases("gae", "verl", skip=())
def test_gae_over_turns_agrees_with_verl_which_skips_what_is_not_the_policys(case: Case) -> None:
    mask = case.i["mask"]
    advantages, returns = _over_turns(case.i["rewards"], case.i["values"], mask, case.i["gamma"], case.i["lam"])
    case.check(masked_whiten(advantages, mask), "advantages", where=mask)
    case.check(returns, "returns", where=mask)


def test_gae_over_turns_is_the_sum_of_the_discounted_errors_of_the_policys_own_tokens() -> None:
    gamma, lam, generator = 0.9, 0.8, torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    advantages, returns = _over_turns(rewards, values, MASK, gamma, lam)
    for row in range(3):
        own = [column for column in range(6) if MASK[row, column]]
        r, v = ([float(table[row, column]) for column in own] for table in (rewards, values))
        errors = [r[i] + gamma * (v[i + 1] if i + 1 < len(own) else 0.0) - v[i] for i in range(len(own))]
        expected = [
            math.fsum((gamma * lam) ** (j - i) * errors[j] for j in range(i, len(own))) for i in range(len(own))
        ]
        assert_close(advantages[row, own], torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-12)
        assert_close(returns[row, own], advantages[row, own] + values[row, own], rtol=0.0, atol=1e-12)
    assert not advantages[~MASK].any()
    assert not returns[~MASK].any()


def test_the_score_is_on_the_policys_last_token_and_no_kl_on_the_environments() -> None:
    scores, kl = torch.tensor([1.0, -2.0, 5.0]), poison(torch.full((3, 6), 0.5), MASK)
    rewards = spread(shape_rewards(scores, compact(kl, MASK), compact_mask(MASK), 0.1), MASK)
    expected = torch.tensor([[-0.05, -0.05, 0, 0, 0.95, 0], [0, -0.05, 0, -0.05, -0.05, -2.05], [0] * 6])
    assert_close(rewards, expected)
