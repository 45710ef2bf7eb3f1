"""PPO, SAO and VAPO on the random walks, with the sampler of the iteration and with an older one. See docs/recipes.md.

python benchmarks/critics.py --seeds 3,4,5 --lags 0,4 --json OUT

With a lag of k an iteration's walks are sampled by the policy as it was k iterations before, as an asynchronous trainer
has them; the settings are the recipes'. PPO then compares with the policy before the update, as it always does.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import PreTrainedModel

import walks
from inputs import recipe
from intervals import with_interval
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.batch_sampling import sample_batch
from ppo_rlhf.ppo.rollouts import Rollouts, measure
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.recipes.random_walks import optimality
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tables import markdown

SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("randomwalks", {}),
    "PPO, importance_cap 2": ("randomwalks", {"importance_cap": 2.0}),
    "SAO": ("sao", {}),
    "VAPO": ("vapo", {}),
}
"""Each side's recipe, and what differs from it."""
SHOWN = ("policy/clipfrac_avg", "policy/rollout_logprob_gap", "val/explained_variance", "policy/grad_norm")


def sampler_of(lag: int) -> Callable[..., Rollouts]:
    """Return what stands for `loop.generate_rollouts`: the policy of `lag` iterations ago samples, or the first one."""
    kept: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    older: list[PreTrainedModel] = []

    def generate(
        state: TrainingState, reference: PreTrainedModel, prompts: PromptDataset, scorer: RewardScorer
    ) -> Rollouts:
        state.progress.clock.restart()
        kept.append({name: tensor.clone() for name, tensor in state.learner.policy.state_dict().items()})
        if not older:
            older.append(copy.deepcopy(state.learner.policy))
        older[0].load_state_dict(kept[0])
        sampler, progress = replace(state.sampler, policy=older[0]), state.progress
        chosen, responses, scores, redraws = sample_batch(
            sampler, progress.iteration + 1, prompts, scorer, progress.clock
        )
        return replace(
            measure(state.learner, state.sampler, state.progress, reference, chosen, responses),
            scores=scores,
            redraws=redraws,
        )

    return generate


def run(job: dict[str, Any], settings: dict[str, Any], lag: int) -> list[dict[str, float]]:
    """Train, and return each iteration's score, the mean optimality of its walks, with what `SHOWN` names."""
    trainer = PPOTrainer(PPOConfig(**settings), job["policy"], reward=optimality, prompts=job["prompts"])
    with patch.object(loop, "generate_rollouts", sampler_of(lag)):
        history = trainer.train()
    return [{"score": row["objective/scores"], **{name: row[name] for name in SHOWN}} for row in history]


def table(found: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return a Markdown table of all sides: last ten iterations, iterations to the target, tokens left out, gap."""
    lines = [["side", "mean of the last ten", f"iterations to {walks.TARGET}", *SHOWN], ["---"] * (3 + len(SHOWN))]
    for side, curves in found.items():
        lasts = [fmean(point["score"] for point in curve[-10:]) for curve in curves]
        reached = ["–" if (at := walks.first_at(curve)) is None else str(at) for curve in curves]
        means = [f"{fmean(point[name] for curve in curves for point in curve):.3f}" for name in SHOWN]
        lines.append([side, with_interval(lasts), ", ".join(reached), *means])
    return markdown(lines)


def main() -> None:
    """Train each side with each lag and seed, from one SFT policy a seed; print the table and write the curves."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[42, 1, 2])
    parser.add_argument("--lags", type=numbers, default=[0])
    parser.add_argument("--sides", type=lambda text: text.split(";"), default=list(SIDES))
    parser.add_argument("--params", type=json.loads, default={}, help="settings of ppo for all sides, as JSON")
    parser.add_argument("--json", type=Path, help="where to write the curves")
    arguments = parser.parse_args()
    found: dict[str, list[list[dict[str, float]]]] = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="critics-") as folder:
            job = json.loads(walks.make_job(seed, Path(folder)).read_text(encoding="utf-8"))
            for side, lag in ((side, lag) for lag in arguments.lags for side in arguments.sides):
                environment, differs = SIDES[side]
                settings = recipe(environment, seed)["ppo"] | differs | arguments.params
                name = side if lag == 0 else f"{side}, {lag} iterations behind"
                found.setdefault(name, []).append(run(job, settings, lag))
                last = fmean(point["score"] for point in found[name][-1][-10:])
                print(f"seed {seed}, {name}: {last:.3f}", file=sys.stderr, flush=True)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
