"""One process of this project: `our_side.py JOB` prints its figures as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from inputs import word
from ppo_rlhf.training import PPOConfig, PPOTrainer
from workload import Job, peak_memory_mib


def our_config(job: Job) -> PPOConfig:
    """Return this project's configuration of a job; every other setting has its default."""
    preset = job.preset
    settings: dict[str, Any] = {
        "seed": job.seed,
        "total_episodes": job.iterations * preset.batch,
        "per_device_train_batch_size": preset.batch,
        "num_mini_batches": preset.batch // preset.minibatch,
        "num_ppo_epochs": preset.epochs,
        "local_rollout_forward_batch_size": preset.batch,
        "learning_rate": job.learning_rate,
        "kl_coef": job.kl_coef,
        "response_length": preset.response_length,
        "temperature": 1.0,
        "stop_token": "none" if job.stop_token_id is None else "eos",
        "stop_token_id": job.stop_token_id,
        "dtype": job.precision,
        "device": job.device,
    }
    return PPOConfig(**{**settings, **job.overrides})


def run(job: Job) -> dict[str, Any]:
    """Train, and return seconds and tokens of each iteration, optimiser steps and peak memory."""
    prompts = [" ".join(map(word, ids)) for ids in job.prompt_ids]
    trainer = PPOTrainer(our_config(job), job.policy, reward=job.reward, prompts=prompts)
    history = list(trainer.train())
    iterations = [
        {
            "experience": metrics["time/iteration_s"] - metrics["time/optimise_s"],
            "update": metrics["time/optimise_s"],
            "iteration": metrics["time/iteration_s"],
            "tokens": metrics["response/length"] * job.preset.batch,
        }
        for metrics in history
    ]
    steps = int(history[-1]["optimiser/steps"])
    return {"iterations": iterations, "steps": steps, "memory_mib": peak_memory_mib(job.device)}


if __name__ == "__main__":
    print(json.dumps(run(Job.read(sys.argv[1]))))
