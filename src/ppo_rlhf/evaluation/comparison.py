"""Comparison of two policies that answered the same prompts: win rate, its interval, diversity, and the eval/* metrics.

Pure arithmetic on what `evaluation.policy.Evaluator` measured; no model is run here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import bdtr, ndtri

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.success_rates import pass_at_k
from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation

MIN_PROMPTS = 10
CONFIDENCE = 0.95
_Z2 = float(ndtri(0.5 + CONFIDENCE / 2.0)) ** 2
EXTREMES = 3
"""Widest wins, and as many losses, that a table of samples shows besides its random rows."""


class Verdict(StrEnum):
    """What a comparison found about our policy; summaries and tags keep the value, the report says it in words."""

    BETTER = "better"
    WORSE = "worse"
    REWARD_ROSE = "reward_rose"
    """The judge is the reward that was trained: a higher reward need not be a better policy."""
    REWARD_FELL = "reward_fell"
    NO_CLEAR_DIFFERENCE = "no_clear_difference"
    TOO_FEW_PROMPTS = "too_few_prompts"


LEVELS = {
    Verdict.BETTER: 1.0,
    Verdict.REWARD_ROSE: 0.5,
    Verdict.NO_CLEAR_DIFFERENCE: 0.0,
    Verdict.TOO_FEW_PROMPTS: 0.0,
    Verdict.REWARD_FELL: -0.5,
    Verdict.WORSE: -1.0,
}
"""The verdict as the metric eval/verdict."""
SENTENCES_OF_EARLIER_RUNS = {
    "PPO beats SFT": Verdict.BETTER,
    "PPO loses to SFT": Verdict.WORSE,
    "The reward rose": Verdict.REWARD_ROSE,
    "The reward fell": Verdict.REWARD_FELL,
    "No clear difference between PPO and SFT": Verdict.NO_CLEAR_DIFFERENCE,
    "Too few held-out prompts to tell PPO and SFT apart": Verdict.TOO_FEW_PROMPTS,
}
"""What summaries kept before they kept the value."""


def read_verdict(stored: str) -> Verdict:
    """Return the verdict of a stored summary, which in earlier runs is a sentence.

    Raises:
        DataError: If it is neither a value of `Verdict` nor one of those sentences.
    """
    if stored in SENTENCES_OF_EARLIER_RUNS:
        return SENTENCES_OF_EARLIER_RUNS[stored]
    try:
        return Verdict(stored)
    except ValueError as error:
        raise DataError(f"evaluation_summary: verdict is {stored!r}; it must be one of {', '.join(Verdict)}") from error


class WinRate(NamedTuple):
    """Share of prompts on which ours beats theirs, ties counted half, with the ends of its 95 % interval."""

    rate: float
    low: float
    high: float


def outcomes(
    policy: PolicyEvaluation, sft: PolicyEvaluation, ours: NDArray[np.float64], theirs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [N, n]: 1 where our i-th response to a prompt beats their i-th, 0 where it loses, 1/2 for a tie.

    `ours` and `theirs` are the scores of the policy's and of SFT's responses, one each. Responses of the same tokens
    are a tie whatever their scores: a model scores one text differently in another batch.

    Raises:
        DataError: If the two are not responses to the same prompts, or a score is not finite.
    """
    _check_comparable(policy, sft)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise DataError("win rate: scores must be finite; a judge or reward returned NaN or infinity")
    return policy.by_prompt((np.sign(_margins(policy, sft, ours, theirs)) + 1.0) / 2.0)


def win_rate(outcomes: NDArray[np.float64]) -> WinRate:
    """Return the mean of outcomes [N, n] over N prompts, and its interval.

    The interval is that of Agresti and Coull (1998), widened to prompts that are worth any share: with z the normal
    quantile, z² / 2 won and z² / 2 lost prompts are added, and it is mean ± z · deviation / √number of all of them.
    Without ties it is theirs. Unlike a bootstrap's it covers near 0 and 1, and of prompts that all went one way.
    """
    worth_N = outcomes.mean(axis=1)
    number = len(worth_N) + _Z2
    centre = (worth_N.sum() + _Z2 / 2.0) / number
    variance = (np.square(worth_N).sum() + _Z2 / 2.0) / number - centre**2
    half = math.sqrt(_Z2 * variance / number)
    return WinRate(float(worth_N.mean()), low=float(max(0.0, centre - half)), high=float(min(1.0, centre + half)))


def conclude(policy: PolicyEvaluation, sft: PolicyEvaluation, *, by_trained_reward: bool) -> dict[str, Any]:
    """Return the `verdict`, by which report, model card, terminal, champion and advice go, with what it rests on.

    A winner is named only if there are `MIN_PROMPTS` or more, the whole interval of the win rate is on one side of
    one half, and the sign test finds chance an unlikely cause. Of several responses to a prompt, the policy that wins
    more pairs wins the prompt. `by_trained_reward` says that the reward that was trained is the judge.
    """
    decisions = outcomes(policy, sft, policy.deciding_scores, sft.deciding_scores)
    several = {} if policy.samples_per_prompt == 1 else {"samples_per_prompt": policy.samples_per_prompt}
    return {**conclude_outcomes(decisions, by_trained_reward=by_trained_reward), **several}


def conclude_outcomes(decisions: NDArray[np.float64], *, by_trained_reward: bool) -> dict[str, Any]:
    """Return what `conclude` does, without `samples_per_prompt`, of outcomes [N, n]."""
    rate, margins_N = win_rate(decisions), (decisions - 0.5).sum(axis=1)
    prompts, wins, losses = len(margins_N), int((margins_N > 0).sum()), int((margins_N < 0).sum())
    if prompts < MIN_PROMPTS:
        verdict = Verdict.TOO_FEW_PROMPTS
    elif rate.low <= 0.5 <= rate.high:
        verdict = Verdict.NO_CLEAR_DIFFERENCE
    elif sign_test(wins, losses) > 1.0 - CONFIDENCE:
        verdict = Verdict.TOO_FEW_PROMPTS
    elif rate.low > 0.5:
        verdict = Verdict.REWARD_ROSE if by_trained_reward else Verdict.BETTER
    else:
        verdict = Verdict.REWARD_FELL if by_trained_reward else Verdict.WORSE
    counts = {"prompts": prompts, "wins": wins, "losses": losses, "eval/verdict": LEVELS[verdict]}
    return {"verdict": verdict, "by_trained_reward": by_trained_reward, **counts}


def sign_test(wins: int, losses: int) -> float:
    """Return the probability that equal policies differ by this much or more: the exact two-sided sign test.

    Six prompts that all go one way have 0.03, five 0.06.
    """
    return min(1.0, 2.0 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def standard_error(values_N: NDArray[np.float64]) -> float:
    """Return the standard error of a mean over prompts: s / sqrt(N), s with N − 1; NaN of a single prompt."""
    return float(values_N.std(ddof=1) / math.sqrt(len(values_N))) if len(values_N) > 1 else math.nan


def distinct_n(completions: Sequence[str], n: int) -> float:
    """Return different n-grams over all n-grams of all completions together, in words split at whitespace.

    0 when no completion has n words. The value falls with the number of words, so compare only policies that answered
    the same number of prompts. Source: Li et al. 2016 (arXiv:1510.03055), pooled over the corpus.
    """
    ngrams = [
        tuple(words[start : start + n])
        for words in (completion.split() for completion in completions)
        for start in range(len(words) - n + 1)
    ]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def measure_prompts(evaluation: PolicyEvaluation, pass_at: Sequence[int] = ()) -> dict[str, NDArray[np.float64]]:
    """Return one number a prompt [N] of each measure: the mean over its responses, and pass@k for each k.

    Responses to one prompt are alike, so a standard error is one over prompts.

    Raises:
        DataError: `pass_at` is given, and a deciding score is neither 0 nor 1.
    """
    of_responses = {
        **evaluation.judges,
        "reward": evaluation.rewards,
        **evaluation.rates,
        "kl": evaluation.kl,
        "response_length": evaluation.lengths,
        "truncated_fraction": ~evaluation.terminated,
    }
    means = {name: evaluation.by_prompt(values).mean(axis=1) for name, values in of_responses.items()}
    if not pass_at:
        return means
    check_right_or_wrong(evaluation)
    right_N = torch.from_numpy(evaluation.by_prompt(evaluation.deciding_scores).sum(axis=1)).long()
    n = evaluation.samples_per_prompt
    return {f"pass_at_{k}": pass_at_k(right_N, n, k).numpy() for k in sorted(pass_at)} | means


def check_right_or_wrong(evaluation: PolicyEvaluation) -> None:
    """Raise `DataError` if a score that decides the win rate is neither 1 nor 0."""
    others = evaluation.deciding_scores[~np.isin(evaluation.deciding_scores, (0.0, 1.0))]
    if others.size:
        source = "evaluation.judge" if JUDGE_COLUMN in evaluation.judges else "the reward"
        raise DataError(
            f"evaluation.pass_at needs answers that are right (1) or wrong (0), and {source} gave {others[0]:g}. Set "
            "evaluation.judge to a function that returns 0 or 1, or leave pass_at empty."
        )


def compare_evaluations(
    policy: PolicyEvaluation, sft: PolicyEvaluation, pass_at: Sequence[int] = ()
) -> dict[str, float]:
    """Return the eval/* metrics of a policy against the SFT policy it started from.

    The win rate is by the judge if both were judged, else by the reward; each further judge has one of its own.
    Standard errors, `eval/<name>_se`, are over prompts; of a single prompt there are none.

    Raises:
        DataError: If the two did not answer the same prompts, or were not judged and rated by the same functions, or
            `pass_at` is given and a deciding score is neither 0 nor 1.
    """
    _check_comparable(policy, sft)
    decisions = {"": (policy.deciding_scores, sft.deciding_scores)}
    decisions |= {name.removeprefix(JUDGE_COLUMN): (policy.judges[name], sft.judges[name]) for name in policy.judges}
    metrics: dict[str, float] = {}
    for name, (ours, theirs) in decisions.items():
        rates = zip(("", "_low", "_high"), win_rate(outcomes(policy, sft, ours, theirs)), strict=True)
        metrics |= {f"eval/win_rate{name}{end}": value for end, value in rates}
    measured, of_sft = measure_prompts(policy, pass_at), measure_prompts(sft, pass_at)
    for name, values in measured.items():
        if name == "truncated_fraction":  # only in the table before and after
            continue
        sides = {f"eval/{name}": values}
        if name not in ("kl", "response_length"):
            sides[f"eval/{name}_sft"] = of_sft[name]
        metrics |= {key: float(side.mean()) for key, side in sides.items()}
        if len(values) > 1:
            metrics |= {f"{key}_se": standard_error(side) for key, side in sides.items()}
    metrics["eval/distinct_2"] = distinct_n(policy.completions, 2)
    metrics["eval/distinct_2_sft"] = distinct_n(sft.completions, 2)
    return metrics


def before_after(policy: PolicyEvaluation, sft: PolicyEvaluation, pass_at: Sequence[int] = ()) -> pd.DataFrame:
    """Return the table before and after, one row a measure.

    Columns: `measure`, the means `sft` and `ppo`, and the standard errors over prompts of the two, `sft_se` and
    `ppo_se`, and of their difference, `change_se`: both answered the same prompts, so it is that of the differences by
    prompt. Errors are NaN of distinct-n, which is no mean over prompts.
    """
    _check_comparable(policy, sft)
    before, after = measure_prompts(sft, pass_at), measure_prompts(policy, pass_at)
    rows: list[dict[str, object]] = [
        {
            "measure": name,
            "sft": before[name].mean(),
            "ppo": after[name].mean(),
            "sft_se": standard_error(before[name]),
            "ppo_se": standard_error(after[name]),
            "change_se": standard_error(after[name] - before[name]),
        }
        for name in after
    ]
    for n in (1, 2):
        shares = {"sft": distinct_n(sft.completions, n), "ppo": distinct_n(policy.completions, n)}
        rows.append({"measure": f"distinct_{n}", **shares})
    return pd.DataFrame(rows)


def sample_pairs(policy: PolicyEvaluation, sft: PolicyEvaluation, *, count: int, seed: int) -> pd.DataFrame:
    """Return both policies' responses to some prompts, side by side; of several responses to a prompt the first.

    First `count` prompts drawn at random, then of the rest the widest wins and the widest losses, `EXTREMES` of each.
    Columns: `chosen` (why the row is here), `outcome` (win, tie or loss of the policy), `prompt`, `sft_response`,
    `ppo_response`, `sft_score`, `ppo_score` (what decides the win rate), `ppo_kl` (nats).
    """
    _check_comparable(policy, sft)
    first = np.arange(0, len(policy.prompts), policy.samples_per_prompt)
    margins = _margins(policy, sft, policy.deciding_scores, sft.deciding_scores)[first]
    drawn = np.random.default_rng(seed).permutation(len(margins))[:count]
    rest = [int(row) for row in np.argsort(-margins, kind="stable") if row not in set(drawn.tolist())]
    wins = [row for row in rest if margins[row] > 0][:EXTREMES]
    losses = [row for row in reversed(rest) if margins[row] < 0][:EXTREMES]
    rows = [*((int(row), "drawn at random") for row in drawn)]
    rows += [(row, "widest win") for row in wins] + [(row, "widest loss") for row in losses]
    return pd.DataFrame(
        {
            "chosen": chosen,
            "outcome": _outcome(margins[row]),
            "prompt": policy.prompts[first[row]],
            "sft_response": sft.completions[first[row]],
            "ppo_response": policy.completions[first[row]],
            "sft_score": float(sft.deciding_scores[first[row]]),
            "ppo_score": float(policy.deciding_scores[first[row]]),
            "ppo_kl": float(policy.kl[first[row]]),
        }
        for row, chosen in rows
    )


def _outcome(margin: float) -> str:
    """Return win, tie or loss of the policy."""
    if margin > 0:
        return "win"
    return "loss" if margin < 0 else "tie"


def _margins(
    policy: PolicyEvaluation, sft: PolicyEvaluation, ours: NDArray[np.float64], theirs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much each of our responses scores higher; 0 where theirs has the same tokens."""
    same = [our == their for our, their in zip(policy.response_ids, sft.response_ids, strict=True)]
    return np.where(same, 0.0, ours - theirs)


def _check_comparable(policy: PolicyEvaluation, sft: PolicyEvaluation) -> None:
    if policy.prompts != sft.prompts:
        raise DataError("evaluation: the two policies did not answer the same prompts in the same order; evaluate both")
    judged, judged_sft = ((e.judges.keys(), e.rates.keys(), e.samples_per_prompt) for e in (policy, sft))
    if judged != judged_sft:
        raise DataError("evaluation: the two policies were not judged and rated by the same functions; evaluate both")
