"""LoRA: its equation, its start, weights that are in memory once, and what merging and saving leave. Oracle: peft."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import (
    LoraSettings,
    check_critic_targets,
    check_targets,
    frozen_fingerprint,
    is_adapter,
    load_adapter,
    load_merged,
    merged,
    save_adapter,
    trained_parameters,
    with_adapter,
    without_adapter,
)
from ppo_rlhf.models.loading import PretrainedHandle, fuse_activations
from tests.own_code import save_with_own_code
from tests.tiny_models import KINDS, save, tiny_model

IDS = torch.tensor([[4, 7, 9, 12], [5, 6, 4, 8]])
SETTINGS = LoraSettings(rank=3, alpha=6, target_modules="all-linear")
WITH_HEAD = LoraSettings(rank=3, alpha=6, target_modules="all-linear+head")
TIED = {"tie_word_embeddings": True}


def adapted(model, seed: int = 0, settings: LoraSettings = SETTINGS):
    """With an adapter that has trained: B is not 0."""
    model = with_adapter(model, settings, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def pointers(model: nn.Module, *, trained: bool) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad is trained}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_changes_no_bit(kind):
    model = tiny_model(kind)
    before = model(IDS).logits
    assert torch.equal(with_adapter(model, SETTINGS, torch.Generator())(IDS).logits, before)


def test_an_adapted_layer_computes_w_x_plus_the_scaled_product_of_its_factors():
    policy = adapted(tiny_model("llama"))
    layer = policy.model.layers[0].mlp.up_proj
    x, a, b = torch.randn(5, 16), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + 6 / 3 * (x @ a.T @ b.T)
    assert_close(layer(x), expected, rtol=0.0, atol=1e-5)


def test_adapters_sit_on_every_linear_layer_but_the_head_or_on_those_that_are_named():
    def layers(settings):
        return {
            name.split(".")[-4] for name in trained_parameters(with_adapter(tiny_model(), settings, torch.Generator()))
        }

    assert layers(SETTINGS) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(LoraSettings(3, 6, "q_proj, v_proj")) == {"q_proj", "v_proj"}


def test_the_first_factor_depends_on_the_generator_alone():
    first, again, other = (
        trained_parameters(with_adapter(tiny_model(), SETTINGS, torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    drawn = torch.cat(
        [weight.detach().flatten() for name, weight in first.items() if ".lora_A." in name and weight.shape[1] == 16]
    )
    bound = (6 / ((1 + 5) * 16)) ** 0.5  # peft's: He et al. 2015 with slope sqrt(5)
    assert float(drawn.abs().max()) <= bound
    assert float(drawn.abs().max()) > 0.95 * bound


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
def test_training_an_adapter_leaves_reference_and_critic_bit_for_bit(kind):
    base = tiny_model(kind)
    expected = base(IDS).logits
    policy = with_adapter(base, SETTINGS, torch.Generator())
    critic = adapted(without_adapter(policy).base_model)
    values = critic(IDS).last_hidden_state
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        policy(IDS).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    assert float((policy(IDS).logits - expected).detach().abs().max()) > 0.1
    assert torch.equal(without_adapter(policy)(IDS).logits, expected)
    assert torch.equal(base(IDS).logits, expected)
    assert torch.equal(critic(IDS).last_hidden_state, values)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_gives_a_plain_model_of_the_same_function_and_leaves_the_adapted_one(kind):
    policy = adapted(tiny_model(kind))
    before = policy(IDS).logits
    plain = merged(policy)
    assert type(plain) is type(policy)
    assert not any("lora" in name or "base_layer" in name for name in plain.state_dict())
    assert_close(plain(IDS).logits, before, rtol=0.0, atol=5e-5)
    assert torch.equal(policy(IDS).logits, before)
    assert pointers(plain, trained=False).isdisjoint(pointers(policy, trained=False))


def test_a_merged_model_is_saved_as_a_plain_one(tmp_path):
    plain = merged(adapted(tiny_model()))
    folder = save(tmp_path / "policy", plain)
    assert torch.equal(PretrainedHandle(folder).causal_lm()(IDS).logits, plain(IDS).logits)


def test_an_adapter_of_a_head_tied_to_the_embeddings_is_merged_into_the_head_alone(tmp_path):
    """Merged into the tied weights it would change the embeddings too, and with them every hidden state."""
    base = tiny_model("llama", tie_word_embeddings=True)
    assert base.lm_head.weight is base.model.embed_tokens.weight
    settings = LoraSettings(3, 6, "q_proj,lm_head")
    policy = adapted(base, settings=settings)
    before = policy(IDS).logits
    plain = merged(policy)
    assert torch.equal(plain.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert_close(plain(IDS).logits, before, rtol=0.0, atol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits, before, rtol=0.0, atol=1e-5)
    save(tmp_path / "base", base)
    policy = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings=settings)
    save_adapter(policy, tmp_path / "adapter", settings)
    assert_close(load_merged(tmp_path / "adapter")(IDS).logits, policy(IDS).logits, rtol=0.0, atol=1e-5)


def test_an_adapter_is_merged_into_a_model_with_code_of_its_own_just_where_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks"))
    base = PretrainedHandle(str(save_with_own_code(tmp_path / "own", monkeypatch)), trust_remote_code=True)
    policy = adapted(base.causal_lm())
    save_adapter(policy, tmp_path / "adapter", SETTINGS)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_merged(tmp_path / "adapter")
    plain = load_merged(tmp_path / "adapter", trust_remote_code=True)
    assert type(plain).__name__ == "OwnModel"
    assert_close(plain(IDS).logits, policy(IDS).logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("kind", "overrides"), [("gpt2", {}), ("llama", {}), ("llama", TIED), ("bitnet", TIED)])
def test_all_linear_and_head_adds_the_head_and_nothing_else(kind, overrides):
    def layers(settings):
        trained = trained_parameters(with_adapter(tiny_model(kind, **overrides), settings, torch.Generator()))
        return {name.partition(".lora_")[0] for name in trained}

    assert layers(WITH_HEAD) - layers(SETTINGS) == {"lm_head"}
    assert layers(SETTINGS) < layers(WITH_HEAD)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critics_backbone_which_has_no_head_gets_the_other_layers_of_all_linear_and_head(kind):
    def adapters(settings):
        return trained_parameters(with_adapter(tiny_model(kind).base_model, settings, torch.Generator())).keys()

    assert adapters(WITH_HEAD) == adapters(SETTINGS) != set()


def test_all_linear_and_head_takes_no_layer_that_only_shares_a_name_with_a_linear_one():
    model = tiny_model()
    model.model.rotary_emb.up_proj = nn.Embedding(3, 2)  # peft would put an adapter on it, were `up_proj` given
    names = trained_parameters(with_adapter(model, WITH_HEAD, torch.Generator()))
    assert not any("rotary_emb" in name for name in names)


@pytest.mark.filterwarnings("error::UserWarning")  # peft's on tied heads and on GPT-2's two ways to store W
@pytest.mark.parametrize(("kind", "overrides"), [("gpt2", {}), ("llama", {}), ("llama", TIED), ("bitnet", TIED)])
def test_an_adapter_on_all_linear_and_head_is_merged_and_saved_with_the_embeddings_as_they_were(
    tmp_path, kind, overrides
):
    save(tmp_path / "base", tiny_model(kind, **overrides))
    base = PretrainedHandle(str(tmp_path / "base")).causal_lm()
    policy = adapted(base, settings=WITH_HEAD)
    before, embeddings = policy(IDS).logits, base.get_input_embeddings().weight
    save(tmp_path / "plain", merged(policy))
    save_adapter(policy, tmp_path / "adapter", WITH_HEAD)
    for plain in (PretrainedHandle(str(tmp_path / "plain")).causal_lm(), load_merged(tmp_path / "adapter")):
        assert not any("lora" in name for name in plain.state_dict())
        assert torch.equal(plain.get_input_embeddings().weight, embeddings)
        assert not torch.equal(plain.get_output_embeddings().weight, base.get_output_embeddings().weight)
        assert_close(plain.eval()(IDS).logits, before, rtol=0.0, atol=5e-5)
    again = with_adapter(base, WITH_HEAD, torch.Generator().manual_seed(9))
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, before)


def test_weights_frozen_in_sixteen_bits_have_adapters_in_float32_and_are_merged_in_float32():
    policy = adapted(tiny_model().bfloat16())
    assert {p.dtype for p in trained_parameters(policy).values()} == {torch.float32}
    layer, plain = policy.model.layers[0].mlp.up_proj, merged(policy)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight.float() + 6 / 3 * b @ a
    assert plain.dtype == torch.float32
    assert_close(plain.model.layers[0].mlp.up_proj.weight, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_saved_and_its_switched_off_adapter_is_our_reference(tmp_path, kind):
    model = tiny_model(kind)
    save(tmp_path / "base", model)
    handle = PretrainedHandle(str(tmp_path / "base"))
    policy = adapted(handle.causal_lm())
    save_adapter(policy, tmp_path / "adapter", SETTINGS)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    fuse_activations(theirs)
    assert torch.equal(theirs.eval()(IDS).logits, policy(IDS).logits)
    with theirs.disable_adapter():
        assert torch.equal(theirs(IDS).logits, without_adapter(policy)(IDS).logits)
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # the adapter knows its base's directory
    fuse_activations(by_name)
    assert torch.equal(by_name.eval()(IDS).logits, policy(IDS).logits)
    whole = load_merged(tmp_path / "adapter")
    assert not any("lora" in name for name in whole.state_dict())
    assert_close(whole.eval()(IDS).logits, policy(IDS).logits, rtol=0.0, atol=5e-5)
    assert is_adapter(tmp_path / "adapter")
    assert not is_adapter(tmp_path / "base")


def test_an_adapter_of_pefts_own_is_loaded(tmp_path):
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    theirs = get_peft_model(tiny_model(), config).eval()
    theirs.save_pretrained(tmp_path)
    ours = with_adapter(tiny_model(), SETTINGS, torch.Generator())
    load_adapter(ours, tmp_path)
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    save_adapter(adapted(tiny_model()), tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="has shape"):
        load_adapter(with_adapter(tiny_model(), LoraSettings(2, 6, "all-linear"), torch.Generator()), tmp_path)
    with pytest.raises(ValueError, match="other names"):
        load_adapter(with_adapter(tiny_model(), LoraSettings(3, 6, "q_proj"), torch.Generator()), tmp_path)


def test_the_fingerprint_is_of_the_frozen_weights():
    first, other_adapter, other_base = adapted(tiny_model()), adapted(tiny_model(), seed=5), adapted(tiny_model(seed=1))
    assert frozen_fingerprint(first) == frozen_fingerprint(other_adapter) != frozen_fingerprint(other_base)


def test_layers_that_the_model_does_not_have_are_named_with_those_that_it_has():
    with pytest.raises(ModelError) as caught:
        check_targets(tiny_model(), LoraSettings(3, 6, "c_attn"))
    assert str(caught.value) == (
        "ppo.lora_target_modules=c_attn does not fit LlamaForCausalLM, which has the linear layers down_proj, "
        "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj. Name some of these"
    )


def test_a_name_among_others_that_the_model_does_not_have_is_refused():
    """peft takes the layers that it finds and says nothing of the rest."""
    with pytest.raises(ModelError) as caught:
        check_targets(tiny_model(), LoraSettings(3, 6, "q_proj, lm_haed, proj"))
    assert str(caught.value) == (
        "ppo.lora_target_modules=q_proj, lm_haed, proj does not fit LlamaForCausalLM, which has the linear layers "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj, but no lm_haed or proj. Name some of "
        "these"
    )
    for settings in (SETTINGS, WITH_HEAD, LoraSettings(3, 6, "layers.0.self_attn.q_proj, lm_head")):
        check_targets(tiny_model(), settings)


def test_a_critics_backbone_is_asked_for_some_of_the_layers_and_not_for_the_head():
    backbone = tiny_model().base_model
    check_critic_targets(backbone, LoraSettings(3, 6, "q_proj, lm_head"))
    with pytest.raises(ModelError, match=r"^ppo\.lora_target_modules=lm_head does not fit LlamaModel, which has"):
        check_critic_targets(backbone, LoraSettings(3, 6, "lm_head"))


def test_checking_a_model_leaves_it_without_an_adapter():
    model = tiny_model()
    names = list(copy.deepcopy(model).state_dict())
    check_targets(model, SETTINGS)
    assert list(model.state_dict()) == names


class Scaled(nn.Linear):
    """Stands for layers that quantise their weights: W + B A is not what an adapter beside them adds up to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.sign())


def test_layers_that_no_adapter_can_be_merged_into_are_refused():
    model = tiny_model()
    model.model.layers[0].mlp.up_proj.__class__ = Scaled
    with pytest.raises(ModelError, match=r"takes model\.layers\.0\.mlp\.up_proj, a layer of type Scaled: no adapter"):
        with_adapter(model, SETTINGS, torch.Generator())


def test_a_model_without_linear_layers_is_refused():
    model = tiny_model()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
    with pytest.raises(ModelError, match=r"which has no linear layers\. Set ppo\.use_peft=false$"):
        check_targets(model, SETTINGS)
