import hashlib
import json
from pathlib import Path

import pytest
import torch
from ppo_rlhf.models.products.activations import TanhGELU
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.activations import ACT2FN
from transformers.utils.logging import is_progress_bar_enabled

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.loading import (
    PretrainedHandle,
    check_model_directory,
    check_vocabulary,
    context_length,
    disable_dropout,
    fuse_activations,
    is_local,
    quiet_transformers,
    steady_context,
)
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from tests.own_code import save_with_own_code
from tests.tiny_models import KINDS, VOCABULARY, draw_weights, save, tiny_model, word_tokenizer

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


def digest(folder: str) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).iterdir())}


def test_a_handle_reads_nothing_until_it_is_asked():
    handle = PretrainedHandle("no/such/folder")
    with pytest.raises(ModelError, match="no/such/folder: there is no such model directory"):
        handle.config()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_gives_the_saved_ones_logits_to_the_last_bit(tmp_path, kind):
    model = tiny_model(kind)
    loaded = PretrainedHandle(save(tmp_path / "m", model)).causal_lm()
    fuse_activations(model)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"])
def test_gelus_tanh_approximation_is_the_same_at_once(tmp_path, name):
    model = tiny_model("gpt2").double()
    for block in model.transformer.h:
        block.mlp.act = ACT2FN[name]
    model.config.activation_function = name
    plain = model(IDS).logits
    fuse_activations(model)
    assert {type(block.mlp.act) for block in model.transformer.h} == {TanhGELU}
    assert_close(model(IDS).logits, plain, rtol=0.0, atol=1e-12)
    model.save_pretrained(tmp_path)
    assert model.config.activation_function == AutoConfig.from_pretrained(tmp_path).activation_function == name


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_loaded_weights_begin_at_a_cache_line_wherever_they_stood_in_the_file(tmp_path, padding):
    """Matrix kernels round differently elsewhere: seen 5e-7 between a model and its reload, 40 bytes off."""
    source = save(tmp_path / "model", tiny_model())
    weights = load_file(Path(source) / "model.safetensors")
    save_file(weights, Path(source) / "model.safetensors", metadata={"format": "pt", "x": "y" * padding})
    assert {p.data_ptr() % 64 for p in PretrainedHandle(source).causal_lm().parameters()} == {0}


def test_a_loaded_model_computes_the_same_in_train_and_eval_mode(tmp_path):
    source = save(tmp_path / "model", tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    model = PretrainedHandle(source).causal_lm()
    assert not model.training
    assert torch.equal(model.train()(IDS).logits, model.eval()(IDS).logits)


def test_disabling_dropout_reaches_probabilities_that_are_plain_numbers():
    model = tiny_model("llama", attention_dropout=0.5)
    disable_dropout(model)
    assert model.config.attention_dropout == 0.0
    assert torch.equal(model.train()(IDS).logits, model.eval()(IDS).logits)


def test_nothing_in_the_models_directory_changes_by_loading_from_it(tmp_path):
    source = save(tmp_path / "model", tiny_model("gpt2", reward=True, num_labels=1), word_tokenizer(pad_token=None))
    before = digest(source)
    handle = PretrainedHandle(source)
    handle.config(), handle.generation_config(), handle.tokenizer(), handle.reward_model(), handle.fingerprint()
    assert digest(source) == before


def test_the_tokenizer_has_a_pad_token_and_pads_on_the_left(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model(), word_tokenizer(pad_token=None)))
    assert handle.tokenizer().pad_token == "<unk>"
    assert handle.tokenizer().padding_side == "left"


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model(vocab_size=len(VOCABULARY) - 2)))
    with pytest.raises(ModelError, match=r"ids up to 24, the model's embedding has 23 rows \(ids 0 to 22\)"):
        handle.tokenizer()


def test_an_embedding_may_have_spare_rows():
    check_vocabulary(word_tokenizer(), LlamaConfig(vocab_size=len(VOCABULARY) + 40), "here")


def test_the_generation_config_comes_from_the_configuration_where_there_is_none(tmp_path):
    source = save(tmp_path / "model", tiny_model(eos_token_id=7))
    Path(source, "generation_config.json").unlink()
    assert PretrainedHandle(source).generation_config().eos_token_id == 7


def broken(tmp_path: Path, how: str) -> str:
    folder = Path(save(tmp_path / "model", tiny_model()))
    weights = folder / "model.safetensors"
    if how == "no configuration":
        (folder / "config.json").unlink()
    elif how == "adapter":
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text("{}")
    elif how == "damaged configuration":
        (folder / "config.json").write_text("{")
    elif how == "no model type":
        (folder / "config.json").write_text("{}")
    elif how == "no weights":
        weights.unlink()
    elif how == "pickled weights":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "empty weights":
        weights.write_bytes(b"")
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "weights that are no safetensors":
        weights.write_bytes(b"x" * 1000)
    elif how == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n")
    elif how == "missing shard":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "missing tensors":
        tensors = {name: t for name, t in load_file(weights).items() if "layers.1" not in name}
        save_file(tensors, weights, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no configuration", "no config.json in this directory, so it is not a Hugging Face model"),
        ("adapter", "It holds a LoRA adapter alone: merge it into its base"),
        ("damaged configuration", "config.json is not valid JSON"),
        ("no model type", "names no model_type"),
        ("no weights", r"no weights in this model directory \(model.safetensors is missing\)"),
        ("pickled weights", r"only pickled weights \(pytorch_model.bin\)"),
        ("empty weights", "model.safetensors is missing or empty"),
        ("cut weights", r"the weights file model.safetensors is damaged or incomplete \(.+\). Copy the model again."),
        ("weights that are no safetensors", "model.safetensors is damaged or incomplete"),
        ("pointer", "It is a Git LFS pointer: run git lfs pull."),
        ("missing shard", "model-00001-of-00002.safetensors is missing or empty"),
        ("missing tensors", r"lacks \d+ of its weights"),
    ],
)
def test_a_broken_directory_is_refused_in_one_line(tmp_path, how, message):
    source = broken(tmp_path, how)
    with pytest.raises(ModelError, match=message) as caught:
        PretrainedHandle(source).causal_lm()
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no tokenizer in this model directory") as caught:
        PretrainedHandle(str(tmp_path / "model")).tokenizer()
    assert "\n" not in str(caught.value)


def test_a_model_whose_own_code_is_not_trusted_is_refused_in_one_line_that_names_the_setting(tmp_path, monkeypatch):
    folder = save_with_own_code(tmp_path / "own", monkeypatch)
    with pytest.raises(ModelError, match=r"If you trust that code, set trust_remote_code=true") as caught:
        PretrainedHandle(str(folder)).config()
    assert "\n" not in str(caught.value)
    assert PretrainedHandle(str(folder), trust_remote_code=True).config().model_type == "own_llama"


def test_a_mistyped_path_that_could_be_a_hub_id_is_said_to_be_neither(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        PretrainedHandle("modles/mine").config()
    assert str(caught.value).startswith(
        "modles/mine: there is no such directory, and as a hub id its configuration cannot be loaded: "
    )


def test_a_file_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelError, match="there is no such model directory"):
        check_model_directory(tmp_path / "model")


def test_a_transformers_classifier_is_loaded_as_a_reward_model_with_a_pad_id(tmp_path):
    source = save(tmp_path / "model", tiny_model("gpt2", reward=True, num_labels=1), word_tokenizer(pad_token=None))
    model = PretrainedHandle(source).reward_model()
    assert isinstance(model, GPT2ForSequenceClassification)
    assert model(IDS.repeat(2, 1)).logits.shape == (2, 1)


def test_our_reward_model_is_loaded_from_its_directory(tmp_path):
    source = save(tmp_path / "model", CausalLMRewardModel.from_causal_lm(tiny_model()))
    assert isinstance(PretrainedHandle(source).reward_model(), CausalLMRewardModel)


def test_a_model_with_two_labels_is_no_reward_model(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model("gpt2", reward=True, num_labels=2)))
    with pytest.raises(ModelError, match=r"has one output \(num_labels 1\), this one has 2"):
        handle.reward_model()


def test_a_language_model_that_says_it_has_one_label_lacks_the_head(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model("gpt2", num_labels=1)))
    with pytest.raises(ModelError, match=r"lacks 1 of its weights \(score.weight\)"):
        handle.reward_model()


def test_a_reward_model_cannot_be_a_policy(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", CausalLMRewardModel.from_causal_lm(tiny_model())))
    with pytest.raises(ModelError, match="this is a reward model, it cannot generate"):
        handle.causal_lm()


def test_the_fingerprint_follows_configuration_and_weights_and_not_the_place(tmp_path):
    first, copy, reshaped, retrained = (
        PretrainedHandle(save(tmp_path / name, tiny_model(**options))).fingerprint()
        for name, options in (("a", {}), ("b", {}), ("c", {"num_hidden_layers": 1}), ("d", {"seed": 1}))
    )
    assert first == copy
    assert len({first, reshaped, retrained}) == 3


@pytest.mark.parametrize(
    ("config", "length"),
    [(GPT2Config(n_positions=77), 77), (LlamaConfig(max_position_embeddings=99), 99), (BloomConfig(), None)],
)
def test_the_context_is_found_under_each_architectures_name(config, length):
    assert context_length(config) == length


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 25}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
ORIGINAL = {"original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def phi3_config(**longer) -> Phi3Config:
    """Phi 3, first trained on 8 tokens and stretched to 64."""
    return Phi3Config(**SMALL, **ORIGINAL, max_position_embeddings=64, pad_token_id=0, rope_scaling=LONGROPE, **longer)


def llama_config(rope: dict, context: int = 64) -> LlamaConfig:
    return LlamaConfig(**SMALL, max_position_embeddings=context, rope_parameters=rope)


def of_two_ropes() -> Gemma3TextConfig:
    ropes = {"full_attention": DYNAMIC, "sliding_attention": {**LONGROPE, **ORIGINAL, "rope_theta": 1e4}}
    return Gemma3TextConfig(**SMALL, head_dim=8, max_position_embeddings=64, rope_parameters=ropes)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (phi3_config(), 8),
        (llama_config({**LONGROPE, **ORIGINAL, "rope_theta": 1e4}), 8),
        (llama_config(DYNAMIC, context=16), 16),
        (of_two_ropes(), 8),
    ],
    ids=["longrope of the configuration", "longrope of its parameters", "dynamic", "by the kind of layer"],
)
def test_where_rope_changes_with_the_longest_sequence_ppo_stops_before_and_says_why(config, length):
    context, why = steady_context(config)
    assert context == length
    assert why == (
        f". Of sequences beyond {length} tokens this model's RoPE changes the frequencies for their whole batch, so "
        "that log-probabilities in PPO would depend on the batch"
    )


@pytest.mark.parametrize(
    "config",
    [
        llama_config({"rope_type": "default", "rope_theta": 1e4}),
        llama_config({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        llama_config({**LONGROPE, "original_max_position_embeddings": 128, "rope_theta": 1e4}),
        Gemma3TextConfig(**SMALL, max_position_embeddings=64),
        GPT2Config(n_positions=64),
    ],
    ids=["default", "linear", "first trained on longer ones", "by the kind of layer", "no RoPE"],
)
def test_where_rope_is_steady_ppo_may_use_all_of_the_context(config):
    assert steady_context(config) == (64, "")


def test_a_model_without_a_limit_has_none_in_ppo():
    assert steady_context(BloomConfig()) == (None, "")


@pytest.mark.parametrize(
    "make", [lambda: Phi3ForCausalLM(phi3_config()), lambda: LlamaForCausalLM(llama_config(DYNAMIC, context=8))]
)
def test_a_sequence_depends_on_its_neighbours_just_beyond_that_length(make):
    model = draw_weights(make().eval(), 0.4, seed=1)
    limit, _ = steady_context(model.config)
    rows = torch.arange(2 * (limit + 1)).view(2, -1) % 25
    apart = {}
    for length in (limit, limit + 1):
        positions = torch.arange(length).repeat(2, 1)
        positions[1] = positions[1].clamp(max=2)  # a short row, padded on the right
        with torch.no_grad():
            together = model(rows[:, :length], position_ids=positions).logits[1, :3]
            alone = model(rows[1:, :3], position_ids=positions[1:, :3]).logits[0]
        apart[length] = float((together - alone).abs().max())
    assert apart[limit] < 1e-5 < 1e-3 < apart[limit + 1]


def test_hub_ids_and_paths_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert [is_local(s) for s in ("gpt2", "org/name", "org/name-1.5B_x")] == [False, False, False]
    assert [is_local(s) for s in ("data/model", "./gpt2", "/a/b", "a/b/c", "~/m", "data")] == [True] * 6


def test_progress_bars_are_off_inside_and_as_before_outside():
    before = is_progress_bar_enabled()
    with quiet_transformers():
        assert not is_progress_bar_enabled()
    assert is_progress_bar_enabled() == before


def test_float64_weights_are_loaded_as_such(tmp_path):
    source = save(tmp_path / "model", tiny_model())
    assert PretrainedHandle(source).causal_lm(torch.float64).dtype == torch.float64
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    assert torch.equal(PretrainedHandle(source).causal_lm(torch.float64)(IDS).logits, plain(IDS).logits)
