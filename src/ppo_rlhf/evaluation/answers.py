"""Answers of a policy to a user's prompts, drawn as PPO draws its responses."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.ppo.rollout import response_batch, sample_responses
from ppo_rlhf.ppo.sampling import SamplingSettings
from ppo_rlhf.rewards.scoring import RewardScorer

NOISE_STREAM = "answers"


@dataclass(frozen=True)
class Answer:
    """One response to a prompt; `reward` is before any shaping or penalty, None if nothing scored it."""

    text: str
    tokens: int
    """Of the policy, stop tokens included."""
    is_cut_off: bool
    """Whether it reached its length before a stop token."""
    reward: float | None = None


def answer_prompts(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    scorer: RewardScorer | None,
    sampling: SamplingSettings,
    config: PPOConfig,
    *,
    seed: int,
    turn: int,
) -> list[Answer]:
    """Let a policy answer each of N prompts, of which one may come several times; without a scorer no reward is given.

    Seed and turn fix the noise, so that policies that are equal answer equally.
    """
    uniforms_NT = episode_uniforms(seed, NOISE_STREAM, turn, len(prompts), sampling.response_length)
    responses = sample_responses(policy, prompts, uniforms_NT, sampling, config, batch_size=64)
    batch = response_batch(prompts, responses, tokenizer)
    rewards = [None] * len(prompts) if scorer is None else scorer.score(batch).total.tolist()
    counts = responses.mask.sum(dim=1).tolist()
    return [
        Answer(text, count, not has_ended, reward)
        for text, count, has_ended, reward in zip(batch.completions, counts, batch.terminated, rewards, strict=True)
    ]
