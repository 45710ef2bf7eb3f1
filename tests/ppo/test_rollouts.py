"""Rollouts: log-probabilities equal those of single unpadded rows, and sampling changes no state."""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.randomness import episode_prompts
from tests.ppo_runs import batch_of

KINDS = ["gpt2", "llama", "bitnet"]


def tables(model, rollouts, temperature):
    """For each row the tempered log-probabilities `[length, V]` at its response positions; no padding, no mask."""
    for prompt, tokens in zip(rollouts.prompts.prompt_ids, rollouts.responses.token_lists(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].double()
        table = torch.log_softmax(logits / temperature, dim=-1)
        yield tokens, table[len(prompt) - 1 : -1]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_entropy_equal_those_of_single_unpadded_rows(make_run, make_model, kind):
    run = make_run(kind)
    run.reference = make_model(kind, seed=5)
    rollouts = run.rollouts()
    assert len(set(rollouts.responses.lengths.tolist())) > 1
    assert len(set(map(len, rollouts.prompts.prompt_ids))) > 1
    for actual, model in ((rollouts.old_logprobs, run.state.policy), (rollouts.reference_logprobs, run.reference)):
        expected = torch.zeros_like(actual)
        for row, (tokens, table) in enumerate(tables(model, rollouts, 0.8)):
            expected[row, : len(tokens)] = table[torch.arange(len(tokens)), tokens]
        assert_close(actual, expected, rtol=0.0, atol=1e-10)
    entropy = torch.zeros_like(rollouts.entropy)
    for row, (tokens, table) in enumerate(tables(run.state.policy, rollouts, 0.8)):
        entropy[row, : len(tokens)] = -(table.exp() * table).sum(-1)
    assert_close(rollouts.entropy, entropy, rtol=0.0, atol=1e-10)


def test_the_samplers_logprobs_are_those_of_the_trained_forward_up_to_rounding(make_run):
    rollouts = make_run("llama", top_k=5, top_p=0.9).rollouts()
    assert_close(rollouts.responses.sampler_logprobs, rollouts.old_logprobs, rtol=0.0, atol=1e-10)


def test_padding_is_zero_and_the_mask_is_true_on_response_tokens_only(make_run):
    rollouts = make_run().rollouts()
    mask = rollouts.mask
    assert mask.sum(1).tolist() == rollouts.responses.lengths.tolist()
    assert bool(mask[:, 0].all())
    assert not bool(mask.all())
    for values in (
        rollouts.responses.sampler_logprobs,
        rollouts.old_logprobs,
        rollouts.reference_logprobs,
        rollouts.entropy,
    ):
        assert values.shape == (12, 8)
        assert bool((values[~mask] == 0.0).all())
        assert bool((values[mask] != 0.0).all())


def test_prompts_come_in_the_order_of_the_seed_and_columns_stay_with_them(make_run):
    run = make_run(seed=9)
    run.state.iteration = 4
    rollouts = run.rollouts()
    rows = episode_prompts(9, 5, 12, 6)
    assert rollouts.iteration == 5
    assert rollouts.prompts == run.prompts.select(rows)


def test_several_responses_to_one_prompt_stand_side_by_side_each_with_noise_of_its_own(make_run):
    one = make_run(per_device_train_batch_size=4, gradient_accumulation_steps=1, num_mini_batches=1)
    three = make_run(responses_per_prompt=3, num_mini_batches=1)
    assert (one.config.batch_size, three.config.batch_size, three.config.prompts_per_batch) == (4, 12, 4)
    chosen, actual = one.rollouts().prompts, three.rollouts()
    assert actual.prompts.prompt_ids == [ids for ids in chosen.prompt_ids for _ in range(3)]
    assert actual.prompts.columns["wanted"] == [word for word in chosen.columns["wanted"] for _ in range(3)]
    responses = [tuple(ids) for ids in actual.responses.token_lists()]
    assert all(len(set(responses[start : start + 3])) > 1 for start in range(0, 12, 3))


def test_the_next_iteration_continues_after_the_prompts_of_the_last_one(make_run):
    run = make_run(responses_per_prompt=4, num_mini_batches=1, total_episodes=24)
    seen = []
    for iteration in range(2):
        run.state.iteration = iteration
        seen += run.rollouts().prompts.prompt_ids[::4]
    assert sorted(seen) == sorted(run.prompts.prompt_ids)  # 2 x 3 prompts: a whole pass over the six


def test_each_iteration_has_noise_of_its_own(make_run, make_prompts):
    """The same policy gives different responses to the same prompt in different iterations."""
    run = make_run(prompts=make_prompts((4,)))
    first = run.rollouts().responses.token_lists()
    assert run.rollouts().responses.token_lists() == first
    run.state.iteration = 1
    assert run.rollouts().responses.token_lists() != first


def test_what_a_reward_sees_are_the_sampled_tokens_and_their_text_without_special_tokens(make_run, make_tokenizer):
    run = make_run()
    rollouts = run.rollouts()
    batch = batch_of(rollouts, run)
    words = make_tokenizer().convert_ids_to_tokens
    special = {"<pad>", "<unk>", "</s>"}
    for row in range(12):
        length = int(rollouts.responses.lengths[row])
        tokens = rollouts.responses.response_ids[row, :length].tolist()
        assert batch.response_ids[row] == tokens
        assert (tokens[-1] == 2) == batch.terminated[row] == bool(rollouts.responses.terminated[row])
        assert batch.completions[row].split() == [word for word in words(tokens) if word not in special]
    assert batch.prompts == rollouts.prompts.texts
    assert batch.prompt_ids == rollouts.prompts.prompt_ids
    assert batch.columns == rollouts.prompts.columns


def test_every_epoch_cuts_the_batch_into_minibatches_and_those_into_micro_batches(make_run):
    epochs = (
        make_run(num_mini_batches=3, per_device_train_batch_size=3, gradient_accumulation_steps=4).rollouts().epochs
    )
    assert len(epochs) == 2
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row for minibatch in epoch for row in minibatch.rows) == list(range(12))
        for minibatch in epoch:
            assert [len(rows) for rows in minibatch.micro_batches] == [3, 1]
            assert sorted(row for rows in minibatch.micro_batches for row in rows) == sorted(minibatch.rows)


def test_a_batch_of_rows_is_trimmed_to_the_longest_of_them(make_run):
    run = make_run()
    rollouts = run.rollouts()
    rows = [int(i) for i in rollouts.responses.lengths.argsort()[:2]]
    (batch,) = rollouts.sequences([rows], run.state)
    lengths = [(len(rollouts.prompts.prompt_ids[i]), int(rollouts.responses.lengths[i])) for i in rows]
    assert batch.rows.input_ids.shape == (2, max(prompt + response for prompt, response in lengths))
    assert batch.shape == (2, max(response for _, response in lengths))
