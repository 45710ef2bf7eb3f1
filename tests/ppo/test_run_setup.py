"""The models that a run starts with, from a directory on disk."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.run_setup import build_critic, load_policies
from tests.tiny_models import save, tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[4, 7, 9, 12]])


@pytest.fixture
def handle(tmp_path) -> PretrainedHandle:
    return PretrainedHandle(save(tmp_path / "policy", tiny_model()))


def pointers(model) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters()}


def test_policy_and_reference_are_two_models_of_which_one_trains(handle):
    policy, reference = load_policies(handle, PPOConfig(), CPU)
    assert pointers(policy.model).isdisjoint(pointers(reference))
    assert all(p.requires_grad for p in policy.model.parameters())
    assert not any(p.requires_grad for p in reference.parameters())
    assert torch.equal(policy.model(IDS).logits, reference(IDS).logits)
    assert policy.value_head is None


def test_with_lora_the_weights_are_loaded_once(handle, monkeypatch):
    loaded = []
    original = PretrainedHandle.causal_lm
    monkeypatch.setattr(
        PretrainedHandle, "causal_lm", lambda self, dtype, **_: (loaded.append(dtype), original(self, dtype))[1]
    )
    policy, reference = load_policies(handle, PPOConfig(use_peft=True, dtype="bfloat16"), CPU)
    assert loaded == [torch.bfloat16]
    assert pointers(reference) < pointers(policy.model)
    assert torch.equal(policy.model(IDS).logits, reference(IDS).logits)


@pytest.mark.parametrize("settings", [{"value_model": "shared"}, {"use_peft": True}], ids=str)
def test_the_critics_value_head_starts_from_the_one_saved_with_the_model(handle, settings):
    file = f"{handle.source}/model.safetensors"
    weight, bias = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
    save_file(
        {**load_file(file), "v_head.summary.weight": weight, "v_head.summary.bias": bias},
        file,
        metadata={"format": "pt"},
    )
    config = PPOConfig(**settings)
    policy, reference = load_policies(handle, config, CPU)
    critic = build_critic(config, policy.model, None, policy.value_head)
    states = reference.base_model(IDS).last_hidden_state
    values = critic(IDS, torch.ones_like(IDS), torch.arange(4)[None])
    torch.testing.assert_close(values, states @ weight[0] + 0.5, rtol=0.0, atol=1e-5)
    assert "value_head.weight" in trained_parameters(critic)
