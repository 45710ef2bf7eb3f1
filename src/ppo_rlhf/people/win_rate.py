"""Comparison of two policies by people: win rate, interval and verdict, and how often the judge agrees."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.evaluation.verdict import conclude_outcomes
from ppo_rlhf.evaluation.win_rate import NORMAL_QUANTILE, WinRate, win_rate
from ppo_rlhf.models.loading import PretrainedHandle

KINDS = {"sft_policy": "SFT", "ppo_policy": "PPO"}
PREFIX = "human/"
OVER_PEOPLE = "win_rate_over_people"
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
    judged: Sequence[float | None] = (),
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
        names), and the counts `pairs`, `answered`, `prompts` (of answered pairs) and `people`; with answers also
        `wins`, `losses` and `judged`.

        The outcome of a pair is the mean over people, and the outcome of a prompt is the mean over its pairs. Responses
        to one prompt are correlated, so intervals and verdict treat prompts, not pairs, as independent. These intervals
        and the verdict hold for these people only: other people have other tastes. `human/win_rate_over_people` is the
        mean of `MIN_PEOPLE` or more people's win rates, with an interval over people and prompts (`over_people`). The
        agreement of judge and people counts only pairs in which people on average prefer one side; a pair that the
        judge scores as a tie counts as half.
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
    together = _by_prompt((prompt, float(np.mean([*by_name.values()]))) for prompt, by_name in answered)
    concluded = conclude_outcomes(together, by_trained_reward=False)
    metrics = _rate("win_rate", together)
    metrics |= {f"{PREFIX}pairs": float(len(answered)), f"{PREFIX}people": float(len(people))}
    if agreement is not None:
        metrics[f"{PREFIX}agreement"] = agreement
    decided = []
    for prompt, by_name, judge in zip(asked, worths, judged or [None] * len(worths), strict=True):
        mean = float(np.mean([*by_name.values()])) if by_name else 0.5
        if judge is not None and mean != 0.5:
            by_people = 1.0 if mean > 0.5 else 0.0
            decided.append((prompt, 1.0 - abs(by_people - judge)))
    if decided:
        metrics |= _rate("judge_agreement", _by_prompt(decided))
    by_person, outcomes = [], []
    for person in people:
        answers = [(prompt, by_name[person]) for prompt, by_name in answered if person in by_name]
        outcomes.append(_means(answers))
        rate = win_rate(_by_prompt(answers))
        by_person.append({"pairs": len(answers), "win_rate": rate.rate, "low": rate.low, "high": rate.high})
    if len(people) >= MIN_PEOPLE:
        rates = [row["win_rate"] for row in by_person]
        metrics |= _named(OVER_PEOPLE, over_people(rates, _variance_of_prompts(outcomes)))
    # Sort people's rows by their numbers, so that the order does not reveal people's names
    by_person.sort(key=lambda row: (-row["pairs"], row["win_rate"]))
    return {
        "verdict": concluded["verdict"],
        "metrics": metrics,
        "by_person": by_person,
        **common,
        "wins": concluded["wins"],
        "losses": concluded["losses"],
        "judged": len(decided),
    }


def _by_prompt(values: Iterable[tuple[Hashable, float]]) -> NDArray[np.float64]:
    """Return the mean of each prompt's values as an array [N, 1]."""
    return np.array([[mean] for mean in _means(values).values()])


def _means(values: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Return the mean of each prompt's values."""
    by_prompt: dict[Hashable, list[float]] = {}
    for prompt, value in values:
        by_prompt.setdefault(prompt, []).append(value)
    return {prompt: float(np.mean(each)) for prompt, each in by_prompt.items()}


def over_people(rates: Sequence[float], variance_of_prompts: float = 0.0) -> WinRate:
    """Return the mean of people's win rates with a 95 % interval that holds for people, and prompts, like these.

    Each person counts alike, however many pairs they answered. A person's rate is any number from 0 to 1, as a prompt's
    mean outcome is, so the interval over people is that of `win_rate`: it has a width even if all people agree. Prompts
    that several people answered move their rates together; `variance_of_prompts` is the variance of the mean that comes
    from them, and each end moves out so that its squared distance from the mean grows by z² times that variance.
    """
    rate, low, high = win_rate(np.array(rates)[:, None])
    moved = NORMAL_QUANTILE * math.sqrt(variance_of_prompts)
    low, high = rate - math.hypot(rate - low, moved), rate + math.hypot(high - rate, moved)
    return WinRate(rate, low=max(0.0, low), high=min(1.0, high))


def _variance_of_prompts(outcomes: Sequence[Mapping[Hashable, float]]) -> float:
    """Return the variance of the mean of people's rates that comes from prompts which several people answered.

    `outcomes` has each person's mean outcome by prompt. Of the variance with prompts as clusters, the variance with
    single answers as clusters is taken off, because the spread of people's rates has that part (Cameron, Gelbach and
    Miller 2011, Journal of Business & Economic Statistics 29, 238-249). Without a shared prompt the result is 0.
    """
    rates = [float(np.mean([*each.values()])) for each in outcomes]
    centre, by_prompt, single = float(np.mean(rates)), dict[Hashable, float](), 0.0
    for each in outcomes:
        for prompt, outcome in each.items():
            part = (outcome - centre) / (len(outcomes) * len(each))
            by_prompt[prompt] = by_prompt.get(prompt, 0.0) + part
            single += part**2
    prompts = len(by_prompt)
    clustered = sum(part**2 for part in by_prompt.values()) * (prompts / (prompts - 1) if prompts > 1 else 1.0)
    return max(0.0, clustered - single) if prompts < sum(map(len, outcomes)) else 0.0


def _rate(name: str, outcomes: Any) -> dict[str, float]:
    return _named(name, win_rate(outcomes))


def _named(name: str, rate: WinRate) -> dict[str, float]:
    return {f"{PREFIX}{name}{end}": value for end, value in zip(("", "_low", "_high"), rate, strict=True)}
