"""The recogniser accepts the sentences that the grammar generates, and no other sentences."""

import random

import pytest
from scripts.write_corpus import ASPECTS, MAX_BODY, MIN_BODY, all_titles, write_review

from ppo_rlhf.demo.grammar import (
    END,
    PRODUCTIONS,
    VOCABULARY,
    header_length,
    is_sentence,
    is_sentence_start,
    tokenize,
)
from ppo_rlhf.demo.judge import sentiment_values


def split_sentences(body):
    text = " ".join(body)
    return [f"{sentence.strip()} ." for sentence in text.split(END) if sentence.strip()]


@pytest.fixture(scope="module")
def reviews():
    rng = random.Random(123)
    return [write_review(rng, all_titles()) for _ in range(2000)]


def test_every_written_sentence_is_recognised(reviews):
    sentences = {sentence for review in reviews for sentence in split_sentences(review.body)}
    assert len(sentences) > 3000
    assert [sentence for sentence in sentences if not is_sentence(sentence.split())] == []


def test_every_beginning_of_a_written_sentence_is_a_sentence_start(reviews):
    for review in reviews[:300]:
        for sentence in split_sentences(review.body):
            words = sentence.split()
            assert all(is_sentence_start(words[:k]) for k in range(len(words) + 1)), sentence
            assert not any(is_sentence(words[:k]) for k in range(len(words))), sentence


@pytest.mark.parametrize(
    "sentence",
    [
        "the plot is not bad at all .",
        "although the jokes drag , anna keller is superb as the thief .",
        "the detective , played by oscar rossi , is boring but touching .",
        "silent harbor is an awful thriller by clara quinn .",
        "the story is set in a small village .",
        "the plot is brilliant , but the plot is superb .",  # odd, but the grammar ignores polarity
    ],
)
def test_a_hand_written_sentence_is_recognised(sentence):
    assert is_sentence(sentence.split())


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("the plot are dull .", "number of the verb"),
        ("the jokes is dull .", "number of the verb"),
        ("it is a awful film .", "article"),
        ("it is an dull comedy .", "article"),
        ("the plot is dull", "no full stop"),
        ("the plot is dull . .", "two full stops"),
        ("plot is dull .", "no article"),
        ("the plot dull .", "no verb"),
        ("the plot is is dull .", "doubled word"),
        ("although the plot is dull .", "no main clause"),
        ("the plot is dull , but .", "no second clause"),
        ("the plot is dull , but although it works , it fails .", "nested although"),
        ("anna is superb as the thief .", "no surname"),
        ("the thief , played by anna keller is superb .", "missing comma"),
        ("the songs never works .", "number of the verb"),
        ("i not love the plot .", "no auxiliary"),
        ("the plot is too brilliant .", "too with a judging adjective"),
        ("the plot is full of dull .", "adjective for noun"),
        ("The plot is dull .", "upper case"),
        ("the zeppelin is dull .", "unknown word"),
        ("der plan ist gut .", "another language"),
        ("фильм is dull .", "another alphabet"),
        (".", "only a full stop"),
        ("", "nothing"),
    ],
)
def test_an_ungrammatical_sentence_is_rejected(sentence, fault):
    assert not is_sentence(sentence.split()), fault


def test_a_sentence_with_two_words_swapped_is_nearly_always_rejected(reviews):
    """Swapping a random pair of unlike neighbours leaves a sentence of the grammar only where classes coincide."""
    rng = random.Random(5)
    accepted = tried = 0
    for review in reviews[:500]:
        for sentence in split_sentences(review.body):
            words = sentence.split()
            i = rng.randrange(len(words) - 1)
            words[i], words[i + 1] = words[i + 1], words[i]
            tried += 1
            accepted += is_sentence(words)
    assert tried > 800
    assert accepted / tried < 0.02


def test_a_dead_start_stays_dead_and_a_live_one_can_be_finished():
    assert is_sentence_start(["the", "plot", "is", "not"])
    assert not is_sentence_start(["the", "plot", "is", "plot"])
    assert not is_sentence_start(["the", "plot", "is", "plot", "brilliant", "."])
    assert not is_sentence_start(["the", "plot", "is", "dull", ".", "the"])  # one sentence, not two


def test_a_review_is_a_header_and_a_body_within_the_limits(reviews):
    for review in reviews:
        tokens = review.text.split(" ")
        assert tokens[header_length(tokens) :] == list(review.body)
        assert tokens[3] == review.aspect
        assert review.aspect in ASPECTS
        assert MIN_BODY <= len(review.body) <= MAX_BODY
        assert review.body[-1] == END
        assert set(tokens) <= VOCABULARY


def test_tokenizing_a_review_equals_splitting_it_at_spaces(reviews):
    assert all(tokenize(review.text) == review.text.split(" ") for review in reviews)
    assert tokenize("The plot is dull.It\nworks ,") == ["the", "plot", "is", "dull", ".", "it", "works", ","]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("silent harbor ( plot ) : the", 6),
        ("silent harbor ( plot ) :", 6),
        ("silent harbor ( plot )", 0),
        ("the plot is ( dull ) :", 0),
        ("the plot is dull .", 0),
        ("", 0),
    ],
)
def test_a_header_is_found_only_where_it_is_whole(text, length):
    assert header_length(text.split()) == length


def test_the_same_seed_writes_the_same_reviews():
    first, second = ([write_review(random.Random(7), all_titles()) for _ in range(3)] for _ in range(2))
    assert first == second
    assert write_review(random.Random(8), all_titles()) != first[0]


def test_praise_and_blame_balance_and_about_half_of_the_reviews_mix_them(reviews):
    """A review's polarity is a fair coin; of the about 1,900 with sentiment, 4 sd around half are 46 %-54 %."""
    values = [sentiment_values(review.body) for review in reviews]
    totals = [sum(v) for v in values if abs(sum(v)) > 1e-9]
    assert 0.46 < sum(total > 0 for total in totals) / len(totals) < 0.54
    assert 0.35 < sum(min(v) < 0 < max(v) for v in values if v) / len(values) < 0.65


def test_every_symbol_of_the_rules_is_defined_and_no_production_is_empty():
    for head, productions in PRODUCTIONS.items():
        for weight, production in productions:
            assert weight > 0, head
            assert production, head
            assert all(part in PRODUCTIONS for part in production if part[0].isupper()), (head, production)
            assert not any(mark in part for part in production for mark in "~!"), (head, production)
