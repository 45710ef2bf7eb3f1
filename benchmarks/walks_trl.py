"""One process of TRL 1.12 on the random walks, by the Python of its own environment: `walks_trl.py JOB`.

It has the settings of our side by the names that both have; TRL has no gradient clipping in PPO and one learning rate.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from trl_reward import FunctionReward, Row, take_functions

SHARED = (
    *("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "seed"),
    *("num_ppo_epochs", "local_rollout_forward_batch_size", "learning_rate", "lr_scheduler_type", "kl_coef", "vf_coef"),
    *("response_length", "temperature", "cliprange", "cliprange_value", "gamma", "lam", "whiten_rewards"),
)


class Curve(TrainerCallback):
    """Notes the score of each iteration, and the seconds since training began."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.score = self.started = 0.0

    def note(self, score: float) -> None:
        """Keep the mean score of an iteration's walks."""
        self.score = score

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.points.append({"score": self.score, "seconds": time.perf_counter() - self.started})


def main() -> None:
    """Train and print the curve; whatever TRL prints goes to stderr."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    transformers.logging.set_verbosity_error()
    output, sys.stdout = sys.stdout, sys.stderr
    tokenizer = AutoTokenizer.from_pretrained(job["policy"])
    policy = AutoModelForCausalLM.from_pretrained(job["policy"], dtype=torch.float32)
    value = AutoModelForSequenceClassification.from_pretrained(job["policy"], dtype=torch.float32, num_labels=1)
    nn.init.zeros_(value.score.weight)
    shared = {name: job["config"][name] for name in SHARED}
    config = PPOConfig(
        **{**shared, "local_rollout_forward_batch_size": shared["per_device_train_batch_size"]},
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        stop_token="eos",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
    )
    optimality = runpy.run_path(job["reward"])["optimality"]

    def reward(rows: list[Row], completions: list[str]) -> list[float]:
        starts, edges, shortest = ([row[name] for row in rows] for name in ("prompt", "edges", "shortest"))
        return list(optimality(starts, completions, edges, shortest))

    curve = Curve()
    take_functions(curve.note)
    prompts = tokenizer([row["prompt"] for row in job["prompts"]])["input_ids"]
    episodes = job["config"]["total_episodes"]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy).requires_grad_(False),
        value_model=value,
        reward_model=FunctionReward(tokenizer, prompts, job["prompts"], reward),
        train_dataset=[{"input_ids": prompts[row % len(prompts)]} for row in range(episodes)],
        callbacks=[curve],
    )
    np.random.seed(job["config"]["seed"])  # TRL shuffles minibatches by numpy and does not seed it
    trainer.train()
    print(json.dumps({"curve": curve.points}), file=output)


if __name__ == "__main__":
    main()
