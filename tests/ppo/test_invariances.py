"""What must not matter: the pad token, its side, how much padding there is, and the tokenizer's own settings."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.ppo import rollout
from ppo_rlhf.ppo.batch import SequenceBatch, make_batch

from .support import ONE_STEP, assert_same_gradients, gradients, moved_on

TIMED = ("time/", "throughput/", "memory/")
EVERY_LOSS = {"kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.1, "importance_cap": 1.5}


def to_the_end(run, snapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, float]]]:
    while not run.state.finished:
        run.iteration()
    history = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in run.state.history]
    return snapshot(run.state.policy), snapshot(run.state.critic), history


@pytest.mark.parametrize("options", [{}, EVERY_LOSS], ids=["plain", "every loss"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_pad_token_that_is_the_end_of_text_trains_the_same_run_as_one_of_its_own(
    make_run, make_tokenizer, snapshot, same_tensors, kind, options
):
    runs = [
        to_the_end(make_run(kind, tokenizer=make_tokenizer(pad_token=pad), **options), snapshot)
        for pad in ("<pad>", "</s>", "<unk>")
    ]
    for other in runs[1:]:
        assert same_tensors(runs[0][0], other[0])
        assert same_tensors(runs[0][1], other[1])
        assert runs[0][2] == other[2]
    assert 0.0 < runs[0][2][0]["response/truncated_fraction"] < 1.0


def test_the_tokenizers_padding_side_does_not_matter(make_run, make_tokenizer, snapshot, same_tensors):
    left, right = (
        to_the_end(make_run(tokenizer=make_tokenizer(padding_side=side)), snapshot) for side in ("left", "right")
    )
    assert same_tensors(left[0], right[0])
    assert left[2] == right[2]


def padded_more(left: int, right: int):
    """`pack` with `left` columns of padding in front, and responses `right` columns wider (as far as there are)."""

    def packed(prompt_ids, response_ids, lengths, pad_token_id, device="cpu") -> SequenceBatch:
        plain = make_batch(prompt_ids, response_ids, lengths, pad_token_id, device)
        more = min(right, response_ids.shape[1] - plain.response_ids.shape[1])

        def wider(tensor: torch.Tensor, before: int, fill: int) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (before, more), value=fill)

        return SequenceBatch(
            wider(plain.input_ids, left, 7),
            wider(plain.attention_mask, left, 0),
            wider(plain.position_ids, left, 0),
            wider(plain.response_ids, 0, 7),
            wider(plain.is_response.long(), 0, 0).bool(),
        )

    return packed


@pytest.mark.parametrize("options", [{}, EVERY_LOSS], ids=["plain", "every loss"])
@pytest.mark.parametrize("sides", [(5, 0), (0, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet"])
def test_the_gradient_does_not_depend_on_padding_on_either_side(make_run, monkeypatch, kind, sides, options):
    experience = moved_on(make_run(kind, **ONE_STEP, **options).before_update()[-1])
    short = dataclasses.replace(
        experience.rollouts, lengths=experience.rollouts.lengths.clamp(max=5)
    )  # so that there are columns behind the longest response
    experience = dataclasses.replace(experience, rollouts=short)
    expected = gradients(make_run, experience, kind, **options)
    monkeypatch.setattr(rollout, "pack", padded_more(*sides))
    assert_same_gradients(gradients(make_run, experience, kind, **options), expected)


def test_old_log_probabilities_and_values_do_not_depend_on_padding_either(make_run, monkeypatch):
    plain_rollouts, plain_scores, _, plain = make_run().before_update()
    monkeypatch.setattr(rollout, "pack", padded_more(6, 8))
    rollouts, scores, _, experience = make_run().before_update()
    mask = rollouts.mask
    assert torch.equal(rollouts.response_ids, plain_rollouts.response_ids)
    assert_close(rollouts.old_logprobs, plain_rollouts.old_logprobs, rtol=0.0, atol=1e-10)
    assert_close(scores.values[:, :-1][mask], plain_scores.values[:, :-1][mask], rtol=0.0, atol=1e-6)  # a Llama's norm
    assert_close(experience.advantages, plain.advantages, rtol=0.0, atol=1e-6)
