"""How often the interval of `corrected_win_rate` has the true rate, and how wide it is. See docs/results.md.

python benchmarks/people_and_judge.py

In each draw people answer n pairs, a judge compares these and 500 others, and the true win rate by people is known. The
width is that of the interval as a share of the width by people's answers alone (`evaluation.win_rate`). A second table
has the share of the answers that suffices if pairs are not drawn alike, but by whether judge and reward disagree, with
the probabilities that make the variance least (`corrected_win_rate(weights=…)`).
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from ppo_rlhf.core.statistics import corrected_win_rate
from ppo_rlhf.evaluation.win_rate import win_rate
from tables import markdown

RATES, ANSWERS, OTHERS, DRAWS = tuple(tenth / 10 for tenth in range(1, 10)), (20, 40, 100), 500, 1_000
JUDGES = {
    "right on 92 %": (0.08, None),
    "right on 92 %, errors for ours": (0.08, 1.0),
    "right on 75 %": (0.25, None),
    "right on 75 %, errors for ours": (0.25, 1.0),
    "knows nothing, says ours on 80 %": (None, 0.8),
}
"""The share of pairs on which a judge is wrong (None: it does not look), and the share of its errors that are for ours
(None: whoever people prefer)."""


def simulate(judge: str, rate: float, answers: int, draws: int = DRAWS) -> tuple[float, float]:
    """Return the share of draws whose interval has the rate, and the mean width as a share of that without a judge."""
    rng, (of_lost, of_won) = np.random.default_rng([answers, round(100 * rate)]), _says_ours(judge, rate)
    covered = widths = alone = 0.0
    for _ in range(draws):
        people = rng.random(answers + OTHERS) < rate
        verdicts = rng.random(answers + OTHERS) < np.where(people, of_won, of_lost)
        _, low, high = corrected_win_rate(people[:answers], verdicts[:answers], verdicts[answers:])
        without = win_rate(people[:answers, None].astype(float))
        covered += low <= rate <= high
        widths += high - low
        alone += without.high - without.low
    return covered / draws, widths / alone


def _says_ours(judge: str, rate: float) -> tuple[float, float]:
    """Return how often a judge prefers ours of the pairs in which people do not, and in which they do."""
    wrong, ours = JUDGES[judge]
    if wrong is None:
        return (ours or 0.0,) * 2
    of_lost = wrong if ours is None else min(wrong * ours / (1.0 - rate), 0.95)
    return of_lost, 1.0 - (wrong - of_lost * (1.0 - rate)) / rate


def share_of_answers(judge: float, reward: float, rate: float) -> float:
    """Return the share of answers that suffices if pairs are drawn by the disagreement of judge and reward.

    The two are right with these probabilities, whatever the other says. With the residual R = Y - λ F of the estimate,
    an answer has the variance E[R²] if all pairs are drawn alike, and (Σ √(P E[R²]))² with the best probabilities; the
    sum has two terms, for pairs on which the two agree and for the others.
    """
    outcomes = np.array([*product((0, 1), (0, 1), (0, 1))])  # by people, by the judge, by the reward
    people, by_judge, by_reward = outcomes.T
    share = np.where(people, rate, 1.0 - rate)
    share = (
        share * np.where(by_judge == people, judge, 1.0 - judge) * np.where(by_reward == people, reward, 1.0 - reward)
    )
    centred, verdict = people - share @ people, by_judge - share @ by_judge
    squares = share * (centred - (share @ (centred * verdict)) / (share @ verdict**2) * verdict) ** 2
    parts = [
        (share[rows].sum() * squares[rows].sum()) ** 0.5 for rows in (by_judge == by_reward, by_judge != by_reward)
    ]
    return float(sum(parts) ** 2 / squares.sum())


def main() -> None:
    """Print the tables: the least and the most over the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    draws, rows = parser.parse_args().draws, []
    for judge, answers in product(JUDGES, ANSWERS):
        found = [simulate(judge, rate, answers, draws) for rate in RATES]
        cells = [judge, str(answers)]
        for part in (found, found[2:7]):
            cells += [f"{100 * min(each[0] for each in part):.1f} to {100 * max(each[0] for each in part):.1f} %"]
            cells += [f"{min(each[1] for each in part):.2f} to {max(each[1] for each in part):.2f}"]
        rows.append(cells)
    headings = ["judge", "answers", "has the rate, 0.1 to 0.9", "width", "has the rate, 0.3 to 0.7", "width"]
    print(markdown([headings, ["---"] * len(headings), *rows]), "\n")
    rights = (0.65, 0.75, 0.92)
    rows = [
        [f"{judge:.2f}", *(f"{share_of_answers(judge, reward, 0.7):.2f}" for reward in rights)]
        for judge in (0.75, 0.92)
    ]
    print(markdown([["judge right", *(f"reward right on {right:.2f}" for right in rights)], ["---"] * 4, *rows]))


if __name__ == "__main__":
    main()
