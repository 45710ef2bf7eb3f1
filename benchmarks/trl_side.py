"""One process of TRL 1.12, run by the Python of its own environment: `trl_side.py JOB` prints one line of JSON.

Settings are TRL's fastest: rollouts of the whole batch, fused AdamW, no gradient checkpointing. Its `bf16` has no
effect on its PPO, so an environment variable of accelerate turns autocast on (`Job.peer_environment`).
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl.experimental.ppo.ppo_trainer as peer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from trl_reward import FunctionReward, Row, take_functions
from workload import Job, peak_memory_mib, response_length_of


def load_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose pad token is in no text, because TRL finds padding by its id.

    The pad token of random models is outside the vocabulary; with full lengths the end of text is, too: then no
    response ends early.
    """
    if job.preset.chats:
        tokenizer = AutoTokenizer.from_pretrained(job.policy, padding_side="left")
        tokenizer.pad_token = tokenizer.unk_token  # SmolLM2 pads with its end of text
        return tokenizer
    size = job.preset.vocabulary
    words = {f"t{i}": i for i in range(size)} | {"<pad>": size, "<eos>": size + 1}
    backend = Tokenizer(WordLevel(words, unk_token="t1"))
    backend.pre_tokenizer = Whitespace()
    end = "<eos>" if job.stop_token_id is None else f"t{job.stop_token_id}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=end, padding_side="left")


def peer_config(job: Job) -> PPOConfig:
    """Return TRL's configuration. With more gradient_accumulation_steps than 1 it takes one step an epoch."""
    preset = job.preset
    rows = preset.trl_rows or preset.batch
    return PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        seed=job.seed,
        total_episodes=job.iterations * preset.batch,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=preset.batch // rows,
        num_mini_batches=preset.batch // preset.minibatch,
        num_ppo_epochs=preset.epochs,
        local_rollout_forward_batch_size=rows,
        learning_rate=job.learning_rate,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        kl_coef=job.kl_coef,
        response_length=preset.response_length,
        temperature=job.temperature,
        missing_eos_penalty=job.missing_eos_penalty,
        stop_token="eos" if job.preset.chats else None,
        stop_token_id=job.stop_token_id,
        use_cpu=job.device == "cpu",
        tf32=job.device == "cuda" or None,
        dataloader_pin_memory=job.device != "cpu",
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
    )


def recipe_reward(job: Job, tokenizer: PreTrainedTokenizerBase) -> FunctionReward:
    """Return the reward of the recipe obedience."""
    sys.path.append(str(Path(__file__).parents[1] / "src"))
    from ppo_rlhf.recipes.obedience import strict  # here, since importing ppo_rlhf sets a variable of cuBLAS

    def score(rows: list[Row], completions: list[str]) -> list[float]:
        columns = {name: [row[name] for row in rows] for name in ("kind", "limit", "names")}
        return strict([""] * len(rows), completions, [row["prompt"] for row in rows], **columns)

    return FunctionReward(tokenizer, job.prompt_ids, job.rows, score)


def load_models(job: Job, tokenizer: PreTrainedTokenizerBase) -> dict[str, nn.Module]:
    """Return TRL's four models in float32, from the files that our side reads."""
    policy = AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32)
    value = AutoModelForSequenceClassification.from_pretrained(job.policy, dtype=torch.float32, num_labels=1)
    nn.init.zeros_(value.score.weight)
    if job.reward is None:
        reward = recipe_reward(job, tokenizer)
    else:
        reward = AutoModelForSequenceClassification.from_pretrained(job.reward, dtype=torch.float32)
    models = {
        "model": policy,
        "ref_model": copy.deepcopy(policy).requires_grad_(False),
        "value_model": value,
        "reward_model": reward.eval().requires_grad_(False),
    }
    return {name: model.to(job.device) for name, model in models.items()}


class Timer(TrainerCallback):
    """Times the parts of each iteration."""

    def __init__(self, job: Job, stop_token_id: int | None) -> None:
        self.job, self.stop_token_id = job, stop_token_id
        self.iterations: list[dict[str, float]] = []
        self.steps = 0
        self.started = 0.0
        self.updating: float | None = None
        self.responses, self.score = torch.zeros(0), 0.0

    def wrap_functions(self) -> None:
        """Note when TRL's loop has sampled, when it first calls the trained models together (the update begins), and
        the scores of the recipe's reward.
        """
        generation, forward = peer.batch_generation, peer.forward

        def noted_generation(model: nn.Module, queries: Tensor, *rest: Any) -> Any:
            result = generation(model, queries, *rest)
            self.responses = result[0][:, queries.shape[1] :]
            return result

        def noted_forward(model: nn.Module, *rest: Any) -> Any:
            if isinstance(model, peer.PolicyAndValueWrapper) and self.updating is None:
                self.updating = self.now()
            return forward(model, *rest)

        def note_score(score: float) -> None:
            self.score = score

        peer.batch_generation, peer.forward = noted_generation, noted_forward
        take_functions(note_score)

    def count_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimiser steps."""
        step = optimizer.step

        def counted_step(*arguments: Any, **options: Any) -> Any:
            self.steps += 1
            return step(*arguments, **options)

        optimizer.step = counted_step

    def now(self) -> float:
        """Return the time in seconds after all work on the device."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = self.now()
        self.iterations.append(
            {
                "experience": self.updating - self.started,
                "update": ended - self.updating,
                "iteration": ended - self.started,
                "tokens": sum(response_length_of(row, self.stop_token_id) for row in self.responses.tolist()),
                "score": self.score,
            }
        )
        self.started, self.updating = self.now(), None


def main() -> None:
    """Train and print the figures; whatever TRL prints goes to stderr."""
    job = Job.read(sys.argv[1])
    transformers.logging.set_verbosity_error()
    output, sys.stdout = sys.stdout, sys.stderr
    torch.backends.cuda.enable_cudnn_sdp(False)  # as on our side: it makes a plan for each new shape, in 40 ms
    tokenizer = load_tokenizer(job)
    timer = Timer(job, tokenizer.eos_token_id if job.preset.chats else job.stop_token_id)
    timer.wrap_functions()
    trainer = PPOTrainer(
        args=peer_config(job),
        processing_class=tokenizer,
        **load_models(job, tokenizer),
        train_dataset=[{"input_ids": ids} for ids in job.prompt_ids],
        callbacks=[timer],
    )
    timer.count_steps(trainer.optimizer.optimizer)  # accelerate's wrapper is called for each pass, and steps less often
    np.random.seed(job.seed)  # TRL shuffles minibatches by numpy and does not seed it
    started = time.process_time()
    trainer.train()
    result = {
        "iterations": timer.iterations,
        "steps": timer.steps,
        "memory_mib": peak_memory_mib(job.device),
        "cpu_s": (time.process_time() - started) / len(timer.iterations),
    }
    print(json.dumps(result), file=output)


if __name__ == "__main__":
    main()
