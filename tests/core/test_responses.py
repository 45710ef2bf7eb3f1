import pytest
import torch

from ppo_rlhf.core.errors import ShapeError
from ppo_rlhf.core.responses import length_mask, response_lengths


def test_a_response_ends_with_its_first_stop_token_which_counts():
    ids = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8]])
    lengths, terminated = response_lengths(ids, [2])
    assert lengths.tolist() == [2, 4, 1, 4]
    assert terminated.tolist() == [True, True, True, False]
    assert lengths.dtype == torch.int64
    assert terminated.dtype == torch.bool


def test_what_follows_the_stop_token_does_not_matter_even_if_padding_is_the_stop_token():
    """A tokenizer whose pad is its end of text gives the same result, since masks come from lengths."""
    tail_eos = torch.tensor([[5, 2, 2, 2], [5, 6, 2, 2]])
    tail_pad = torch.tensor([[5, 2, 0, 0], [5, 6, 2, 0]])
    for a, b in zip(response_lengths(tail_eos, [2]), response_lengths(tail_pad, [2]), strict=True):
        assert torch.equal(a, b)


def test_length_mask_is_true_on_the_first_tokens_of_each_row():
    mask = length_mask(torch.tensor([0, 1, 3]), 3)
    assert mask.tolist() == [[False, False, False], [True, False, False], [True, True, True]]
    assert mask.dtype == torch.bool


def test_wrong_shapes_and_lengths_are_refused_with_a_message_that_says_what_to_do():
    with pytest.raises(ShapeError, match=r"response_lengths: response_ids.*\[3\].*\[B, T\]"):
        response_lengths(torch.tensor([1, 2, 3]), [2])
    with pytest.raises(ShapeError, match=r"length_mask: lengths.*\[1, 1\].*\[B\]"):
        length_mask(torch.tensor([[1]]), 3)
    with pytest.raises(ShapeError, match=r"lengths.*1\.\.4.*0\.\.width=3"):
        length_mask(torch.tensor([1, 4]), 3)
    with pytest.raises(ShapeError, match=r"lengths.*-1\.\.2"):
        length_mask(torch.tensor([-1, 2]), 3)
