"""Tables and picture of the recipe obedience from finished runs, one a seed. See docs/results.md.

python benchmarks/obedience.py --strict DATA1,DATA2,DATA3 --naive DATA4,DATA5,DATA6 --svg docs/images/obedience.svg

DATA is the folder `data/obedience` (or `data/obedience_naive`) that `kedro run --env obedience --pipelines align
--params seed=…` left.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from inputs import raw_rows
from intervals import with_interval
from tables import markdown

ROWS = {
    "reward": "reward",
    "judge_score": "judge (copies count 0)",
    "win_rate": "win rate",
    "obedient": "obeys the instruction",
    "on_topic": "names the topic",
    "copied": "copies the request",
    "cut_off": "cut off",
    "kl": "KL from SFT, nats a response",
    "explained_variance": "critic's explained variance, last 8 iterations",
    "minutes": "minutes of training",
    "memory": "GiB while training",
}
EXAMPLES = 6


def figures(data: Path) -> dict[str, tuple[float | None, float]]:
    """Return each of `ROWS` of a run, for SFT (None where it has none) and PPO."""
    summary = json.loads((data / "08_reporting/evaluation_summary.json").read_text(encoding="utf-8"))
    history = pd.read_csv(data / "07_model_output/training_history/training_history.csv")
    found: dict[str, tuple[float | None, float]] = {}
    for name in ("reward", "judge_score", "obedient", "on_topic", "copied"):
        found[name] = summary[f"eval/{name}_sft"], summary[f"eval/{name}"]
    cut = [1 - float(responses(data, side)["terminated"].mean()) for side in ("sft", "ppo")]
    found["cut_off"] = cut[0], cut[1]
    found["kl"], found["win_rate"] = (0.0, summary["eval/kl"]), (None, summary["eval/win_rate"])
    found["explained_variance"] = None, float(history["val/explained_variance"].tail(8).mean())
    found["minutes"] = None, float(history["time/iteration_s"].sum() / 60)
    found["memory"] = None, float(history["memory/peak_bytes"].max() / 2**30)
    return found


def responses(data: Path, side: str) -> pd.DataFrame:
    """Return the held-out responses of a run, of `sft` or `ppo`."""
    return pd.read_parquet(data / f"07_model_output/{side}_evaluation.parquet")


def table(runs: dict[str, list[Path]]) -> str:
    """Return the means over seeds with their 95 % intervals as a Markdown table."""
    found = {form: [figures(data) for data in folders] for form, folders in runs.items()}
    everything = [figure for of_form in found.values() for figure in of_form]
    forms = [[f"PPO, {form}", f"{form} by seed"] for form in runs]
    lines = [["", "SFT", *(name for names in forms for name in names)], ["---"] * (2 + 2 * len(runs))]
    for name, words in ROWS.items():
        digits = 1 if name in ("kl", "minutes", "memory") else 3
        of_sft = [sft for figure in everything if (sft := figure[name][0]) is not None]
        line = [words, f"{np.mean(of_sft):.{digits}f}" if of_sft else ""]
        for of_form in found.values():
            values = [figure[name][1] for figure in of_form]
            line += [with_interval(values, digits), ", ".join(f"{value:.{digits}f}" for value in values)]
        lines.append(line)
    return markdown(lines)


def examples(data: Path) -> str:
    """Return a few held-out requests, drawn by a seed, with both policies' answers, as a Markdown table."""
    rows, sides = raw_rows("obedience_held_out"), [responses(data, side) for side in ("sft", "ppo")]
    lines = [["request", "SFT", "PPO"], ["---"] * 3]
    for number in sorted(random.Random(0).sample(range(len(rows)), EXAMPLES)):
        request = rows[number]["prompt"][0]["content"]
        if request not in sides[0]["prompt"][number]:
            raise SystemExit(f"{data}: its held-out prompts are not those of data/01_raw/obedience_held_out.jsonl")
        answers = (" ".join(side["response"][number].split()).replace("|", "\\|") for side in sides)
        scores = (f" ({side['reward'][number]:.0f})" for side in sides)
        lines.append([request, *(answer + score for answer, score in zip(answers, scores, strict=True))])
    return markdown(lines)


def draw(runs: dict[str, list[Path]], file: Path) -> None:
    """Plot as SVG the batches' reward and the critic's explained variance by iteration, a thin line a seed."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "obedience", "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.0), layout="constrained")
    panels = {
        "objective/scores": "reward of the batch",
        "val/explained_variance": "explained variance of the critic",
    }
    for colour, (form, folders) in zip(("#1f77b4", "#d62728"), runs.items(), strict=False):
        for number, data in enumerate(folders):
            history = pd.read_csv(data / "07_model_output/training_history/training_history.csv")
            for plot, key in zip(axes, panels, strict=True):
                points = history[["iteration", key]].dropna()
                label = None if number else form
                plot.plot(points["iteration"], points[key], color=colour, linewidth=0.9, label=label)
    for plot, words in zip(axes, panels.values(), strict=True):
        plot.set_title(words, fontsize=10)
        plot.set_xlabel("iteration")
        plot.grid(visible=True, alpha=0.25)
    axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Print the tables, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for form in ("strict", "naive"):
        parser.add_argument(f"--{form}", type=lambda text: [Path(part) for part in text.split(",")], default=[])
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    forms = {"strict reward": arguments.strict, "naive reward": arguments.naive}
    runs = {form: folders for form, folders in forms.items() if folders}
    print(table(runs), *(examples(folders[0]) for folders in runs.values()), sep="\n\n")
    if arguments.svg:
        draw(runs, arguments.svg)


if __name__ == "__main__":
    main()
