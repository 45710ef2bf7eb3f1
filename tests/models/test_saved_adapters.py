"""Adapters of other programs, in place of a whole model. Oracle: peft, which loads each onto its base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.directories import ADAPTER_WEIGHTS, check_model_directory
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.pipelines.ppo.nodes import load_sft_policy
from ppo_rlhf.trainer.start_models import take_policies
from tests.tiny_models import adapter_of, save, tiny_model, word_tokenizer

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


def test_an_adapter_on_the_hub_is_merged_into_its_base_on_the_hub(on_the_hub, tmp_path):
    save(on_the_hub("org/base", "main", "0"), tiny_model())
    base = AutoModelForCausalLM.from_pretrained("org/base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(on_the_hub("org/adapter", "v1", "1"))
    handle = PretrainedHandle("org/adapter@v1")
    assert_close(handle.causal_lm()(IDS).logits, adapted.eval()(IDS).logits)
    assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()  # the base's tokenizer
    assert handle.base.source == "org/base"


def test_the_fingerprint_of_an_adapter_on_the_hub_follows_its_weights(on_the_hub, tmp_path):
    base = tiny_model()
    save(on_the_hub("org/base", "main", "0"), base)
    for commit in "12":
        adapter_of(base, on_the_hub("org/adapter", "main", commit), "org/base", seed=int(commit))
    first, second, newest = (
        PretrainedHandle(source).fingerprint()
        for source in (f"org/adapter@{'1' * 40}", f"org/adapter@{'2' * 40}", "org/adapter")
    )
    assert first != second == newest
    (on_the_hub("org/adapter", "main", "2") / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"org/adapter: .*adapter_model\.safetensors"):
        PretrainedHandle("org/adapter").causal_lm()


def test_an_adapter_stands_for_its_base_with_it_merged(tmp_path):
    base = tiny_model()
    path = save(tmp_path / "base", base)
    adapted = adapter_of(base, tmp_path / "adapter", path)
    handle = PretrainedHandle(str(tmp_path / "adapter"))
    ids = torch.tensor([[3, 4, 5, 6]])
    assert_close(handle.causal_lm()(ids).logits, adapted.eval()(ids).logits)
    assert not torch.equal(handle.causal_lm()(ids).logits, base.eval()(ids).logits)
    assert handle.tokenizer().get_vocab() == PretrainedHandle(path).tokenizer().get_vocab()
    assert handle.generation_config().eos_token_id == PretrainedHandle(path).generation_config().eos_token_id
    before = handle.fingerprint()
    assert before != PretrainedHandle(path).fingerprint()
    adapter_of(base, tmp_path / "adapter", path, lora_alpha=3)
    assert PretrainedHandle(str(tmp_path / "adapter")).fingerprint() != before


def test_an_adapter_of_a_reward_model_scores_with_its_own_head(tmp_path):
    base = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=0)
    adapted = adapter_of(base, tmp_path / "adapter", save(tmp_path / "base", base), "c_attn", task_type="SEQ_CLS")
    ids = torch.tensor([[3, 4, 5, 6]])
    assert_close(PretrainedHandle(str(tmp_path / "adapter")).reward_model()(ids).logits, adapted.eval()(ids).logits)


def test_an_adapter_with_a_score_head_makes_a_reward_model_of_a_language_model(tmp_path):
    """TRL's RewardTrainer with LoRA writes the head among the adapter's weights."""
    path = save(tmp_path / "base", tiny_model("gpt2", pad_token_id=0))
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    adapted = adapter_of(base, tmp_path / "adapter", path, "c_attn", task_type="SEQ_CLS")
    handle, ids = PretrainedHandle(str(tmp_path / "adapter")), torch.tensor([[3, 4, 5, 6]])
    model = handle.reward_model()
    assert_close(model(ids).logits, adapted.eval()(ids).logits)
    assert model(ids).logits.shape == (1, 1)
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        PretrainedHandle(path).reward_model()  # the base is not a reward model


@pytest.mark.parametrize("source", ["org/base@v2", "adapter"])
def test_a_policys_own_adapter_is_merged_into_the_revision_or_adapter_that_it_started_from(
    on_the_hub, tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    save(on_the_hub("org/base", "main", "0"), tiny_model())
    save(on_the_hub("org/base", "v2", "1"), tiny_model(seed=1))
    adapter_of(tiny_model(seed=1), tmp_path / "adapter", "org/base", revision="v2")
    start = PretrainedHandle(source).causal_lm()
    assert start.name_or_path == start.config.name_or_path == source
    settings = LoraSettings(2, 4, "q_proj")
    policy = with_adapter(start, settings, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    save_adapter(policy, tmp_path / "trained", settings)
    assert_close(PretrainedHandle(str(tmp_path / "trained")).causal_lm()(IDS).logits, policy(IDS).logits)


def test_an_adapter_whose_base_is_nowhere_is_refused_with_its_name(tmp_path):
    adapter_of(tiny_model(), tmp_path / "adapter", "/no/such/base")
    with pytest.raises(ModelError, match="/no/such/base"):
        PretrainedHandle(str(tmp_path / "adapter")).causal_lm()


def _shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = dict.fromkeys(load_file(folder / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


WHOLE_WEIGHTS = {
    "one file": (lambda folder: None, "model.safetensors"),
    "shards": (_shard, "model.safetensors.index.json"),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "model.safetensors"),
    "no adapter's weights": (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("form", WHOLE_WEIGHTS)
def test_merged_weights_beside_their_adapter_are_refused_in_one_line(tmp_path, form):
    change, name = WHOLE_WEIGHTS[form]
    source = save(tmp_path / "both", tiny_model())
    adapter_of(tiny_model(), tmp_path / "both", source)
    change(tmp_path / "both")
    adapter_of(tiny_model(), tmp_path / "on it", source)  # whose base is that folder
    handle, ways_out = PretrainedHandle(source), rf"{name} lies .* remove adapter_config\.json .* a folder of its own"
    reads = (handle.tokenizer, handle.check_causal_lm, handle.check_reward_model, handle.check_critic, handle.causal_lm)
    for read in (*reads, lambda: check_model_directory(source), PretrainedHandle(str(tmp_path / "on it")).tokenizer):
        with pytest.raises(ModelError, match=ways_out) as refused:
            read()
        assert "\n" not in str(refused.value)
        assert str(refused.value).count(source) == 1 or read == reads[-1]


def test_a_merged_model_beside_its_adapter_on_the_hub_is_refused(on_the_hub):
    folder = on_the_hub("org/both", "main", "0")
    adapter_of(tiny_model(), folder, save(folder, tiny_model()))
    with pytest.raises(ModelError, match=r"^org/both: model\.safetensors lies beside an adapter"):
        PretrainedHandle("org/both").tokenizer()


def test_an_adapter_with_a_config_json_or_a_pickled_value_head_is_an_adapter(tmp_path):
    """axolotl saves the base's config.json beside an adapter, TRL 0.11 a pytorch_model.bin with the value head."""
    path = save(tmp_path / "base", tiny_model())
    adapted = adapter_of(tiny_model(), tmp_path / "axolotl", path)
    adapter_of(tiny_model(), tmp_path / "trl", path)
    tiny_model().config.save_pretrained(tmp_path / "axolotl")
    torch.save({"v_head.summary.weight": torch.zeros(1, 16)}, tmp_path / "trl" / "pytorch_model.bin")
    for name in ("axolotl", "trl"):
        handle = PretrainedHandle(str(tmp_path / name))
        assert_close(handle.causal_lm()(IDS).logits, adapted(IDS).logits)
        assert handle.value_head() is None
        check_model_directory(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "adapter_config.json is not valid JSON"),
        ("[]", "adapter_config.json holds a list"),
        ('{"peft_type": ["LORA"]}', "peft_type=.*must be a text"),
        ('{"peft_type": "LORA", "base_model_name_or_path": 3}', "base_model_name_or_path=3"),
        ('{"peft_type": "LORA", "base_model_name_or_path": "adapter"}', "the adapter itself"),
        ('{"peft_type": "LORA", "base_model_name_or_path": "./x/../other"}', "the adapter itself"),
        ('{"peft_type": "LORA", "base_model_name_or_path": "base", "token_indices": 7}', "no token ids"),
    ],
)
def test_a_broken_adapter_configuration_is_refused_in_one_line(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    adapter_of(tiny_model(), tmp_path / "other", "adapter")
    adapter_of(tiny_model(), tmp_path / "adapter", save(tmp_path / "base", tiny_model()))
    (tmp_path / "x").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as refused:
        PretrainedHandle("adapter").tokenizer()
    assert "\n" not in str(refused.value)


# --- new tokens, and embeddings that are tied ------------------------------------------------------------------------

NEW = [f"<{name}>" for name in "uvwxyzabc"]


def tokenizer_of(rows: int):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(NEW[: rows - len(tokenizer)])
    return tokenizer


def resized_adapter(folder: Path, rows: int, *, tied: bool, **options: Any):
    """Save a base of 30 tokens, and an adapter that was trained with another number of them and its tokenizer."""
    base = save(folder / "base", tiny_model(vocab_size=30, tie_word_embeddings=tied), tokenizer_of(30))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(rows)
    adapted = adapter_of(model, folder / "adapter", base, task_type="CAUSAL_LM", **options)
    tokenizer_of(rows).save_pretrained(folder / "adapter")
    return adapted, PretrainedHandle(str(folder / "adapter"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rows", [32, 26], ids=["grown", "shrunk"])
@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {},
        {"trainable_token_indices": [5, 24, 25]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ],
    ids=["embeddings saved", "embedding saved", "linear layers", "single tokens", "factors on the embeddings"],
)
def test_an_adapter_with_its_own_tokens_is_merged_into_a_base_with_as_many(tmp_path, options, rows, tied):
    adapted, handle = resized_adapter(tmp_path, rows, tied=tied, **options)
    ids = torch.tensor([[4, 24, 25, 5, rows - 1, rows - 2]])
    merged, tokenizer = handle.causal_lm(), handle.tokenizer()
    assert handle.config().vocab_size == merged.config.vocab_size == len(tokenizer) == rows
    save(tmp_path / "merged", merged, tokenizer)
    for model in (merged, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        assert model.get_input_embeddings().weight.shape[0] == rows
        assert_close(model(ids).logits, adapted(ids).logits, rtol=0.0, atol=1e-3)


def test_a_policy_that_is_an_adapter_is_described_with_its_base_and_its_new_tokens(tmp_path, caplog):
    caplog.set_level("INFO")
    handle = resized_adapter(tmp_path, 32, tied=False, modules_to_save=["embed_tokens", "lm_head"])[1]
    base, config = handle.base, PPOConfig(device="cpu")
    load_sft_policy(handle, config)
    take_policies(config, handle.source, None, None, torch.device("cpu"))
    load_sft_policy(base, config)
    take_policies(config, base.source, None, None, torch.device("cpu"))
    told = (
        f"Policy: {handle.source} (an adapter, merged into {base.source}, whose vocabulary goes from 30 to 32 tokens)"
    )
    pipeline, trainer, whole = (line for line in caplog.messages if line.startswith("Policy: "))
    assert pipeline.startswith(f"{told}, ")
    assert trainer == f"{told}."
    assert whole.startswith(f"Policy: {base.source}, ")


def test_single_new_tokens_suffice_where_the_head_is_tied_to_the_embedding(tmp_path):
    """The adapter is saved without the embedding, as with `save_embedding_layers=False`."""
    adapted, handle = resized_adapter(tmp_path, 32, tied=True, trainable_token_indices=[5, 30, 31])
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert not any("base_layer" in name for name in load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS))
    ids = torch.tensor([[4, 30, 5, 31]])
    assert_close(handle.causal_lm()(ids).logits, adapted(ids).logits, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("options", [{"target_modules": ["q_proj", "embed_tokens"]}, {}], ids=["head", "both"])
def test_an_adapter_without_the_rows_of_its_new_tokens_is_refused(tmp_path, options):
    """Without the refusal, peft would draw the missing rows at random."""
    adapted, handle = resized_adapter(tmp_path, 32, tied=False, **options)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=bool(options))
    with pytest.raises(ModelError, match=r"\b3[12]\b.*\b30\b"):
        handle.tokenizer(), handle.causal_lm()


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_of_two_layers_that_are_tied_leaves_the_other_as_it_was(tmp_path, layer):
    base = tiny_model(tie_word_embeddings=True)
    adapted = adapter_of(base, tmp_path / "adapter", save(tmp_path / "base", base), layer)
    merged = PretrainedHandle(str(tmp_path / "adapter")).causal_lm()
    assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=0.0, atol=1e-3)
    assert merged.config.tie_word_embeddings is False


def test_a_vocabulary_is_as_large_as_the_adapters_for_reward_models_of_our_own_form_too(tmp_path):
    path = save(tmp_path / "base", CausalLMRewardModel.from_causal_lm(tiny_model()))
    base = PretrainedHandle(path).reward_model()
    adapted = adapter_of(base, tmp_path / "adapter", path, task_type="SEQ_CLS", modules_to_save=["embed_tokens"])
    handle = PretrainedHandle(str(tmp_path / "adapter"))
    assert handle.config().get_text_config().vocab_size == 25
    assert_close(handle.reward_model()(IDS).logits, adapted(IDS).logits)


def test_an_adapter_that_lacks_weights_of_a_layer_is_refused(tmp_path):
    """Without the refusal, peft would only warn and merge the other layers."""
    base = tiny_model()
    adapter_of(base, tmp_path / "adapter", save(tmp_path / "base", base))
    weights = load_file(file := tmp_path / "adapter" / ADAPTER_WEIGHTS)
    save_file({name.replace("layers.1.", "blocks.1."): tensor for name, tensor in weights.items()}, file)
    with pytest.raises(ModelError, match=r"adapter: .*layers\.1\.\S*lora_A\S*$"):
        PretrainedHandle(str(tmp_path / "adapter")).causal_lm()


# --- kinds that cannot be merged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig, AdaptionPromptConfig])
def test_an_adapter_that_no_weights_can_hold_is_refused_with_its_kind(tmp_path, kind):
    path = save(tmp_path / "base", tiny_model())
    shape = {"adapter_len": 2, "adapter_layers": 1} if kind is AdaptionPromptConfig else {"num_virtual_tokens": 2}
    config = kind(task_type="CAUSAL_LM", **shape)
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=f"adapter: .*{config.peft_type.value}"):
        PretrainedHandle(str(tmp_path / "adapter")).check_causal_lm()  # before any weights are read


def peft_of(folder: Path, **settings: Any) -> tuple[Path, torch.nn.Module]:
    """Save an adapter whose weights were trained on what peft made of the base; return its folder and the model."""
    base = AutoModelForCausalLM.from_pretrained(save(folder / "base", tiny_model()))
    adapted = get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **settings}))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter", adapted.eval()


@pytest.mark.parametrize("how", [True, "gaussian", "orthogonal"])
def test_an_adapter_whose_initialisation_leaves_the_base_as_it_is_is_merged(tmp_path, how):
    folder, adapted = peft_of(tmp_path, init_lora_weights=how)
    assert_close(PretrainedHandle(str(folder)).causal_lm()(IDS).logits, adapted(IDS).logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora", "one of tomorrow"])
def test_an_adapter_on_changed_weights_of_its_base_is_refused(tmp_path, how):
    folder, _ = peft_of(tmp_path)
    change(folder, init_lora_weights=how)
    with pytest.raises(ModelError, match=f"init_lora_weights='{how}', so this adapter belongs to changed weights"):
        PretrainedHandle(str(folder)).config()


def test_an_adapter_on_repeated_layers_of_its_base_is_refused(tmp_path):
    folder, _ = peft_of(tmp_path, layer_replication=[[0, 2], [1, 2]])
    with pytest.raises(
        ModelError, match=r"layer_replication=\[\[0, 2\], \[1, 2\]\], so this adapter belongs to a model"
    ):
        PretrainedHandle(str(folder)).config()


def test_an_adapter_that_changes_its_base_in_a_way_without_a_name_here_is_refused_when_loaded(tmp_path, monkeypatch):
    folder, _ = peft_of(tmp_path)
    change(folder, init_lora_weights="pissa")
    monkeypatch.setattr("ppo_rlhf.models.saved_adapters.check_keeps_base", lambda *_: None)
    with pytest.raises(ModelError, match="loading it changes the weights of its base"):
        PretrainedHandle(str(folder)).causal_lm()


def change(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **settings}))


ENDLESS = r"(\w+\.?)+!"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"modules_to_save": [ENDLESS]},
        {"rank_pattern": {ENDLESS: 4}},
        {"layers_pattern": [ENDLESS]},
        {"feedforward_modules": ENDLESS},
        {"n_frequency_pattern": {ENDLESS: 3}},
        {"block_size_pattern": {ENDLESS: 3}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_pattern_of_an_adapter_that_never_comes_to_an_end_is_refused(tmp_path, monkeypatch, settings):
    monkeypatch.setattr("ppo_rlhf.models.adapter_settings.PATTERN_S", 1.0)
    folder, _ = peft_of(tmp_path)
    change(folder, **settings)
    with pytest.raises(ModelError, match=r"with the layers' names does not end within 1 s"):
        PretrainedHandle(str(folder)).causal_lm()


def test_a_pattern_of_an_adapter_selects_what_peft_lets_it_select(tmp_path):
    folder, adapted = peft_of(tmp_path, target_modules=r"^(?!.*visual).*(?:q_proj|v_proj).*$")
    assert_close(PretrainedHandle(str(folder)).causal_lm()(IDS).logits, adapted(IDS).logits, rtol=0.0, atol=1e-5)
    change(folder, target_modules="(")
    with pytest.raises(ModelError, match=r"target_modules='\(', which is no regular expression"):
        PretrainedHandle(str(folder)).causal_lm()
