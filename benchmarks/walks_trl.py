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
import trl.experimental.ppo.ppo_trainer as peer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

SHARED = (
    *("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "seed"),
    *("num_ppo_epochs", "local_rollout_forward_batch_size", "learning_rate", "lr_scheduler_type", "kl_coef", "vf_coef"),
    *("response_length", "temperature", "cliprange", "cliprange_value", "gamma", "lam", "whiten_rewards"),
)


class FunctionReward(nn.Module):
    """Stands for the reward model that TRL wants."""

    def __init__(self, job: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.function = runpy.run_path(job["reward"])["optimality"]
        self.rows = {row["prompt"]: row for row in job["prompts"]}
        self.tokenizer = tokenizer

    def score(self, sequences: Tensor, context: int) -> Tensor:
        """Return the rewards `[B]` of prompts of `context` tokens with their responses."""
        prompts, completions = (
            self.tokenizer.batch_decode(part, skip_special_tokens=True)
            for part in (sequences[:, :context], sequences[:, context:])
        )
        columns = {name: [self.rows[prompt][name] for prompt in prompts] for name in ("edges", "shortest")}
        return torch.tensor(self.function(prompts, completions, **columns))


class Curve(TrainerCallback):
    """Notes the score of each iteration, and the seconds since training began."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.score = self.started = 0.0

    def reward(self, model: nn.Module, sequences: Tensor, pad: int, context: int) -> Any:
        """Stand for TRL's `get_reward`, which also computes the values."""
        if not isinstance(model, FunctionReward):
            return get_reward(model, sequences, pad, context)
        scores = model.score(sequences, context)
        self.score = float(scores.mean())
        return None, scores, None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.points.append({"score": self.score, "seconds": time.perf_counter() - self.started})


get_reward = peer.get_reward


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
    curve = Curve()
    peer.get_reward = curve.reward
    prompts = tokenizer([row["prompt"] for row in job["prompts"]])["input_ids"]
    episodes = job["config"]["total_episodes"]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy).requires_grad_(False),
        value_model=value,
        reward_model=FunctionReward(job, tokenizer),
        train_dataset=[{"input_ids": prompts[row % len(prompts)]} for row in range(episodes)],
        callbacks=[curve],
    )
    np.random.seed(job["config"]["seed"])  # TRL shuffles minibatches by numpy and does not seed it
    trainer.train()
    print(json.dumps({"curve": curve.points}), file=output)


if __name__ == "__main__":
    main()
