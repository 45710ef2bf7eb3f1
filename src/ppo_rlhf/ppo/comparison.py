"""Comparison of two policies that answered the same prompts: win rate, its interval, diversity, and the eval/* metrics.

Pure arithmetic on what `evaluation.evaluate_policy` measured; no model is run here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.ppo.evaluation import PolicyEvaluation

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
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Decided:
        """Count them from both policies' scores, one a prompt."""
        margins = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
        return cls(wins=int((margins > 0).sum()), losses=int((margins < 0).sum()))

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
    """Return the share of prompts with `ours > theirs`; a tie counts one half.

    The interval is the percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13). A resample's mean
    depends only on how many losses, ties and wins it drew, so resamples are drawn as multinomial counts: the same
    distribution as drawing prompts with replacement, in memory that does not grow with their number.

    Args:
        ours: Scores [N], one a prompt.
        theirs: Scores [N] of the other policy on the same prompts.
        seed: Fixes the resamples.
        bootstrap_samples: Resamples that the interval is taken from.

    Raises:
        DataError: If the scores are not paired, or there are none, or one is not finite.
    """
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if ours.ndim != 1 or ours.shape != theirs.shape or ours.size == 0:
        raise DataError(f"win rate: scores must be paired, one a prompt; got shapes {ours.shape} and {theirs.shape}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise DataError("win rate: scores must be finite; a judge or reward returned NaN or infinity")
    worth = np.array([0.0, 0.5, 1.0])  # loss, tie, win
    counts = np.bincount(np.sign(ours - theirs).astype(np.int64) + 1, minlength=3)
    resampled = np.random.default_rng(seed).multinomial(ours.size, counts / ours.size, size=bootstrap_samples)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(resampled @ worth / ours.size, [tail, 1.0 - tail])
    return WinRate(rate=float(counts @ worth / ours.size), low=float(low), high=float(high))


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


def compare_evaluations(
    policy: PolicyEvaluation, sft: PolicyEvaluation, *, seed: int, bootstrap_samples: int
) -> dict[str, float]:
    """Return the eval/* metrics of a policy against the SFT policy it started from.

    The win rate is by the judge if both were judged, else by the reward.

    Raises:
        DataError: If the two did not answer the same prompts, or were not judged and rated by the same functions.
    """
    _check_comparable(policy, sft)
    wins = win_rate(policy.deciding_scores, sft.deciding_scores, seed=seed, bootstrap_samples=bootstrap_samples)
    metrics = {"eval/win_rate": wins.rate, "eval/win_rate_low": wins.low, "eval/win_rate_high": wins.high}
    if policy.judge_scores is not None and sft.judge_scores is not None:
        metrics["eval/judge_score"] = float(policy.judge_scores.mean())
        metrics["eval/judge_score_sft"] = float(sft.judge_scores.mean())
    metrics |= {
        "eval/reward": float(policy.rewards.mean()),
        "eval/reward_sft": float(sft.rewards.mean()),
        "eval/kl": float(policy.kl.mean()),
        "eval/response_length": float(policy.lengths.mean()),
        "eval/distinct_2": distinct_n(policy.completions, 2),
        "eval/distinct_2_sft": distinct_n(sft.completions, 2),
    }
    for name, values in policy.rates.items():
        metrics[f"eval/{name}"] = float(values.mean())
        metrics[f"eval/{name}_sft"] = float(sft.rates[name].mean())
    return metrics


def summarise(evaluation: PolicyEvaluation) -> dict[str, float]:
    """Return one policy's means, by measure, in the order in which a table shows them."""
    summary: dict[str, float] = {}
    if evaluation.judge_scores is not None:
        summary["judge_score"] = float(evaluation.judge_scores.mean())
    summary["reward"] = float(evaluation.rewards.mean())
    summary |= {name: float(values.mean()) for name, values in evaluation.rates.items()}
    return summary | {
        "kl": float(evaluation.kl.mean()),
        "response_length": float(evaluation.lengths.mean()),
        "truncated_fraction": float(1.0 - evaluation.terminated.mean()),
        "distinct_1": distinct_n(evaluation.completions, 1),
        "distinct_2": distinct_n(evaluation.completions, 2),
    }


def before_after(policy: PolicyEvaluation, sft: PolicyEvaluation) -> pd.DataFrame:
    """Return the table before and after: one row a measure, columns `measure`, `sft`, `ppo`."""
    _check_comparable(policy, sft)
    before, after = summarise(sft), summarise(policy)
    return pd.DataFrame([{"measure": name, "sft": before[name], "ppo": after[name]} for name in after])


def sample_pairs(policy: PolicyEvaluation, sft: PolicyEvaluation, *, count: int, seed: int) -> pd.DataFrame:
    """Return both policies' responses to some prompts, side by side.

    First `count` prompts drawn at random, then of the rest the widest wins and the widest losses, `EXTREMES` of each.
    Columns: `chosen` (why the row is here), `outcome` (win, tie or loss of the policy), `prompt`, `sft_response`,
    `ppo_response`, `sft_score`, `ppo_score` (what decides the win rate), `ppo_kl` (nats).
    """
    _check_comparable(policy, sft)
    margins = policy.deciding_scores - sft.deciding_scores
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
            "prompt": policy.prompts[row],
            "sft_response": sft.completions[row],
            "ppo_response": policy.completions[row],
            "sft_score": float(sft.deciding_scores[row]),
            "ppo_score": float(policy.deciding_scores[row]),
            "ppo_kl": float(policy.kl[row]),
        }
        for row, chosen in rows
    )


def _check_comparable(policy: PolicyEvaluation, sft: PolicyEvaluation) -> None:
    if policy.prompts != sft.prompts:
        raise DataError("evaluation: the two policies did not answer the same prompts in the same order; evaluate both")
    if (policy.judge_scores is None) != (sft.judge_scores is None) or policy.rates.keys() != sft.rates.keys():
        raise DataError("evaluation: the two policies were not judged and rated by the same functions; evaluate both")
