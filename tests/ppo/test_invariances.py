"""Results must not depend on the pad token, the padding side, the amount of padding or the tokenizer's settings."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.passes import forward, sequences
from ppo_rlhf.passes.packed_attention import SharedLayout
from ppo_rlhf.passes.sequences import SequenceBatch, make_batch
from ppo_rlhf.passes.token_rows import TokenRows
from tests.ppo_runs import MEASURED

from .support import ONE_STEP, assert_same_gradients, gradients, moved_on

EVERY_LOSS = {"kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.1, "importance_cap": 1.5}


def test_neither_the_pad_token_nor_its_side_changes_a_run(make_run, make_tokenizer, snapshot, same_tensors):
    runs = []
    for options in ({}, {"pad_token": "</s>"}, {"pad_token": "<unk>", "padding_side": "right"}):
        run = make_run("gpt2", tokenizer=make_tokenizer(**options), **EVERY_LOSS)
        while not run.state.progress.finished:
            run.iteration()
        history = [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in run.state.progress.history]
        runs.append((snapshot(run.state.learner.policy), snapshot(run.state.learner.critic), history))
    for other in runs[1:]:
        assert same_tensors(runs[0][0], other[0])
        assert same_tensors(runs[0][1], other[1])
        assert runs[0][2] == other[2]
    assert 0.0 < runs[0][2][0]["response/truncated_fraction"] < 1.0


def padded_more(left: int, right: int):
    """`make_batch` with `left` more columns of padding before the prompts and `right` more after the responses."""

    def make(prompt_ids, response_ids, lengths, pad_token_id, *, fill) -> SequenceBatch:
        batch = make_batch(prompt_ids, response_ids, lengths, pad_token_id, fill=fill)

        def wider(tensor: torch.Tensor, fill: int) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (left, right), value=fill)

        rows = batch.rows
        padded = wider(rows.input_ids, 7), wider(rows.attention_mask, 0), wider(rows.position_ids, 0)
        more = TokenRows.of(*padded)
        if isinstance(rows.layout, SharedLayout):  # the packed form, which has the prefix once, stays
            row, column = rows.slots // rows.input_ids.shape[1], rows.slots % rows.input_ids.shape[1]
            names = ("input_ids", "attention_mask", "position_ids")
            slots = row * padded[0].shape[1] + column + left
            more = dataclasses.replace(rows, **dict(zip(names, padded, strict=True)), slots=slots)
        return dataclasses.replace(batch, rows=more)

    return make


@pytest.mark.parametrize("settings", [{}, {"value_model": "shared"}, {"max_tokens_per_micro_batch": 30}], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rows_that_are_filled_up_for_an_accelerator_change_nothing(make_run, monkeypatch, kind, settings):
    settings = {**EVERY_LOSS, **settings}
    plain = make_run(kind, **ONE_STEP, **settings).before_update()[-1]
    expected = gradients(make_run, moved_on(plain), kind, **settings)
    sizes = []

    def filled(*args, fill) -> SequenceBatch:
        batch = make_batch(*args, fill=True)
        sizes.append((batch.rows.packed_ids.shape[1], len(batch.rows.slots)))
        return batch

    monkeypatch.setattr(sequences, "make_batch", filled)
    actual = make_run(kind, **ONE_STEP, **settings).before_update()[-1]
    assert all(size % 64 == 0 for size, _ in sizes)
    assert any(size > tokens for size, tokens in sizes)
    atol = 1e-12 if kind == "gpt2" else 1e-6  # a Llama's norm is float32
    assert_close(actual.rollouts.old_logprobs, plain.rollouts.old_logprobs, rtol=0.0, atol=atol)
    assert_close(actual.rollouts.values, plain.rollouts.values, rtol=0.0, atol=atol)
    assert_same_gradients(gradients(make_run, moved_on(plain), kind, **settings), expected)


@pytest.mark.parametrize(("dtype", "fills"), [("bfloat16", True), ("float32", False)])
def test_on_a_processor_rows_are_filled_up_in_16_bits_only(make_run, monkeypatch, dtype, fills):
    """oneDNN compiles its 16-bit kernels for each shape."""
    asked, run = set(), make_run("gpt2", **ONE_STEP, dtype=dtype)

    def noted(*args, fill) -> SequenceBatch:
        asked.add(fill)
        return make_batch(*args, fill=fill)

    monkeypatch.setattr(sequences, "make_batch", noted)
    run.iteration()
    assert asked == {fills}


@pytest.mark.parametrize(("kind", "sides"), [("gpt2", (5, 0)), ("llama", (0, 3)), ("bitnet", (4, 2))], ids=str)
def test_padding_on_either_side_changes_neither_rollouts_nor_gradients_of_a_model_that_needs_it(
    make_run, monkeypatch, kind, sides
):
    monkeypatch.setattr(forward, "packs", lambda _: False)
    plain = make_run(kind, **ONE_STEP, **EVERY_LOSS).before_update()[-1]
    expected = gradients(make_run, moved_on(plain), kind, **EVERY_LOSS)
    monkeypatch.setattr(sequences, "make_batch", padded_more(*sides))
    actual = make_run(kind, **ONE_STEP, **EVERY_LOSS).before_update()[-1]
    assert torch.equal(actual.rollouts.responses.response_ids, plain.rollouts.responses.response_ids)
    assert_close(actual.rollouts.old_logprobs, plain.rollouts.old_logprobs, rtol=0.0, atol=1e-10)
    assert_close(actual.rollouts.values, plain.rollouts.values, rtol=0.0, atol=1e-6)  # a Llama's norm is float32
    assert_same_gradients(gradients(make_run, moved_on(plain), kind, **EVERY_LOSS), expected)
