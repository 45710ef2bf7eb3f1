"""Tables (Markdown, to stdout) and figure of what parity.py measured.

    python tests/benchmarks/parity/summary.py "demo=demo.json" "stories=stories.json" --figure docs/images/parity.svg

Intervals are 95 %, from Student's t over seeds; differences are Welch's. Equal KL: each run's measured policies, the
SFT policy first, are joined by straight lines in the plane of KL and score, in the order of training; the score at a KL
is the best on that path at this KL or below. `objective` is score − β · KL, what both sides maximise.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Group = tuple[str, str, float]  # side, variant, kl_coef
LABELS = {"ours": "this project", "trl": "TRL 1.12.0"}
COLOURS = {"ours": "#1f5fa8", "trl": "#c8501e"}
GRID_POINTS, POINTS_A_SEGMENT = 40, 20


def read_groups(path: str) -> dict[Group, list[dict[str, Any]]]:
    """Return the runs of a results file by side, variant and KL coefficient, in the order of seeds."""
    groups: dict[Group, list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(json.loads(Path(path).read_text(encoding="utf-8"))["runs"], key=lambda run: run["seed"]):
        groups[run["side"], run["variant"], run["settings"]["kl_coef"]].append(run)
    return dict(sorted(groups.items(), key=lambda item: (item[0][2], item[0][1] != "default", item[0][0] != "ours")))


def mean_interval(values: Array, axis: int = 0) -> tuple[Array, Array]:
    """Return mean and half-width of its 95 % interval."""
    n = values.shape[axis]
    error = values.std(axis=axis, ddof=1) / np.sqrt(n)
    return values.mean(axis=axis), stats.t.ppf(0.975, n - 1) * error


def welch(first: Array, second: Array) -> tuple[float, float]:
    """Return the difference of the means (first − second) and the half-width of its 95 % interval."""
    a, b = (sample.var(ddof=1) / len(sample) for sample in (first, second))
    if a + b == 0:
        return float(first.mean() - second.mean()), 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return float(first.mean() - second.mean()), float(stats.t.ppf(0.975, freedom) * np.sqrt(a + b))


def finals(runs: list[dict[str, Any]], key: str) -> Array:
    """Return one number a seed, of the last policy."""
    rows = [(run["evaluations"][-1], run["settings"]["kl_coef"]) for run in runs]
    if key == "objective":
        return np.array([row["score"] - kl_coef * row["kl"] for row, kl_coef in rows])
    return np.array([row[key] for row, _ in rows])


def at_equal_kl(runs: list[dict[str, Any]], grid: Array) -> Array:
    """Return the best scores [seeds, grid] within given KLs."""
    rows = []
    for run in runs:
        path = np.array([(row["kl"], row["score"]) for row in run["evaluations"]])
        place = np.linspace(0, len(path) - 1, (len(path) - 1) * POINTS_A_SEGMENT + 1)
        kl, score = (np.interp(place, np.arange(len(path)), path[:, axis]) for axis in (0, 1))
        order = np.argsort(kl, kind="stable")
        rows.append(np.interp(grid, kl[order], np.maximum.accumulate(score[order])))
    return np.array(rows)


def reach(*groups: list[dict[str, Any]]) -> float:
    """Return the largest KL that every run of the groups has come to."""
    return min(max(row["kl"] for row in run["evaluations"]) for runs in groups for run in runs)


def table_of_finals(groups: dict[Group, list[dict[str, Any]]]) -> list[str]:
    """Return the last policies' measures, one line a group; differences are to ours at the same KL coefficient."""
    last = next(iter(groups.values()))[0]["evaluations"][-1]
    keys = ["score", "kl", "objective", "length", *(key for key in ("gold", "win_rate") if key in last)]
    titles = ["side", "variant", "seeds", "β", *keys, "objective less ours", "score less ours at equal KL"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for (side, variant, kl_coef), runs in groups.items():
        ours = groups.get(("ours", "default", kl_coef), runs)
        cells = [LABELS[side], variant, str(len(runs)), f"{kl_coef:g}"]
        cells += [_cell(*mean_interval(finals(runs, key))) for key in keys]
        if runs is ours:
            cells += ["–", "–"]
        else:
            kl = np.array([reach(runs, ours)])
            equal = welch(at_equal_kl(runs, kl)[:, 0], at_equal_kl(ours, kl)[:, 0])
            cells.append(_signed(*welch(finals(runs, "objective"), finals(ours, "objective"))))
            cells.append(f"{_signed(*equal)} at {kl[0]:.2f}")
        lines.append(_line(cells))
    return lines


def table_at_equal_kl(groups: dict[Group, list[dict[str, Any]]], kl_coef: float) -> list[str]:
    """Return scores at equal KL of both sides' default variants."""
    ours, peer = groups["ours", "default", kl_coef], groups["trl", "default", kl_coef]
    grid = np.linspace(0, reach(ours, peer), 6)[1:]
    first, second = at_equal_kl(ours, grid), at_equal_kl(peer, grid)
    titles = [f"KL, nats a response (β = {kl_coef:g})", LABELS["ours"], LABELS["trl"], "ours less TRL's"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for i, kl in enumerate(grid):
        cells = [_cell(*mean_interval(side[:, i])) for side in (first, second)]
        lines.append(_line([f"{kl:.2f}", *cells, _signed(*welch(first[:, i], second[:, i]))]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(mean: Any, half: Any) -> str:
    return f"{mean:.3f} ± {half:.3f}"


def _signed(mean: float, half: float) -> str:
    return f"{mean:+.3f} ± {half:.3f}"


def draw(tasks: dict[str, dict[Group, list[dict[str, Any]]]], path: Path) -> None:
    """Draw each task's default variants: held-out score against KL, and the training batches' score by iteration."""
    plt.switch_backend("svg")
    plt.rcParams.update({"svg.hashsalt": "parity", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(2, len(tasks), figsize=(3.9 * len(tasks), 5.8), squeeze=False, layout="constrained")
    for (above, below), (title, groups) in zip(axes.T, tasks.items(), strict=True):
        lowest = min(kl_coef for _, _, kl_coef in groups)
        for side, colour in COLOURS.items():
            runs = groups[side, "default", lowest]
            for run in runs:
                points = np.array([(row["kl"], row["score"]) for row in run["evaluations"]]).round(4)
                above.plot(*points.T, color=colour, lw=0.5, alpha=0.45)
            grid = np.linspace(0, reach(runs), GRID_POINTS)
            _band(above, grid, at_equal_kl(runs, grid), colour, f"{LABELS[side]}, {len(runs)} seeds")
            training = np.array([[row["score"] for row in run["history"]] for run in runs])
            _band(below, np.arange(1, training.shape[1] + 1.0), training, colour, LABELS[side])
        above.set(title=f"{title} (β = {lowest:g})", xlabel="KL from SFT, nats a response", ylabel="score, held out")
        below.set(xlabel="iteration (64 responses)", ylabel="score, training batch")
    for axis in axes.flat:
        axis.legend(frameon=False, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _band(axis: Any, x: Array, rows: Array, colour: str, label: str) -> None:
    mean, half = mean_interval(rows)
    axis.plot(x, mean, color=colour, lw=1.6, label=label)
    axis.fill_between(x, mean - half, mean + half, color=colour, alpha=0.18, lw=0)


def main() -> None:
    """Print the tables of every results file, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="title=results.json")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    tasks = {}
    for argument in arguments.results:
        title, _, path = argument.rpartition("=")
        tasks[title] = read_groups(path)
    for title, groups in tasks.items():
        print(f"\n## {title}\n", *table_of_finals(groups), sep="\n")
        for kl_coef in sorted({kl_coef for side, variant, kl_coef in groups if (side, variant) == ("trl", "default")}):
            print("", *table_at_equal_kl(groups, kl_coef), sep="\n")
    if arguments.figure:
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(tasks, arguments.figure)


if __name__ == "__main__":
    main()
