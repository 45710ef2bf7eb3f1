"""Prompts that begin alike: the run that computes their beginning once is the run that computes every row, in float64.

`LEAST_SHARED` beyond the length of every prompt keeps the plain path, the oracle.
"""

import os

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes import prefixes
from ppo_rlhf.passes.packed_attention import SharedLayout
from ppo_rlhf.ppo.rollouts import Rollouts
from ppo_rlhf.ppo.run_setup import build_critic, build_state, load_policies
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from tests.ppo_runs import Run, build_prompts_alike

from .support import ONE_STEP, gradients, gradients_of, moved_on

ATOL = 1e-10
PPO = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
LORA = {"use_peft": True, "lora_r": 2}
FULL = {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.1}
CONFIGURATIONS = {
    "whole weights, a tied head": ("gpt2", {}),
    "grouped heads": ("llama", {}),
    "grouped heads, a tied head, a token budget": (
        "llama",
        {"model": {"tie_word_embeddings": True}, "max_tokens_per_micro_batch": 40},
    ),
    "a shared critic": ("gpt2", {"value_model": "shared", "vf_coef": 0.5}),
    "LoRA": ("gpt2", LORA),
    "LoRA on a shared trunk, checkpointing": (
        "llama",
        {**LORA, "value_model": "shared", "gradient_checkpointing": True},
    ),
    "checkpointing": ("gpt2", {"gradient_checkpointing": True}),
    "entropy, KL over the vocabulary": ("gpt2", FULL),
    "micro-batches of one row": ("gpt2", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}),
    "micro-batches of three rows": ("gpt2", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}),
    "several responses a prompt": ("gpt2", {"responses_per_prompt": 4, "local_rollout_forward_batch_size": 4}),
}

REAL_MODEL = "PPO_RLHF_REAL_MODEL"
"""Environment variable with the directory of a chat model such as SmolLM2-135M-Instruct, for the slow test."""
SMALL = {"total_episodes": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "response_length": 6}
SMALL |= {"dtype": "float64", "device": "cpu", "kl_coef": 0.0}


def chats(tokenizer) -> PromptDataset:
    """Return chats whose template begins all of them alike."""
    texts = ["Name a colour.", "What is two and three?", "Say hello in French, please.", "Why?"]
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    return PromptDataset(ids, texts, {})


def lengths(batch: ResponseBatch) -> torch.Tensor:
    return torch.tensor([float(len(ids)) for ids in batch.response_ids], dtype=torch.float64)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch):
    """Llama's norm computes in float32, whose rounding would hide an error of 1e-8."""

    def forward(self, states):
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def shares(rollouts: Rollouts) -> bool:
    """Return whether a micro-batch computes a common beginning once."""
    return any(isinstance(batch.rows.layout, SharedLayout) for batch in rollouts.cut.first_inputs)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_with_a_shared_prefix_is_the_run_of_whole_rows(make_run, monkeypatch, name):
    kind, changes = CONFIGURATIONS[name]
    settings = {**PPO, "prompts": build_prompts_alike(), **changes}
    with monkeypatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SHARED", 99)
        plain = make_run(kind, **ONE_STEP, **settings).before_update()[-1]
        moved = moved_on(plain)
        expected = gradients(make_run, moved, kind, **settings)
        assert not shares(plain.rollouts)
    shared = make_run(kind, **ONE_STEP, **settings).before_update()[-1]
    assert shares(shared.rollouts) is (settings["per_device_train_batch_size"] > 1)
    assert torch.equal(shared.rollouts.responses.response_ids, plain.rollouts.responses.response_ids)
    for table in ("old_logprobs", "reference_logprobs", "entropy", "values"):
        assert_close(getattr(shared.rollouts, table), getattr(plain.rollouts, table), rtol=0.0, atol=ATOL, msg=table)
    actual = gradients(make_run, moved, kind, **settings)
    assert actual.keys() == expected.keys()
    for weight, gradient in expected.items():
        assert_close(actual[weight], gradient, rtol=0.0, atol=ATOL, msg=weight)


@pytest.mark.slow
@pytest.mark.skipif(REAL_MODEL not in os.environ, reason=f"{REAL_MODEL} names no directory of a chat model")
@pytest.mark.parametrize("settings", [{}, {**LORA, "gradient_checkpointing": True}, {"value_model": "shared"}], ids=str)
def test_a_real_chat_model_gives_the_numbers_and_gradients_of_whole_rows(monkeypatch, settings):
    handle, found = PretrainedHandle(os.environ[REAL_MODEL]), []
    for least in (99, prefixes.LEAST_SHARED):
        monkeypatch.setattr(prefixes, "LEAST_SHARED", least)
        config = PPOConfig(**{**SMALL, **ONE_STEP, **settings})
        policy, reference = load_policies(handle, config, torch.device("cpu"))
        state = build_state(policy.model, build_critic(config, policy.model, None), policy.tokenizer, config)
        run = Run(state, reference, chats(policy.tokenizer), RewardScorer([("length", 1.0, lengths)]), config)
        experience = run.before_update()[-1]
        numbers = {
            name: getattr(experience.rollouts, name) for name in ("old_logprobs", "reference_logprobs", "values")
        }
        found.append(numbers | gradients_of(run, moved_on(experience)))
    whole, shared = found
    for name, tensor in whole.items():
        assert_close(shared[name], tensor, rtol=0.0, atol=ATOL * max(1.0, float(tensor.abs().max())), msg=name)
