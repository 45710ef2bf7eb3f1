"""Prompts by difficulty (`ppo.curriculum`) beside uniform prompts, from the same SFT models. See docs/results.md.

python benchmarks/curriculum.py --task walks --seeds 3,4,5 --json OUT

With a curriculum the batch is no fair sample of the prompts, so the policy is measured apart: on all starts of the
random walks, on the calculator's questions that are not trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from inputs import PROJECT, recipe
from intervals import with_interval
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.recipes import calculator, random_walks
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig, split_demonstrations
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig, train_sft_policy
from ppo_rlhf.training import PPOConfig, PPOTrainer


@dataclass(frozen=True)
class Task:
    """A recipe whose prompts are visited often, and whose reward says 1 where a prompt is solved."""

    recipe: str
    demonstrations: str
    prompts: str
    reward: Callable[..., list[float]]
    held_out: int  # prompts that are not trained; 0: all prompts are trained, and measured
    repeats: int  # responses to each measured prompt
    targets: tuple[float, ...]  # scores to reach
    spoilt: int = 0  # trained prompts whose `answer` is made wrong, so that no response solves them


TASKS = {
    "walks": Task(
        recipe="randomwalks",
        demonstrations="random_walks",
        prompts="random_walk_prompts",
        reward=random_walks.optimality,
        held_out=0,
        repeats=20,
        targets=(0.9, 0.95),
    ),
    "calculator": Task(
        recipe="calculator",
        demonstrations="calculator_demonstrations",
        prompts="calculator_prompts",
        reward=calculator.is_right,
        held_out=80,
        repeats=4,
        targets=(0.5, 0.6),
    ),
}
TASKS["spoilt_calculator"] = replace(TASKS["calculator"], spoilt=60)
SIDES: dict[str, dict[str, Any]] = {"uniform": {}, "curriculum": {"curriculum": 1.0}}
Curve = list[dict[str, float]]
"""Of each measured iteration its number of `episodes`, the measured `score`, and shares of the curriculum."""


def table_of(name: str) -> pd.DataFrame:
    """Return a file of data/01_raw."""
    return pd.read_json(PROJECT / f"data/01_raw/{name}.jsonl", lines=True)


def train(task: Task, policy: str, settings: dict[str, Any], seed: int) -> Curve:
    """Train from an SFT policy, and return the measured curve; it starts with the SFT policy."""
    rows = table_of(task.prompts).to_dict("records")
    order = permutation(len(rows), seed, "held out").tolist()
    measured, trained = order[: task.held_out or None], order[task.held_out :]
    training = [rows[row] | ({"answer": -1} if place < task.spoilt else {}) for place, row in enumerate(trained)]
    config = PPOConfig(**(recipe(task.recipe, seed)["ppo"] | {"eval_interval": 2, **settings}))
    trainer = PPOTrainer(
        config,
        policy,
        reward=task.reward,
        prompts=training,
        evaluation_prompts=[rows[row] for row in measured for _ in range(task.repeats)],
    )
    assert trainer.held_out is not None
    before = trainer.evaluate().metrics["eval/reward"]
    history = trainer.train()
    curve = [{"episodes": 0.0, "score": before}]
    for row in trainer.held_out.rows:
        if number := int(row["iteration"]):
            shares = {name: value for name, value in history[number - 1].items() if name.startswith("curriculum/")}
            curve.append({"episodes": history[number - 1]["episode"], "score": row["eval/reward"], **shares})
    return curve


def episodes_to(target: float, curve: Curve) -> str:
    """Return the episodes until the first measured score at the target."""
    return next((f"{point['episodes']:.0f}" for point in curve if point["score"] >= target), "–")


def table(found: dict[str, list[Curve]], targets: Sequence[float]) -> str:
    """Return a Markdown table of both sides, and the interval of the difference over pairs of one seed."""
    heads = ["prompts", *(f"episodes to {target}" for target in targets), "mean of the curve", "last five"]
    lines = [heads, ["---"] * len(heads)]
    means = {side: [fmean(point["score"] for point in curve) for curve in curves] for side, curves in found.items()}
    lasts = {
        side: [fmean(point["score"] for point in curve[-5:]) for curve in curves] for side, curves in found.items()
    }
    for side, curves in found.items():
        reached = [", ".join(episodes_to(target, curve) for curve in curves) for target in targets]
        lines.append([side, *reached, with_interval(means[side]), with_interval(lasts[side])])
    uniform, other = SIDES
    less = [with_interval([b - a for a, b in zip(each[uniform], each[other], strict=True)]) for each in (means, lasts)]
    lines.append(["difference", *[""] * len(targets), *less])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Train both sides with each seed, from one SFT policy a seed; print the table and write the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[42, 1, 2])
    parser.add_argument("--params", type=json.loads, default={}, help="settings of ppo for both sides, as JSON")
    parser.add_argument("--json", type=Path, help="where to write the curves")
    arguments = parser.parse_args()
    task, found = TASKS[arguments.task], {side: [] for side in SIDES}
    for seed in arguments.seeds:
        parameters = recipe(task.recipe, seed)
        preparation = DataPreparationConfig(**parameters["data_preparation"])
        tables = split_demonstrations(table_of(task.demonstrations), preparation)
        sft = SupervisedFinetuningConfig(**parameters["supervised_finetuning"])
        with tempfile.TemporaryDirectory(prefix="curriculum-") as folder:
            train_sft_policy(None, *tables, sft)[0].save(Path(folder) / "policy")
            for side, differs in SIDES.items():
                settings = {**arguments.params, **differs}
                found[side].append(train(task, str(Path(folder) / "policy"), settings, seed))
                print(f"seed {seed}, {side}: {found[side][-1][-1]}", file=sys.stderr, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found, task.targets))


if __name__ == "__main__":
    main()
