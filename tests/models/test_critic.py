"""Critics: their first values, whose weights they copy, and what a shared trunk shares."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma3ForConditionalGeneration,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from tests.tiny_models import KINDS, composite_config, draw_weights, tiny_model

ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
# the rows as in a rollout: padded before the prompt and after the response
IDS = torch.tensor([[0, 3, 4, 5, 6, 7], [0, 0, 8, 9, 22, 22], [10, 11, 12, 13, 22, 22]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]])
POSITIONS = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 3, 3]])
BERT = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
LLAMA = tiny_model("llama").config
MAKE = {"separate": Critic.from_policy, "shared": SharedCritic}


def policy_of(kind: str):
    if kind != "gemma3":  # which reads images too, and has sliding windows
        return tiny_model(kind).double()
    shape = {name: value for name, value in LLAMA.to_dict().items() if name != "rope_parameters"}  # Gemma 3 has its own
    text = {**shape, "head_dim": 8, "sliding_window": 4}
    config = composite_config(**{**text, "layer_types": ["sliding_attention", "full_attention"]})
    return draw_weights(Gemma3ForConditionalGeneration(config), 0.3).double().eval()


def drawn_head(width: int = 16) -> nn.Linear:
    head = nn.Linear(width, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
        head.bias.fill_(0.25)
    return head


def one_row(critic, tokens: list[int]) -> torch.Tensor:
    length = len(tokens)
    return critic(torch.tensor([tokens]), torch.ones(1, length).long(), torch.arange(length)[None])[0]


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_fresh_critic_values_every_state_at_exactly_zero_and_can_learn(kind, make):
    critic = make(policy_of(kind))
    values = critic(IDS, MASK, POSITIONS)
    assert torch.equal(values, torch.zeros(3, 6, dtype=torch.float64))
    values.sum().backward()
    assert float(critic.value_head.weight.grad.abs().max()) > 0.0
    assert all(parameter.requires_grad for parameter in critic.parameters())


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_values_do_not_depend_on_padding_on_either_side(kind, make):
    critic = make(policy_of(kind), value_head=drawn_head())
    values = critic(IDS, MASK, POSITIONS)
    for row, tokens, start in zip(values, ROWS, (1, 2, 0), strict=True):
        assert_close(row[start : start + len(tokens)], one_row(critic, tokens), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_critic_reads_the_hidden_states_of_the_language_model_head(kind):
    policy, head = policy_of(kind), drawn_head()
    read: list[torch.Tensor] = []
    policy.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    critic = SharedCritic(policy, head)
    policy(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
    assert_close(critic.values(read[0]), read[0] @ head.weight[0] + 0.25, rtol=0.0, atol=1e-10)
    critic(IDS, MASK, POSITIONS).sum().backward()
    assert bool(policy.get_input_embeddings().weight.grad.any())  # the value loss trains the trunk


def test_the_names_of_saved_weights():
    backbone = [f"backbone.{name}" for name in tiny_model().base_model.state_dict()]
    head = ["value_head.weight", "value_head.bias"]
    assert list(Critic.from_policy(tiny_model()).state_dict()) == backbone + head
    assert list(SharedCritic(tiny_model()).state_dict()) == head


def test_a_given_head_is_copied_and_must_fit():
    for make in MAKE.values():
        head = drawn_head()
        critic = make(tiny_model().double(), value_head=head)
        assert torch.equal(critic.value_head.weight, head.weight)
        assert critic.value_head.weight.data_ptr() != head.weight.data_ptr()
        with pytest.raises(ModelError, match="width 8, the policy's have 16"):
            make(tiny_model(), value_head=nn.Linear(8, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CausalLMRewardModel.from_causal_lm(tiny_model("llama", seed=5)),
        lambda: CausalLMRewardModel.from_causal_lm(policy_of("gemma3")),
        lambda: GPT2ForSequenceClassification(tiny_model("gpt2", num_labels=1).config),
        lambda: LlamaForSequenceClassification(tiny_model("llama", num_labels=1).config),
    ],
    ids=["ours", "ours on gemma3", "gpt2", "llama"],
)
def test_a_critic_from_a_reward_model_gives_its_score_at_the_last_token(make):
    torch.manual_seed(0)
    reward_model = make().double().eval()
    critic = Critic.from_reward_model(reward_model, tiny_model().double())
    for row in ROWS:
        score = reward_model(input_ids=torch.tensor([row])).logits[0, 0]
        assert_close(one_row(critic, row)[-1], score, rtol=0.0, atol=1e-12)


def test_a_critic_copies_what_it_starts_from_even_if_that_is_frozen():
    policy = tiny_model().requires_grad_(False)
    reward_model = CausalLMRewardModel.from_causal_lm(policy).requires_grad_(False)
    originals = {**policy.state_dict(), **{f"r.{n}": t for n, t in reward_model.state_dict().items()}}
    before = {name: tensor.clone() for name, tensor in originals.items()}
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        assert all(parameter.requires_grad for parameter in critic.parameters())
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.add_(1.0)
    assert all(torch.equal(originals[name], before[name]) for name in before)
    assert not any(parameter.requires_grad for parameter in [*policy.parameters(), *reward_model.parameters()])


def test_critics_train_and_value_in_float32_at_least():
    policy = tiny_model().bfloat16()
    reward_model = CausalLMRewardModel.from_causal_lm(policy)
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}
        assert one_row(critic, ROWS[0]).dtype == torch.float32
    assert one_row(SharedCritic(policy), ROWS[0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("reward_model", "message"),
    [
        (CausalLMRewardModel.from_causal_lm(tiny_model(vocab_size=31)), "vocabulary has 31 tokens, the policy's 25"),
        (BertForSequenceClassification(BertConfig(**BERT)), "no linear `score` head"),
        (LlamaForSequenceClassification(LlamaConfig(**{**LLAMA.to_dict(), "num_labels": 2})), "no linear `score` head"),
    ],
    ids=["vocabulary", "head", "labels"],
)
def test_a_reward_model_that_gives_no_critic_is_refused(reward_model, message):
    with pytest.raises(ModelError, match=r"ppo\.value_model=reward_init: .*" + message):
        Critic.from_reward_model(reward_model, tiny_model())
