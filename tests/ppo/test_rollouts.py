"""Rollouts: log-probabilities equal those of single unpadded rows, and sampling changes no state."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2ForSequenceClassification

from ppo_rlhf.core.randomness import episode_prompts
from ppo_rlhf.passes.sequences import sequence_batches
from ppo_rlhf.rewards.scorers import ModelScorer, check_scorable
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo_runs import batch_of, build_tokenizer
from tests.tiny_models import draw_weights

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
    for actual, model in (
        (rollouts.old_logprobs, run.state.learner.policy),
        (rollouts.reference_logprobs, run.reference),
    ):
        expected = torch.zeros_like(actual)
        for row, (tokens, table) in enumerate(tables(model, rollouts, 0.8)):
            expected[row, : len(tokens)] = table[torch.arange(len(tokens)), tokens]
        assert_close(actual, expected, rtol=0.0, atol=1e-10)
    entropy = torch.zeros_like(rollouts.entropy)
    for row, (tokens, table) in enumerate(tables(run.state.learner.policy, rollouts, 0.8)):
        entropy[row, : len(tokens)] = -(table.exp() * table).sum(-1)
    assert_close(rollouts.entropy, entropy, rtol=0.0, atol=1e-10)


def test_the_samplers_logprobs_are_those_of_the_trained_forward_up_to_rounding(make_run):
    rollouts = make_run("llama", top_k=5, top_p=0.9).rollouts()
    assert_close(rollouts.responses.sampler_logprobs, rollouts.old_logprobs, rtol=0.0, atol=1e-10)


def padded_run(make_run, **settings):
    """Return a run whose embedding has 40 rows for 23 tokens; the other rows have most of the probability."""
    reward = draw_weights(GPT2ForSequenceClassification(GPT2Config(**REWARD_SHAPE)), 0.3).double()
    scorer = RewardScorer([("model", 1.0, ModelScorer(reward, build_tokenizer(), build_tokenizer()))])
    return make_run(model={"vocab_size": 40, "tie_word_embeddings": False}, scorer=scorer, **settings)


REWARD_SHAPE = {"vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 1}
REWARD_SHAPE |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


@pytest.mark.parametrize("settings", [{}, {"rollout_engine": "hf"}, {"min_response_length": 4}], ids=str)
def test_rows_of_the_embedding_without_a_token_are_never_sampled_and_losses_use_the_whole_distribution(
    make_run, settings
):
    """A reward model that has 23 rows reads the responses."""
    run = padded_run(make_run, **settings)
    assert run.state.sampler.settings.unused_ids == (range(23, 40),)
    rollouts = run.rollouts()
    assert int(rollouts.responses.response_ids.max()) < 23
    assert float(rollouts.logprob_gap) < 1e-5
    row, length = 0, int(rollouts.responses.lengths[0])
    ids = rollouts.prompts.prompt_ids[row] + rollouts.responses.response_ids[row, :length].tolist()
    with torch.no_grad():
        logits = run.state.learner.policy(torch.tensor([ids])).logits[0, -length - 1 : -1] / run.config.temperature
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[-length:])[:, None])[:, 0]
    assert_close(rollouts.old_logprobs[row, :length], expected, rtol=0.0, atol=1e-9)
    assert float(logits.softmax(-1)[:, 23:].sum(-1).mean()) > 0.2
    check_scorable(run.scorer, run.prompts.lengths, 8, run.state.sampler.settings.stop_token_ids)
    assert all(math.isfinite(value) for value in run.iteration().values())


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
    run.state.progress.iteration = 4
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
        run.state.progress.iteration = iteration
        seen += run.rollouts().prompts.prompt_ids[::4]
    assert sorted(seen) == sorted(run.prompts.prompt_ids)  # 2 x 3 prompts: a whole pass over the six


def test_each_iteration_has_noise_of_its_own(make_run, make_prompts):
    """The same policy gives different responses to the same prompt in different iterations."""
    run = make_run(prompts=make_prompts((4,)))
    first = run.rollouts().responses.token_lists()
    assert run.rollouts().responses.token_lists() == first
    run.state.progress.iteration = 1
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
    run = make_run(num_mini_batches=3, per_device_train_batch_size=3, gradient_accumulation_steps=4)
    epochs = run.rollouts().cut.epochs
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
    given = rollouts.prompts.prompt_ids, rollouts.responses.response_ids, rollouts.responses.lengths, [rows]
    (batch,) = sequence_batches(*given, run.state.sampler.settings.pad_token_id, fill=False)
    lengths = [(len(rollouts.prompts.prompt_ids[i]), int(rollouts.responses.lengths[i])) for i in rows]
    assert batch.rows.input_ids.shape == (2, max(prompt + response for prompt, response in lengths))
    assert batch.shape == (2, max(response for _, response in lengths))
