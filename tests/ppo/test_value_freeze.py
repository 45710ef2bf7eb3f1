"""A critic whose attention is frozen: what trains, what the optimiser holds, and what a plan and a log line say."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, MambaForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.ppo.run_setup import freeze_critic
from ppo_rlhf.preflight.memory import MOMENTS, RunShape, plan_memory
from tests.ppo.support import ONE_STEP, gradients_of, moved_on
from tests.ppo_runs import build_model
from tests.tiny_models import MAMBA

FROZEN = {
    "llama": ".self_attn.",
    "gpt2": ".attn.",
    "bitnet": ".self_attn.",  # with a norm inside, which stays, too
}
"""What the names of the weights of attention contain, and no other; norms beside attention have it in their name."""


def is_frozen(kind: str, name: str) -> bool:
    return FROZEN[kind] in f".{name}"


@pytest.mark.parametrize("kind", FROZEN)
def test_attention_stays_as_it_was_and_everything_else_of_the_critic_moves(make_run, snapshot, kind):
    run = make_run(kind, value_freeze="attention")
    before = {name: tensor.clone() for name, tensor in snapshot(run.state.learner.critic).items()}
    policy = {name: tensor.clone() for name, tensor in snapshot(run.state.learner.policy).items()}
    for _ in range(2):  # the head starts at 0, so the backbone has no gradient before its first step
        run.iteration()
    after, moved = snapshot(run.state.learner.critic), snapshot(run.state.learner.policy)
    stayed = {name for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert stayed == {name for name in before if is_frozen(kind, name)}
    assert 0 < len(stayed) < len(before)
    assert all(not torch.equal(moved[name], tensor) for name, tensor in policy.items())


@pytest.mark.parametrize("kind", FROZEN)
def test_the_other_weights_have_the_gradient_that_they_have_without_the_setting(make_run, kind):
    free, frozen = (make_run(kind, **ONE_STEP, value_freeze=value) for value in ("none", "attention"))
    experience = moved_on(free.before_update()[-1])
    for run in (free, frozen):
        torch.nn.init.normal_(run.state.learner.critic.value_head.weight, generator=torch.Generator().manual_seed(4))
    expected, actual = gradients_of(free, experience), gradients_of(frozen, experience)
    assert set(expected) - set(actual) == {
        name for name in expected if name.startswith("critic.") and is_frozen(kind, name)
    }
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], rtol=0.0, atol=1e-12)


def test_the_optimiser_holds_no_state_of_what_is_frozen(make_run):
    run = make_run(value_freeze="attention")
    run.iteration()
    held = {id(weight) for group in run.state.learner.critic_optimizer.param_groups for weight in group["params"]}
    critic = dict(run.state.learner.critic.named_parameters())
    assert held == {id(weight) for name, weight in critic.items() if not is_frozen("llama", name)}
    assert {id(weight) for weight in run.state.learner.critic_optimizer.state} == held


def test_a_line_says_how_many_parameters_of_the_critic_train(make_run, caplog):
    caplog.set_level("INFO", logger="ppo_rlhf")
    run = make_run(value_freeze="attention")
    critic = dict(run.state.learner.critic.named_parameters())
    total = sum(weight.numel() for weight in critic.values()) / 1e6
    trained = sum(weight.numel() for name, weight in critic.items() if not is_frozen("llama", name)) / 1e6
    (line,) = [message for message in caplog.messages if "Critic:" in message]
    assert f" {total:.3g} M parameters" in line
    assert f" {trained:.3g} M train; its attention " in line
    caplog.clear()
    make_run()
    assert not [message for message in caplog.messages if "Critic:" in message]


def test_the_memory_plan_counts_no_moments_of_what_is_frozen(make_run):
    config = make_run().config
    model = build_model()
    shape = RunShape(policy=AutoConfig.for_model(**model.config.to_dict()), prompt_length=8)
    of_attention = sum(weight.nbytes for name, weight in model.named_parameters() if is_frozen("llama", name))
    plain, frozen = (plan_memory(replace(config, value_freeze=value), shape) for value in ("none", "attention"))
    assert of_attention > 0
    assert plain.held[MOMENTS] - frozen.held[MOMENTS] == 2 * of_attention
    assert plain.trained - frozen.trained == of_attention


def test_a_critic_whose_layers_have_no_attention_is_refused(make_run):
    config = replace(make_run().config, value_freeze="attention")
    critic = Critic.from_policy(MambaForCausalLM(MAMBA))
    with pytest.raises(ModelError, match=r"ppo\.value_freeze=attention: .*MambaModel.*set ppo\.value_freeze=none"):
        freeze_critic(critic, config)
