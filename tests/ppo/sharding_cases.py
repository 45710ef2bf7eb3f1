"""Runs that two processes with FSDP2 and one process without must do alike; `test_sharding` starts them by torchrun.

torchrun --nproc_per_node 2 -m tests.ppo.sharding_cases RESULTS FOLDER
torchrun --nproc_per_node 2 -m tests.ppo.sharding_cases RESULTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.model_files import gathered
from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.passes.sharding import shard_in_place
from ppo_rlhf.passes.transfers import refilled
from ppo_rlhf.rewards.scorers import ModelScorer
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runtime.processes import from_all, is_main_process, process_count, shards_models, wait_for_all
from tests.ppo_runs import MEASURED, Run, build_model, build_prompts_alike, build_run, build_tokenizer, weight_sums

ITERATIONS, RESPONSES = 5, 8
CASES: dict[str, dict[str, Any]] = {
    "token budget, GPT-2 with a tied head": {
        **{"kind": "gpt2", "max_tokens_per_micro_batch": 16, "gradient_accumulation_steps": 2},
        **{"weight_decay": 0.1, "ema_decay": 0.8, "num_ppo_epochs": 2},
    },
    "shared trunk, critic first, checkpointing": {
        **{"value_model": "shared", "vf_coef": 0.5, "critic_warmup_iterations": 1, "value_learning_rate": 3e-3},
        **{"gradient_checkpointing": True, "entropy_coef": 0.01},
    },
    "LoRA": {"use_peft": True, "lora_r": 2},
    "a shared prefix": {"kind": "gpt2", "prompts": build_prompts_alike(), "gradient_checkpointing": True},
}
MORE: dict[str, dict[str, Any]] = {
    "critic from the reward model, early stop": {"value_model": "reward_init", "target_kl": 1e-3, "num_ppo_epochs": 2},
    "critic first, checkpointing": {"critic_warmup_iterations": 1, "gradient_checkpointing": True},
    "LoRA, critic from the reward model": {"use_peft": True, "lora_r": 2, "value_model": "reward_init"},
    "LoRA on a shared trunk": {"use_peft": True, "lora_r": 2, "value_model": "shared", "vf_coef": 0.5},
    "frozen attention of the critic, band of ratios": {
        **{"value_freeze": "attention", "importance_low": 0.7, "importance_high": 6.0, "num_critic_epochs": 2},
    },
    "turns": {"environment": "tests.ppo.test_episodes:reply_twice", "turn_length": 3},
    "an architecture that needs padding": {"kind": "bitnet", "max_tokens_per_micro_batch": 30},
}
RESUMED = ("token budget, GPT-2 with a tied head", "LoRA")
"""Cases whose runs are saved with FSDP2 and resumed without, and the other way round."""


def build(settings: dict[str, Any]) -> Run:
    """Build a run with a reward model; with FSDP2 all models are sharded.

    The critic, and with LoRA the reference policy, share weights with other models or start as a copy.
    """
    settings = {
        "num_ppo_epochs": 1,
        "response_length": 6,
        "stop_token_id": 22,
        **settings,
    }  # token 22 is a word, so some responses end early
    steps = settings.get("gradient_accumulation_steps", 1)
    reward_model = CausalLMRewardModel.from_causal_lm(build_model(settings.get("kind", "llama"), seed=2))
    reward_model.requires_grad_(False)
    reward_model.score.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    scorer = ModelScorer(reward_model, build_tokenizer(), build_tokenizer(), batch_size=3)
    sizes = {
        "gradient_accumulation_steps": steps,
        "per_device_train_batch_size": RESPONSES // steps // process_count(),
        "total_episodes": RESPONSES * ITERATIONS,
    }
    run = build_run(
        scorer=RewardScorer([("model", 1.0, scorer)], reward_model), reward_model=reward_model, **{**settings, **sizes}
    )
    if shards_models():
        for model in (run.reference, reward_model):
            shard_in_place(model, run.state.learner.device)
    return run


def results(settings: dict[str, Any], start: Path | None = None, end: Path | None = None) -> dict[str, Any]:
    """Return tokens, metrics and weights of a run; `start` and `end` are checkpoints to read and write."""
    run = build(settings)
    if start is not None:
        restore(run.state, start)
    actual: dict[str, Any] = {}
    while run.state.progress.iteration < (ITERATIONS if start is None else 3):
        metrics = run.iteration()
        actual[f"metrics {run.state.progress.iteration}"] = {
            key: value for key, value in metrics.items() if not key.startswith(MEASURED)
        }
        if end is not None and run.state.progress.iteration == 2:
            save(run, end)
    with refilled(run.state.learner.policy, run.state.learner.critic):
        actual["weights"] = weight_sums(run)
    return actual


def save(run: Run, folder: Path) -> None:
    """Write a checkpoint and the exported policy, as the pipeline does."""
    state, exported = gathered(run.state), exported_policy(run.state.learner, run.state.sampler)
    if is_main_process():
        write_checkpoint(folder, state)
        exported.save(folder / "exported")
    wait_for_all()


def held(*models: Module) -> float:
    """Return the share of the models' weights that is on this process."""
    weights = {id(weight): weight for model in models for weight in model.parameters()}.values()
    own = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    return own / sum(weight.numel() for weight in weights)


def folder_of(folder: Path, name: str, kind: str) -> Path:
    return folder / kind / name.partition(",")[0]


def main(path: Path, folder: Path | None = None) -> None:
    """Run the cases; write the main process's results, which the other process must match."""
    actual: dict[str, Any] = {}
    for name, settings in (CASES if folder else MORE).items():
        saved = folder is not None and name in RESUMED
        actual[name] = results(settings, end=folder_of(folder, name, "sharded") if saved else None)
        for kind in ("plain", "sharded") if saved else ():
            start = folder_of(folder, name, kind) / "iteration_000002"
            actual[f"{name}, resumed from {kind}"] = results(settings, start)
    assert len(set(from_all(json.dumps(actual)))) == 1, "the processes differ"
    run = build({})
    run.iteration()
    actual["held"] = [
        held(run.state.learner.policy, *run.state.learner.forwards),
        held(run.reference),
        held(run.scorer.model),
    ]
    if is_main_process():
        path.write_text(json.dumps(actual))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
