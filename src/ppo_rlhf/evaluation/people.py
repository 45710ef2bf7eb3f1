"""Two policies compared by people: win rate, interval and verdict by person and together, and the judge beside them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.evaluation.comparison import conclude_outcomes, win_rate

KINDS = {"sft_policy": "SFT", "ppo_policy": "PPO"}
PREFIX = "human/"


def compare_by_people(
    worths: Sequence[Mapping[str, float]],
    judged: Sequence[float | None] = (),
    *,
    prompts: Sequence[str] | None = None,
    ours: str = "PPO",
    theirs: str = "SFT",
    agreement: float | None = None,
) -> dict[str, Any]:
    """Return verdict, metrics and each person's win rate; no name of a person.

    Args:
        worths: For each pair what it is worth to our policy by person: 1, 0, or ½ for a tie; empty: unanswered.
        judged: For each pair what it is worth to our policy by the judge; empty: no judge.
        prompts: For each pair its prompt; None: all are different.
        ours: The name of the policy whose win rate is given.
        theirs: The name of the other one.
        agreement: Krippendorff's alpha of the answers, None if no pair was answered twice.

    Returns:
        `verdict` on ours, as of `conclude` (None: nobody has answered); `ours`, `theirs`; `metrics`, `human/*`;
        `by_person`, in an order that tells nothing, with `pairs`, `win_rate`, `low` and `high`; `pairs`, `answered`,
        `prompts` (of answered pairs), `people`. A pair that several people answered is worth their mean, and so is a
        prompt of several pairs: responses to one prompt are alike, so intervals and verdict are over prompts. How often
        judge and people agree counts pairs of which people on the whole prefer one side; where the judge has a tie it
        agrees half.
    """
    asked = range(len(worths)) if prompts is None else prompts
    answered = [(of, each) for of, each in zip(asked, worths, strict=True) if each]
    people = sorted({person for _, each in answered for person in each})
    common: dict[str, Any] = {
        "ours": ours,
        "theirs": theirs,
        "pairs": len(worths),
        "answered": len(answered),
        "prompts": len({of for of, _ in answered}),
        "people": len(people),
    }
    if not answered:
        return {"verdict": None, "metrics": {}, "by_person": [], **common}
    together = _by_prompt((of, float(np.mean([*each.values()]))) for of, each in answered)
    concluded = conclude_outcomes(together, by_trained_reward=False)
    metrics = _rate("win_rate", together)
    metrics |= {f"{PREFIX}pairs": float(len(answered)), f"{PREFIX}people": float(len(people))}
    if agreement is not None:
        metrics[f"{PREFIX}agreement"] = agreement
    decided = []
    for of, each, judge in zip(asked, worths, judged or [None] * len(worths), strict=True):
        mean = float(np.mean([*each.values()])) if each else 0.5
        if judge is not None and mean != 0.5:
            by_people = 1.0 if mean > 0.5 else 0.0
            decided.append((of, 1.0 - abs(by_people - judge)))
    if decided:
        metrics |= _rate("judge_agreement", _by_prompt(decided))
    by_person = []
    for person in people:
        told = [(of, each[person]) for of, each in answered if person in each]
        own = win_rate(_by_prompt(told))
        by_person.append({"pairs": len(told), "win_rate": own.rate, "low": own.low, "high": own.high})
    by_person.sort(key=lambda row: (-row["pairs"], row["win_rate"]))  # not by name
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
    """Return the mean of each prompt's values, [N, 1]."""
    of_prompt: dict[Hashable, list[float]] = {}
    for prompt, value in values:
        of_prompt.setdefault(prompt, []).append(value)
    return np.array([[np.mean(each)] for each in of_prompt.values()])


def _rate(name: str, outcomes: Any) -> dict[str, float]:
    return {f"{PREFIX}{name}{end}": value for end, value in zip(("", "_low", "_high"), win_rate(outcomes), strict=True)}
