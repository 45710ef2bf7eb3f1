"""Train the recipe randomwalks here and by TRL 1.12's PPO, from the same SFT models. See docs/recipes.md.

python benchmarks/walks.py --peer-python PATH --seeds 3,4,5,6,7 --json OUT --svg docs/images/random_walks.svg

Without --peer-python only this project trains.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib
import pandas as pd
from matplotlib import pyplot as plt

from compare import ENVIRONMENT, machine, run_side
from inputs import PROJECT, recipe
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig, split_demonstrations
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig, train_sft_policy
from tables import markdown
from workload import QUIET_PEER

HERE = Path(__file__).resolve().parent
TARGET = 0.95
SHOWN = (1, 2, 3, 5, 10, 15, 20, 30, 40)
Curve = list[dict[str, float]]
"""Of each iteration `score`, the mean optimality of its walks before the update, and `seconds` since the start."""


def make_job(seed: int, folder: Path) -> Path:
    """Train the SFT policy of a seed as the recipe does, and write what both sides read."""
    parameters = recipe("randomwalks", seed)
    table = pd.read_json(PROJECT / "data/01_raw/random_walks.jsonl", lines=True)
    tables = split_demonstrations(table, DataPreparationConfig(**parameters["data_preparation"]))
    policy, _ = train_sft_policy(None, *tables, SupervisedFinetuningConfig(**parameters["supervised_finetuning"]))
    policy.save(folder / "policy")
    prompts = pd.read_json(PROJECT / "data/01_raw/random_walk_prompts.jsonl", lines=True).to_dict("records")
    job = {
        "policy": str(folder / "policy"),
        "prompts": prompts,
        "reward": str(PROJECT / "src/ppo_rlhf/recipes/random_walks.py"),
        "config": dataclasses.asdict(PPOConfig(**parameters["ppo"])),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return folder / "job.json"


def first_at(curve: Curve) -> int | None:
    """Return the first iteration whose walks reach the target, or None."""
    return next((number for number, point in enumerate(curve, 1) if point["score"] >= TARGET), None)


def curves_table(curves: dict[str, list[Curve]], seeds: Sequence[int]) -> str:
    """Return the scores by iteration as a Markdown table."""
    lines = [["iteration", *map(str, SHOWN)], ["---"] * (1 + len(SHOWN))]
    for side, found in curves.items():
        for seed, curve in zip(seeds, found, strict=True):
            scores = (f"{curve[number - 1]['score']:.3f}" if number <= len(curve) else "" for number in SHOWN)
            lines.append([f"{side}, seed {seed}", *scores])
    return markdown(lines)


def summary_table(curves: dict[str, list[Curve]]) -> str:
    """Return iterations and seconds to the target, and the last ten iterations' score, as a Markdown table."""
    lines = [
        ["side", f"iterations to {TARGET}", f"seconds to {TARGET}", "seconds an iteration", "last ten"],
        ["---"] * 5,
    ]
    for side, found in curves.items():
        reached = [first_at(curve) for curve in found]
        seconds = [None if at is None else curve[at - 1]["seconds"] for at, curve in zip(reached, found, strict=True)]
        each = median(curve[-1]["seconds"] / len(curve) for curve in found)
        lasts = [sum(point["score"] for point in curve[-10:]) / len(curve[-10:]) for curve in found]
        lines.append(
            [
                side,
                ", ".join("–" if at is None else str(at) for at in reached),
                ", ".join("–" if at is None else f"{at:.1f}" for at in seconds),
                f"{each:.2f}",
                ", ".join(f"{last:.3f}" for last in lasts),
            ]
        )
    return markdown(lines)


def draw(curves: dict[str, list[Curve]], file: Path) -> None:
    """Plot the curves as SVG, with a thin line for each seed: over iterations, and over seconds."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "walks", "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.2), sharey=True, layout="constrained")
    for colour, (side, found) in zip(("#1f77b4", "#d62728"), curves.items(), strict=False):
        for number, curve in enumerate(found):
            scores, label = [point["score"] for point in curve], side if number == 0 else None
            left.plot(range(1, 1 + len(curve)), scores, color=colour, linewidth=0.9, label=label)
            right.plot([point["seconds"] for point in curve], scores, color=colour, linewidth=0.9)
    for axes, what in ((left, "iteration"), (right, "seconds of training")):
        axes.set_xlabel(what)
        axes.axhline(1.0, color="#999999", linewidth=0.8, linestyle="--")
        axes.grid(visible=True, alpha=0.25)
    left.set_ylabel("optimality of the batch's walks")
    left.legend(loc="lower right", frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train each seed on each side in turn, write the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of an environment with TRL 1.12.0")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[42, 1, 2])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    sides = {"this project": (sys.executable, "walks_ours.py")}
    if arguments.peer_python:
        sides["TRL 1.12"] = arguments.peer_python, "walks_trl.py"
    curves: dict[str, list[Curve]] = {side: [] for side in sides}
    for number, seed in enumerate(arguments.seeds):
        with tempfile.TemporaryDirectory(prefix="walks-") as folder:
            job = make_job(seed, Path(folder))
            for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
                python, script = sides[side]
                curves[side].append(
                    run_side(side, [python, str(HERE / script), str(job)], ENVIRONMENT | QUIET_PEER)["curve"]
                )
                print(f"seed {seed}, {side}: {curves[side][-1][-1]}", file=sys.stderr, flush=True)
    description = machine(arguments.peer_python)
    print(description["processor"], curves_table(curves, arguments.seeds), summary_table(curves), sep="\n\n")
    if arguments.svg:
        draw(curves, arguments.svg)
    if arguments.json:
        arguments.json.write_text(json.dumps({**description, "curves": curves}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
