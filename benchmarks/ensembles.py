"""One reward model against three that may disagree (`reward.combine`), on the demo's policy. See docs/results.md.

python benchmarks/ensembles.py --sft SFT --work FOLDER --svg docs/images/ensembles.svg

SFT is the demo's SFT policy. Three reward models learn from pairs of the demo, sampled and labelled with noise by a
seed each. PPO then maximises one of them, or a combination of all, with a small KL penalty; the gold judge scores
held-out responses along the way. What FOLDER holds is not computed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from inputs import PROJECT, recipe
from intervals import with_interval
from ppo_rlhf import PPOConfig, PPOTrainer
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.demo.judge import gold_score
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.supervised.preferences import sample_preferences
from ppo_rlhf.supervised.reward_training import RewardModellingConfig, train_reward_model
from tables import markdown

SEEDS = (1, 2, 3)
PAIRS, HELD_OUT, INTERVAL = 2_000, 256, 8
"""Pairs of a reward model (the demo takes 8,000), prompts only for evaluations, iterations between evaluations."""
METHODS = {
    "one": "one reward model",
    "mean": "mean of three",
    "min": "min of three",
    "mean_minus_std": "mean_minus_std of three",
}
Points = list[dict[str, float]]


def reward_model(sft: PretrainedHandle, folder: Path, seed: int) -> str:
    """Return the directory of the reward model of a seed, trained as in the demo on fewer pairs."""
    if not folder.exists():
        parameters = recipe("demo", seed)
        config = PPOConfig(**parameters["ppo"])
        settings = RewardModellingConfig(**{**parameters["reward_modelling"], "pairs": PAIRS, "minimum_accuracy": 0.5})
        policy, tokenizer = sft.causal_lm(), sft.tokenizer()
        prompts = PromptReader.of(sft, config).read(table(training=True), PromptsConfig().column, "prompts")
        sampled = sample_preferences(
            policy,
            tokenizer,
            prompts,
            sampling_settings(config, tokenizer, policy),
            config,
            ("gold_score", gold_score),
            pairs=PAIRS,
            beta=settings.label_beta,
            seed=seed,
        )
        train_reward_model(sft, sampled, settings)[0].save(folder)
    return str(folder)


def table(*, training: bool) -> Any:
    """Return the demo's prompts to train on, or those that only evaluations see."""
    from datasets import Dataset

    rows = pd.read_json(PROJECT / "data/01_raw/prompts.jsonl", lines=True)
    return Dataset.from_pandas(rows[HELD_OUT:] if training else rows[:HELD_OUT], preserve_index=False)


def train(sft: str, models: Sequence[str], method: str, seed: int, iterations: int, kl_coef: float) -> Points:
    """Return KL, the gold judge's mean score and the disagreement at each evaluation of a run."""
    used = [models[SEEDS.index(seed)]] if method == "one" else models
    several: dict[str, Any] = {} if method == "one" else {"combine": method, "normalise": "component"}
    components: list[Any] = [{"type": "model", "path": path} for path in used]
    settings = {
        **recipe("demo", seed)["ppo"],
        "total_episodes": 64 * iterations,
        "kl_coef": kl_coef,
        "reward_normalisation": "running",
        "eval_interval": INTERVAL,
        "seed": seed,
    }
    trainer = PPOTrainer(
        PPOConfig(**settings),
        sft,
        reward=RewardConfig(components=components, **several),
        prompts=table(training=True),
        evaluation_prompts=table(training=False),
        judge=gold_score,
    )
    trainer.train()
    assert trainer.held_out is not None
    names = {"kl": "eval/kl", "gold": "eval/judge_score", "sft": "eval/judge_score_sft", "reward": "eval/reward"}
    names |= {"disagreement": "reward/disagreement", "score_s": "time/score_s"}
    return [
        {"iteration": row["iteration"], **{short: row[name] for short, name in names.items() if name in row}}
        for row in trainer.held_out.with_evaluations(trainer.history)
        if "eval/kl" in row
    ]


def summary(found: dict[str, list[Points]]) -> str:
    """Return the judge's gain at its best and at the end, by seed, KL and seconds as a Markdown table."""
    lines = [["", "gold judge's gain at the end", "largest gain", "KL at the end, nats", "scoring, s an iteration"]]
    lines.append(["---"] * 5)
    for method, runs in found.items():
        gains = [[point["gold"] - point["sft"] for point in run] for run in runs]
        cells = [", ".join(f"{pick(gain):.2f}" for gain in gains) for pick in (itemgetter(-1), max)]
        cells.append(with_interval([run[-1]["kl"] for run in runs], 1))
        cells.append(with_interval([float(np.mean([point["score_s"] for point in run])) for run in runs], 2))
        lines.append([METHODS[method], *cells])
    return markdown(lines)


def draw(found: dict[str, list[Points]], file: Path) -> None:
    """Plot as SVG the gold judge's gain over SFT against KL, a thin line a seed, and the disagreement by iteration."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ensembles", "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
    for colour, (method, runs) in zip(("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c"), found.items(), strict=False):
        for number, run in enumerate(runs):
            label = None if number else METHODS[method]
            gains = [0.0, *(point["gold"] - point["sft"] for point in run)]
            axes[0].plot([0.0, *(point["kl"] for point in run)], gains, color=colour, linewidth=0.9, label=label)
            if method != "one":
                apart = [point["disagreement"] for point in run]
                axes[1].plot([point["iteration"] for point in run], apart, color=colour, linewidth=0.9)
    words = (("gold judge's gain over SFT", "KL from SFT, nats a response"), ("disagreement", "iteration"))
    for plot, (title, below) in zip(axes, words, strict=True):
        plot.set_title(title, fontsize=10)
        plot.set_xlabel(below)
        plot.grid(visible=True, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(METHODS), frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train what is missing, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", type=Path, required=True, help="the demo's SFT policy")
    parser.add_argument("--work", type=Path, required=True, help="folder for reward models and results")
    parser.add_argument("--iterations", type=int, default=80, help="of 64 responses each")
    parser.add_argument("--kl-coef", type=float, default=0.005, help="the demo's is 0.08")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    sft = PretrainedHandle(str(arguments.sft))
    models = [reward_model(sft, arguments.work / f"reward_model_{seed}", seed) for seed in SEEDS]
    print(*(f"{path}: {PretrainedHandle(path).config().held_out_accuracy:.3f}" for path in models), sep="\n")
    found: dict[str, list[Points]] = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method in METHODS:
            file = arguments.work / f"{method}_{seed}.json"
            if not file.exists():
                points = train(str(arguments.sft), models, method, seed, arguments.iterations, arguments.kl_coef)
                file.write_text(json.dumps(points), encoding="utf-8")
            found[method].append(json.loads(file.read_text(encoding="utf-8")))
            if arguments.svg:
                draw(found, arguments.svg)
    print(summary(found))


if __name__ == "__main__":
    main()
