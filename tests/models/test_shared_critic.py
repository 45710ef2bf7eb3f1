"""A value head on the policy's trunk: what it reads, what belongs to it, and that it costs no pass of its own."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import Critic, SharedCritic
from tests.tiny_models import KINDS, tiny_model

IDS = torch.tensor([[0, 0, 4, 7, 9], [5, 6, 4, 8, 10]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])


def drawn_head(width: int = 16) -> nn.Linear:
    head = nn.Linear(width, 1)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
        head.bias.fill_(0.25)
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_heads_on_the_states_that_the_language_model_head_reads(kind):
    policy, head = tiny_model(kind), drawn_head()
    read: list[torch.Tensor] = []
    policy.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    critic = SharedCritic.from_policy(policy, head)
    with torch.no_grad():
        policy(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
    expected = read[0] @ head.weight[0] + 0.25
    assert_close(critic.values(read[0]), expected, rtol=0.0, atol=1e-5)
    assert torch.equal(critic(IDS, MASK, POSITIONS), critic.values(read[0]))


def test_a_fresh_head_values_every_state_at_zero_and_can_learn():
    policy = tiny_model()
    critic = SharedCritic.from_policy(policy)
    values = critic(IDS, MASK, POSITIONS)
    assert torch.equal(values, torch.zeros(2, 5))
    values.sum().backward()
    assert bool(critic.value_head.weight.grad.abs().sum() > 0)


def test_the_value_loss_reaches_the_trunk():
    policy = tiny_model()
    SharedCritic.from_policy(policy, drawn_head())(IDS, MASK, POSITIONS).sum().backward()
    assert bool(policy.model.embed_tokens.weight.grad.abs().sum() > 0)


def test_only_the_head_belongs_to_the_critic():
    critic = SharedCritic.from_policy(tiny_model(), drawn_head())
    assert list(critic.state_dict()) == ["value_head.weight", "value_head.bias"]
    assert len(list(critic.parameters())) == 2


@pytest.mark.parametrize("make", [Critic.from_policy, SharedCritic.from_policy])
def test_a_head_that_is_given_is_copied(make):
    head = drawn_head()
    critic = make(tiny_model(), value_head=head)
    assert torch.equal(critic.value_head.weight, head.weight)
    assert critic.value_head.weight.data_ptr() != head.weight.data_ptr()


def test_a_head_of_another_width_is_refused():
    with pytest.raises(ModelError) as caught:
        SharedCritic.from_policy(tiny_model(), nn.Linear(8, 1))
    assert str(caught.value) == (
        "The value head (v_head.summary) reads states of width 8, the policy's have 16: they do not belong together"
    )
