"""Toy nodes with the dataset names and the state protocol of the real ones."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import RewardError
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runtime.names import IS_LAST

ERRORS = {error.__name__: error for error in (ZeroDivisionError, SystemExit, asyncio.CancelledError, RewardError)}
NONE: Any = None
"""Stands for the parts of a training state that a toy does not have."""
VOCABULARY = {"<unk>": 0, "</s>": 1, "the": 2, "film": 3, "was": 4}


def train_sft(prompts: PromptsConfig) -> tuple[TrainedModel, list[dict[str, float]]]:
    losses = [{"step": step, "sft/loss": loss} for step, loss in ((1, 3.0), (2, 2.5), (3, 2.25))]
    return tiny_model(), [*losses, {"step": 3, "sft/eval_loss": 2.75}]


def configure_ppo(ppo: PPOConfig) -> PPOConfig:
    return ppo


def read_prompts(raw_prompts: Dataset, prompts: PromptsConfig, reward: RewardConfig) -> list[str]:
    return list(raw_prompts[prompts.column])


def initialise_training_state(ppo_config: PPOConfig, prompt_texts: list[str]) -> TrainingState:
    return TrainingState(ppo_config, *[NONE] * 3, Progress(ppo_config))


def generate_rollouts(training_state: TrainingState, prompt_texts: list[str]) -> SimpleNamespace:
    completions = [f"answer {i}" for i in range(len(prompt_texts))]
    return SimpleNamespace(
        prompts=SimpleNamespace(texts=prompt_texts),
        texts=SimpleNamespace(completions=completions),
        responses=SimpleNamespace(terminated=torch.ones(len(completions), dtype=torch.bool)),
        iteration=training_state.progress.iteration + 1,
    )


def score_responses(rollouts: SimpleNamespace, training_state: TrainingState) -> dict[str, SimpleNamespace]:
    rows = len(rollouts.texts.completions)
    return {"scores": SimpleNamespace(total=torch.arange(float(rows))), "kl": SimpleNamespace(kl=torch.ones(rows, 4))}


def estimate_advantages(
    rollouts: SimpleNamespace, scores: SimpleNamespace, shaped_rewards: SimpleNamespace, ppo_config: PPOConfig
) -> float:
    return 0.0


def list_completions(
    rollouts: SimpleNamespace, scores: SimpleNamespace, shaped_rewards: SimpleNamespace, ppo_config: PPOConfig
) -> list[dict[str, object]]:
    if not ppo_config.samples(rollouts.iteration):
        return []
    columns = {
        "prompt": rollouts.prompts.texts,
        "completion": rollouts.texts.completions,
        "score": scores.total.tolist(),
        "kl": shaped_rewards.kl.sum(-1).tolist(),
        "stopped": rollouts.responses.terminated.tolist(),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [{"iteration": rollouts.iteration, **row} for row in rows]


def optimise_policy(training_state: TrainingState, experience: float) -> dict[str, object]:
    progress = training_state.progress
    progress.iteration += 1
    stop_at = os.environ.get("TOY_SIGNAL_AT")  # "2:SIGTERM"
    if stop_at and stop_at.startswith(f"{progress.iteration}:"):
        os.kill(os.getpid(), signal.Signals[stop_at.split(":")[1]])
    if os.environ.get("TOY_FAIL_AT") == str(progress.iteration):
        raise ERRORS[os.environ.get("TOY_ERROR", "ZeroDivisionError")]("the update went wrong")
    metrics = {"objective/scores": progress.iteration / 4, "episode": 8.0 * progress.iteration}
    progress.history.append({"iteration": float(progress.iteration), **metrics})
    return {"state": training_state, "metrics": metrics, "checkpoint": training_state}


def train_settings(ppo: PPOConfig) -> list[dict[str, float]]:
    if "TOY_FAIL_AT" in os.environ:
        raise ZeroDivisionError("a training went wrong")
    return [{"kl": 1.0}]


def evaluate_iteration(next_training_state: TrainingState) -> dict[str, float]:
    progress = next_training_state.progress
    if progress.iteration % 2 and not progress.finished:
        return {}
    measured = {"eval/win_rate": 0.5, "eval/reward_sft": -1.0, "eval/reward_se": 0.25}
    return {"iteration": float(progress.iteration), **measured, **({IS_LAST: True} if progress.finished else {})}


def export_policy(next_training_state: TrainingState) -> TrainedModel:
    return tiny_model()


def compare_policies(ppo_policy: object) -> dict[str, object]:
    conditions = {"start_model": "0123456789abcdef", "prompts": "three", "judge": "the toy", "sampling": "none"}
    verdict = {"verdict": "too_few_prompts", "prompts": 3, "decided_by": "the toy"}
    measured = {"eval/win_rate": 0.75, "eval/reward_sft": -1.0, "eval/reward_se": 0.125, "eval/reward_sft_se": 1 / 3}
    return {**measured, **verdict, "conditions": conditions}


def tiny_model() -> TrainedModel:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>")), unk_token="<unk>", eos_token="</s>"
    )
    size = {"vocab_size": len(VOCABULARY), "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    return TrainedModel(GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=1)), tokenizer)
