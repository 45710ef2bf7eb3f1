"""Runs of a toy that learn in two seconds: eight prompts, a random policy of two layers, rewards of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.advice import Advice, advise
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.comparison import distinct_n
from ppo_rlhf.evaluation.equal_reward import compare_at_equal_reward
from ppo_rlhf.evaluation.exploitation import exploitation
from ppo_rlhf.evaluation.since_best import REWARDED, SCORES, TRAINED_REWARD, since_best
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from tests.evaluation.test_since_best import evaluation
from tests.ppo_runs import VOCABULARY, WORDS, batch_of, build_run, learn_from

LENGTH = 8
PROMPTS = PromptDataset(
    [[3 + row, 4 + row] for row in range(8)],
    [f"{WORDS[row]} {WORDS[row + 1]}" for row in range(8)],
    {"wanted": [WORDS[7 * row % 20] for row in range(8)]},
)
WORTH = torch.linspace(-1.0, 1.0, len(VOCABULARY))[torch.randperm(23, generator=torch.Generator().manual_seed(4))]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "local_rollout_forward_batch_size": 32,
    "response_length": LENGTH,
    "stop_token": "none",
    "temperature": 1.0,
    "missing_eos_penalty": None,
    "kl_coef": 0.05,
    "learning_rate": 5e-3,
    "value_learning_rate": 2e-2,
}
Reward = Callable[[ResponseBatch], Tensor]


def worth(batch: ResponseBatch) -> Tensor:
    """Mean worth of a response's tokens, from -1 to 1: a single token repeated has the most."""
    return torch.stack([WORTH[ids].mean() for ids in map(list, batch.response_ids)])


def wanted(batch: ResponseBatch) -> Tensor:
    """Share of a response's tokens that are the word its prompt asks for."""
    pairs = zip(batch.response_ids, batch.columns["wanted"], strict=True)
    return torch.tensor([sum(VOCABULARY[token] == word for token in ids) / len(ids) for ids, word in pairs])


def answered(batch: ResponseBatch) -> Tensor:
    """1 if a quarter of a response's tokens are the word its prompt asks for, else 0."""
    return (wanted(batch) >= 0.25).float()


def answered_with_variety(batch: ResponseBatch) -> Tensor:
    """As `answered`, but 0 for a response that mostly repeats its tokens."""
    return answered(batch) * (variety(batch) >= 0.5)


def long(batch: ResponseBatch) -> Tensor:
    return torch.tensor([len(ids) / LENGTH for ids in batch.response_ids])


def short(batch: ResponseBatch) -> Tensor:
    return 2.0 - long(batch)


def variety(batch: ResponseBatch) -> Tensor:
    """The judge: different tokens of a response, as a share of its length."""
    return torch.tensor([len(set(ids)) / len(ids) for ids in batch.response_ids])


@dataclass(frozen=True)
class Trained:
    """A finished run: each iteration's metrics, with `judge`; every tenth has those of an evaluation, too."""

    config: PPOConfig
    rows: list[dict[str, float]]

    def advice(self, iterations: int | None = None) -> dict[str, Advice]:
        return {item.rule.name: item for item in advise(self.config, self.rows[:iterations])}

    def last(self, key: str, iterations: int | None = None) -> float:
        """Mean over ten iterations."""
        return float(np.mean([row[key] for row in self.rows[:iterations][-10:]]))


def train(reward: Reward, iterations: int = 40, spread: float = 0.2, **settings: Any) -> Trained:
    """Train; an evaluation is of the responses drawn for training, and the first iteration's are the SFT policy's."""
    settings = SETTINGS | settings
    run = build_run(
        prompts=PROMPTS,
        scorer=RewardScorer([("toy", 1.0, reward)]),
        model={"spread": spread},
        total_episodes=iterations * settings["per_device_train_batch_size"],
        **settings,
    )
    rows: list[dict[str, float]] = []
    earlier: list[dict[str, Any]] = []
    while not run.state.progress.finished:
        rollouts, scores, _, experience = run.before_update()
        batch = batch_of(rollouts, run)
        judge, rewards = variety(batch).numpy(), scores.total.double().numpy()
        now, diversity = evaluation(judge, rewards), distinct_n(list(batch.completions), 2)
        row = learn_from(run.state, experience) | {"iteration": 1.0 + len(rows), "judge": float(judge.mean())}
        if not rows:
            sft, sft_diversity = now, diversity
        elif len(rows) % 10 == 9:
            since = since_best(now, sft, earlier)
            since |= {"eval/judge_score": judge.mean(), TRAINED_REWARD: since["eval/since_best_reward"]}
            since |= exploitation(since | {"iteration": row["iteration"]}, [], run.config, "off")[0]
            kept = {key: since.pop(key) for key in (SCORES, REWARDED) if key in since}
            earlier.append({"eval/reward": rewards.mean()} | kept)
            row |= compare_at_equal_reward(now, sft)
            row["eval/judge_score_sft"] = sft.deciding_scores.mean()
            row |= since | {"eval/distinct_2": diversity, "eval/distinct_2_sft": sft_diversity}
        rows.append(row)
    return Trained(run.config, rows)
