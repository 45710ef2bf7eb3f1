"""Comparison of two policies that answered the same prompts: win rate, its interval, diversity, and the eval/* metrics.

Pure arithmetic on what `evaluation.evaluate_policy` measured; no model is run here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.success_rates import pass_at_k
from ppo_rlhf.ppo.evaluation import JUDGE_COLUMN, PolicyEvaluation

CONFIDENCE = 0.95
EXTREMES = 3
"""Widest wins, and as many losses, that a table of samples shows besides its random rows."""


@dataclass(frozen=True)
class WinRate:
    """Share of prompts on which ours beats theirs, ties counted half, with the ends of its 95 % interval."""

    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class Decided:
    """Prompts on which one policy's response scored higher than the other's; a tie decides nothing."""

    wins: int
    losses: int

    @classmethod
    def of(cls, policy: PolicyEvaluation, sft: PolicyEvaluation) -> Decided:
        """Count them by the deciding scores; of several responses to a prompt, by which policy wins more pairs."""
        margins = policy.by_prompt(np.sign(policy.deciding_scores - sft.deciding_scores)).sum(axis=1)
        return cls(wins=int((margins > 0).sum()), losses=int((margins < 0).sum()))

    @classmethod
    def of_tables(cls, policy: pd.DataFrame, sft: pd.DataFrame) -> Decided:
        """Count them in the tables of two evaluations (`PolicyEvaluation.to_frame`)."""
        return cls.of(PolicyEvaluation.from_frame(policy), PolicyEvaluation.from_frame(sft))

    @property
    def by_chance(self) -> float:
        """Probability that equal policies differ by this much or more: the exact two-sided sign test.

        Six prompts that all go one way have 0.03, five 0.06. The bootstrap cannot tell: its resamples of prompts that
        were all won are all won, so of one prompt, too, the interval is the point 1.
        """
        fewer, number = min(self.wins, self.losses), self.wins + self.losses
        k = np.arange(1, fewer + 1)
        log_ways = np.cumsum(np.r_[0.0, np.log((number - k + 1) / k)])  # of k of them to go the other way
        return min(1.0, 2.0 * float(np.exp(log_ways - number * math.log(2.0)).sum()))


def win_rate(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], *, seed: int, bootstrap_samples: int = 10_000
) -> WinRate:
    """Return the share of responses with `ours > theirs`; a tie counts one half.

    The interval is the percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13). A resample's mean
    depends only on how many prompts it drew of each number of wins and ties, so resamples are drawn as multinomial
    counts: the same distribution as drawing prompts with replacement, in memory that does not grow with their number.

    Args:
        ours: Scores [N], one a prompt, or [N, n] of n responses to each.
        theirs: Scores of the other policy on the same prompts, in the same shape; the i-th responses are compared.
        seed: Fixes the resamples.
        bootstrap_samples: Resamples that the interval is taken from.

    Raises:
        DataError: If the scores are not paired, or there are none, or one is not finite.
    """
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if ours.ndim not in (1, 2) or ours.shape != theirs.shape or ours.size == 0:
        raise DataError(f"win rate: scores must be paired, one a prompt; got shapes {ours.shape} and {theirs.shape}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise DataError("win rate: scores must be finite; a judge or reward returned NaN or infinity")
    halves_N = (np.sign(ours - theirs).astype(np.int64) + 1).reshape(len(ours), -1).sum(axis=1)  # a tie 1, a win 2
    number, most = len(halves_N), 2 * ours.size // len(ours)
    worth = np.arange(most + 1) / most
    counts = np.bincount(halves_N, minlength=most + 1)
    resampled = np.random.default_rng(seed).multinomial(number, counts / number, size=bootstrap_samples)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(resampled @ worth / number, [tail, 1.0 - tail])
    return WinRate(rate=float(counts @ worth / number), low=float(low), high=float(high))


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
    judges = {} if evaluation.judge_scores is None else {JUDGE_COLUMN: evaluation.judge_scores}
    judges |= {f"{JUDGE_COLUMN}_{name}": scores for name, scores in evaluation.other_judges.items()}
    of_responses = {
        **judges,
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
        source = "the reward" if evaluation.judge_scores is None else "evaluation.judge"
        raise DataError(
            f"evaluation.pass_at needs answers that are right (1) or wrong (0), and {source} gave {others[0]:g}. Set "
            "evaluation.judge to a function that returns 0 or 1, or leave pass_at empty."
        )


def compare_evaluations(
    policy: PolicyEvaluation, sft: PolicyEvaluation, *, seed: int, bootstrap_samples: int, pass_at: Sequence[int] = ()
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
    decisions |= {f"_{name}": (policy.other_judges[name], sft.other_judges[name]) for name in policy.other_judges}
    metrics: dict[str, float] = {}
    for name, (ours, theirs) in decisions.items():
        pair = policy.by_prompt(ours), sft.by_prompt(theirs)
        wins = win_rate(*pair, seed=seed, bootstrap_samples=bootstrap_samples)
        ends = {"": wins.rate, "_low": wins.low, "_high": wins.high}
        metrics |= {f"eval/win_rate{name}{end}": value for end, value in ends.items()}
    measured, of_sft = measure_prompts(policy, pass_at), measure_prompts(sft, pass_at)
    for name, values in measured.items():
        if name == "truncated_fraction":  # in the table before and after alone
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
            **{"measure": name, "sft": before[name].mean(), "ppo": after[name].mean()},
            **{"sft_se": standard_error(before[name]), "ppo_se": standard_error(after[name])},
            "change_se": standard_error(after[name] - before[name]),
        }
        for name in after
    ]
    for n in (1, 2):
        shares = {"sft": distinct_n(sft.completions, n), "ppo": distinct_n(policy.completions, n)}
        rows.append({"measure": f"distinct_{n}", **shares, "sft_se": math.nan, "ppo_se": math.nan})
    return pd.DataFrame(rows)


def sample_pairs(policy: PolicyEvaluation, sft: PolicyEvaluation, *, count: int, seed: int) -> pd.DataFrame:
    """Return both policies' responses to some prompts, side by side; of several responses to a prompt the first.

    First `count` prompts drawn at random, then of the rest the widest wins and the widest losses, `EXTREMES` of each.
    Columns: `chosen` (why the row is here), `outcome` (win, tie or loss of the policy), `prompt`, `sft_response`,
    `ppo_response`, `sft_score`, `ppo_score` (what decides the win rate), `ppo_kl` (nats).
    """
    _check_comparable(policy, sft)
    first = np.arange(0, len(policy.prompts), policy.samples_per_prompt)
    margins = (policy.deciding_scores - sft.deciding_scores)[first]
    drawn = np.random.default_rng(seed).permutation(len(margins))[:count]
    rest = [int(row) for row in np.argsort(-margins, kind="stable") if row not in set(drawn.tolist())]
    wins = [row for row in rest if margins[row] > 0][:EXTREMES]
    losses = [row for row in reversed(rest) if margins[row] < 0][:EXTREMES]
    rows = [*((int(row), "drawn at random") for row in drawn)]
    rows += [(row, "widest win") for row in wins] + [(row, "widest loss") for row in losses]
    return pd.DataFrame(
        {
            "chosen": chosen,
            "outcome": ("loss", "tie", "win")[int(np.sign(margins[row])) + 1],
            "prompt": policy.prompts[first[row]],
            "sft_response": sft.completions[first[row]],
            "ppo_response": policy.completions[first[row]],
            "sft_score": float(sft.deciding_scores[first[row]]),
            "ppo_score": float(policy.deciding_scores[first[row]]),
            "ppo_kl": float(policy.kl[first[row]]),
        }
        for row, chosen in rows
    )


def _check_comparable(policy: PolicyEvaluation, sft: PolicyEvaluation) -> None:
    if policy.prompts != sft.prompts:
        raise DataError("evaluation: the two policies did not answer the same prompts in the same order; evaluate both")
    judged, judged_sft = (
        (e.judge_scores is None, e.other_judges.keys(), e.rates.keys(), e.samples_per_prompt) for e in (policy, sft)
    )
    if judged != judged_sft:
        raise DataError("evaluation: the two policies were not judged and rated by the same functions; evaluate both")
