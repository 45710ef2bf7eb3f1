from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError, ShapeError
from ppo_rlhf.core.option_names import RewardCombination
from ppo_rlhf.core.reward_combination import COMBINATIONS, combine_scores
from ppo_rlhf.core.rewards import last_token_mask, overlong_penalty, shape_rewards

from .support import NAN, prefix_mask


def test_score_sits_on_the_last_real_token_and_kl_on_every_real_token():
    kl = torch.tensor([[0.5, -0.3, 0.2], [0.1, NAN, NAN], [0.4, 0.6, NAN]])
    rewards = shape_rewards(torch.tensor([1.0, -2.0, 3.0]), kl, prefix_mask([3, 1, 2], 3), 0.1)
    expected = torch.tensor([[-0.05, 0.03, 0.98], [-2.01, 0.0, 0.0], [-0.04, 2.94, 0.0]])
    assert_close(rewards, expected, rtol=0.0, atol=1e-6)


def test_scores_are_clipped_before_the_kl_joins():
    mask = prefix_mask([2, 2, 2], 2)
    kl = torch.full((3, 2), 10.0)
    rewards = shape_rewards(torch.tensor([7.0, -7.0, 0.5]), kl, mask, 1.0, reward_clip=2.0)
    assert_close(rewards[:, 1], torch.tensor([-8.0, -12.0, -9.5]), rtol=0.0, atol=0.0)
    assert (rewards[:, 0] == -10.0).all()


def test_a_row_without_real_tokens_is_zero_even_if_its_score_is_nan():
    mask = prefix_mask([0, 1], 2)
    rewards = shape_rewards(torch.tensor([NAN, 1.0]), torch.tensor([[NAN, NAN], [0.0, NAN]]), mask, 0.1)
    assert rewards.tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_a_nan_score_or_kl_on_a_real_token_is_not_hidden():
    mask = prefix_mask([2], 2)
    assert shape_rewards(torch.tensor([NAN]), torch.zeros(1, 2), mask, 0.1)[0, 1].isnan()
    assert shape_rewards(torch.tensor([1.0]), torch.tensor([[NAN, 0.0]]), mask, 0.1)[0, 0].isnan()


def test_last_token_mask_marks_one_token_a_row_and_none_in_empty_rows():
    assert last_token_mask(prefix_mask([3, 1, 0], 3)).long().tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("mask", [[[True, False, True]], [[False, True, True]]], ids=["hole", "left-padded"])
def test_masks_that_are_no_prefix_are_refused(mask: list[list[bool]]):
    with pytest.raises(ShapeError, match="shape_rewards: row 0 of mask"):
        shape_rewards(torch.ones(1), torch.ones(1, 3), torch.tensor(mask), 0.1)


def test_wrong_shapes_and_options_are_refused():
    mask, kl, scores = prefix_mask([2], 2), torch.ones(1, 2), torch.ones(1)
    with pytest.raises(ShapeError, match=r"scores.*\[2\].*\[1\]"):
        shape_rewards(torch.ones(2), kl, mask, 0.1)
    with pytest.raises(ConfigError, match=r"kl_coef=-0\.1.*>= 0"):
        shape_rewards(scores, kl, mask, -0.1)
    with pytest.raises(ConfigError, match=r"reward_clip=0\.0.*> 0"):
        shape_rewards(scores, kl, mask, 0.1, reward_clip=0.0)


def test_the_overlong_penalty_rises_in_a_line_over_the_buffer():
    """Of at most 10 tokens, each of the last 4 adds a quarter to the penalty."""
    penalty = overlong_penalty(torch.tensor([0, 1, 6, 7, 8, 9, 10]), 10, 4)
    assert penalty.tolist() == [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert penalty.dtype == torch.float64
    assert overlong_penalty(torch.tensor([1, 5, 10]), 10, 10).tolist() == [0.1, 0.5, 1.0]


def test_the_overlong_penalty_refuses_a_buffer_that_does_not_fit():
    for buffer in (0, 11):
        with pytest.raises(ConfigError, match=rf"overlong_penalty: buffer={buffer}.*>= 1.*<= 10"):
            overlong_penalty(torch.tensor([3]), 10, buffer)
    with pytest.raises(ShapeError, match=r"lengths.*\[1, 2\].*\[B\]"):
        overlong_penalty(torch.ones(1, 2), 10, 4)


def test_each_declared_combination_has_a_function_without_which_it_is_refused(monkeypatch):
    assert set(COMBINATIONS) == set(get_args(RewardCombination))
    monkeypatch.delitem(COMBINATIONS, "min")
    with pytest.raises(ConfigError, match=rf"how='min'.*{', '.join(COMBINATIONS)}\."):
        combine_scores(torch.zeros(2, 3), "min")
