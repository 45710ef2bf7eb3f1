"""Comparison of two policies by people: the judge's win rate as people's answers correct it, interval and verdict."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.core.statistics import corrected_win_rate
from ppo_rlhf.evaluation.verdict import conclude_outcomes
from ppo_rlhf.evaluation.win_rate import CONFIDENCE, WinRate, win_rate
from ppo_rlhf.models.loading import PretrainedHandle

KINDS = {"sft_policy": "SFT", "ppo_policy": "PPO"}
PREFIX = "human/"
OVER_PEOPLE = "win_rate_over_people"
BY_JUDGE = f"{PREFIX}judge_win_rate"
JUDGED_POLICY = "human.policy"
"""The tag with the path of the policy that people judged."""
MIN_PEOPLE = 5
"""With fewer people no interval over people is given."""


def is_policy_of(summary: Mapping[str, Any], policy: PretrainedHandle) -> bool:
    """Return whether people judged a policy with these weights; the summary is empty if people judged none."""
    try:
        return bool(summary) and bool(summary["fingerprint"] == policy.fingerprint())
    except ModelError:  # there is no policy at this path
        return False


def compare_by_people(
    worths: Sequence[Mapping[str, float]],
    judged: Sequence[float] = (),
    *,
    prompts: Sequence[str] | None = None,
    ours: str = "PPO",
    theirs: str = "SFT",
    agreement: float | None = None,
) -> dict[str, Any]:
    """Return the verdict, the metrics and each person's win rate, without any person's name.

    Args:
        worths: For each pair of responses, the outcomes by person: 1 if our policy won, 0 if it lost, ½ for a tie.
            The mapping is empty for a pair that nobody answered.
        judged: For each pair of responses, the outcome by the judge; empty without a judge.
        prompts: The prompt of each pair; None if all prompts differ.
        ours: Name of the policy whose win rate is computed.
        theirs: Name of the policy that `ours` is compared with.
        agreement: Krippendorff's alpha of the answers, or None if no pair was answered twice.

    Returns:
        A dictionary with `verdict` (as in `conclude`; None if nobody answered), `ours`, `theirs`, `metrics`
        (`human/*`), `by_person` (rows with `pairs`, `win_rate`, `low` and `high`, in an order that does not reveal
        names), and the counts `pairs`, `answered`, `prompts` (of answered pairs) and `people`; with answers also `wins`
        and `losses`.

        The outcome of a pair is the mean over people, and the outcome of a prompt is the mean over its pairs. Responses
        to one prompt are correlated, so intervals and verdict treat prompts, not pairs, as independent. The judge's
        outcomes of prompts that nobody answered make `human/win_rate` more certain (`corrected_win_rate`);
        `human/judge_win_rate` is the judge's alone. The interval and the verdict hold for these people only: other
        people have other tastes. `human/win_rate_over_people` is the mean over `MIN_PEOPLE` or more people, each of
        whom counts alike however many pairs they answered, with an interval over people and prompts.
    """
    asked = range(len(worths)) if prompts is None else prompts
    answered = [(prompt, by_name) for prompt, by_name in zip(asked, worths, strict=True) if by_name]
    people = sorted({person for _, by_name in answered for person in by_name})
    common: dict[str, Any] = {
        "ours": ours,
        "theirs": theirs,
        "pairs": len(worths),
        "answered": len(answered),
        "prompts": len({prompt for prompt, _ in answered}),
        "people": len(people),
    }
    if not answered:
        return {"verdict": None, "metrics": {}, "by_person": [], **common}
    together = _means((prompt, float(np.mean([*by_name.values()]))) for prompt, by_name in answered)
    verdicts = [*zip(asked, judged, worths, strict=True)] if judged else []
    judge = _means((prompt, verdict) for prompt, verdict, by_name in verdicts if by_name)
    others = [*_means((prompt, verdict) for prompt, verdict, _ in verdicts if prompt not in together).values()]
    corrected = None
    if others:
        corrected = WinRate(*corrected_win_rate([*together.values()], [judge[prompt] for prompt in together], others))
    concluded = conclude_outcomes(_column(together), by_trained_reward=False, corrected=corrected)
    metrics = _named("win_rate", corrected or win_rate(_column(together)))
    metrics |= {f"{PREFIX}pairs": float(len(answered)), f"{PREFIX}people": float(len(people))}
    if agreement is not None:
        metrics[f"{PREFIX}agreement"] = agreement
    if judged:
        metrics[BY_JUDGE] = float(np.mean([*judge.values(), *others]))
    by_person, outcomes = [], []
    for person in people:
        answers = [(prompt, by_name[person]) for prompt, by_name in answered if person in by_name]
        outcomes.append(_means(answers))
        rate = win_rate(_column(outcomes[-1]))
        by_person.append({"pairs": len(answers), "win_rate": rate.rate, "low": rate.low, "high": rate.high})
    if len(people) >= MIN_PEOPLE:
        rows = [
            (outcome, judge.get(prompt, 0.0), prompt, person, 1.0 / len(each))
            for person, each in enumerate(outcomes)
            for prompt, outcome in each.items()
        ]
        values, verdicts_on_people, pairs, persons, weights = zip(*rows, strict=True)
        clusters = {"pairs": pairs, "persons": persons, "weights": weights}
        metrics |= _named(OVER_PEOPLE, corrected_win_rate(values, verdicts_on_people, others, **clusters))
    # Sort people's rows by their numbers, so that the order does not reveal people's names
    by_person.sort(key=lambda row: (-row["pairs"], row["win_rate"]))
    return {
        "verdict": concluded["verdict"],
        "metrics": metrics,
        "by_person": by_person,
        **common,
        "wins": concluded["wins"],
        "losses": concluded["losses"],
    }


def favours(
    people: Sequence[float], judged: Sequence[float], traits: Mapping[tuple[str, str], Sequence[float]]
) -> list[str]:
    """Return what the judge favours more than people do, by more than noise.

    `traits` has a number for each pair by the names of the response with more and with less of a trait: above 0 if ours
    has more, below 0 if theirs has. A judge that is wrong at random is wrong as often where people prefer the response
    with more as where they prefer that with less. Fisher's exact test compares the two on pairs without ties; at most
    5 % of such judges are said to favour anything.
    """
    named = []
    for names, more in traits.items():
        counts = {True: [0, 0], False: [0, 0]}  # by whether people prefer the response with more: judge right or wrong
        for by_people, by_judge, sign in zip(people, judged, more, strict=True):
            if by_people != 0.5 and by_judge != 0.5 and sign:
                counts[(by_people > 0.5) == (sign > 0)][(by_people > 0.5) != (by_judge > 0.5)] += 1
        for name, prefer_more in zip(names, (False, True), strict=True):
            if _fisher(*counts[prefer_more], *counts[not prefer_more]) < (1.0 - CONFIDENCE) / (2 * len(traits)):
                named.append(name)
    return named


def _fisher(right: int, wrong: int, others_right: int, others_wrong: int) -> float:
    """Return the one-sided p-value of Fisher's exact test that the first row is wrong more often than the second."""
    row, all_wrong, total = right + wrong, wrong + others_wrong, right + wrong + others_right + others_wrong
    ways = [math.comb(all_wrong, k) * math.comb(total - all_wrong, row - k) for k in range(min(row, all_wrong) + 1)]
    return sum(ways[wrong:]) / math.comb(total, row)


def _column(means: Mapping[Hashable, float]) -> NDArray[np.float64]:
    """Return the values as an array [N, 1]."""
    return np.array([*means.values()])[:, None]


def _means(values: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Return the mean of each prompt's values."""
    by_prompt: dict[Hashable, list[float]] = {}
    for prompt, value in values:
        by_prompt.setdefault(prompt, []).append(value)
    return {prompt: float(np.mean(each)) for prompt, each in by_prompt.items()}


def _named(name: str, rate: tuple[float, float, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}{end}": value for end, value in zip(("", "_low", "_high"), rate, strict=True)}
