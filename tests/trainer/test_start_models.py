"""PPO trains each kind of model that it can start from, whole and with an adapter of its own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.tiny_adapters import adapter_of
from tests.tiny_models import save, tiny_model

IDS = torch.tensor([[4, 5, 6, 7]])
KINDS = ["whole model", "adapter", "adapter on an adapter", "hub revision", "adapter with a whole layer"]


@pytest.fixture
def start(request, tmp_path, on_the_hub) -> str:
    base = tiny_model()
    folder = on_the_hub("org/base", "v2", "2") if request.param == "hub revision" else tmp_path / "base"
    path = save(folder, base)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    adapter_of(base, tmp_path / "first", path, init_lora_weights="gaussian")
    adapter_of(PretrainedHandle(first).causal_lm(), tmp_path / "second", first, "v_proj")
    adapter_of(base, tmp_path / "third", path, modules_to_save=["lm_head"])
    return dict(zip(KINDS, [path, first, second, "org/base@v2", str(tmp_path / "third")], strict=True))[request.param]


@pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "use_peft"])
@pytest.mark.parametrize("start", KINDS, indirect=True)
def test_one_step_from_each_kind_of_start_moves_all_weights_or_those_of_the_adapter(start, use_peft, tmp_path):
    config = PPOConfig(
        use_peft=use_peft,
        total_episodes=8,
        per_device_train_batch_size=8,
        response_length=4,
        num_ppo_epochs=1,
        learning_rate=1e-2,
        missing_eos_penalty=None,
        device="cpu",
    )
    trainer = PPOTrainer(
        config, start, reward=lambda prompts, completions: [len(c) for c in completions], prompts=["a b", "c"]
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.named_parameters()}
    begin = PretrainedHandle(start).causal_lm()(IDS).logits
    assert torch.equal(trainer.policy(IDS).logits, begin)
    [metrics] = trainer.train()
    assert metrics["objective/kl"] == 0.0  # the policy was its reference
    moved = {name for name, parameter in trainer.policy.named_parameters() if not torch.equal(before[name], parameter)}
    trained = {name for name in before if ".lora_B." in name} if use_peft else set(before)
    assert moved == trained <= set(trained_parameters(trainer.policy))
    trainer.save_pretrained(str(tmp_path / "trained"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")(IDS).logits
    assert (after - trainer.policy(IDS).logits).abs().max() < 1e-4 < (after - begin).abs().max()
