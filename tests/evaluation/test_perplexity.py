"""Perplexity of given texts: the loss of each text by a loop over its tokens, and the interval of the change."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.perplexity import (
    compare_perplexity,
    degrees_of_freedom,
    per_token,
    perplexity_row,
    text_losses,
)
from tests.ppo.short_memory import ShortMemory
from tests.tiny_models import PAD, tiny_model

TEXTS = [[6, 7, 8, 9, 10, 11], [8, 9], [12, 13, 14, 15]]
COUNTS = [
    [False, True, True, True, True, True],  # a plain text
    [False, True],
    [False, False, True, False],  # a completion of one token, and a turn of somebody else's
]
T_975 = {1: 12.7062047}  # quantiles of Student's t, from a table


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


def test_the_mean_per_token_weighs_texts_by_their_tokens_and_its_error_leaves_each_out():
    # R = 4 / 4; without the first text 2 / 3, without the second 2 / 1: sqrt(1 / 2 * ((1 / 3)^2 + 1^2))
    assert per_token(np.array([2.0, 2.0]), np.array([1.0, 3.0])) == (1.0, pytest.approx(math.sqrt(5.0) / 3.0))


@pytest.mark.parametrize(
    ("tokens", "freedom"), [([5.0] * 4, 3.0), ([1.0, 3.0], 0.2), ([1.0, 2.0], 8 / 17), ([9e9, 1], 0.2)]
)
def test_a_few_long_texts_leave_few_degrees_of_freedom(tokens, freedom):
    """(1 + 4)^2 / (1 + 16) - 1 = 8 / 17; (1 + 9)^2 / (1 + 81) - 1 = 0.22 for 1 and 3."""
    expected = 18 / 82 if tokens == [1.0, 3.0] else freedom
    assert degrees_of_freedom(np.array(tokens)) == pytest.approx(expected)


def test_texts_of_one_length_have_the_standard_error_of_a_mean():
    losses = np.array([1.0, 2.0, 4.0, 9.0])
    mean, error = per_token(losses, np.full(4, 5.0))
    assert mean == pytest.approx(0.8, abs=1e-15)
    assert error == pytest.approx((losses / 5.0).std(ddof=1) / 2.0, abs=1e-15)


def test_perplexity_change_and_interval_by_hand():
    # SFT: 8 nats of 4 tokens. PPO: 10 nats; differences 2 and 0, R = 0.5, without one text 0 or 1
    metrics = compare_perplexity(table([2, 2], [2.0, 6.0], [4.0, 6.0]))
    half = T_975[1] * math.sqrt(1 / 2 * (0.5**2 + 0.5**2))
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


Texts = tuple[np.ndarray, np.ndarray]
"""Tokens and changes of texts, in nats."""


def texts_of(world: str, number: int, rng: np.random.Generator) -> Texts:
    """Texts of very different lengths (lognormal, deviation 1), whose change per token is 0, equal, depends on the
    length, or is skewed."""
    tokens = np.maximum(2.0, rng.lognormal(4.0, 1.0, number).round())
    per_token_N = {
        "unchanged": lambda: 0.05 * rng.standard_normal(number),
        "equal": lambda: np.full(number, 0.1),
        "by length": lambda: 0.1 + 0.05 * (np.log(tokens) - 4.0) + 0.05 * rng.standard_normal(number),
        "skewed": lambda: 0.05 * rng.lognormal(0.0, 1.0, number),
    }[world]()
    return tokens, tokens * per_token_N + 0.3 * np.sqrt(tokens) * rng.standard_normal(number)


def covered(world: str, number: int, runs: int) -> int:
    """In how many of some runs the interval has the change of all texts of this kind."""
    tokens, changes = texts_of(world, 1_000_000, np.random.default_rng(0))
    true = 0.0 if world == "unchanged" else changes.sum() / tokens.sum()
    rng, found = np.random.default_rng(number), 0
    for _ in range(runs):
        tokens, changes = texts_of(world, number, rng)
        metrics = compare_perplexity(table(tokens, np.zeros(number), changes))
        found += metrics["eval/reference_nll_change_low"] <= true <= metrics["eval/reference_nll_change_high"]
    return found


WORLDS = ["unchanged", "equal", "by length", "skewed"]


@pytest.mark.parametrize("number", [3, 10, 24])
def test_unchanged_texts_are_rarely_said_to_have_changed(number):
    assert 400 - covered("unchanged", number, 400) <= binom.ppf(0.999, 400, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 5, 10, 24, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_the_interval_has_the_true_change_as_often_as_the_page_says(world, number):
    assert covered(world, number, 2000) >= binom.ppf(0.001, 2000, 0.92)


def test_the_row_of_the_table_has_the_perplexities_and_standard_errors_of_the_delta_method():
    losses = table([1, 3, 2], [2.0, 6.0, 1.0], [4.0, 6.5, 2.0])
    (row,) = perplexity_row(losses).to_dict("records")
    assert row["measure"] == "reference_perplexity"
    assert (row["sft"], row["ppo"]) == pytest.approx((math.exp(9 / 6), math.exp(12.5 / 6)), rel=1e-14)

    def by_leaving_out(function):
        """The jackknife's standard error of a perplexity's linear part: each text left out of the sums in turn."""
        values = losses[["tokens", "sft", "ppo"]].to_numpy(float)
        moves = np.array([function(*(values.sum(axis=0) - text)) for text in values]) - function(*values.sum(axis=0))
        return math.sqrt(2 / 3 * np.square(moves).sum())

    functions = {
        "sft_se": lambda tokens, sft, ppo: math.exp(9 / 6) * sft / tokens,
        "ppo_se": lambda tokens, sft, ppo: math.exp(12.5 / 6) * ppo / tokens,
        "change_se": lambda tokens, sft, ppo: (math.exp(12.5 / 6) * ppo - math.exp(9 / 6) * sft) / tokens,
    }
    for name, function in functions.items():
        assert row[name] == pytest.approx(by_leaving_out(function), rel=1e-12)
