"""LoRA: its equation, its start, weights that are in memory once, and what merging and saving leave. Oracle: peft."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import (
    LoraSettings,
    check_critic_targets,
    check_targets,
    frozen_fingerprint,
    load_adapter,
    merged,
    save_adapter,
    with_adapter,
    without_adapter,
)
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ppo_rlhf.models.loading import PretrainedHandle
from tests.own_code import save_with_own_code
from tests.tiny_models import KINDS, save, tiny_model, with_trained_adapter

IDS = torch.tensor([[4, 7, 9, 12], [5, 6, 4, 8]])
SETTINGS = LoraSettings(rank=3, alpha=6, target_modules="all-linear")
WITH_HEAD = LoraSettings(rank=3, alpha=6, target_modules="all-linear+head")
TIED = {"tie_word_embeddings": True}


def adapted(model, seed: int = 0, settings: LoraSettings = SETTINGS):
    return with_trained_adapter(model, settings, seed=seed)


def pointers(model: nn.Module, *, trained: bool) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad is trained}


def adapted_layers(model, settings: LoraSettings) -> set[str]:
    trained = trained_parameters(with_adapter(model, settings, torch.Generator()))
    return {name.partition(".lora_")[0] for name in trained}


def test_an_adapted_layer_computes_w_x_plus_the_scaled_product_of_its_factors():
    policy = adapted(tiny_model("llama"))
    layer = policy.model.layers[0].mlp.up_proj
    x, a, b = torch.randn(5, 16), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + 6 / 3 * (x @ a.T @ b.T)
    assert_close(layer(x), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("kind", "overrides"), [("gpt2", {}), ("llama", {}), ("llama", TIED), ("bitnet", TIED)])
def test_adapters_sit_on_all_linear_layers_with_or_without_the_head_or_on_those_that_are_named(kind, overrides):
    model = tiny_model(kind, **overrides)
    linear = adapted_layers(model, SETTINGS)
    assert len(linear) == 2 * {"gpt2": 4}.get(kind, 7)  # the model has two blocks
    assert adapted_layers(model, WITH_HEAD) - linear == {"lm_head"}
    assert adapted_layers(model.base_model, WITH_HEAD) == adapted_layers(model.base_model, SETTINGS) != set()
    if kind == "llama":
        named = adapted_layers(model, LoraSettings(3, 6, "q_proj, v_proj"))
        assert {name.rpartition(".")[2] for name in named} == {"q_proj", "v_proj"}


def test_the_first_factor_depends_only_on_the_generator():
    first, again, other = (
        trained_parameters(with_adapter(tiny_model(), SETTINGS, torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    drawn = torch.cat([w.detach().flatten() for name, w in first.items() if ".lora_A." in name and w.shape[1] == 16])
    bound = (6 / ((1 + 5) * 16)) ** 0.5  # as in peft: He et al. 2015 with slope sqrt(5)
    assert 0.95 * bound < float(drawn.abs().max()) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_policy_critic_and_reference_hold_the_frozen_weights_once(kind):
    base = tiny_model(kind)
    policy = adapted(base)
    reference, critic = without_adapter(policy), adapted(without_adapter(policy).base_model, seed=1)
    weights = {parameter.data_ptr() for parameter in base.parameters()}
    assert pointers(policy, trained=False) == weights
    assert pointers(reference, trained=False) | pointers(reference, trained=True) == weights
    assert pointers(critic, trained=False) <= weights
    assert pointers(policy, trained=True).isdisjoint(pointers(critic, trained=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_changes_nothing_and_training_it_changes_no_other_model(kind):
    base = tiny_model(kind)
    expected = base(IDS).logits
    policy = with_adapter(base, SETTINGS, torch.Generator())
    assert torch.equal(policy(IDS).logits, expected)
    critic = adapted(without_adapter(policy).base_model)
    hidden = critic(IDS).last_hidden_state
    optimizer = torch.optim.AdamW(trained_parameters(policy).values(), lr=0.1)
    for _ in range(3):
        policy(IDS).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    assert float((policy(IDS).logits - expected).detach().abs().max()) > 0.1
    assert torch.equal(without_adapter(policy)(IDS).logits, expected)
    assert torch.equal(base(IDS).logits, expected)
    assert torch.equal(critic(IDS).last_hidden_state, hidden)


@pytest.mark.filterwarnings("error::UserWarning")  # of peft, about tied heads and GPT-2's two layouts of W
@pytest.mark.parametrize(
    ("kind", "overrides", "settings"),
    [("gpt2", {}, WITH_HEAD), ("llama", {}, SETTINGS), ("llama", TIED, WITH_HEAD), ("bitnet", TIED, SETTINGS)],
    ids=["gpt2 with its tied head", "llama", "llama with a tied head", "bitnet"],
)
def test_an_adapter_is_merged_and_saved_with_the_embeddings_as_they_were(tmp_path, kind, overrides, settings):
    """An adapter merged into a tied head would also change the embeddings, and with them every hidden state."""
    base = PretrainedHandle(save(tmp_path / "base", tiny_model(kind, **overrides))).causal_lm()
    policy = adapted(base, settings=settings)
    before, embeddings = policy(IDS).logits, base.get_input_embeddings().weight
    plain = merged(policy)
    assert type(plain) is type(policy)
    assert torch.equal(policy(IDS).logits, before)
    assert pointers(plain, trained=False).isdisjoint(pointers(policy, trained=False))
    save_adapter(policy, tmp_path / "adapter", settings)
    saved = PretrainedHandle(save(tmp_path / "plain", plain)).causal_lm()
    loaded = PretrainedHandle(str(tmp_path / "adapter")).causal_lm()
    for model in (plain, saved, loaded):
        assert not any("lora" in name or "base_layer" in name for name in model.state_dict())
        assert torch.equal(model.get_input_embeddings().weight, embeddings)
        assert_close(model.eval()(IDS).logits, before, rtol=0.0, atol=5e-5)
    again = with_adapter(base, settings, torch.Generator().manual_seed(9))
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, before)


def test_sixteen_bit_weights_have_adapters_in_float32_and_are_merged_in_float32():
    policy = adapted(tiny_model().bfloat16())
    assert {p.dtype for p in trained_parameters(policy).values()} == {torch.float32}
    layer, plain = policy.model.layers[0].mlp.up_proj, merged(policy)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert plain.dtype == torch.float32
    assert_close(plain.model.layers[0].mlp.up_proj.weight, layer.base_layer.weight.float() + 6 / 3 * b @ a)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_saved_adapter_and_switched_off_it_is_our_reference(tmp_path, kind):
    save(tmp_path / "base", tiny_model(kind))
    policy = adapted(PretrainedHandle(str(tmp_path / "base")).causal_lm())
    save_adapter(policy, tmp_path / "adapter", SETTINGS)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_close(theirs.eval()(IDS).logits, policy(IDS).logits, rtol=0.0, atol=1e-5)
    with theirs.disable_adapter():
        assert_close(theirs(IDS).logits, without_adapter(policy)(IDS).logits, rtol=0.0, atol=1e-5)
    by_name = AutoModelForCausalLM.from_pretrained(
        tmp_path / "adapter"
    )  # adapter_config.json names the directory of the base
    assert_close(by_name.eval()(IDS).logits, policy(IDS).logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("part", ["policy", "its backbone", "critic's backbone"])
def test_an_adapted_model_saves_only_its_adapter_by_its_own_save_pretrained(tmp_path, part):
    """transformers' `save_pretrained` would write names of inner layers, which then load as random weights."""
    base = AutoModelForCausalLM.from_pretrained(save(tmp_path / "base", tiny_model()))
    model = adapted(base if part != "critic's backbone" else base.base_model)
    saved = model.base_model if part == "its backbone" else model
    copy.deepcopy(saved).save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    auto = AutoModelForCausalLM if part == "policy" else AutoModel
    theirs = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_close(theirs(IDS)[0], saved(IDS)[0], rtol=0.0, atol=0.0)
    plain = merged(saved) if part == "policy" else without_adapter(saved)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain" / "config.json").is_file()


def test_an_adapter_of_pefts_own_is_loaded_and_one_of_another_shape_is_refused(tmp_path):
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    theirs = get_peft_model(tiny_model(), config).eval()
    theirs.save_pretrained(tmp_path)
    ours = with_adapter(tiny_model(), SETTINGS, torch.Generator())
    load_adapter(ours, tmp_path)
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    with pytest.raises(ValueError, match="has shape"):
        load_adapter(with_adapter(tiny_model(), LoraSettings(2, 6, "all-linear"), torch.Generator()), tmp_path)
    with pytest.raises(ValueError, match=r"down_proj\.lora_A"):
        load_adapter(with_adapter(tiny_model(), LoraSettings(3, 6, "q_proj"), torch.Generator()), tmp_path)


def test_code_of_the_base_model_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks"))
    base = PretrainedHandle(str(save_with_own_code(tmp_path / "own", monkeypatch)), trust_remote_code=True)
    policy = adapted(base.causal_lm())
    save_adapter(policy, tmp_path / "adapter", SETTINGS)
    with pytest.raises(ModelError, match="trust_remote_code=true"):
        PretrainedHandle(str(tmp_path / "adapter")).causal_lm()
    plain = PretrainedHandle(str(tmp_path / "adapter"), trust_remote_code=True).causal_lm()
    assert type(plain).__name__ == "OwnModel"
    assert_close(plain(IDS).logits, policy(IDS).logits, rtol=0.0, atol=1e-5)


def test_the_fingerprint_is_of_the_frozen_weights():
    first, other_adapter, other_base = adapted(tiny_model()), adapted(tiny_model(), seed=5), adapted(tiny_model(seed=1))
    assert frozen_fingerprint(first) == frozen_fingerprint(other_adapter) != frozen_fingerprint(other_base)


def test_names_that_are_none_of_the_models_layers_are_refused_with_those_that_it_has():
    model = tiny_model()
    names = list(model.state_dict())
    for targets, complaint in (("c_attn", "up_proj, v_proj"), ("q_proj, lm_haed, proj", "but no lm_haed or proj")):
        with pytest.raises(ModelError, match=rf"ppo\.lora_target_modules={targets} .*{complaint}"):
            check_targets(model, LoraSettings(3, 6, targets))
    for settings in (SETTINGS, WITH_HEAD, LoraSettings(3, 6, "layers.0.self_attn.q_proj, lm_head")):
        check_targets(model, settings)
    assert list(model.state_dict()) == names  # the check adds no adapter to the model
    check_critic_targets(model.base_model, LoraSettings(3, 6, "q_proj, lm_head"))
    with pytest.raises(ModelError, match="LlamaModel"):
        check_critic_targets(model.base_model, LoraSettings(3, 6, "lm_head"))


class Scaled(nn.Linear):
    """A layer that quantises its weights: merging W + B A is not the same as adding the adapter's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.sign())


def test_layers_that_no_adapter_can_be_merged_into_are_refused():
    model = tiny_model()
    model.model.layers[0].mlp.up_proj = Scaled(16, 24, bias=False)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj.*Scaled"):
        with_adapter(model, SETTINGS, torch.Generator())
