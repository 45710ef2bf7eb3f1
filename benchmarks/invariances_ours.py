"""This project's adapter of `invariances.py`."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from invariances import SHAPE, Case, Seen
from ppo_rlhf.core.advantages import generalized_advantage_estimate
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.losses import clipped_value_loss
from ppo_rlhf.core.statistics import masked_whiten
from ppo_rlhf.ppo import loop, losses
from ppo_rlhf.training import PPOConfig, PPOTrainer

FUNCTIONS = {
    "log-probabilities": token_logprobs,
    "whitening": lambda values, mask, shift_mean: masked_whiten(values, mask, shift_mean=shift_mean),
    "GAE": lambda *inputs: generalized_advantage_estimate(*inputs)[1],
    "value loss": lambda *inputs: clipped_value_loss(*inputs[:-1], cliprange_value=inputs[-1]).loss,
}


def observe(case: Case) -> Seen:
    """Run the calls of one iteration, with optimisers that stand still."""
    config = PPOConfig(
        total_episodes=SHAPE.batch,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulated,
        num_mini_batches=case.minibatches,
        num_ppo_epochs=case.epochs,
        response_length=SHAPE.response_length,
        temperature=1.0,
        lam=case.lam,
        kl_coef=0.0,
        max_grad_norm=1e9,
        dtype=case.precision,
        device="cpu",
    )
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    if case.pad_is_stop:
        tokenizer.pad_token = tokenizer.eos_token
    policy = AutoModelForCausalLM.from_pretrained(case.policy)
    trainer = PPOTrainer(config, policy, tokenizer=tokenizer, reward=case.reward, prompts=case.prompts)
    state, gradients, ratios, inputs = trainer.state, list[Tensor](), list[Tensor](), list[Any]()

    def step() -> None:
        models = (state.learner.policy, state.learner.critic)
        gradients.append(torch.cat([p.grad.flatten() for m in models for p in m.parameters() if p.grad is not None]))

    def noted_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **rest: Any) -> Any:
        ratios.append((new.detach() - old).exp()[mask])
        return clipped_policy_loss(new, old, advantages, mask, **rest)

    def noted_advantages(*given: Any) -> Any:
        inputs.extend(given)
        return loop_advantages(*given)

    clipped_policy_loss, loop_advantages = losses.clipped_policy_loss, loop.estimate_advantages
    state.learner.policy_optimizer.step, state.learner.critic_optimizer.step = lambda: None, step
    with (
        mock.patch.object(losses, "clipped_policy_loss", noted_loss),
        mock.patch.object(loop, "estimate_advantages", noted_advantages),
    ):
        trainer.train()
    rollouts, scores, rewards, _ = inputs
    plain = dataclasses.replace(config, whiten_advantages=False)
    raw = loop.estimate_advantages(rollouts, scores, rewards, dataclasses.replace(state, config=plain))
    responses = rollouts.responses.token_lists()
    return Seen(responses, scores.total, rollouts.mask, raw.advantages, ratios[0], gradients[0], len(gradients))
