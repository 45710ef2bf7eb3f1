"""Win rate, interval, verdict, diversity and the eval/* metrics, against hand arithmetic and exact probabilities."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.evaluation.comparison import (
    before_after,
    compare_evaluations,
    conclude,
    distinct_n,
    outcomes,
    sample_pairs,
)
from ppo_rlhf.evaluation.policy import PolicyEvaluation
from ppo_rlhf.evaluation.verdict import Verdict, read_verdict
from ppo_rlhf.evaluation.win_rate import sign_test, win_rate

DOCS = Path(__file__).parents[2] / "docs"
ALWAYS = {
    *("eval/win_rate", "eval/win_rate_low", "eval/win_rate_high", "eval/reward", "eval/reward_sft", "eval/kl"),
    *("eval/response_length", "eval/distinct_2", "eval/distinct_2_sft"),
    *("eval/reward_se", "eval/reward_sft_se", "eval/kl_se", "eval/response_length_se"),
}


def four(name):
    """The metrics of a measure of both policies."""
    return {f"eval/{name}{end}" for end in ("", "_sft", "_se", "_sft_se")}


number = itertools.count()


def evaluation(
    rewards,
    judge_scores=None,
    rates=None,
    completions=None,
    prompts=None,
    kl=None,
    other_judges=None,
    samples=1,
    response_ids=None,
):
    """An evaluation; unless they are given, no two responses have the same tokens."""
    rewards = np.asarray(rewards, dtype=float)
    judges = {} if judge_scores is None else {"judge_score": judge_scores}
    judges |= {f"judge_score_{name}": scores for name, scores in (other_judges or {}).items()}
    return PolicyEvaluation(
        prompts=prompts or [f"prompt {row // samples}" for row in range(len(rewards))],
        completions=completions or ["a b c"] * len(rewards),
        response_ids=response_ids or [[next(number)] for _ in rewards],
        rewards=rewards,
        judges={name: np.asarray(scores, dtype=float) for name, scores in judges.items()},
        rates={name: np.asarray(values, dtype=float) for name, values in (rates or {}).items()},
        kl=np.zeros(len(rewards)) if kl is None else np.asarray(kl, dtype=float),
        lengths=np.arange(1, len(rewards) + 1),
        terminated=np.ones(len(rewards), dtype=bool),
        samples_per_prompt=samples,
    )


def compared(ours, theirs):
    """The outcomes of scores, one a prompt."""
    policy, sft = evaluation(ours), evaluation(theirs)
    return outcomes(policy, sft, policy.rewards, sft.rewards)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1, 2, 3, 0], [0, 2, 1, 5], 2.5 / 4),  # win, tie, win, loss
        ([1, 1, 1], [1, 1, 1], 0.5),
        ([1, 2], [0, 0], 1.0),
        ([0, 0], [1, 2], 0.0),
        ([-1.0], [-2.0], 1.0),
    ],
)
def test_win_rate_counts_wins_whole_and_ties_half(ours, theirs, expected):
    assert win_rate(compared(ours, theirs)).rate == pytest.approx(expected, abs=1e-12)


def test_responses_of_the_same_tokens_are_ties_whatever_their_scores():
    """A model scores one text differently in another batch. Four prompts: the same tokens twice, a win and a loss."""
    ids = [[1, 2], [3], [4], [5, 6]]
    policy = evaluation([0.1, 0.2, 1, 0], response_ids=ids, judge_scores=[1, 0, 1, 0], other_judges={"b": [1, 1, 1, 0]})
    others = [[1, 2], [3], [4, 4], [5]]
    sft = evaluation([0.0, 0.3, 0, 1], response_ids=others, judge_scores=[0, 1, 0, 1], other_judges={"b": [0, 0, 0, 1]})
    assert outcomes(policy, sft, policy.rewards, sft.rewards).tolist() == [[0.5], [0.5], [1.0], [0.0]]
    metrics = compare_evaluations(policy, sft)
    assert (metrics["eval/win_rate"], metrics["eval/win_rate_b"]) == (0.5, 0.5)
    summary = conclude(policy, sft, by_trained_reward=False)
    assert (summary["wins"], summary["losses"]) == (1, 1)
    table = sample_pairs(policy, sft, count=4, seed=0).set_index("prompt")
    assert table["outcome"].to_dict() == {"prompt 0": "tie", "prompt 1": "tie", "prompt 2": "win", "prompt 3": "loss"}


@pytest.mark.parametrize(
    ("wins", "losses", "low", "high"),
    [
        # Agresti and Coull with z = 1.96: of 20 prompts 19 won; centre (19 + 1.9207) / 23.8415, deviation by hand
        (19, 1, 0.7459, 1.0),
        (1, 19, 0.0, 0.2541),
        (10, 10, 0.2993, 0.7007),
        (1, 0, 0.1675, 1.0),  # one prompt says next to nothing
    ],
)
def test_the_interval_without_ties_is_agresti_and_coulls(wins, losses, low, high):
    found = win_rate(compared([1] * wins + [-1] * losses, [0] * (wins + losses)))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


WIN_RATES = np.round(np.arange(0.50, 0.991, 0.01), 2)


def coverage(prompts, tie_share, rates=WIN_RATES):
    """Exact probability that the interval has the true win rate, for each of them.

    Ties are `tie_share` of the most that the win rate allows: 2 (1 - rate).
    """
    counts = np.array([(w, prompts - w - n, n) for w in range(prompts + 1) for n in range(prompts + 1 - w)])
    if tie_share == 0:
        counts = counts[counts[:, 1] == 0]
    found = [win_rate(np.repeat([1.0, 0.5, 0.0], count)[:, None]) for count in counts]
    low, high = np.array([(interval.low, interval.high) for interval in found]).T
    covered = []
    for rate in rates:
        ties = 2.0 * tie_share * (1.0 - rate)
        chances = multinomial.pmf(counts, prompts, [rate - ties / 2.0, ties, 1.0 - rate - ties / 2.0])
        assert chances.sum() == pytest.approx(1.0, abs=1e-9)
        covered.append(chances[(low <= rate + 1e-12) & (rate <= high + 1e-12)].sum())
    return np.array(covered)


@pytest.mark.parametrize(
    "tie_share", [0.0, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.9, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("prompts", [20, 64, 256])
def test_the_interval_has_the_true_win_rate_as_often_as_it_says(prompts, tie_share):
    covered = coverage(prompts, tie_share)
    assert 0.93 <= covered.mean() <= 0.97
    assert covered.min() >= 0.90


@pytest.mark.parametrize(
    ("prompts", "tie_share", "worst"),
    [(12, 0.0, 0.922), (20, 0.0, 0.929), (64, 0.0, 0.935), (256, 0.0, 0.942), (10, 1.0, 0.904)],
)
def test_the_interval_has_the_true_win_rate_at_worst_as_often_as_the_docs_say(prompts, tie_share, worst):
    assert f"{worst:.3f}" in (DOCS / "algorithm.md").read_text("utf-8")
    rates = np.arange(0.5, 0.99001, 0.0002)  # coverage is ragged: it falls where the end of an interval passes
    assert coverage(prompts, tie_share, rates).min() == pytest.approx(worst, abs=0.0006)


@pytest.mark.parametrize(
    "prompts", [20, pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_the_interval_of_several_responses_has_the_true_win_rate_as_often_as_it_says(prompts):
    """Four responses to a prompt; prompts differ in how often they are won, Beta with the correlation 0.5, no ties."""
    rng = np.random.default_rng(0)
    covered = []
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99):
        of_prompts = rng.beta(rate, 1.0 - rate, size=(1500, prompts, 1))
        runs = (rng.random((1500, prompts, 4)) < of_prompts).astype(float)
        found = [win_rate(run) for run in runs]
        covered.append(np.mean([interval.low <= rate <= interval.high for interval in found]))
    assert 0.93 <= np.mean(covered) <= 0.97
    assert np.min(covered) >= 0.90


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (6, 0, 2 / 64),
        (0, 6, 2 / 64),
        (9, 1, 2 * (1 + 10) / 1024),
        (3, 3, 1.0),
    ],
)
def test_a_sign_test_worked_by_hand(wins, losses, expected):
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(17, 30), (30_000, 29_000), (100_000, 0)])
def test_the_sign_test_of_many_prompts_is_scipys(wins, losses):
    expected = binomtest(wins, wins + losses).pvalue
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(
    ("wins", "losses", "ties", "by_judge", "by_reward"),
    [
        (60, 20, 0, Verdict.BETTER, Verdict.REWARD_ROSE),
        (20, 60, 0, Verdict.WORSE, Verdict.REWARD_FELL),
        (40, 30, 0, Verdict.NO_CLEAR_DIFFERENCE, Verdict.NO_CLEAR_DIFFERENCE),
        (9, 0, 0, Verdict.TOO_FEW_PROMPTS, Verdict.TOO_FEW_PROMPTS),  # below ten prompts
        (2, 0, 0, Verdict.TOO_FEW_PROMPTS, Verdict.TOO_FEW_PROMPTS),
        (0, 0, 9, Verdict.TOO_FEW_PROMPTS, Verdict.TOO_FEW_PROMPTS),
        (10, 0, 0, Verdict.BETTER, Verdict.REWARD_ROSE),
        (
            12,
            4,
            0,
            Verdict.TOO_FEW_PROMPTS,
            Verdict.TOO_FEW_PROMPTS,
        ),  # the interval is above one half, and the sign test gives 0.077
        (5, 0, 95, Verdict.NO_CLEAR_DIFFERENCE, Verdict.NO_CLEAR_DIFFERENCE),
        (20, 1, 1000, Verdict.BETTER, Verdict.REWARD_ROSE),
    ],
)
def test_a_winner_is_named_only_from_ten_prompts_an_interval_on_one_side_and_an_unlikely_chance(
    wins, losses, ties, by_judge, by_reward
):
    scores = [1] * wins + [-1] * losses + [0] * ties
    sft = evaluation([0] * len(scores))
    for is_reward, expected in ((False, by_judge), (True, by_reward)):
        summary = conclude(evaluation(scores), sft, by_trained_reward=is_reward)
        assert summary == {
            "verdict": expected,
            "eval/verdict": {"better": 1.0, "reward_rose": 0.5, "reward_fell": -0.5, "worse": -1.0}.get(expected, 0.0),
            "by_trained_reward": is_reward,
            "prompts": len(scores),
            "wins": wins,
            "losses": losses,
        }


def test_a_stored_verdict_is_read_and_another_text_is_refused():
    assert read_verdict("reward_fell") is Verdict.REWARD_FELL
    with pytest.raises(DataError, match=r"^evaluation_summary: .*'PPO won'.* better, worse"):
        read_verdict("PPO won")


@pytest.mark.parametrize(("ours", "theirs"), [([float("nan")], [0.0]), ([0.0], [float("inf")])])
def test_win_rate_refuses_scores_that_cannot_be_compared(ours, theirs):
    with pytest.raises(DataError, match="finite"):
        compared(ours, theirs)


@pytest.mark.parametrize(
    ("completions", "n", "expected"),
    [
        (["a b a b"], 2, 2 / 3),  # ab, ba, ab
        (["a b", "a b"], 2, 1 / 2),  # pooled over completions
        (["a b", "c d"], 2, 1.0),  # no pair across the boundary
        (["a a a"], 1, 1 / 3),
        (["a  b\n a"], 2, 1.0),  # any whitespace splits
        (["", "a"], 2, 0.0),  # nothing long enough
    ],
)
def test_distinct_n_is_the_share_of_different_ngrams(completions, n, expected):
    assert distinct_n(completions, n) == pytest.approx(expected, abs=1e-12)


def test_metrics_with_a_judge_have_exactly_the_documented_keys_and_the_judge_decides():
    policy = evaluation([0, 0], judge_scores=[2, 2], rates={"grammatical_rate": [1, 0]}, kl=[1, 3])
    sft = evaluation([9, 9], judge_scores=[1, 2], rates={"grammatical_rate": [1, 1]})
    metrics = compare_evaluations(policy, sft)
    assert set(metrics) == ALWAYS | four("judge_score") | four("grammatical_rate")
    assert metrics["eval/win_rate"] == 0.75  # a win and a tie by the judge, though the reward lost both
    expected = {"judge_score": 2.0, "reward": 0.0, "grammatical_rate": 0.5, "kl": 2.0, "response_length": 1.5}
    expected |= {"judge_score_sft": 1.5, "reward_sft": 9.0, "grammatical_rate_sft": 1.0}
    assert {name: metrics[f"eval/{name}"] for name in expected} == expected
    assert all(type(value) is float for value in metrics.values())


def test_metrics_without_a_judge_leave_its_keys_out_and_the_reward_decides():
    metrics = compare_evaluations(evaluation([1, 1]), evaluation([0, 2]))
    assert set(metrics) == ALWAYS
    assert metrics["eval/win_rate"] == 0.5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (evaluation([1, 1], prompts=["other", "prompts"]), "different prompts"),
        (evaluation([1, 1], judge_scores=[1, 1]), "different functions"),
        (evaluation([1, 1], rates={"polite_rate": [1, 1]}), "different functions"),
        (evaluation([1, 1], other_judges={"strict": [1, 1]}), "different functions"),
    ],
)
def test_evaluations_of_different_things_are_not_compared(other, message):
    for compare in (
        lambda a, b: compare_evaluations(a, b),
        before_after,
        lambda a, b: sample_pairs(a, b, count=1, seed=0),
    ):
        with pytest.raises(DataError, match=message):
            compare(evaluation([1, 1]), other)


def test_table_before_and_after_has_both_policies_measures():
    policy = evaluation([1, 3], judge_scores=[1, 1], completions=["a a", "a a"], kl=[2, 4])
    sft = evaluation([0, 0], judge_scores=[0, 1], completions=["a b", "c d"])
    table = before_after(policy, sft).set_index("measure")
    errors = table[["sft_se", "ppo_se", "change_se"]]
    assert errors.loc["judge_score"].tolist() == pytest.approx([0.5, 0.0, 0.5])  # sd of 0, 1: sqrt(1/2); by sqrt(2)
    assert errors.loc["reward"].tolist() == pytest.approx([0.0, 1.0, 1.0])
    assert errors.loc[["distinct_1", "distinct_2"]].isna().all(axis=None)
    table = table[["sft", "ppo"]]
    expected = {"judge_score": [0.5, 1.0], "reward": [0.0, 2.0], "kl": [0.0, 3.0], "truncated_fraction": [0.0, 0.0]}
    expected |= {"distinct_1": [1.0, 0.25], "distinct_2": [1.0, 0.5]}
    assert {name: table.loc[name].tolist() for name in expected} == expected


def test_the_error_of_a_change_is_that_of_the_differences_by_prompt():
    """Rewards differ by 9 from prompt to prompt, and rise by 1, 2 and 3: sd 1, by sqrt(3). Unpaired it would be 7.8."""
    policy, sft = evaluation([1, 11, 21]), evaluation([0, 9, 18])
    table = before_after(policy, sft).set_index("measure")
    assert table.loc["reward", "change_se"] == pytest.approx(1 / math.sqrt(3), rel=1e-12)
    assert table.loc["reward", "sft_se"] == pytest.approx(9 / math.sqrt(3), rel=1e-12)
    twice = before_after(evaluation([1, 3, 2, 4], samples=2), evaluation([0, 0, 0, 0], samples=2)).set_index("measure")
    assert twice.loc["reward", "change_se"] == pytest.approx(0.5, rel=1e-12)  # prompts rise by 2 and 3


def test_a_single_prompt_has_no_standard_error():
    metrics = compare_evaluations(evaluation([1]), evaluation([0]))
    assert not [key for key in metrics if key.endswith("_se")]
    errors = before_after(evaluation([1]), evaluation([0]))[["sft_se", "ppo_se", "change_se"]]
    assert errors.isna().all(axis=None)


def test_further_judges_have_means_and_win_rates_and_decide_nothing_else():
    policy = evaluation([0, 0], judge_scores=[2, 2], other_judges={"strict": [1, 5], "mild": [0, 0]})
    sft = evaluation([9, 9], judge_scores=[1, 2], other_judges={"strict": [3, 4], "mild": [1, 1]})
    metrics = compare_evaluations(policy, sft)
    win_rates = {f"eval/win_rate_{judge}{end}" for judge in ("strict", "mild") for end in ("", "_low", "_high")}
    assert set(metrics) == ALWAYS.union(
        *map(four, ("judge_score", "judge_score_strict", "judge_score_mild")), win_rates
    )
    assert metrics["eval/win_rate"] == 0.75
    assert (metrics["eval/win_rate_strict"], metrics["eval/win_rate_mild"]) == (0.5, 0.0)
    for judge in ("strict", "mild"):
        low, rate, high = (metrics[f"eval/win_rate_{judge}{end}"] for end in ("_low", "", "_high"))
        assert 0.0 <= low <= rate < high <= 1.0
    assert [metrics[f"eval/judge_score_strict{end}"] for end in ("", "_sft")] == [3.0, 3.5]


def test_several_responses_to_a_prompt_are_one_observation():
    """Prompt means 0.5 and 1 have sd 0.5 / sqrt(2), so the error of their mean is 0.25; four responses would have less.

    Pairs: win and tie, tie and tie: (1 + 1/2 + 1/2 + 1/2) / 4.
    """
    policy, sft = evaluation([1, 0, 1, 1], samples=2), evaluation([0, 0, 1, 1], samples=2)
    metrics = compare_evaluations(policy, sft)
    assert metrics["eval/reward"] == 0.75
    assert metrics["eval/reward_se"] == pytest.approx(0.25, rel=1e-12)
    assert metrics["eval/win_rate"] == 0.625
    summary = conclude(policy, sft, by_trained_reward=False)
    assert [summary[name] for name in ("prompts", "samples_per_prompt", "wins", "losses")] == [2, 2, 1, 0]
    table = sample_pairs(policy, sft, count=9, seed=0)
    assert sorted(table["ppo_score"]) == [1.0, 1.0]  # of prompt 0 the first response, not the second
    with pytest.raises(DataError, match="different functions"):
        compare_evaluations(policy, evaluation([0, 0, 1, 1], prompts=policy.prompts))


def test_the_policy_that_wins_more_pairs_of_responses_wins_the_prompt_whichever_come_first():
    """By prompt: loss, win, win; tie, tie, win; win, loss, loss; loss, tie, win."""
    policy = evaluation([0, 2, 2, 1, 1, 2, 2, 0, 0, 0, 1, 2], samples=3)
    summary = conclude(policy, evaluation([1] * 12, samples=3), by_trained_reward=False)
    assert [summary[name] for name in ("prompts", "samples_per_prompt", "wins", "losses")] == [4, 3, 2, 1]


def test_equal_responses_to_one_prompt_give_the_interval_of_one_response():
    """Eight responses that all win or all lose say no more about the prompts than one."""
    worth = np.repeat([1.0, 0.5, 0.0], [28, 4, 8])
    assert win_rate(np.repeat(worth[:, None], 8, axis=1)) == win_rate(worth[:, None])


def test_pass_at_k_is_of_the_deciding_scores_with_its_error_over_prompts():
    """Two right of 4, then none: pass@2 is 1 - C(2,2) / C(4,2) = 5/6 and 0, with mean 5/12 and error 5/12."""
    policy = evaluation([9] * 8, judge_scores=[1, 0, 0, 1, 0, 0, 0, 0], samples=4)
    sft = evaluation([9] * 8, judge_scores=[1] * 8, samples=4)
    metrics = compare_evaluations(policy, sft, pass_at=[1, 2])
    assert metrics["eval/pass_at_1"] == metrics["eval/judge_score"] == 0.25
    assert metrics["eval/pass_at_2"] == pytest.approx(5 / 12, rel=1e-12)
    assert metrics["eval/pass_at_2_se"] == pytest.approx(5 / 12, rel=1e-12)
    assert (metrics["eval/pass_at_2_sft"], metrics["eval/pass_at_2_sft_se"]) == (1.0, 0.0)
    table = before_after(policy, sft, [1, 2]).set_index("measure")
    assert table.loc["pass_at_2", "ppo"] == pytest.approx(5 / 12, rel=1e-12)
    with pytest.raises(DataError, match=r"pass_at.*evaluation\.judge .*0\.5"):
        before_after(evaluation([1], judge_scores=[0.5]), evaluation([1], judge_scores=[1]), [1])


def test_sample_pairs_hold_random_rows_then_the_widest_wins_and_losses_without_repeats():
    margins = np.arange(-10.0, 11.0)
    completions = [f"answer {row}" for row in range(21)]
    policy = evaluation(margins, completions=completions, kl=margins)
    table = sample_pairs(policy, evaluation(np.zeros(21)), count=4, seed=0)
    assert table["chosen"].tolist() == ["drawn at random"] * 4 + ["widest win"] * 3 + ["widest loss"] * 3
    assert table["prompt"].is_unique
    drawn = set(table["ppo_score"][:4])
    assert table["ppo_score"][4:7].tolist() == sorted(set(range(1, 11)) - drawn, reverse=True)[:3]
    assert table["ppo_score"][7:].tolist() == sorted(set(range(-10, 0)) - drawn)[:3]
    outcomes = {1.0: "win", 0.0: "tie", -1.0: "loss"}
    assert table["outcome"].tolist() == [outcomes[sign] for sign in np.sign(table["ppo_score"])]
    rows = [int(text.split()[1]) for text in table["ppo_response"]]
    assert table["ppo_kl"].tolist() == [margins[row] for row in rows]  # every column is of the same prompt
    few = sample_pairs(evaluation([1, 0, 2]), evaluation([0, 0, 9]), count=50, seed=0)
    assert sorted(few["prompt"]) == ["prompt 0", "prompt 1", "prompt 2"]
