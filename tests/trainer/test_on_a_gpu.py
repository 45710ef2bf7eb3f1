"""A run on a CUDA device against the same run on the CPU, and against itself. Needs a GPU: pytest -m gpu."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.memory import RunShape, plan_memory
from ppo_rlhf.models.reward_model import CausalLMRewardConfig, CausalLMRewardModel
from ppo_rlhf.ppo.precision import trained_dtype
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import draw_weights, tiny_model, word_tokenizer

pytestmark = pytest.mark.gpu

TIMED = ("time/", "throughput/", "memory/")
PROMPTS = ["a b c", "d", "e f", "g h i j", "k", "l m n"]
SETTINGS: dict[str, Any] = {
    "total_episodes": 36,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "response_length": 8,
    "learning_rate": 1e-3,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_peft": True, "lora_r": 2},
    {"value_model": "shared"},
    {"gradient_checkpointing": True},
    {"max_tokens_per_micro_batch": 40},
    {"ema_decay": 0.9, "entropy_coef": 0.01},
    {"rollout_engine": "hf"},
]


def history(kind: str = "llama", **settings: Any) -> list[dict[str, float]]:
    config = PPOConfig(**{**SETTINGS, "dtype": "float64", **settings})
    width = {"n_embd": 32} if kind == "gpt2" else {"hidden_size": 32}  # heads of 16: FlashAttention takes 8, 16, …
    policy = tiny_model(kind, **width).to(trained_dtype(config))
    torch.manual_seed(0)  # of the reward model's head
    reward = CausalLMRewardModel.from_causal_lm(tiny_model(seed=2)).double()
    trainer = PPOTrainer(config, policy, None, word_tokenizer(), reward=reward, prompts=PROMPTS)
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in trainer.train()]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_number_is_that_of_the_cpu(kind, settings):
    expected, found = history(kind, device="cpu", **settings), history(kind, device="cuda", **settings)
    for iteration, (on_cpu, on_gpu) in enumerate(zip(expected, found, strict=True)):
        for name, value in on_cpu.items():
            assert on_gpu[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (iteration, name)


@pytest.mark.parametrize("engine", ["static", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoding_token_by_token_sees_what_the_trained_forward_sees(kind, dtype, engine):
    rows = history(kind, device="cuda", dtype=dtype, rollout_engine=engine, total_episodes=48, learning_rate=1e-5)
    bound = {"float32": 1e-3, "bfloat16": 0.08, "float16": 0.01}[dtype]  # logits of these models are up to 5 wide
    assert [row["policy/rollout_logprob_gap"] < bound for row in rows] == [True] * len(rows), rows
    assert all(math.isfinite(row["loss/total"]) for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_exactly_one(dtype):
    rows = history(device="cuda", dtype=dtype, num_ppo_epochs=1, num_mini_batches=1)
    assert [row["val/ratio"] for row in rows] == [1.0] * len(rows)
    assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=0.02)


def test_two_runs_are_equal_to_the_last_bit():
    first, second = (history(device="cuda", dtype="float32") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compiled_layers_train_as_the_layers_as_they_are(kind):
    plain, compiled = (history(kind, device="cuda", dtype="float32", compile=on) for on in (False, True))
    for name in ("objective/kl", "loss/value_avg", "policy/grad_norm"):
        assert compiled[0][name] == pytest.approx(plain[0][name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "use_peft": True}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_the_plan_of_the_memory_is_within_35_percent_of_the_peak(settings):
    shape = GPT2Config(vocab_size=8192, n_embd=512, n_layer=6, n_head=8, bos_token_id=None, eos_token_id=2)
    policy = GPT2LMHeadModel(shape)
    config = PPOConfig(
        **{
            "total_episodes": 64,
            "per_device_train_batch_size": 32,
            "local_rollout_forward_batch_size": 32,
            "num_mini_batches": 4,
            "response_length": 128,
            "stop_token": "none",
            "dtype": "float32",
            "device": "cuda",
            **settings,
        }
    )
    words = word_tokenizer()
    words.add_tokens([f"t{i}" for i in range(8192 - len(words))])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reward = CausalLMRewardModel.from_causal_lm(GPT2LMHeadModel(shape))
    PPOTrainer(config, policy, None, words, reward=reward, prompts=["a " * 64] * 64).train()
    peak = torch.cuda.max_memory_allocated() - before
    reward_shape = CausalLMRewardConfig(text_config=shape)
    planned = plan_memory(config, RunShape(shape, 64, reward_shape, on_cpu=False)).needed
    print(f"plan {planned / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB, {settings}")
    assert 1 / 1.35 < planned / peak < 1.35


@pytest.mark.parametrize("settings", [{}, {"use_peft": True, "lora_r": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_colocated_vllm_samples_from_the_policy_as_it_was_pushed(tmp_path, settings, tied):
    pytest.importorskip("vllm", reason="vLLM is optional: pip install ppo_rlhf[vllm]")
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}  # heads of 64, which vLLM takes
    draw_weights(tiny_model("llama", tie_word_embeddings=tied, **shape), 0.06).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    config = PPOConfig(**{**SETTINGS, **settings}, device="cuda", dtype="bfloat16", rollout_engine="vllm")
    trainer = PPOTrainer(
        config, str(tmp_path), reward=lambda prompts, completions, **_: [0.0] * len(prompts), prompts=PROMPTS
    )
    for row in trainer.train():  # which stops by itself where vLLM has other weights
        assert row["policy/rollout_logprob_gap"] < 0.1
