"""Run one job through TRL's last PPO trainer. Started by parity.py under the peer's Python: `trl_side.py JOB.json`.

The trainer is used as it is. Two things are handed to it from outside: numpy's seed, which it leaves alone although
it shuffles minibatches with it, and, for a reward that is a Python function, a branch in its `get_reward`.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch
import trl.experimental.ppo.ppo_trainer as peer
from job import Job
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class BackboneWithHead(nn.Module):
    """What TRL needs of a reward or value model: a backbone, found by its prefix, and a linear head `score`."""

    base_model_prefix = "backbone"

    def __init__(self, backbone: nn.Module, width: int) -> None:
        """Start with the head at 0, so that the first values are 0 everywhere."""
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(width, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)


class FunctionReward(nn.Module):
    """A reward of the decoded text in the place of a reward model."""

    def __init__(self, reference: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        module, name = reference.split(":")
        self.function: Callable[..., list[float]] = getattr(importlib.import_module(module), name)
        self.tokenizer = tokenizer

    def forward(self, query_responses: Tensor, context_length: int) -> Tensor:
        """Return one score a row [B]; the responses are those that TRL has cut behind the stop token."""
        parts = query_responses[:, :context_length], query_responses[:, context_length:]
        prompts, completions = (self.tokenizer.batch_decode(part, skip_special_tokens=True) for part in parts)
        return torch.tensor(self.function(prompts, completions), dtype=torch.float32)


def install_function_rewards() -> None:
    """Let TRL's `get_reward` call a FunctionReward; every other model goes where it went before."""
    original = peer.get_reward

    def get_reward(model: nn.Module, query_responses: Tensor, pad_token_id: int, context_length: int) -> Any:
        if isinstance(model, FunctionReward):
            return None, model(query_responses, context_length), None
        return original(model, query_responses, pad_token_id, context_length)

    peer.get_reward = get_reward


def load_scalar_model(directory: str) -> nn.Module:
    """Load a reward model: this project's layout (a backbone of any causal model), or transformers' own classes."""
    raw = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    if raw["model_type"] != "causal_lm_reward":
        return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    text = raw["text_config"]
    config = AutoConfig.for_model(**text)
    model = BackboneWithHead(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).base_model, config.hidden_size
    )
    model.load_state_dict(load_file(Path(directory) / "model.safetensors"))
    return model


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer. TRL finds padding by its id, so it must be an id that the model never samples as text."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.add_special_tokens({"pad_token": "<outside the vocabulary>"})  # masked before it reaches a model
    return tokenizer


class Saver(TrainerCallback):
    """Saves the policy where the job asks for it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called once an iteration; TRL's global step counts iterations."""
        if self.job.is_saved(state.global_step):
            kwargs["model"].policy.save_pretrained(self.job.saved_policy(state.global_step))


def peer_config(job: Job, output_dir: str) -> PPOConfig:
    """Return TRL's configuration of a job.

    `accumulated` reaches the same batch by gradient accumulation, one minibatch a micro-batch, as on a small device.
    """
    settings, accumulation = job.settings, 1
    if job.variant == "accumulated":
        accumulation = settings.num_mini_batches
    return PPOConfig(
        output_dir=output_dir,
        seed=job.seed,
        total_episodes=settings.iterations * settings.batch_size,
        per_device_train_batch_size=settings.batch_size // accumulation,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=settings.num_mini_batches,
        num_ppo_epochs=settings.num_ppo_epochs,
        local_rollout_forward_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        kl_coef=settings.kl_coef,
        kl_estimator="k1",
        response_length=settings.response_length,
        temperature=settings.temperature,
        stop_token="eos",
        missing_eos_penalty=settings.missing_eos_penalty,
        whiten_rewards=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def build_trainer(job: Job, history: list[dict[str, float]]) -> PPOTrainer:
    """Return the trainer; its log is kept in `history`."""
    tokenizer = load_tokenizer(job.sft)
    if tokenizer.eos_token_id != job.stop_token_id:
        raise SystemExit(f"{job.sft}: the tokenizer's end of text is {tokenizer.eos_token_id}, not {job.stop_token_id}")
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(job.sft, dtype=torch.float32)
    if job.reward_is_model:
        reward, value = load_scalar_model(job.reward), load_scalar_model(job.reward)
    else:
        reward = FunctionReward(job.reward, tokenizer)
        value = BackboneWithHead(copy.deepcopy(policy.base_model), policy.config.hidden_size)
    trainer = PPOTrainer(
        args=peer_config(job, tempfile.mkdtemp()),
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy).requires_grad_(False),
        reward_model=reward.eval().requires_grad_(False),
        value_model=value,
        train_dataset=[{"input_ids": ids} for ids in job.prompt_ids],
        callbacks=[Saver(job)],
    )
    trainer.log = lambda metrics, *_: history.append(
        {"iteration": len(history) + 1, "score": metrics["objective/scores"], "kl": metrics["objective/kl"]}
    )
    return trainer


def main() -> None:
    """Run the job that the command line names."""
    job = Job.read(sys.argv[1])
    install_function_rewards()
    history: list[dict[str, float]] = []
    trainer = build_trainer(job, history)
    np.random.seed(job.seed)
    trainer.train()
    job.write_history(history)


if __name__ == "__main__":
    main()
