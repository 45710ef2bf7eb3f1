"""LoRA on mixtures of experts: which layers `all-linear` selects, and that peft loads the adapter. Oracle: peft."""

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import (
    LoraSettings,
    check_critic_targets,
    check_targets,
    describe_mixture,
    load_adapter,
    merged,
    mixtures,
    save_adapter,
    with_adapter,
)
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from tests.tiny_models import named_model, save, tiny_model, with_trained_adapter

IDS = torch.tensor([[4, 7, 9, 12], [5, 6, 4, 8]])
ALL = LoraSettings(rank=2, alpha=4, target_modules="all-linear")
LATENT = {
    **{
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "head_dim": 4,
    },
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
SHARED = {"gate_proj", "up_proj", "down_proj"}
CASES: dict[str, tuple[dict[str, Any], set[str], set[str], set[str]]] = {
    # settings, names of the layers that get an adapter, of routers and experts, of plain layers that peft cannot name
    "Qwen3Moe": ({"num_experts": 4}, ATTENTION, {"gate", "experts"}, set()),
    "Mixtral": ({"num_local_experts": 4}, ATTENTION, {"gate", "experts"}, set()),
    "Olmoe": ({"num_experts": 4}, ATTENTION, {"gate", "experts"}, set()),
    "DeepseekV3": (
        {"n_routed_experts": 4, **LATENT},
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        {"gate", "experts"},
        SHARED,
    ),
    "GptOss": ({"num_local_experts": 4, "head_dim": 8}, ATTENTION, {"router", "experts"}, set()),
    "GraniteMoe": ({"num_local_experts": 4}, ATTENTION, {"router", "experts"}, set()),
    "Qwen2Moe": (
        {"num_experts": 4, "shared_expert_intermediate_size": 8},
        ATTENTION | SHARED | {"shared_expert_gate"},
        {"gate", "experts"},
        set(),
    ),
    # its router holds a plain linear layer, as those of Gemma 4, AFMoE, JetMoE and LongCat do
    "HunYuanMoEV1": ({"num_experts": 4, "moe_topk": 2, "head_dim": 8}, ATTENTION | {"wg"}, {"experts"}, SHARED),
}
WORKED_BEFORE = ("GptOss", "GraniteMoe", "Qwen2Moe")


def mixture(name: str) -> PreTrainedModel:
    return named_model(name, **CASES[name][0])


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    return with_trained_adapter(model, ALL, seed=1)


def last(names) -> set[str]:
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in names}


@pytest.mark.parametrize("name", CASES)
def test_all_linear_takes_the_plain_linear_layers_and_one_line_says_what_it_leaves_out(name):
    _, names, experts, others = CASES[name]
    model = mixture(name)
    assert last(mixtures(model)) == experts
    check_targets(model, ALL)
    check_critic_targets(model.base_model, ALL)
    assert last(trained_parameters(adapted(model))) == names
    line = describe_mixture(model, ALL)
    assert f"all-linear adapts {', '.join(sorted(names))} of {name}ForCausalLM" in line
    assert f"({', '.join(sorted(experts))})" in line
    known = set().union(*(case[3] for case in CASES.values()))
    assert {other for other in known if re.search(rf"\b{other}\b", line.rpartition(")")[2])} == set(others)
    assert "\n" not in line


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of peft, about layers that it mistakes for experts
@pytest.mark.parametrize("name", CASES)
def test_the_adapter_is_saved_as_peft_loads_it_and_merged_exactly(name, tmp_path):
    base = save(tmp_path / "base", mixture(name))
    policy = adapted(PretrainedHandle(base).causal_lm())
    expected = policy(IDS).logits
    assert not torch.equal(expected, mixture(name)(IDS).logits)
    save_adapter(policy, tmp_path / "adapter", ALL)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    for model in (theirs, merged(policy), PretrainedHandle(str(tmp_path / "adapter")).causal_lm()):
        assert_close(model(IDS).logits, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", WORKED_BEFORE)
def test_an_adapter_whose_file_says_all_linear_is_loaded_and_resumed(name, tmp_path):
    """Adapters on mixtures of experts were saved in this form before adapter_config.json listed the layers."""
    base = save(tmp_path / "base", mixture(name))
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    saved = save_as(theirs, "all-linear", tmp_path / "adapter")
    resumed = with_adapter(mixture(name), ALL, torch.Generator())
    load_adapter(resumed, tmp_path / "adapter")
    for model in (resumed, PretrainedHandle(saved).causal_lm()):
        assert_close(model(IDS).logits, theirs(IDS).logits, rtol=0.0, atol=1e-5)


def save_as(model: PeftModel, targets: str, folder) -> str:
    """Save an adapter with `targets` as its target_modules, which peft has replaced by a list."""
    model.peft_config["default"].target_modules = targets
    model.save_pretrained(folder)
    return str(folder)


def test_experts_that_are_named_are_refused_with_the_layers_that_fit():
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts, .*k_proj, lm_head, o_proj"):
        check_targets(mixture("Qwen3Moe"), LoraSettings(2, 4, "gate_proj,up_proj,down_proj"))


def test_a_model_without_experts_is_adapted_as_before_and_nothing_is_said():
    assert mixtures(tiny_model()) == []
    assert describe_mixture(tiny_model(), ALL) is None
    assert ALL.to_peft(tiny_model()).target_modules == "all-linear"
