"""Rounds of feedback on the demo, in which the gold judge answers in MLflow's review queue as a person would.

Each round collects pairs on the newest policy, answers them, trains the reward model anew on all answers, and PPO from
SFT: `python scripts/feedback_rounds.py --svg docs/images/feedback_rounds.svg`, in the project's folder, once there is
an SFT policy. It prints a table after each round.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import mlflow
import pandas as pd

from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.demo.judge import gold_score

QUEUE, PERSON = "rounds", "the demo's gold judge"


def run(environment: list[str], pipelines: str, *settings: str) -> None:
    """Run pipelines as a user does, and stop if they fail."""
    subprocess.run(["kedro", "run", *environment, "--pipelines", pipelines, "--params", ",".join(settings)], check=True)


def answer_all(queues: ReviewQueues) -> int:
    """Let the judge answer all unanswered pairs, and return the number of answered pairs."""
    pairs = queues.read(QUEUE)
    waiting = [each for each in pairs if not each.answers]
    scores = [
        gold_score([str(each.prompt) for each in waiting], [getattr(each, side) for each in waiting])
        for side in ("response_a", "response_b")
    ]
    for each, a, b in zip(waiting, *scores, strict=True):
        queues.answer(QUEUE, each.trace_id, "tie" if a == b else "A" if a > b else "B", PERSON)
    return len(pairs)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the reward model's accuracy and PPO's gold score by round."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rounds", "font.family": "sans-serif"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    rounds = [row["round"] for row in rows]
    titles = {"reward model accuracy": "Reward model, accuracy on held-out pairs", "gold score of PPO": "Gold score"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axes.plot(rounds, [row[name] for row in rows], marker="o", label="PPO")
        axes.set(title=title, xlabel="round", xticks=rounds)
    axes.plot(rounds, [row["gold score of SFT"] for row in rows], linestyle="--", color="gray", label="SFT")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the rounds, print the table and plot it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="demo", help="Kedro's environment")
    parser.add_argument("--experiment", default="ppo_rlhf_demo", help="the environment's, in MLflow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=600, help="pairs of a round")
    parser.add_argument("--svg", type=Path, help="where to draw the rounds")
    given = parser.parse_args()
    environment = ["--env", given.env]
    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    queues, rows = ReviewQueues(uri, given.experiment), list[dict[str, Any]]()
    for number in range(1, given.rounds + 1):
        begin = time.monotonic()
        policy = "sft_policy" if number == 1 else "ppo_policy"
        collect = f"feedback.policy={policy}", f"feedback.queue={QUEUE}", f"feedback.pairs={given.pairs}"
        run(environment, "collect_feedback", *collect)
        answered = answer_all(queues)
        run(environment, "reward_modelling,align", f"preferences_path=mlflow:{QUEUE}")
        mlflow.set_tracking_uri(uri)
        [last] = mlflow.search_runs(experiment_names=[given.experiment], max_results=1, output_format="list")
        metrics = last.data.metrics  # not of a file: its folder is the environment's
        rows.append(
            {
                "round": number,
                "answered pairs": answered,
                "reward model accuracy": metrics["reward_model/eval_accuracy"],
                "gold score of PPO": metrics["eval/judge_score"],
                "gold score of SFT": metrics["eval/judge_score_sft"],
                "win rate": metrics["eval/win_rate"],
                "minutes": (time.monotonic() - begin) / 60,
            }
        )
        print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)
        if given.svg:
            draw(rows, given.svg)


if __name__ == "__main__":
    main()
