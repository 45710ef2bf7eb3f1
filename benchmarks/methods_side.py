"""One process of `methods.py`: `methods_side.py JOB` trains and evaluates one policy and prints one line of JSON.

JOB is a JSON file with `method` (grpo4, grpo8, ppo), `seed`, `model` (a directory), `policy` (of ppo: the trained
policy's directory), `config` (the recipe's PPOConfig) and `folder` (where to write).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from inputs import raw_rows
from ppo_rlhf.recipes.obedience import copied, strict
from ppo_rlhf.training import PPOConfig, PPOTrainer
from workload import peak_memory_mib


def train_grpo(job: dict[str, Any], group: int) -> dict[str, Any]:
    """Train by TRL's GRPO with `group` responses to a prompt, save the policy, and return what it took."""
    config = PPOConfig(**job["config"])
    micro, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    batch = micro * accumulation
    updates = config.num_ppo_epochs * config.num_mini_batches
    steps = config.total_episodes // batch * updates
    scores, tokens = list[float](), list[int]()

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        texts = [chat[-1]["content"] for chat in completions]
        found = strict(texts, texts, prompts, *(columns[name] for name in ("kind", "limit", "names")))
        scores.append(sum(found) / len(found))
        tokens.append(sum(map(len, completion_ids)))
        end = trainer.processing_class.eos_token_id
        cut = [ids[-1] != end for ids in completion_ids]
        return [score - config.missing_eos_penalty * missing for score, missing in zip(found, cut, strict=True)]

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        train_dataset=Dataset.from_list(raw_rows()),
        args=GRPOConfig(
            output_dir=job["folder"],
            seed=job["seed"],
            num_generations=group,
            generation_batch_size=batch,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation // config.num_mini_batches,
            num_iterations=config.num_ppo_epochs,
            max_steps=steps,
            max_completion_length=config.response_length,
            temperature=config.temperature,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            warmup_steps=math.ceil(config.warmup_ratio * steps),
            beta=config.kl_coef,
            epsilon=config.cliprange,
            max_grad_norm=config.max_grad_norm,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    trainer.train()
    taken = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_started}
    trainer.save_model(job["folder"])
    trainer.processing_class.save_pretrained(job["folder"])
    return {**taken, "memory_mib": peak_memory_mib("cpu"), "curve": scores, "tokens": sum(tokens)}


def evaluate(job: dict[str, Any], policy: str) -> dict[str, float]:
    """Return a policy's means over its responses to the held-out prompts, with the KL from the model."""
    held_out = raw_rows("obedience_held_out")
    config = PPOConfig(**{**job["config"], "value_model": "shared"})
    trainer = PPOTrainer(config, policy, job["model"], reward=strict, evaluation_prompts=held_out)
    _, responses = trainer.evaluate()
    chats, completions = [row["prompt"] for row in held_out], list(responses["response"])
    means = {name: float(responses[name].mean()) for name in ("reward", "kl")}
    copies = copied(completions, completions, chats)
    return {**means, "copied": sum(copies) / len(copies), "cut_off": 1 - float(responses["terminated"].mean())}


METHODS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "grpo4": lambda job: {"grpo4": train_grpo(job, 4) | evaluate(job, job["folder"])},
    "grpo8": lambda job: {"grpo8": train_grpo(job, 8) | evaluate(job, job["folder"])},
    "ppo": lambda job: {"ppo": evaluate(job, job["policy"])},
}


def main() -> None:
    """Print the figures; whatever the libraries print goes to stderr."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(METHODS[job["method"]](job)), file=output)


if __name__ == "__main__":
    main()
