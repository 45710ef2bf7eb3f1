"""One process of this project on the random walks: `walks_ours.py JOB` prints its curve as one line of JSON."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from ppo_rlhf.recipes.random_walks import optimality
from ppo_rlhf.training import PPOConfig, PPOTrainer


def run(job: dict[str, Any]) -> list[dict[str, float]]:
    """Train, and return the mean optimality of each iteration with the seconds since the start."""
    trainer = PPOTrainer(PPOConfig(**job["config"]), job["policy"], reward=optimality, prompts=job["prompts"])
    history = trainer.train()
    seconds = accumulate(metrics["time/iteration_s"] for metrics in history)
    return [
        {"score": metrics["objective/scores"], "seconds": since}
        for metrics, since in zip(history, seconds, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps({"curve": run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))}))
