"""A run on a CUDA device gives the results of the CPU and repeats exactly. Needs a GPU: pytest -m gpu."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.reward_model import CausalLMRewardConfig, CausalLMRewardModel
from ppo_rlhf.passes.compilation import compiles
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo.precision import device_of, has_bfloat16, trained_dtype
from ppo_rlhf.preflight.memory import RunShape, plan_memory
from ppo_rlhf.training import PPOTrainer
from tests.ppo_runs import MEASURED
from tests.tiny_models import END, draw_weights, save, tiny_model, word_tokenizer

pytestmark = pytest.mark.gpu

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


def first_letter(completions: list[str], **_: Any) -> list[float]:
    """Score a response by its first letter."""
    return [float(text.startswith("a")) + 0.1 * len(text.split()) for text in completions]


def history(kind: str = "llama", **settings: Any) -> list[dict[str, float]]:
    config = PPOConfig(**{**SETTINGS, "dtype": "float64", **settings})
    width = {"n_embd": 32} if kind == "gpt2" else {"hidden_size": 32}  # heads of 16: FlashAttention takes 8, 16, …
    policy = tiny_model(kind, **width).to(trained_dtype(config))
    torch.manual_seed(0)  # of the reward model's head
    reward = CausalLMRewardModel.from_causal_lm(tiny_model(seed=2)).double()
    trainer = PPOTrainer(config, policy, None, word_tokenizer(), reward=reward, prompts=PROMPTS)
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in trainer.train()]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_number_is_that_of_the_cpu(kind, settings):
    expected, actual = history(kind, device="cpu", **settings), history(kind, device="cuda", **settings)
    for iteration, (on_cpu, on_gpu) in enumerate(zip(expected, actual, strict=True)):
        for name, value in on_cpu.items():
            assert on_gpu[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (iteration, name)


@pytest.mark.parametrize("engine", ["static", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoding_token_by_token_sees_what_the_trained_forward_sees(kind, dtype, engine):
    rows = history(kind, device="cuda", dtype=dtype, rollout_engine=engine, total_episodes=48, learning_rate=1e-5)
    # logits of these models are up to 5 wide; float32's products read TF32, of 10 bits as float16
    bound = {"float32": 0.01, "bfloat16": 0.08, "float16": 0.01}[dtype]
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
        assert compiled[0][name] == pytest.approx(plain[0][name], rel=1e-2, abs=1e-3), name  # tolerance for TF32


def test_bfloat16_is_the_default_where_the_gpu_has_it():
    config = PPOConfig(**{**SETTINGS, "device": "cuda"})
    policy = tiny_model(hidden_size=32)
    trainer = PPOTrainer(config, policy, None, word_tokenizer(), reward=first_letter, prompts=PROMPTS)
    assert trainer.config.dtype == ("bfloat16" if has_bfloat16(torch.device("cuda")) else "float32")
    assert all(math.isfinite(row["loss/total"]) for row in trainer.train())


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="no TF32 here")
def test_float32_products_read_tf32_unless_kernels_are_deterministic():
    left, right = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = left.double() @ right.double()
    for deterministic, low, high in ((True, 0.0, 1e-5), (False, 1e-5, 1e-2)):
        device = device_of(PPOConfig(device="cuda", deterministic=deterministic))
        error = ((left.to(device) @ right.to(device)).cpu().double() - exact).norm() / exact.norm()
        assert low <= error < high, deterministic


def test_static_and_hf_sample_the_same_tokens_and_hf_is_compiled():
    """In float64 rounding does not change the sampled tokens."""
    model = tiny_model(hidden_size=32).double().cuda()
    prompts = [[4 + (row + place) % 19 for place in range(1 + row % 5)] for row in range(8)]
    noise = torch.rand(8, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    how = SamplingSettings(12, 1.0, 0, 1.0, (END,), 0)
    actual = [generate_responses(model, prompts, noise, how, engine=engine) for engine in ("static", "hf", "hf")]
    assert compiles(torch.device("cuda")), "install a C compiler and Triton: hf is far slower without"
    for other in actual[1:]:
        assert torch.equal(actual[0].response_ids, other.response_ids)


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_adapters_on_4_bits_with_8_bit_moments_train_in_less_memory(value_model):
    """The sampler unpacks the same weights as the trained forward, so the two see the same probabilities."""
    pytest.importorskip("bitsandbytes")

    def train(**settings: Any) -> tuple[list[dict[str, float]], int]:
        torch.manual_seed(0)
        shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
        policy = tiny_model(**shape).to(torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            path = save(Path(folder) / "sft", policy)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            config = PPOConfig(
                **{**SETTINGS, "device": "cuda", "dtype": "bfloat16", "use_peft": True, "learning_rate": 1e-4},
                value_model=value_model,
                sft_model_path=path,
                **settings,
            )
            trainer = PPOTrainer(config, reward=first_letter, prompts=PROMPTS)
            rows = trainer.train()
            return rows, torch.cuda.memory_allocated() - before

    _, held = train()
    quantised, less = train(load_in_4bit=True, optim="adamw_8bit")
    assert all(math.isfinite(row["loss/total"]) for row in quantised)
    assert quantised[-1]["optimiser/skipped_steps"] == 0
    assert all(row["policy/rollout_logprob_gap"] < 0.2 for row in quantised), quantised
    assert less < held


def test_vllm_samples_what_the_trained_forward_sees(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if "vllm" not in str(PPOConfig.__annotations__["rollout_engine"]):
        pytest.skip("this version has no engine vllm")
    path = save(tmp_path / "sft", tiny_model(hidden_size=128, num_attention_heads=2, tie_word_embeddings=False))
    config = PPOConfig(**{**SETTINGS, "device": "cuda", "rollout_engine": "vllm", "sft_model_path": path})
    rows = PPOTrainer(config, reward=first_letter, prompts=PROMPTS).train()
    assert all(row["policy/rollout_logprob_gap"] < 0.2 for row in rows), rows


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
    planned = plan_memory(config, RunShape(shape, 64, (reward_shape,), on_cpu=False)).needed
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
    for row in trainer.train():  # train() raises if vLLM holds other weights
        assert row["policy/rollout_logprob_gap"] < 0.1
