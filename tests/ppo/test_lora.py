"""Runs with LoRA: which weights train, which are shared in memory, and the invariants of the update."""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import has_adapter, merged, merged_parameters
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.passes.forward import packs
from ppo_rlhf.ppo.run_setup import policy_to_train
from tests.ppo.test_update import poisoned, recorded

from .support import ONE_STEP, assert_same_gradients, gradients_of, moved_on

KINDS = ["gpt2", "llama", "bitnet"]
LORA = {"use_peft": True, "lora_r": 2, "lora_alpha": 8}
IDS = torch.tensor([[3, 9, 14, 6], [5, 7, 4, 12]])


def stir(*models) -> None:
    """Move every adapter away from its initial value, at which half of its gradient is 0."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for model in models:
            for name, parameter in trained_parameters(model).items():
                if "lora" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def stirred(make_run, kind: str, **settings):
    run = make_run(kind, **{**LORA, **settings})
    stir(run.state.learner.policy, run.state.learner.critic)
    return run


def gradient(make_run, experience, kind: str, **settings) -> dict[str, torch.Tensor]:
    actual = gradients_of(stirred(make_run, kind, **{**ONE_STEP, **settings}), experience)
    assert {name.partition(".")[0] for name in actual} == {"policy", "critic"}
    return actual


@pytest.mark.parametrize(
    ("kind", "value_model"), [("gpt2", "separate"), pytest.param("llama", "shared", marks=pytest.mark.slow)]
)
def test_adapters_and_value_head_train_and_the_frozen_weights_keep_every_bit(make_run, kind, value_model):
    run = make_run(kind, value_model=value_model, dtype="float32", **LORA)
    models = {"policy": run.state.learner.policy, "critic": run.state.learner.critic, "reference": run.reference}
    before = {f"{m}.{n}": p.detach().clone() for m, model in models.items() for n, p in model.named_parameters()}
    for _ in range(2):
        run.iteration()
    after = {f"{m}.{n}": p for m, model in models.items() for n, p in model.named_parameters()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name or "value_head" in name}
    assert all(after[name].requires_grad is (name in moved) for name in before)


@pytest.mark.parametrize(
    ("kind", "value_model"), [("gpt2", "separate"), pytest.param("llama", "shared", marks=pytest.mark.slow)]
)
def test_policy_critic_and_reference_take_the_memory_of_one_base_and_of_what_trains(make_run, kind, value_model):
    state, reference = (run := make_run(kind, value_model=value_model, **LORA)).state, run.reference

    def storages(*models):
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    trained = {
        id(p): p.nbytes for m in (state.learner.policy, state.learner.critic) for p in trained_parameters(m).values()
    }
    together = storages(state.learner.policy, state.learner.critic, reference)
    assert sum(together.values()) == sum(storages(reference).values()) + sum(trained.values())
    held = {
        id(p)
        for o in (state.learner.policy_optimizer, state.learner.critic_optimizer)
        for p in o.param_groups[0]["params"]
    }
    assert held == set(trained)


@pytest.mark.parametrize(
    ("kind", "value_model"), [pytest.param("gpt2", "separate", marks=pytest.mark.slow), ("llama", "shared")]
)
def test_the_first_ratio_is_one_to_the_last_bit(make_run, monkeypatch, kind, value_model):
    run = stirred(make_run, kind, value_model=value_model, dtype="bfloat16" if kind == "llama" else "float32")
    calls = recorded(monkeypatch, "clipped_policy_loss")
    run.iteration()
    assert torch.equal(calls[0]["new"][calls[0]["mask"]], calls[0]["old"][calls[0]["mask"]])
    assert not torch.equal(calls[-1]["new"][calls[-1]["mask"]], calls[-1]["old"][calls[-1]["mask"]])


@pytest.mark.parametrize(
    ("kind", "value_model"), [("gpt2", "separate"), pytest.param("llama", "shared", marks=pytest.mark.slow)]
)
def test_the_gradient_depends_neither_on_the_cut_nor_on_padding(make_run, kind, value_model):
    experience = moved_on(stirred(make_run, kind, value_model=value_model).before_update()[-1])
    expected = gradient(make_run, experience, kind, value_model=value_model)
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    assert_same_gradients(gradient(make_run, experience, kind, value_model=value_model, **cut), expected)
    assert_same_gradients(gradient(make_run, poisoned(experience), kind, value_model=value_model), expected)
    assert all(float(g.abs().max()) > 0 for g in expected.values())


def test_sixteen_bit_runs_freeze_in_sixteen_bits_and_train_in_float32(make_run):
    state = make_run(dtype="bfloat16", **LORA).state
    for model in (state.learner.policy, state.learner.critic):
        assert {p.dtype for p in trained_parameters(model).values()} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_critic_from_the_reward_model_is_an_adapter_on_its_frozen_weights(make_run, make_model):
    reward_model = CausalLMRewardModel.from_causal_lm(make_model("llama", seed=2))
    run = make_run(reward_model=reward_model, value_model="reward_init", **LORA)
    critic = run.state.learner.critic
    frozen = {p.data_ptr() for p in critic.parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in reward_model.backbone.parameters()}
    assert has_adapter(critic.backbone)
    before = reward_model(IDS).logits
    assert torch.equal(critic.backbone(IDS).last_hidden_state, reward_model.backbone(IDS).last_hidden_state)
    run.iteration()
    assert torch.equal(reward_model(IDS).logits, before)
    assert not torch.equal(critic.backbone(IDS).last_hidden_state, reward_model.backbone(IDS).last_hidden_state)


@pytest.mark.parametrize("kind", [*KINDS[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in KINDS[1:])])
def test_the_exported_policy_is_a_plain_model_that_computes_what_was_trained(make_run, kind):
    run = stirred(make_run, kind, dtype="float32")
    run.iteration()
    exported = exported_policy(run.state.learner, run.state.sampler)
    assert not has_adapter(exported.model)
    assert exported.value_head is None
    logits = run.state.learner.policy(IDS).logits
    assert_close(exported.model(IDS).logits, logits, rtol=0.0, atol=2e-5 * float(logits.detach().abs().max()))


def test_an_adapted_policy_packs_though_its_base_was_probed_before(make_run):
    run = make_run(**LORA)
    assert not run.state.learner.computes_padding
    assert packs(run.reference.base_model)
    again = policy_to_train(run.reference, run.config)
    assert packs(again.base_model)
    assert torch.equal(again(IDS).logits, run.reference(IDS).logits)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("target", ["all-linear", "all-linear+head"])
def test_parameters_are_merged_one_by_one_as_the_whole_model_is(make_run, kind, target):
    settings = {**LORA, "lora_target_modules": target}
    policy = make_run(kind, model={"tie_word_embeddings": False}, dtype="float32", **settings).state.learner.policy
    stir(policy)
    expected = dict(merged(policy).named_parameters())
    actual = dict(merged_parameters(policy))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_close(value, expected[name].detach(), rtol=0.0, atol=1e-7)


def test_a_tied_head_with_an_adapter_is_refused(make_run):
    policy = make_run("gpt2", dtype="float32", **LORA, lora_target_modules="all-linear+head").state.learner.policy
    with pytest.raises(ModelError, match=r"^ppo\.lora_target_modules: .*GPT2LMHeadModel"):
        next(iter(merged_parameters(policy)))
