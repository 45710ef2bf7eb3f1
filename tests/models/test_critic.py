"""The critic: its first values, whose weights it copies, and that it shares none of them."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitNetConfig,
    BitNetForCausalLM,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from tests.tiny_models import composite_config

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
GPT2_SHAPE = {
    "vocab_size": 23,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def randomised(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.4, generator=generator)
    return model.to(dtype).eval()


def policy_of(kind: str, **changes):
    if kind == "gpt2":
        return randomised(GPT2LMHeadModel(GPT2Config(**{**GPT2_SHAPE, **changes})))
    if kind == "gemma3":
        text = {**SHAPE, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
        return randomised(Gemma3ForConditionalGeneration(composite_config(**{**text, **changes})))
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "bitnet": (BitNetConfig, BitNetForCausalLM)}[kind]
    return randomised(model(config(**{**SHAPE, **changes})))


def one_row(critic: Critic, tokens: list[int]) -> torch.Tensor:
    length = len(tokens)
    return critic(torch.tensor([tokens]), torch.ones(1, length).long(), torch.arange(length)[None])[0]


ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet", "gemma3"])
def test_a_critic_from_the_policy_values_every_state_at_exactly_zero_and_can_learn(kind):
    critic = Critic.from_policy(policy_of(kind))
    for row in ROWS:
        values = one_row(critic, row)
        assert values.shape == (len(row),)
        assert torch.equal(values, torch.zeros(len(row), dtype=torch.float64))
    values.sum().backward()
    assert float(critic.value_head.weight.grad.abs().max()) > 0.0
    assert all(parameter.requires_grad for parameter in critic.parameters())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet", "gemma3"])
def test_values_do_not_depend_on_padding_on_either_side(kind):
    critic = Critic.from_policy(policy_of(kind))
    randomised(critic.value_head, seed=3)
    # rows of a rollout: padding before the prompt and behind the response
    ids = torch.tensor([[0, 3, 4, 5, 6, 7], [0, 0, 8, 9, 22, 22], [10, 11, 12, 13, 22, 22]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 3, 3]])
    values = critic(ids, mask, positions)
    for row, tokens, start in zip(values, ROWS, (1, 2, 0), strict=True):
        assert_close(row[start : start + len(tokens)], one_row(critic, tokens), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet", "gemma3"])
def test_a_critic_from_our_reward_model_gives_its_score_at_the_last_token(kind):
    reward_model = randomised(CausalLMRewardModel.from_causal_lm(policy_of(kind)), seed=5)
    critic = Critic.from_reward_model(reward_model, policy_of(kind))
    for row in ROWS:
        score = reward_model(torch.tensor([row])).logits[0, 0]
        assert_close(one_row(critic, row)[-1], score, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_critic_from_a_transformers_classifier_gives_its_score_at_the_last_token(kind):
    if kind == "gpt2":
        reward_model = GPT2ForSequenceClassification(GPT2Config(**GPT2_SHAPE, num_labels=1))
    else:
        reward_model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1))
    critic = Critic.from_reward_model(randomised(reward_model, seed=5), policy_of(kind))
    for row in ROWS:
        score = reward_model(input_ids=torch.tensor([row])).logits[0, 0]
        assert_close(one_row(critic, row)[-1], score, rtol=0.0, atol=1e-12)


def test_a_critic_is_a_copy_and_training_it_changes_neither_policy_nor_reward_model():
    policy = policy_of("llama")
    reward_model = randomised(CausalLMRewardModel.from_causal_lm(policy), seed=5)
    originals = {**policy.state_dict(), **{f"r.{n}": t for n, t in reward_model.state_dict().items()}}
    before = {name: tensor.clone() for name, tensor in originals.items()}
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.add_(1.0)
    assert all(torch.equal(originals[name], before[name]) for name in before)


def test_a_frozen_model_gives_a_critic_that_can_be_trained():
    policy = policy_of("llama").requires_grad_(False)
    reward_model = randomised(CausalLMRewardModel.from_causal_lm(policy)).requires_grad_(False)
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        assert all(parameter.requires_grad for parameter in critic.parameters())
    assert not any(parameter.requires_grad for parameter in [*policy.parameters(), *reward_model.parameters()])


def test_the_critic_takes_the_policys_precision_and_values_are_float32_at_least():
    policy = policy_of("llama").float()
    reward_model = randomised(CausalLMRewardModel.from_causal_lm(policy))
    critic = Critic.from_reward_model(reward_model, policy)
    assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}
    assert one_row(critic, ROWS[0]).dtype == torch.float32
    half = Critic.from_policy(policy_of("llama").to(torch.bfloat16))
    assert one_row(half, ROWS[0]).dtype == torch.float32


def test_a_reward_model_with_another_vocabulary_is_refused():
    reward_model = CausalLMRewardModel.from_causal_lm(policy_of("llama", vocab_size=31))
    with pytest.raises(ModelError) as caught:
        Critic.from_reward_model(reward_model, policy_of("llama"))
    assert str(caught.value) == (
        "ppo.value_model=reward_init: the reward model's vocabulary has 31 tokens, the policy's 23; "
        "set ppo.value_model=separate"
    )


def test_a_reward_model_without_a_linear_score_head_is_refused():
    config = BertConfig(
        vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=1
    )
    with pytest.raises(ModelError) as caught:
        Critic.from_reward_model(BertForSequenceClassification(config), policy_of("llama"))
    assert str(caught.value) == (
        "ppo.value_model=reward_init: BertForSequenceClassification has no linear `score` head with one output; "
        "set ppo.value_model=separate"
    )


def test_a_reward_model_with_several_outputs_is_refused():
    reward_model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=2))
    with pytest.raises(ModelError, match=r"has no linear `score` head with one output; set ppo\.value_model=separate$"):
        Critic.from_reward_model(reward_model, policy_of("llama"))
