"""One setting, `ppo.curriculum` or `ppo.critic_column`, beside PPO without it, from the same SFT models. See
docs/results.md.

python benchmarks/curriculum.py --task walks --seeds 3,4,5 --json OUT
python benchmarks/curriculum.py --setting critic_column --task walks --seeds 3,4,5 --json OUT

With a curriculum the batch is no fair sample of the prompts, so the policy is measured apart: on all starts of the
random walks, on the calculator's questions that are not trained. The critic sees the answer, or a shortest walk.
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
from tables import markdown


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
    column: str  # what the critic sees
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
        column="path",
    ),
    "calculator": Task(
        recipe="calculator",
        demonstrations="calculator_demonstrations",
        prompts="calculator_prompts",
        reward=calculator.is_right,
        held_out=80,
        repeats=4,
        targets=(0.5, 0.6),
        column="answer",
    ),
}
TASKS["spoilt_calculator"] = replace(TASKS["calculator"], spoilt=60)
Curve = list[dict[str, float]]
"""Of each measured iteration its number of `episodes`, the measured `score`, what the critic explains of the batch's
returns (`explained`), and shares of the curriculum."""


def sides_of(setting: str, task: Task) -> dict[str, dict[str, Any]]:
    """Return the settings of the two sides: without and with the setting."""
    return {"without": {}, setting: {setting: 1.0 if setting == "curriculum" else task.column}}


def table_of(name: str) -> pd.DataFrame:
    """Return a file of data/01_raw."""
    return pd.read_json(PROJECT / f"data/01_raw/{name}.jsonl", lines=True)


def shortest_walk(start: str, edges: str) -> str:
    """Return the nodes after the start of a shortest walk to the goal, the first such walk in the alphabet."""
    walks, seen = [[start]], {start}
    while walks[0][-1] != random_walks.GOAL:
        walk = walks.pop(0)
        following = sorted(edge[1] for edge in edges.split() if edge[0] == walk[-1] and edge[1] not in seen)
        seen |= {*following}
        walks += [[*walk, node] for node in following]
    return " ".join(walks[0][1:])


def prompts_of(task: Task) -> list[dict[str, Any]]:
    """Return the task's prompts; those of the random walks get the column `path`."""
    rows: list[dict[str, Any]] = table_of(task.prompts).to_dict("records")
    return [row | ({"path": shortest_walk(row["prompt"], row["edges"])} if "edges" in row else {}) for row in rows]


def train(task: Task, policy: str, settings: dict[str, Any], seed: int) -> Curve:
    """Train from an SFT policy, and return the measured curve; it starts with the SFT policy."""
    rows = prompts_of(task)
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
    curve = [{"episodes": 0.0, "score": before, "explained": history[0]["val/explained_variance"]}]
    for row in trainer.held_out.rows:
        if number := int(row["iteration"]):
            metrics = history[number - 1]
            shares = {name: value for name, value in metrics.items() if name.startswith("curriculum/")}
            found = {"score": row["eval/reward"], "explained": metrics["val/explained_variance"]}
            curve.append({"episodes": metrics["episode"], **found, **shares})
    return curve


def episodes_to(target: float, curve: Curve) -> str:
    """Return the episodes until the first measured score at the target."""
    return next((f"{point['episodes']:.0f}" for point in curve if point["score"] >= target), "–")


def table(found: dict[str, list[Curve]], targets: Sequence[float]) -> str:
    """Return a Markdown table of both sides, and the interval of the difference over pairs of one seed."""
    means: dict[str, Callable[[Curve], float]] = {
        "mean of the curve": lambda curve: fmean(point["score"] for point in curve),
        "last five": lambda curve: fmean(point["score"] for point in curve[-5:]),
        "explained variance, first five": lambda curve: fmean(point["explained"] for point in curve[:5]),
        "explained variance": lambda curve: fmean(point["explained"] for point in curve),
    }
    heads = ["side", *(f"episodes to {target}" for target in targets), *means]
    lines = [heads, ["---"] * len(heads)]
    for side, curves in found.items():
        reached = [", ".join(episodes_to(target, curve) for curve in curves) for target in targets]
        lines.append([side, *reached, *(with_interval([mean(curve) for curve in curves]) for mean in means.values())])
    pairs = list(zip(*found.values(), strict=True))
    differences = [with_interval([mean(other) - mean(plain) for plain, other in pairs]) for mean in means.values()]
    lines.append(["difference", *[""] * len(targets), *differences])
    return markdown(lines)


def main() -> None:
    """Train both sides with each seed, from one SFT policy a seed; print the table and write the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("curriculum", "critic_column"), default="curriculum")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[42, 1, 2])
    parser.add_argument("--params", type=json.loads, default={}, help="settings of ppo for both sides, as JSON")
    parser.add_argument("--json", type=Path, help="where to write the curves")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    sides = sides_of(arguments.setting, task)
    found: dict[str, list[Curve]] = {side: [] for side in sides}
    for seed in arguments.seeds:
        parameters = recipe(task.recipe, seed)
        preparation = DataPreparationConfig(**parameters["data_preparation"])
        tables = split_demonstrations(table_of(task.demonstrations), preparation)
        shape = parameters["supervised_finetuning"]["from_scratch"]
        shape["max_position_embeddings"] = max(32, shape["max_position_embeddings"])  # room for the critic's column
        sft = SupervisedFinetuningConfig(**parameters["supervised_finetuning"])
        with tempfile.TemporaryDirectory(prefix="curriculum-") as folder:
            train_sft_policy(None, *tables, sft)[0].save(Path(folder) / "policy")
            for side, differs in sides.items():
                settings = {**arguments.params, **differs}
                found[side].append(train(task, str(Path(folder) / "policy"), settings, seed))
                print(f"seed {seed}, {side}: {found[side][-1][-1]}", file=sys.stderr, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found, task.targets))


if __name__ == "__main__":
    main()
