"""Perplexity of given texts: the loss of each text by a loop over its tokens, and the interval of the change."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.perplexity import compare_perplexity, per_token, perplexity_row, text_losses
from tests.ppo.short_memory import ShortMemory
from tests.tiny_models import PAD, tiny_model

TEXTS = [[6, 7, 8, 9, 10, 11], [8, 9], [12, 13, 14, 15]]
COUNTS = [
    [False, True, True, True, True, True],  # a plain text
    [False, True],
    [False, False, True, False],  # a completion of one token, and a turn of somebody else's
]
T_975 = {1: 12.7062047, 2: 4.3026527}  # quantiles of Student's t, from a table


def losses_by_a_loop(model, texts=TEXTS, counts=COUNTS):
    losses = []
    for ids, counted in zip(texts, counts, strict=True):
        loss = 0.0
        for position in range(1, len(ids)):
            if counted[position]:
                with torch.no_grad():
                    logits = model(torch.tensor([ids[:position]])).logits[0, -1]
                loss -= math.log(float(logits.softmax(0)[ids[position]]))
        losses.append(loss)
    return losses


def measured(model, batch_size=2, counts=COUNTS, **settings):
    how = {"device": torch.device("cpu"), "batch_size": batch_size, "pad_token_id": PAD}
    return text_losses(model, TEXTS, counts, PPOConfig(**settings), **how)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_texts_loss_is_that_of_a_loop_over_the_tokens_that_count_whatever_the_batch(kind, batch_size):
    model = tiny_model(kind).double()
    assert measured(model, batch_size) == pytest.approx(losses_by_a_loop(model), abs=1e-12)


def test_memory_that_runs_out_halves_the_texts_in_a_pass(monkeypatch, caplog):
    model = tiny_model().double()
    expected, short = measured(model), ShortMemory(monkeypatch, "reference", most=1)
    assert measured(model).tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    assert max(short.tried) == 2
    assert "Ran out of memory in the perplexity of reference texts with 2 responses at a time" in caplog.text


def test_the_sampling_temperature_does_not_count():
    model = tiny_model().double()
    assert measured(model, temperature=0.5) == pytest.approx(losses_by_a_loop(model), abs=1e-12)


def test_the_first_token_of_a_text_never_counts():
    model = tiny_model().double()
    also_first = [[True, *row[1:]] for row in COUNTS]
    assert measured(model, counts=also_first).tolist() == measured(model).tolist()


def test_padding_that_is_nan_changes_no_loss():
    model = tiny_model(tie_word_embeddings=False).double()
    expected = measured(model, batch_size=3).tolist()
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD] = torch.nan
    assert measured(model, batch_size=3).tolist() == expected


def table(tokens, sft, ppo):
    return pd.DataFrame({"tokens": tokens, "sft": sft, "ppo": ppo})


def test_the_mean_per_token_weighs_texts_by_their_tokens():
    # R = 4 / 4; the residuals 2 - 1 and 2 - 3 are 1 and -1; sqrt(2 / 1 * (1 + 1)) / 4
    assert per_token(np.array([2.0, 2.0]), np.array([1.0, 3.0])) == (1.0, pytest.approx(0.5, abs=1e-15))


def test_texts_of_one_length_have_the_standard_error_of_a_mean():
    losses = np.array([1.0, 2.0, 4.0, 9.0])
    mean, error = per_token(losses, np.full(4, 5.0))
    assert mean == pytest.approx(0.8, abs=1e-15)
    assert error == pytest.approx((losses / 5.0).std(ddof=1) / 2.0, abs=1e-15)


def test_perplexity_change_and_interval_by_hand():
    # SFT: 8 nats of 4 tokens. PPO: 10 nats; differences 2 and 0, R = 0.5, residuals 1.5 and -1.5
    metrics = compare_perplexity(table([1, 3], [2.0, 6.0], [4.0, 6.0]))
    half = T_975[1] * math.sqrt(2 * (1.5**2 + 1.5**2)) / 4
    assert metrics == {
        "eval/reference_perplexity": pytest.approx(math.exp(2.5), rel=1e-14),
        "eval/reference_perplexity_sft": pytest.approx(math.exp(2.0), rel=1e-14),
        "eval/reference_nll_change": 0.5,
        "eval/reference_nll_change_low": pytest.approx(0.5 - half, rel=1e-8),
        "eval/reference_nll_change_high": pytest.approx(0.5 + half, rel=1e-8),
    }


def test_texts_are_paired_so_an_equal_change_of_all_texts_has_no_noise():
    tokens, sft = np.array([3.0, 10.0, 4.0]), np.array([5.0, 40.0, 6.0])
    metrics = compare_perplexity(table(tokens, sft, sft + 0.25 * tokens))
    ends = [metrics[f"eval/reference_nll_change{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([0.25] * 3, abs=1e-12)


def test_one_text_has_no_interval_and_no_text_has_no_metrics():
    assert compare_perplexity(table([4], [4.0], [8.0])) == {
        "eval/reference_perplexity": pytest.approx(math.exp(2.0), rel=1e-14),
        "eval/reference_perplexity_sft": pytest.approx(math.e, rel=1e-14),
        "eval/reference_nll_change": 1.0,
    }
    assert compare_perplexity(pd.DataFrame()) == {}


def test_the_interval_covers_the_true_change():
    """Texts of very different lengths whose tokens are correlated: intervals over tokens would be far too narrow."""
    generator, true, covered = np.random.default_rng(0), 0.1, 0
    for _ in range(1000):
        tokens = generator.lognormal(4.0, 0.7, 30).round() + 1
        changes = tokens * (true + 0.2 * generator.standard_normal(30))
        metrics = compare_perplexity(table(tokens, np.zeros(30), changes))
        covered += metrics["eval/reference_nll_change_low"] < true < metrics["eval/reference_nll_change_high"]
    assert 0.92 < covered / 1000 < 0.97


def test_the_row_of_the_table_has_the_perplexities_and_standard_errors_of_the_delta_method():
    losses = table([1, 3, 2], [2.0, 6.0, 1.0], [4.0, 6.5, 2.0])
    (row,) = perplexity_row(losses).to_dict("records")
    assert row["measure"] == "reference_perplexity"
    assert (row["sft"], row["ppo"]) == pytest.approx((math.exp(9 / 6), math.exp(12.5 / 6)), rel=1e-14)

    def by_derivatives(function):
        """The standard error of a function of the sums, from its numerical derivatives and the texts' covariance."""
        values = losses[["tokens", "sft", "ppo"]].to_numpy(float)
        sums = values.sum(axis=0)
        steps = 1e-6 * np.eye(3)
        slopes = np.array([(function(*(sums + step)) - function(*(sums - step))) / 2e-6 for step in steps])
        return math.sqrt(slopes @ (3 * np.cov(values, rowvar=False)) @ slopes)

    functions = {
        "sft_se": lambda tokens, sft, ppo: math.exp(sft / tokens),
        "ppo_se": lambda tokens, sft, ppo: math.exp(ppo / tokens),
        "change_se": lambda tokens, sft, ppo: math.exp(ppo / tokens) - math.exp(sft / tokens),
    }
    for name, function in functions.items():
        assert row[name] == pytest.approx(by_derivatives(function), rel=1e-6)
