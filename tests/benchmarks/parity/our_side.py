"""Run one job through the functions that the pipeline's nodes call. Started by parity.py: `our_side.py JOB.json`."""

from __future__ import annotations

import sys

import torch
from departures import VARIANTS
from job import Job

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.build import build_critic
from ppo_rlhf.ppo.experience import score_responses
from ppo_rlhf.ppo.rollout import generate_rollouts
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.update import optimise_policy
from ppo_rlhf.rewards.scorers import RewardComponentConfig, RewardConfig, RewardScorer, build_reward_scorer


def our_config(job: Job) -> PPOConfig:
    """Return this project's configuration of a job. What is not named has TRL's default on both sides."""
    settings = job.settings
    return PPOConfig(
        seed=job.seed,
        total_episodes=settings.iterations * settings.batch_size,
        per_device_train_batch_size=settings.batch_size,
        num_ppo_epochs=settings.num_ppo_epochs,
        local_rollout_forward_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        kl_coef=settings.kl_coef,
        response_length=settings.response_length,
        temperature=settings.temperature,
        stop_token_id=job.stop_token_id,
        missing_eos_penalty=settings.missing_eos_penalty,
        value_model="reward_init" if job.reward_is_model else "separate",
        device="cpu",
        **VARIANTS[job.variant].settings(settings.num_mini_batches),
    )


def build_scorer(job: Job, sft: PretrainedHandle) -> RewardScorer:
    """Return the job's reward."""
    component = (
        RewardComponentConfig(type="model")
        if job.reward_is_model
        else RewardComponentConfig(type="function", function=job.reward)
    )
    model = PretrainedHandle(job.reward) if job.reward_is_model else None
    return build_reward_scorer(RewardConfig(components=[component]), model, sft.tokenizer())


def train(job: Job) -> None:
    """Train, save the policies that are asked for, and write the history."""
    config, departures, sft = our_config(job), VARIANTS[job.variant], PretrainedHandle(job.sft)
    tokenizer, scorer = sft.tokenizer(), build_scorer(job, sft)
    policy, reference = sft.causal_lm(), sft.causal_lm().requires_grad_(False)
    state = TrainingState.create(policy, build_critic(config, policy, scorer.model), tokenizer, config)
    prompts = PromptDataset(job.prompt_ids, tokenizer.batch_decode(job.prompt_ids, skip_special_tokens=True), {})
    history = []
    while not state.finished:
        rollouts = departures.rollouts(generate_rollouts(state, reference, prompts, config))
        scores = score_responses(rollouts, scorer, state)
        metrics = optimise_policy(state, departures.experience(rollouts, scores, state, config), config)
        cut_off = float((~rollouts.terminated).double().mean())
        penalty = (config.missing_eos_penalty or 0.0) * cut_off
        history.append(
            {"iteration": state.iteration, "score": float(scores.total.mean()) - penalty, "kl": metrics["objective/kl"]}
        )
        if job.is_saved(state.iteration):
            state.policy.save_pretrained(job.saved_policy(state.iteration))
    job.write_history(history)


if __name__ == "__main__":
    torch.manual_seed(0)  # nothing that is random reads it; so that a change of that would show
    train(Job.read(sys.argv[1]))
