"""Padding, worked by hand: prompts on the left, responses on the right, masks from lengths."""

import pytest
import torch

from ppo_rlhf.ppo.batch import left_pad, make_batch, positions


def test_prompts_are_padded_on_the_left_with_positions_from_their_first_token():
    padded = left_pad([[5, 6, 7], [8], [0, 9]], pad_token_id=0)
    assert padded.input_ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 9]]
    assert padded.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]  # a real token may be the pad id
    assert padded.position_ids.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 1]]


def test_positions_count_real_tokens_from_zero():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert positions(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize("pad_token_id", [0, 7, 99])
def test_prompts_and_responses_are_packed_side_by_side_and_trimmed_to_their_longest(pad_token_id):
    p = pad_token_id
    responses = torch.tensor([[1, 2, 50, 50, 50], [3, 50, 50, 50, 50], [7, 7, 7, 50, 50]])  # 50: to be ignored
    packed = make_batch([[4], [5, 6], [7, 7, 7]], responses, torch.tensor([2, 1, 3]), pad_token_id)
    assert packed.input_ids.tolist() == [[p, p, 4, 1, 2, p], [p, 5, 6, 3, p, p], [7, 7, 7, 7, 7, 7]]
    assert packed.attention_mask.tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert packed.position_ids.tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5]]
    assert packed.response_ids.tolist() == [[1, 2, p], [3, p, p], [7, 7, 7]]
    assert packed.is_response.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert packed.is_response.dtype == torch.bool


def test_packing_leaves_the_responses_alone():
    responses = torch.tensor([[1, 2, 3]])
    make_batch([[4]], responses, torch.tensor([1]), 0)
    assert responses.tolist() == [[1, 2, 3]]
