"""One worker of this project, driven through the functions that the pipeline's nodes call: `-m speed.our_side JOB`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.accelerator import frozen_dtype, resolve_device
from ppo_rlhf.ppo.build import build_critic, load_policies
from ppo_rlhf.ppo.experience import estimate_advantages, score_responses, shape_rewards
from ppo_rlhf.ppo.rollout import generate_rollouts
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.update import optimise_policy
from ppo_rlhf.rewards.scorers import RewardComponentConfig, RewardConfig, build_reward_scorer
from speed.channel import Channel, peak_memory_mib
from speed.imports import import_late
from speed.workload import Job

DTYPES = {"float32": "float32", "bf16": "bfloat16"}


def our_config(job: Job) -> PPOConfig:
    """Return this project's configuration of a job: what is not named is its default."""
    preset = job.preset
    settings: dict[str, Any] = {
        "seed": job.noise_seed,
        "total_episodes": job.iterations * preset.batch,
        "per_device_train_batch_size": preset.batch,
        "num_mini_batches": preset.batch // preset.minibatch,
        "num_ppo_epochs": preset.epochs,
        "local_rollout_forward_batch_size": preset.batch,
        "learning_rate": job.learning_rate,
        "kl_coef": job.kl_coef,
        "response_length": preset.response_length,
        "temperature": 1.0,
        **({"stop_token": "none"} if job.stop_token_id is None else {"stop_token_id": job.stop_token_id}),
        "dtype": DTYPES[job.precision],
        "device": job.device,
    }
    return PPOConfig(**{**settings, **job.overrides})


class OurSide:
    """The models of a job, and its iterations."""

    def __init__(self, job: Job) -> None:
        """Load everything."""
        self.config = our_config(job)
        self._device = resolve_device(self.config.device)
        handle = PretrainedHandle(job.policy)
        policy, self._reference = load_policies(handle, self.config, self._device)
        self._scorer = build_reward_scorer(
            RewardConfig(components=[RewardComponentConfig(type="model")]),
            PretrainedHandle(job.reward),
            policy.tokenizer,
            batch_size=self.config.local_rollout_forward_batch_size,
            device=self._device,
            dtype=frozen_dtype(self.config),
        )
        critic = build_critic(self.config, policy.model, self._scorer.model)
        self.state = TrainingState.create(policy.model, critic, policy.tokenizer, self.config)
        texts = policy.tokenizer.batch_decode(job.prompt_ids, skip_special_tokens=True)
        self._prompts = PromptDataset(job.prompt_ids, texts, {})

    def iterate(self) -> dict[str, Any]:
        """Run one iteration; return seconds by phase, and the tokens of each prompt and response."""
        started = self._now()
        rollouts = generate_rollouts(self.state, self._reference, self._prompts, self.config)
        scores = score_responses(rollouts, self._scorer, self.state)
        shaped = shape_rewards(rollouts, scores, self.state)
        experience = estimate_advantages(rollouts, scores, shaped, self.config)
        scored = self._now()
        metrics = optimise_policy(self.state, experience, self.config)
        ended = self._now()
        assert rollouts.generation_seconds is not None
        return {
            "rollout": rollouts.generation_seconds,
            "score": scored - started - rollouts.generation_seconds,
            "update": ended - scored,
            "iteration": ended - started,
            "prompt_tokens": [len(ids) for ids in rollouts.prompts.prompt_ids],
            "response_tokens": rollouts.lengths.tolist(),
            "steps": self.state.optimiser_steps,
            "kl": metrics["objective/kl"],
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def memory_mib(device: str, at_start: float) -> float:
    """Return the peak: of the CUDA device's allocations, or of resident memory above what the imports took."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_memory_mib() - at_start


def main() -> None:
    """Serve compare.py."""
    import_late()
    imported, channel, job = peak_memory_mib(), Channel(), Job.read(sys.argv[1])
    side = OurSide(job)
    channel.send(threads=torch.get_num_threads())
    while channel.wait():
        channel.send(**side.iterate(), memory_mib=memory_mib(job.device, imported))


if __name__ == "__main__":
    main()
