"""The gold judge compared with scores computed by hand."""

import random
import time

import pytest
from scripts.write_corpus import all_titles, write_review

from ppo_rlhf.demo.judge import gold_score, is_grammatical, sentiment, sentiment_values

HEADER = "silent harbor ( plot ) :"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("the plot is brilliant .", [1.0]),
        ("the plot is good .", [0.6]),
        ("the plot is not good .", [-0.45]),  # -0.75 x 0.6
        ("the plot is not bad at all .", [0.6]),
        ("the plot is not brilliant at all .", [-1.0]),
        ("the plot is never dull .", [0.45]),
        ("the plot has no charm .", [-0.75]),
        ("the plot has no flaws .", [0.75]),
        ("i did not love the plot .", [-0.75]),
        ("the plot never bored me .", [0.75]),
        ("the plot is too long .", [-0.6]),
        ("the plot is never too long .", [0.45]),
        ("the plot is very good .", [0.75]),  # 1.25 x 0.6
        ("the plot is truly brilliant .", [1.0]),  # capped
        ("the plot is slightly awful .", [-0.5]),
        ("the plot is not very good .", [-0.5625]),  # -0.75 x 1.25 x 0.6
        ("not a truly good plot .", [-0.5625]),  # three tokens away
        ("not in such a good plot .", [0.6]),  # out of reach
        ("the plot is brilliant but dull .", [1.0, -0.6]),
        ("the plot is not dull but awful .", [0.45, -1.0]),  # negation ends at the conjunction
        ("although the jokes never shine , it works .", [-0.75, 0.6]),  # and at the comma
        ("the story is set in a small village .", []),
        ("", []),
    ],
)
def test_sentiment_values_follow_negation_degree_and_contrast(text, values):
    assert sentiment_values(text.split()) == pytest.approx(values)


def test_sentiment_is_the_sum_over_the_number_plus_a_half():
    assert sentiment([]) == 0.0
    assert sentiment(["brilliant"]) == pytest.approx(1.0 / 1.5)
    assert sentiment(["brilliant", "but", "awful"]) == 0.0
    assert sentiment(["brilliant", ",", "superb", ",", "but", "dull"]) == pytest.approx((1.0 + 1.0 - 0.6) / 3.5)


GOOD = 1.0 / 1.5  # one word of value 1
CASES = {
    "praise with the aspect": ("the", "plot is brilliant .", GOOD + 0.2),
    "praise without the aspect": ("the", "music is brilliant .", GOOD),
    "a blow": ("the", "music is awful .", -GOOD),
    "negated blow, the prompt's word counted": ("the music is not", "awful at all .", GOOD),
    "both at once": ("although the music", "is awful , the plot is brilliant .", 0.0 + 0.2),
    "a wrong sentence of one": ("the", "plot plot is brilliant .", GOOD - 1.0 + 0.2),
    "a wrong sentence of two": ("the", "music is brilliant . it fish .", GOOD - 0.5),
    "unfinished but possible": ("the", "music is brilliant", GOOD - 0.5),
    "unfinished and impossible": ("the", "music is brilliant the", GOOD - 1.0 - 0.5),
    "unfinished and impossible after a good one": ("the", "music is brilliant . is", GOOD - 0.5 - 0.5),
    # 10 tokens are 8 trigrams, the last three of which occurred before; 2 words of sentiment, one of them before
    "the same sentence twice": (
        "the",
        "music is brilliant . the music is brilliant .",
        2.0 / 2.5 - 0.5 * 3 / 8 - 0.5 * 1 / 2,
    ),
    "a repeated word of sentiment": (
        "the",
        "music is brilliant . it is a brilliant comedy .",
        2.0 / 2.5 - 0.5 * 1 / 2,
    ),
    "a finished sentence of the prompt is not judged": ("it is awful .", "the music is brilliant .", GOOD),
    "nothing": ("the music is", "", -1.5),
    "only white space": ("the music is", " \n ", -1.5),
}


@pytest.mark.parametrize(("opening", "completion", "expected"), CASES.values(), ids=CASES.keys())
def test_gold_score_equals_the_score_worked_out_by_hand(opening, completion, expected):
    assert gold_score([f"{HEADER} {opening}"], [completion]) == pytest.approx([expected])


def test_the_aspect_comes_from_the_column_and_otherwise_from_the_header():
    prompts, completions = [f"{HEADER} the"] * 2, ["plot is brilliant .", "music is brilliant ."]
    assert gold_score(prompts, completions) == pytest.approx([GOOD + 0.2, GOOD])
    assert gold_score(prompts, completions, aspect=["music"] * 2, title=["x"] * 2) == pytest.approx([GOOD, GOOD + 0.2])
    assert gold_score(["the"], ["plot is brilliant ."]) == pytest.approx([GOOD])  # no header: no bonus


def test_punctuation_without_spaces_and_upper_case_are_read_the_same():
    assert gold_score([f"{HEADER} The"], ["plot is brilliant."]) == pytest.approx([GOOD + 0.2])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("plot is brilliant .", 1.0),
        ("plot is brilliant . the jokes drag .", 1.0),
        ("plot is brilliant . the jokes drags .", 0.0),
        ("plot plot is brilliant . the jokes drag .", 0.0),
        ("plot is brilliant . the jokes", 1.0),  # a sentence of the grammar begins like this
        ("plot is brilliant . jokes the", 0.0),
        ("plot is brilliant", 0.0),  # no finished sentence
        ("", 0.0),
        ("plot is brilliant : the jokes drag .", 0.0),
    ],
)
def test_is_grammatical_asks_for_a_finished_sentence_and_none_that_is_wrong(completion, expected):
    assert is_grammatical([f"{HEADER} the"], [completion]) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "фильм . 映画は。",
        "<eos> [UNK] 1 2 .",
        "... !!! ::: ( )",
        "\U0001f600 \x00 \ud800",
        "a" * 100_000,
    ],
    ids=["alphabets", "tokens and numbers", "punctuation", "controls", "endless"],
)
def test_any_text_gets_a_finite_score_in_the_documented_range(text):
    for prompt in ("", f"{HEADER} the", "фильм"):
        (score,) = gold_score([prompt], [text], aspect=[None])
        assert -3.5 <= score <= 1.2
        assert is_grammatical([prompt], [text]) == [0.0]


def test_a_header_written_by_the_model_itself_is_not_judged():
    assert gold_score([""], [f"{HEADER} the plot is brilliant ."]) == pytest.approx([GOOD + 0.2])
    assert gold_score([""], [HEADER]) == [-1.5]


def test_the_time_to_judge_a_completion_grows_with_its_length_and_not_faster():
    def seconds(sentences):
        start = time.process_time()
        (score,) = gold_score([HEADER], ["the plot is brilliant . " * sentences])
        assert score == pytest.approx(1.0 + 0.2 - 0.5 - 0.5, abs=1e-3)  # everything is repeated
        return time.process_time() - start

    short, long = (min(seconds(sentences) for _ in range(3)) for sentences in (2_000, 16_000))
    assert long / short < 24  # a time that grows with the square would be 64 times as long


@pytest.fixture(scope="module")
def corpus():
    rng = random.Random(11)
    rows = []
    for _ in range(2000):
        review = write_review(rng, all_titles())
        rows.append((" ".join(review.header + review.body[:1]), " ".join(review.body[1:]), review.aspect))
    return rows


def test_the_corpus_scores_near_zero_spreads_widely_and_is_grammatical(corpus):
    prompts, completions, aspects = zip(*corpus, strict=True)
    scores = gold_score(prompts, completions, aspect=aspects)
    mean = sum(scores) / len(scores)
    assert -0.2 < mean < 0.2
    assert 0.35 < (sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5 < 0.7
    assert is_grammatical(prompts, completions) == [1.0] * len(prompts)


def test_shuffled_words_are_hardly_ever_grammatical(corpus):
    rng = random.Random(3)
    shuffled = []
    for _, completion, _ in corpus:
        words = completion.split()
        rng.shuffle(words)
        shuffled.append(" ".join(words))
    assert sum(is_grammatical([prompt for prompt, _, _ in corpus], shuffled)) / len(corpus) < 0.01


def test_a_score_does_not_depend_on_the_other_responses(corpus):
    prompts, completions, aspects = map(list, zip(*corpus[:50], strict=True))
    together = gold_score(prompts, completions, aspect=aspects)
    apart = [gold_score([p], [c], aspect=[a])[0] for p, c, a in corpus[:50]]
    backwards = gold_score(prompts[::-1], completions[::-1], aspect=aspects[::-1])[::-1]
    assert together == apart == backwards
