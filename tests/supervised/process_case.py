"""Supervised training, sampled preferences and scores: several processes must give the results of one process."""

from pathlib import Path

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.evaluation.perplexity import text_losses
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer
from ppo_rlhf.runtime import processes
from ppo_rlhf.supervised.reward_training import train_reward_model
from ppo_rlhf.supervised.sft import train_sft_policy
from tests.rewards.test_scorers import batch
from tests.supervised import test_preferences, test_reward_training, test_sft
from tests.tiny_models import END, PAD, save, tiny_model, word_tokenizer

SETTINGS = {"per_device_train_batch_size": 4, "num_train_epochs": 1}
FUNCTION = {"type": "function", "function": f"{__name__}:length"}
calls = []


def length(prompts, completions, **columns):
    calls.append(len(prompts))
    return [float(len(completion.split())) for completion in completions]


def broken(prompts, completions):
    raise ValueError("broken")


def results(folder: Path) -> dict[str, object]:
    """Return the results that must not depend on the number of processes; the last batches are full."""
    sources = {name: str(folder / f"{name}_{processes.process_count()}") for name in ("policy", "reward")}
    if processes.is_main_process():
        save(sources["policy"], tiny_model("llama"), word_tokenizer(pad_token=None))
    processes.wait_for_all()
    policy, found = PretrainedHandle(sources["policy"]), {}
    settings = test_sft.config(**SETTINGS, gradient_accumulation_steps=2)
    trained, found["sft"] = train_sft_policy(policy, test_sft.TEXTS, test_sft.HELD_OUT, settings)
    found["sft weights"] = sums(trained.model)
    settings = test_reward_training.config(**SETTINGS, minimum_accuracy=0.0, group_by_length=False)
    trained, found["reward"] = train_reward_model(policy, test_reward_training.pairs(26, prompts=False), settings)
    found["reward weights"] = sums(trained.model)
    how = {"device": trained.model.device, "batch_size": 2, "pad_token_id": PAD}
    texts = [[6, 7, 8, 9], [10, 11], [6, 9, 12]]
    counts = [[False, True, False, True], [False, True], [False, False, True]]
    measured = tiny_model("llama").double()
    found["text losses"] = text_losses(measured, texts, counts, PPOConfig(), **how).tolist()
    found["preferences"] = test_preferences.sample(length, pairs=7).to_dict("list")
    if processes.is_main_process():
        save(sources["reward"], trained.model)
    processes.wait_for_all()
    config = RewardConfig(components=[{"type": "model", "weight": 0.5}, FUNCTION])
    scorer = build_reward_scorer(config, PretrainedHandle(sources["reward"]), word_tokenizer())
    found["scores"] = scorer.score(batch([[6, 7, END], [8], [9]], [True, False, False])).total.tolist()
    found["one score"] = scorer.score(batch([[6, 7, END]], [True])).total.tolist()
    return found


def sums(model) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in model.state_dict().items()}


def check_several() -> None:
    """Check the work that only the main process does, and the errors that all processes raise."""
    assert len(calls) == (4 if processes.is_main_process() else 0)
    config = RewardConfig(components=[{**FUNCTION, "function": f"{__name__}:broken"}])
    scorer = build_reward_scorer(config, None, word_tokenizer())
    with pytest.raises(RewardError, match="ValueError: broken"):
        scorer.score(batch([[6]], [False]))
    with pytest.raises(ConfigError, match=r"supervised_finetuning\.per_device_train_batch_size=3"):
        train_sft_policy(None, test_sft.TEXTS, test_sft.HELD_OUT, test_sft.scratch(per_device_train_batch_size=3))
