"""Rounds of feedback on the demo, in which the gold judge answers the files of pairs as a person would.

Each round collects pairs on the newest policy, answers them, trains the reward model anew on all answers, and PPO from
SFT: `python scripts/feedback_rounds.py`, in the project's folder, once there is an SFT policy. It prints a table after
each round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from ppo_rlhf.demo.judge import gold_score


def run(environment: list[str], pipelines: str, *settings: str) -> None:
    """Run pipelines as a user does, and stop if they fail."""
    subprocess.run(["kedro", "run", *environment, "--pipelines", pipelines, "--params", ",".join(settings)], check=True)


def answers(file: Path) -> list[dict[str, Any]]:
    """Let the judge answer a file of pairs."""
    pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [pair["prompt"] for pair in pairs]
    scores = [gold_score(prompts, [pair[side] for pair in pairs]) for side in ("response_a", "response_b")]
    return [
        {"number": pair["number"], "answer": "tie" if a == b else "A" if a > b else "B"}
        for pair, a, b in zip(pairs, *scores, strict=True)
    ]


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="demo", help="Kedro's environment")
    parser.add_argument("--experiment", default="ppo_rlhf_demo", help="the environment's, in MLflow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=600, help="pairs of a round")
    given = parser.parse_args()
    environment, folder = ["--env", given.env], Path(tempfile.mkdtemp(prefix="feedback_rounds_"))
    rows, answered = list[dict[str, Any]](), list[dict[str, Any]]()
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    for number in range(1, given.rounds + 1):
        begin, pairs = time.monotonic(), folder / f"pairs.{number}.jsonl"
        policy = "sft_policy" if number == 1 else "ppo_policy"
        collect = f"feedback.policy={policy}", "feedback.queue=rounds", f"feedback.pairs={given.pairs}"
        run(environment, "collect_feedback", *collect, f"feedback.export={pairs}")
        answered += answers(pairs)
        lines = "".join(f"{json.dumps(row)}\n" for row in answered)
        (folder / "answers.jsonl").write_text(lines, encoding="utf-8")
        run(environment, "reward_modelling,align", f"preferences_path={folder / 'answers.jsonl'}")
        [last] = mlflow.search_runs(experiment_names=[given.experiment], max_results=1, output_format="list")
        metrics = last.data.metrics
        rows.append(
            {
                "round": number,
                "answered pairs": len(answered),
                "reward model accuracy": metrics["reward_model/eval_accuracy"],
                "gold score of PPO": metrics["eval/judge_score"],
                "gold score of SFT": metrics["eval/judge_score_sft"],
                "win rate": metrics["eval/win_rate"],
                "minutes": (time.monotonic() - begin) / 60,
            }
        )
        print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
