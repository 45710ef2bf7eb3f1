"""Checkpointed gradients: each layer is computed once more in the update, and only there, and no number changes."""

import pytest
import torch
from ppo_rlhf.models.passes import attention_by_sequence
from transformers import MixtralConfig, MixtralForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import packed_attention
from ppo_rlhf.models.gradient_checkpointing import enable_gradient_checkpointing, recomputing
from ppo_rlhf.ppo.update import optimise_policy

KINDS = ["gpt2", "llama", "bitnet"]
VARIANTS = [{}, {"value_model": "shared"}, {"use_peft": True, "lora_r": 2}, {"value_model": "shared", "use_peft": True}]


def count_calls(run) -> list[int]:
    """Count how often the first layer's MLP of the policy, and of a critic of its own, computes."""
    calls = [0]
    backbones = {run.state.policy.base_model, run.state.critic.backbone}

    def count(*_):
        calls[0] += 1

    for backbone in backbones:
        layer = (backbone.h if hasattr(backbone, "h") else backbone.layers)[0]
        layer.mlp.register_forward_pre_hook(count)  # recomputing stops within the last layer that is needed
    return calls


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_is_recomputed_once_in_the_update_and_never_before_it(make_run, kind, variant):
    counted = {}
    for checkpointing in (False, True):
        run = make_run(kind, gradient_checkpointing=checkpointing, **variant)
        calls = count_calls(run)
        experience = run.before_update()[-1]
        before, calls[0] = calls[0], 0
        optimise_policy(run.state, experience, run.config)
        counted[checkpointing] = (before, calls[0])
    micro_batches = 2 * 2 * 1  # epochs, minibatches of one micro-batch each
    models = 1 if variant.get("value_model") == "shared" else 2
    assert counted[True][0] == counted[False][0]
    assert counted[False][1] == micro_batches * models
    assert counted[True][1] == 2 * micro_batches * models


def assert_same_numbers(make_run, snapshot, same_tensors, kind, **settings) -> None:
    plain = make_run(kind, side_by_side=False, **settings)
    recomputing = make_run(kind, gradient_checkpointing=True, **settings)
    for _ in range(2):
        expected, found = plain.iteration(), recomputing.iteration()
    timed = ("time/", "throughput/", "memory/")
    assert {k: v for k, v in found.items() if not k.startswith(timed)} == {
        k: v for k, v in expected.items() if not k.startswith(timed)
    }
    for name in ("policy", "critic"):
        assert same_tensors(snapshot(getattr(recomputing.state, name)), snapshot(getattr(plain.state, name)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_same_bit_for_bit(make_run, snapshot, same_tensors, kind, variant, dtype):
    assert_same_numbers(make_run, snapshot, same_tensors, kind, dtype=dtype, **variant)


@pytest.mark.parametrize(("kind", "variant"), zip([*KINDS, "gpt2"], VARIANTS, strict=True), ids=str)
def test_they_are_where_sequences_are_attended_to_one_by_one(
    make_run, snapshot, same_tensors, monkeypatch, kind, variant
):
    """As they are where lengths differ much; these spare too little."""
    monkeypatch.setattr(attention_by_sequence, "FEWEST_PAIRS", 1)
    attended, attend = [], packed_attention.attend_by_sequence
    monkeypatch.setattr(packed_attention, "attend_by_sequence", lambda *x, **o: attended.append(1) or attend(*x, **o))
    assert_same_numbers(make_run, snapshot, same_tensors, kind, **variant)
    assert attended


def test_routers_that_draw_noise_in_training_mode_draw_none():
    shape = {"vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = MixtralConfig(**shape, **heads, num_local_experts=4, router_jitter_noise=0.5)
    torch.manual_seed(0)
    model, ids = MixtralForCausalLM(config).eval(), torch.tensor([[4, 7, 9, 12, 5]])
    enable_gradient_checkpointing(model)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    calls, expected = [], gradients()
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    with recomputing(model):
        found = gradients()
    assert len(calls) == 2
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(module.training for module in model.modules())


def test_outside_the_update_the_models_are_in_evaluation_mode(make_run):
    run = make_run(gradient_checkpointing=True)
    for _ in range(2):
        assert not run.state.policy.training
        assert not run.state.critic.backbone.training
        run.iteration()


def test_models_are_put_back_after_an_update_that_fails(make_run, monkeypatch):
    run = make_run(gradient_checkpointing=True)
    experience = run.before_update()[-1]

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(run.state.policy_optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        optimise_policy(run.state, experience, run.config)
    assert not run.state.policy.training


def test_an_architecture_without_it_is_refused(make_run, monkeypatch, make_model):
    monkeypatch.setattr(type(make_model("llama")), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError) as caught:
        make_run("llama", gradient_checkpointing=True)
    assert str(caught.value) == (
        "ppo.gradient_checkpointing=true: LlamaForCausalLM does not support it; set it to false"
    )
