"""The pretrained critic: what it learns, how it is stored, and how a run starts from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.models.adapters import has_adapter
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.pipelines.critic_pretraining import training as module
from ppo_rlhf.pipelines.critic_pretraining.training import (
    HELD_OUT,
    CriticPretrainingConfig,
    pretrain_critic,
    pretraining_config,
)
from ppo_rlhf.ppo.run_setup import build_critic, load_stored_critic
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.ppo_runs import tensors_equal
from tests.tiny_models import VOCABULARY, save, tiny_model

LORA = {"use_peft": True, "lora_r": 2}


def score_of(prompt: list[int], response: list[int]) -> float:
    """By the prompt's first token, from 4 to 7, and a little by the response's length."""
    return 2.0 * (prompt[0] - 5.5) + 0.1 * len(response)


def score(batch: ResponseBatch) -> Tensor:
    return torch.tensor(list(map(score_of, batch.prompt_ids, batch.response_ids)), dtype=torch.float64)


def ppo(**settings: Any) -> PPOConfig:
    defaults = {
        "per_device_train_batch_size": 32,
        "num_mini_batches": 4,
        "num_ppo_epochs": 2,
        "response_length": 4,
        "temperature": 1.0,
        "value_learning_rate": 2e-2,
        "cliprange_value": 10.0,
        "device": "cpu",
        "value_model": "pretrained",
    }
    return PPOConfig(**{**defaults, **settings})


def prompts(first: int) -> PromptDataset:
    ids = [[4 + row % 4, first + row // 4] for row in range(32)]
    return PromptDataset(ids, [" ".join(VOCABULARY[i] for i in row) for row in ids], {})


def pretrain(sft: str, iterations: int, **settings: Any) -> tuple[TrainedModel, list[dict[str, float]]]:
    scorer = RewardScorer([("score", 1.0, score)])
    pretraining = CriticPretrainingConfig(iterations=iterations)
    reported: list[int] = []
    critic, history = pretrain_critic(
        PretrainedHandle(sft),
        prompts(8),
        prompts(16),
        scorer,
        pretraining,
        ppo(**settings),
        lambda iteration, metrics: reported.append(iteration),
    )
    assert reported == list(range(1, iterations + 1))
    return critic, history


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "sft", tiny_model())


@pytest.fixture(scope="module")
def critics(sft: str) -> dict[str, TrainedModel]:
    """Critics pretrained for one iteration, all weights or by LoRA."""
    return {"all weights": pretrain(sft, 1)[0], "LoRA": pretrain(sft, 1, **LORA)[0]}


# --- what it learns --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_explained_variance_is_that_of_plain_returns_on_responses_to_held_out_prompts(
    sft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is SFT, so no KL is paid: with gamma = lambda = 1 each state's return is the response's score.

    The oracle values each row separately, without padding, by the critic that is returned, and takes numpy's variance.
    """
    rollouts = []
    generate = module.generate_rollouts
    monkeypatch.setattr(module, "generate_rollouts", lambda *given: rollouts.append(generate(*given)) or rollouts[-1])
    critic, history = pretrain(sft, iterations=8)
    (held_out,) = rollouts
    values, returns = [], []
    for prompt, response in zip(held_out.prompts.prompt_ids, held_out.responses.token_lists(), strict=True):
        with torch.no_grad():
            states = critic.model.base_model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
            of_row = critic.model.score(states)[:, 0].numpy()
        values += of_row[len(prompt) - 1 : -1].tolist()
        returns += [score_of(prompt, response)] * len(response)
    explained = 1 - np.var(np.array(returns) - np.array(values)) / np.var(returns)
    assert history[-1][HELD_OUT] == pytest.approx(explained, abs=1e-4)
    assert {tuple(ids) for ids in held_out.prompts.prompt_ids}.isdisjoint(map(tuple, prompts(8).prompt_ids))
    assert history[0][HELD_OUT] == 0.0  # a head of zeros
    assert explained > 0.3
    assert [row["step"] for row in history] == list(range(9))


@pytest.mark.parametrize("kind", ["all weights", "LoRA"])
def test_what_is_stored_is_a_plain_backbone_that_was_trained(critics: dict[str, TrainedModel], kind: str) -> None:
    critic = critics[kind].model
    trained, start = (model.state_dict() for model in (critic.base_model, tiny_model().model))
    assert trained.keys() == start.keys()  # no adapter is left
    assert any(not torch.equal(trained[name], start[name]) for name in start)
    assert critic.score.weight.any()


def test_the_policy_of_the_pretraining_does_not_change_and_its_noise_is_not_that_of_the_run() -> None:
    config = pretraining_config(
        CriticPretrainingConfig(iterations=3), ppo(kl_controller="adaptive", lam=0.9, lam_alpha=0.05)
    )
    assert config.critic_warmup_iterations == 3 < config.num_total_batches
    assert (config.lam, config.lam_critic, config.value_model) == (0.9, 1.0, "separate")
    assert config.seed != ppo().seed


# --- stored and started from -----------------------------------------------------------------------------------------


@pytest.fixture
def stored(critics: dict[str, TrainedModel], tmp_path: Path) -> PretrainedHandle:
    dataset = PretrainedModelDataset(str(tmp_path / "pretrained_critic"))
    dataset.save(critics["all weights"])
    handle = dataset.load()
    assert handle is not None
    return handle


def test_a_stored_critic_comes_back_bit_for_bit(
    sft: str, critics: dict[str, TrainedModel], stored: PretrainedHandle
) -> None:
    expected, model = critics["all weights"].model, load_stored_critic(stored, ppo())
    critic = build_critic(ppo(), tiny_model(), None, stored_critic=model)
    assert tensors_equal(critic.backbone.state_dict(), expected.base_model.state_dict())
    assert tensors_equal(critic.value_head.state_dict(), expected.score.state_dict())
    assert all(parameter.requires_grad for parameter in critic.parameters())
    for given in (stored.source, model):
        trainer = PPOTrainer(ppo(), sft, value_model=given)
        assert tensors_equal(trainer.state.learner.critic.state_dict(), critic.state_dict())


@pytest.mark.parametrize("kind", ["all weights", "LoRA"])
def test_lora_puts_an_adapter_on_the_stored_critic(critics: dict[str, TrainedModel], tmp_path: Path, kind: str) -> None:
    """The adapter starts as nothing, so the values are the stored critic's."""
    critics[kind].save(tmp_path / "critic")
    config = ppo(**LORA)
    stored = load_stored_critic(PretrainedHandle(str(tmp_path / "critic")), config)
    critic = build_critic(config, tiny_model(), None, stored_critic=stored)
    assert has_adapter(critic)
    ids = torch.tensor([[4, 7, 9, 12]])
    with torch.no_grad():
        values = critic(ids, torch.ones_like(ids), torch.arange(4)[None])
        torch.testing.assert_close(values, critics[kind].model(ids).logits[..., 0], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("value_model", ["shared", "pretrained"])
def test_the_pretraining_starts_from_a_critic_of_its_own(value_model: str) -> None:
    with pytest.raises(ConfigError, match=r"critic_pretraining\.value_model"):
        CriticPretrainingConfig(value_model=value_model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"value_model": "shared", "value_learning_rate": None, "export_value_head": True}, "export_value_head"),
        ({"value_model": "separate", "load_in_4bit": True, **LORA}, "load_in_4bit"),
        ({"truncated_responses": "bootstrap"}, "truncated_responses=bootstrap: .*truncated_responses=keep"),
    ],
    ids=["the head of a shared trunk", "4 bits", "targets with the critic's own values"],
)
def test_settings_that_a_critic_of_its_own_cannot_have_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"ppo\.{named}"):
        pretraining_config(CriticPretrainingConfig(), ppo(**settings))


def test_no_stored_critic_is_one_line_with_where_each_front_takes_one(sft: str) -> None:
    with pytest.raises(ConfigError, match=r"value_model.*critic_path"):
        PPOTrainer(ppo(), sft)


def test_a_stored_critic_of_another_vocabulary_is_refused(stored: PretrainedHandle) -> None:
    model = load_stored_critic(stored, ppo())
    with pytest.raises(ModelError, match=r"ppo\.value_model=pretrained: .*25 tokens, the policy's 31"):
        build_critic(ppo(), tiny_model(vocab_size=31), None, stored_critic=model)
