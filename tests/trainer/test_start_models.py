"""PPO trains each kind of start model, both all weights and with a new adapter."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.tiny_models import END, PAD, VOCABULARY, adapter_of, draw_weights, save, tiny_model, write_gguf

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


def trainer_of(start: str, *, use_peft: bool) -> PPOTrainer:
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
    return PPOTrainer(config, start, reward=lambda prompts, completions: [*map(len, completions)], prompts=["a", "b"])


@pytest.mark.parametrize(
    "use_peft", [pytest.param(False, id="whole", marks=pytest.mark.slow), pytest.param(True, id="use_peft")]
)
@pytest.mark.parametrize("start", KINDS, indirect=True)
def test_one_step_from_each_kind_of_start_moves_all_weights_or_those_of_the_adapter(start, use_peft, tmp_path):
    trainer = trainer_of(start, use_peft=use_peft)
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


def test_a_gguf_file_is_a_start_and_its_export_an_ordinary_directory(tmp_path):
    begin = write_gguf(tmp_path / "tiny.gguf")(IDS).logits
    trainer = trainer_of(str(tmp_path / "tiny.gguf"), use_peft=False)
    assert (trainer.policy(IDS).logits - begin).abs().max() < 1e-5
    [metrics] = trainer.train()
    assert metrics["objective/kl"] == 0.0
    trainer.save_pretrained(str(tmp_path / "trained"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")(IDS).logits
    assert (after - trainer.policy(IDS).logits).abs().max() < 1e-4 < (after - begin).abs().max()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf", "trained"]


def test_a_mixture_of_experts_trains_its_attention_by_default_and_one_line_says_so(tmp_path, caplog):
    shape = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    path = save(tmp_path, draw_weights(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **ids)), 0.3))
    trainer = trainer_of(path, use_peft=True)
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in trainer.policy.named_parameters() if not torch.equal(before[name], parameter)}
    assert {name.rpartition(".lora_B")[0].rpartition(".")[2] for name in moved} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    (line,) = [record.message for record in caplog.records if "lora_target_modules" in record.message]
    assert "all-linear adapts k_proj, o_proj, q_proj, v_proj of Qwen3MoeForCausalLM. " in line
    assert "(experts, gate)" in line
