"""Gradient checkpointing recomputes each layer once in the update, nowhere else, and changes no number."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.passes.gradient_checkpointing import NAME, enable_gradient_checkpointing, recomputing
from tests.ppo_runs import MEASURED, learn_from

VARIANTS = [
    ("llama", {}),
    ("gpt2", {"value_model": "shared", "dtype": "float32"}),
    ("llama", {"use_peft": True, "lora_r": 2, "dtype": "bfloat16"}),
]


def count_calls(run) -> list[int]:
    """Count the forward passes of the first layer's MLP in the policy, and in a critic with its own backbone."""
    calls = [0]

    def count(*_):
        calls[0] += 1

    for backbone in {run.state.learner.policy.base_model, run.state.learner.critic.backbone}:
        layer = (backbone.h if hasattr(backbone, "h") else backbone.layers)[0]
        layer.mlp.register_forward_pre_hook(count)  # recomputing stops within the last layer that is needed
    return calls


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=str)
def test_every_layer_is_recomputed_once_in_the_update_and_no_number_changes(
    make_run, snapshot, same_tensors, kind, variant
):
    counted, metrics, runs = [], [], []
    for checkpointing in (False, True):
        run = make_run(kind, gradient_checkpointing=checkpointing, **variant)
        calls = count_calls(run)
        experience = run.before_update()[-1]
        assert not run.state.learner.policy.training
        before, calls[0] = calls[0], 0
        actual = learn_from(run.state, experience)
        counted.append((before, calls[0]))
        metrics.append({name: value for name, value in actual.items() if not name.startswith(MEASURED)})
        runs.append(run)
    passes = 2 * 2 * (1 if variant.get("value_model") == "shared" else 2)  # epochs, minibatches, models
    assert counted[0][1] == passes
    assert counted[1] == (counted[0][0], 2 * passes)
    assert metrics[1] == metrics[0]
    for name in ("policy", "critic"):
        assert same_tensors(*(snapshot(getattr(run.state.learner, name)) for run in runs))
    assert not runs[1].state.learner.policy.training


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
        actual = gradients()
    assert len(calls) == 2
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert not any(module.training for module in model.modules())


def test_models_are_put_back_after_an_update_that_fails(make_run, monkeypatch):
    run = make_run(gradient_checkpointing=True)
    experience = run.before_update()[-1]

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(run.state.learner.policy_optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        learn_from(run.state, experience)
    assert not any(module.training for module in run.state.learner.policy.modules())


def test_an_architecture_without_it_is_refused(make_run, monkeypatch, make_model):
    monkeypatch.setattr(type(make_model("llama")), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"ppo\.gradient_checkpointing=true: LlamaForCausalLM"):
        make_run("llama", gradient_checkpointing=True)


def test_a_transformers_that_marks_layers_otherwise_is_an_error_and_no_silence(make_model, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(model, f"{NAME}_enable", lambda options: setattr(model.model.layers[0], "checkpoints", True))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .*constraints\.txt"):
        enable_gradient_checkpointing(model)
