"""Checkpointed gradients: each layer is computed once more in the update, and only there, and no number changes."""

import pytest

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.training.update import optimise

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
        optimise(run.state, experience, run.config)
        counted[checkpointing] = (before, calls[0])
    micro_batches = 2 * 2 * 1  # epochs, minibatches of one micro-batch each
    models = 1 if variant.get("value_model") == "shared" else 2
    assert counted[True][0] == counted[False][0]
    assert counted[False][1] == micro_batches * models
    assert counted[True][1] == 2 * micro_batches * models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_same_bit_for_bit(make_run, snapshot, same_tensors, kind, variant, dtype):
    plain = make_run(kind, dtype=dtype, side_by_side=False, **variant)
    recomputing = make_run(kind, dtype=dtype, gradient_checkpointing=True, **variant)
    for _ in range(2):
        expected, found = plain.iteration(), recomputing.iteration()
    timed = ("time/", "throughput/", "memory/")
    assert {k: v for k, v in found.items() if not k.startswith(timed)} == {
        k: v for k, v in expected.items() if not k.startswith(timed)
    }
    for name in ("policy", "critic"):
        assert same_tensors(snapshot(getattr(recomputing.state, name)), snapshot(getattr(plain.state, name)))


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
        optimise(run.state, experience, run.config)
    assert not run.state.policy.training


def test_an_architecture_without_it_is_refused(make_run, monkeypatch, make_model):
    monkeypatch.setattr(type(make_model("llama")), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError) as caught:
        make_run("llama", gradient_checkpointing=True)
    assert str(caught.value) == (
        "ppo.gradient_checkpointing=true: LlamaForCausalLM does not support it; set it to false"
    )
