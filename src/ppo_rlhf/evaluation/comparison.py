"""Comparison of two policies that answered the same prompts: win rate, its interval, diversity, and the eval/* metrics.

The functions compute on the measurements of `evaluation.policy.Evaluator` and run no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.success_rates import pass_at_k
from ppo_rlhf.evaluation.equal_reward import compare_at_equal_reward
from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation
from ppo_rlhf.evaluation.verdict import conclude_outcomes
from ppo_rlhf.evaluation.win_rate import win_rate

RANDOM_PAIRS, EXTREMES = 8, 3
"""Numbers of random prompts, of widest wins, and of widest losses in the table of sample pairs. No settings: the pairs
are what a reader of the report looks through, and the tables of the two evaluations have all responses."""


def outcomes(
    policy: PolicyEvaluation, sft: PolicyEvaluation, ours: NDArray[np.float64], theirs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return outcomes [N, n]: 1 where the policy's i-th response to a prompt beats SFT's i-th response, 0 for a loss,
    1/2 for a tie.

    `ours` and `theirs` are the scores of the policy's and of SFT's responses, one score for each response. Responses
    with the same tokens are a tie whatever their scores, because rounding makes a model's score of a text depend on the
    batch.

    Raises:
        DataError: The two evaluations have different prompts, or a score is not finite.
    """
    _check_comparable(policy, sft)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise DataError("win rate: scores must be finite; a judge or reward returned NaN or infinity")
    return policy.by_prompt((np.sign(_margins(policy, sft, ours, theirs)) + 1.0) / 2.0)


def conclude(policy: PolicyEvaluation, sft: PolicyEvaluation, *, by_trained_reward: bool) -> dict[str, Any]:
    """Return a dictionary with the `verdict` on the policy, and the numbers that the verdict depends on.

    A winner is named only if there are at least `MIN_PROMPTS` prompts, the whole interval of the win rate is on one
    side of one half, and the p-value of the sign test is at most 5 %. With several responses to a prompt,
    the policy that wins more pairs wins the prompt. `by_trained_reward` is True if the trained reward is the judge.
    """
    decisions = outcomes(policy, sft, policy.deciding_scores, sft.deciding_scores)
    several = {} if policy.samples_per_prompt == 1 else {"samples_per_prompt": policy.samples_per_prompt}
    return {**conclude_outcomes(decisions, by_trained_reward=by_trained_reward), **several}


def standard_error(values_N: NDArray[np.float64]) -> float:
    """Return the standard error of a mean over N prompts: s / sqrt(N), s with denominator N − 1; NaN for one prompt."""
    return float(values_N.std(ddof=1) / math.sqrt(len(values_N))) if len(values_N) > 1 else math.nan


def distinct_n(completions: Sequence[str], n: int) -> float:
    """Return the number of different n-grams divided by the number of n-grams, over the words of all completions.

    Words are split at whitespace. The result is 0 if no completion has n words. Distinct-n falls with the number of
    words, so compare only policies that answered the same number of prompts. Source: Li et al. 2016 (arXiv:1510.03055),
    pooled over the corpus.
    """
    ngrams = [
        tuple(words[start : start + n])
        for words in (completion.split() for completion in completions)
        for start in range(len(words) - n + 1)
    ]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def measure_prompts(evaluation: PolicyEvaluation, pass_at: Sequence[int] = ()) -> dict[str, NDArray[np.float64]]:
    """Return the values [N] of each measure, one for each prompt: the mean over the prompt's responses, or pass@k.

    Responses to one prompt are correlated, so standard errors must be computed over prompts.

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
    """Raise `DataError` if a score that decides the win rate is neither 0 nor 1."""
    invalid = evaluation.deciding_scores[~np.isin(evaluation.deciding_scores, (0.0, 1.0))]
    if invalid.size:
        source = "evaluation.judge" if JUDGE_COLUMN in evaluation.judges else "the reward"
        raise DataError(
            f"evaluation.pass_at needs scores of 1 (right) or 0 (wrong), but {source} returned {invalid[0]:g}. Set "
            "evaluation.judge to a function that returns 0 or 1, or leave pass_at empty."
        )


def compare_evaluations(
    policy: PolicyEvaluation, sft: PolicyEvaluation, pass_at: Sequence[int] = ()
) -> dict[str, float]:
    """Return the eval/* metrics that compare a policy with the SFT policy that it started from.

    If there is a judge, the judge decides the win rate; if not, the reward decides. Each further judge has its own win
    rate. Standard errors `eval/<name>_se` are over prompts, and are missing if there is only one prompt.

    Raises:
        DataError: The two policies answered different prompts, or different functions judged or rated them, or
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
        # The truncated fraction is no logged metric: it appears only in the table `before_after`
        if name == "truncated_fraction":
            continue
        sides = {f"eval/{name}": values}
        if name not in ("kl", "response_length"):
            sides[f"eval/{name}_sft"] = of_sft[name]
        metrics |= {key: float(side.mean()) for key, side in sides.items()}
        if len(values) > 1:
            metrics |= {f"{key}_se": standard_error(side) for key, side in sides.items()}
    metrics |= compare_at_equal_reward(policy, sft)
    metrics["eval/distinct_2"] = distinct_n(policy.completions, 2)
    metrics["eval/distinct_2_sft"] = distinct_n(sft.completions, 2)
    return metrics


def before_after(policy: PolicyEvaluation, sft: PolicyEvaluation, pass_at: Sequence[int] = ()) -> pd.DataFrame:
    """Return the table that compares SFT and PPO, with one row for each measure.

    Columns: `measure`, the means `sft` and `ppo`, and the standard errors over prompts `sft_se`, `ppo_se` and
    `change_se`. `change_se` is the standard error of the differences on each prompt, because both policies answered the
    same prompts. The standard errors of distinct-n are NaN, because distinct-n is not a mean over prompts.
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


def sample_pairs(
    policy: PolicyEvaluation, sft: PolicyEvaluation, *, seed: int, count: int = RANDOM_PAIRS
) -> pd.DataFrame:
    """Return a table of sample pairs: for some prompts, the first response of each of both policies.

    The first `count` rows of the table are drawn at random. After the random rows come the widest wins and the widest
    losses among the remaining prompts, `EXTREMES` rows of each kind. Columns: `chosen` (how the row was chosen),
    `outcome` (win, tie or loss of the policy), `prompt`, `sft_response`, `ppo_response`, `sft_score` and `ppo_score`
    (the scores that decide the win rate), `ppo_kl` (nats).
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
    """Return `win`, `tie` or `loss`, as seen from the policy."""
    if margin > 0:
        return "win"
    return "loss" if margin < 0 else "tie"


def _margins(
    policy: PolicyEvaluation, sft: PolicyEvaluation, ours: NDArray[np.float64], theirs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return our score minus theirs for each response, and 0 where both responses have the same tokens."""
    same = [our == their for our, their in zip(policy.response_ids, sft.response_ids, strict=True)]
    return np.where(same, 0.0, ours - theirs)


def _check_comparable(policy: PolicyEvaluation, sft: PolicyEvaluation) -> None:
    if policy.prompts != sft.prompts:
        raise DataError("evaluation: the two policies answered different prompts, or in another order; evaluate both")
    judged, judged_sft = ((e.judges.keys(), e.rates.keys(), e.samples_per_prompt) for e in (policy, sft))
    if judged != judged_sft:
        raise DataError("evaluation: different functions judged or rated the two policies; evaluate both")
