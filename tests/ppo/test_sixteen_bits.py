"""Policy and reference policy do the same arithmetic, so that the KL is 0 before the first step, in 16 bits too.

The models have what hides in small random ones: logits near 25, where a step of bfloat16 is 0.125.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes.packed_attention import SharedLayout
from ppo_rlhf.ppo.rollouts import critic_values, measure, policy_passes
from ppo_rlhf.ppo.run_setup import build_critic, build_state, load_policies
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo_runs import Run, build_model, build_prompts, build_prompts_alike, build_tokenizer, first_letters

CPU = torch.device("cpu")
REAL_MODEL = "PPO_RLHF_REAL_MODEL"
"""Environment variable with the directory of a chat model such as SmolLM2-135M-Instruct, for the slow test."""
SETTINGS = {
    "total_episodes": 36,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_mini_batches": 2,
    "num_ppo_epochs": 1,
    "local_rollout_forward_batch_size": 5,  # not the micro-batches: other batches round differently in 16 bits
    "response_length": 8,
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "device": "cpu",
}
LORA = {"use_peft": True, "lora_r": 2}


def start(handle: PretrainedHandle, **settings) -> Run:
    config = PPOConfig(**{**SETTINGS, **settings})
    policy, reference = load_policies(handle, config, CPU)
    critic = build_critic(config, policy.model, None)
    state = build_state(policy.model, critic, policy.tokenizer, config)
    return Run(state, reference, build_prompts(), RewardScorer([("first_letters", 2.0, first_letters)]), config)


@pytest.fixture
def saved(tmp_path: Path):
    """Save a model, 64 wide, whose largest logit is about 25."""

    def save(kind: str = "llama", **options) -> PretrainedHandle:
        size = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
        model = build_model(kind, dtype=torch.float32, spread=0.3, **size, **options)
        ids = torch.tensor([[3, 9, 14, 6, 12, 5]])
        with torch.no_grad():
            for norm in (m for name, m in model.named_modules() if name.endswith((".norm", ".ln_f"))):
                norm.weight.mul_(25.0 / float(model(ids).logits.abs().max()))
            assert 24.0 < float(model(ids).logits.abs().max()) < 26.0
        model.save_pretrained(tmp_path / kind)
        build_tokenizer().save_pretrained(tmp_path / kind)
        return PretrainedHandle(str(tmp_path / kind))

    return save


def gaps(run: Run) -> torch.Tensor:
    rollouts = run.rollouts()
    return (rollouts.old_logprobs - rollouts.reference_logprobs)[rollouts.mask]


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("llama", {}, {"dtype": "bfloat16"}),
        ("llama", {}, {"dtype": "bfloat16", "temperature": 0.7}),
        ("llama", {"tie_word_embeddings": True}, {"dtype": "bfloat16", "value_model": "shared"}),
        ("gpt2", {}, {"dtype": "bfloat16", "kl_estimator": "full"}),
        ("bitnet", {}, {"dtype": "bfloat16"}),
        ("llama", {}, {"dtype": "float32"}),
        ("llama", {}, {"dtype": "bfloat16", **LORA}),
        ("gpt2", {}, {"dtype": "bfloat16", "value_model": "shared", **LORA}),
        ("llama", {}, {"dtype": "bfloat16", "load_in_4bit": True, **LORA}),
    ],
)
def test_the_kl_is_0_to_the_bit_before_the_first_step(saved, kind, options, settings):
    if settings.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    run = start(saved(kind, **options), **settings)
    if settings["dtype"] == "float32":  # float32 measures the reference in batches of its own
        assert float(gaps(run).abs().max()) < 1e-4
    else:
        assert not gaps(run).any()
    assert run.iteration()["objective/kl"] == pytest.approx(0.0, abs=1e-4 if settings["dtype"] == "float32" else 0.0)
    assert gaps(run).any()  # it has learned


@pytest.mark.parametrize("settings", [{}, LORA, {"value_model": "shared"}], ids=str)
def test_the_kl_of_prompts_that_begin_alike_is_0_to_the_bit_and_the_first_ratio_1(saved, settings):
    run = start(saved(), dtype="bfloat16", **{**settings, "num_mini_batches": 1})
    run.prompts = build_prompts_alike()
    assert any(isinstance(batch.rows.layout, SharedLayout) for batch in run.rollouts().cut.first_inputs)
    assert not gaps(run).any()
    metrics = run.iteration()
    assert (metrics["val/ratio"], metrics["policy/approxkl_avg"]) == (1.0, 0.0)
    assert gaps(run).any()


def test_the_reference_reads_the_policys_own_batches_in_16_bits(make_run):
    run = make_run(dtype="bfloat16", local_rollout_forward_batch_size=5)
    rollouts = run.rollouts()
    read: dict[str, list[list[int]]] = {"policy": [], "reference": []}
    for name, model in (("policy", run.state.learner.policy), ("reference", run.reference)):
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, ids, name=name: read[name].append(ids[0].flatten().tolist()))
    parts = run.state.learner, run.state.sampler, run.state.progress
    measure(*parts, run.reference, rollouts.prompts, rollouts.responses)
    assert len(read["policy"]) == 2
    assert read["reference"] == read["policy"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_first_ratio_is_exactly_one(make_run, kind):
    run = make_run(kind, dtype="bfloat16", num_mini_batches=1, num_ppo_epochs=1)
    for _ in range(2):
        metrics = run.iteration()
        assert (metrics["val/ratio"], metrics["policy/approxkl_avg"]) == (1.0, 0.0)


@pytest.mark.parametrize("part", ["log-probabilities", "values"])
def test_a_block_of_passes_casts_each_weight_once(make_run, part):
    """Autocast keeps its casts until its context ends."""

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                cast.append(id(args[0]))
            return func(*args, **(kwargs or {}))

    cast: list[int] = []
    run = make_run("gpt2", dtype="bfloat16", per_device_train_batch_size=2, num_mini_batches=1)
    cut = run.rollouts().cut
    assert len(cut.first_inputs) > 1
    with Casts():
        if part == "values":
            critic_values(run.state.learner, cut)
        else:
            policy_passes(run.state.learner, cut, None)
    assert cast
    assert len(set(cast)) == len(cast)


@pytest.mark.parametrize("tied", [False, True])
def test_only_weights_that_autocast_casts_are_stored_in_16_bits(saved, tied):
    handle = saved(tie_word_embeddings=tied)
    _, reference = load_policies(handle, PPOConfig(dtype="bfloat16", device="cpu"), CPU)
    start = handle.causal_lm()
    wide = {name for name, weight in reference.named_parameters() if weight.dtype == torch.float32}
    assert wide == {n for n, _ in start.named_parameters() if "norm" in n or "embed" in n}
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) is tied
    assert not any(weight.requires_grad for weight in reference.parameters())
    for name, weight in reference.named_parameters():
        assert torch.equal(weight, start.get_parameter(name).to(weight.dtype)), name


@pytest.mark.slow
@pytest.mark.skipif(REAL_MODEL not in os.environ, reason=f"{REAL_MODEL} names no directory of a chat model")
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "value_model": "shared"},
        {"dtype": "bfloat16", **LORA},
        {"dtype": "bfloat16", "load_in_4bit": True, **LORA},
        {"dtype": "bfloat16", "value_model": "shared", "load_in_4bit": True, **LORA},
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_the_kl_of_a_real_model_is_0_before_the_first_step(settings):
    if settings.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    run = start(PretrainedHandle(os.environ[REAL_MODEL]), response_length=24, **settings)
    texts = [f"Say {what} about {topic}." for what in ("one thing", "a few words") for topic in ("rain", "old trains")]
    chats = [[{"role": "user", "content": text}] for text in texts]
    template = partial(run.state.sampler.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    run.prompts = PromptDataset([template(chat) for chat in chats], texts, {})
    found = gaps(run)
    assert float(found.abs().max()) <= (1e-4 if settings["dtype"] == "float32" else 0.0)
