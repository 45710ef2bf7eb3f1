"""One process of this project: `our_side.py JOB` prints its figures as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from inputs import word
from ppo_rlhf.recipes.obedience import strict
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
        "temperature": job.temperature,
        "missing_eos_penalty": job.missing_eos_penalty,
        "stop_token": "eos" if job.preset.chats or job.stop_token_id is not None else "none",
        "stop_token_id": job.stop_token_id,
        "dtype": job.precision,
        "device": job.device,
    }
    return PPOConfig(**{**settings, **job.overrides})


def run(job: Job) -> dict[str, Any]:
    """Train, and return seconds and tokens of each iteration, optimiser steps and peak memory."""
    prompts = job.rows or [" ".join(map(word, ids)) for ids in job.prompt_ids]
    trainer = PPOTrainer(our_config(job), job.policy, reward=job.reward or strict, prompts=prompts)
    started = time.process_time()
    history = list(trainer.train())
    cpu_s = (time.process_time() - started) / len(history)
    iterations = [
        {
            "experience": metrics["time/iteration_s"] - metrics["time/optimise_s"],
            "update": metrics["time/optimise_s"],
            "iteration": metrics["time/iteration_s"],
            "tokens": metrics["response/length"] * job.preset.batch,
            "score": metrics["objective/scores"],
        }
        for metrics in history
    ]
    steps = int(history[-1]["optimiser/steps"])
    return {"iterations": iterations, "steps": steps, "memory_mib": peak_memory_mib(job.device), "cpu_s": cpu_s}


if __name__ == "__main__":
    print(json.dumps(run(Job.read(sys.argv[1]))))
