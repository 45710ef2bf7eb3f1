"""How often the interval of `corrected_win_rate` has the true rate, and how wide it is. See docs/results.md.

python benchmarks/people_and_judge.py

In each draw people answer n pairs, a judge compares these and 500 others, and the true win rate by people is known. The
width is that of the interval as a share of the width by people's answers alone (`evaluation.win_rate`).
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


def main() -> None:
    """Print the table: the least and the most over the rates."""
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
    print(markdown([headings, ["---"] * len(headings), *rows]))


if __name__ == "__main__":
    main()
