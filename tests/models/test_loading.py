"""Loading models: refusals, the outputs of loaded models, and the lengths of sequences."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils.logging import is_progress_bar_enabled

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.context_length import context_length, usable_context
from ppo_rlhf.models.directories import check_model_directory, hub_answers, is_local
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.preparation import disable_dropout, fuse_activations, prepare
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.tokenizers import check_vocabulary, same_vocabulary
from ppo_rlhf.runtime.log_lines import quiet_transformers
from tests.own_code import save_with_own_code
from tests.tiny_models import (
    END,
    KINDS,
    PAD,
    VOCABULARY,
    draw_weights,
    named_model,
    not_causal_models,
    save,
    tiny_model,
    vision_model,
    word_tokenizer,
)

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


def digest(folder: str) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).iterdir())}


def test_a_handle_reads_nothing_until_it_is_asked():
    handle = PretrainedHandle("no/such/folder")
    with pytest.raises(ModelError, match="no/such/folder"):
        handle.config()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_gives_the_saved_models_logits(tmp_path, kind):
    model = tiny_model(kind).double()
    loaded = PretrainedHandle(save(tmp_path / "m", model)).causal_lm(torch.float64)
    assert loaded.dtype == torch.float64
    assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "gemma 3"])
def test_a_model_that_reads_later_tokens_is_refused_when_it_is_loaded(tmp_path, name):
    handle = PretrainedHandle(save(tmp_path / "m", not_causal_models()[name]))
    with pytest.raises(ModelError, match=r"/m: .*later") as refused:
        handle.causal_lm()
    assert "\n" not in str(refused.value)


def test_one_line_says_which_part_of_a_model_for_images_is_left_out(tmp_path, caplog):
    whole = vision_model()
    handle = PretrainedHandle(save(tmp_path, whole))
    policy, _ = handle.causal_lm(), handle.causal_lm()  # a run loads a reference, too
    assert_close(policy(IDS).logits, whole(IDS).logits)
    assert not any("visual" in name for name in policy.state_dict())
    assert handle.left_out(policy) == "vision"
    assert [record.message for record in caplog.records if record.name.startswith("ppo_rlhf")] == [
        f"{tmp_path}: only the text part is loaded, trained and exported, as Qwen3_5ForCausalLM; the checkpoint's "
        "vision is left out."
    ]
    assert (
        handle.left_out(whole)
        == PretrainedHandle(save(tmp_path / "llama", llama := tiny_model())).left_out(llama)
        == ""
    )


def test_a_causal_model_with_the_small_weights_of_a_new_model_is_loaded(tmp_path):
    config = BertConfig(**not_causal_models()["bert"].config.to_diff_dict() | {"is_decoder": True})
    PretrainedHandle(save(tmp_path / "bert", BertLMHeadModel(config))).causal_lm()
    PretrainedHandle(save(tmp_path / "llama", LlamaForCausalLM(tiny_model().config))).causal_lm()


def test_an_encoder_decoder_is_refused_from_its_configuration(tmp_path):
    config = T5Config(vocab_size=25, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    save(tmp_path / "t5", T5ForConditionalGeneration(config))
    with pytest.raises(ModelError, match="/t5: T5Config"):
        PretrainedHandle(str(tmp_path / "t5")).check_causal_lm()


def test_a_fused_gelu_computes_the_same_and_the_configuration_keeps_its_name(tmp_path):
    model = tiny_model("gpt2").double()
    plain = model(IDS).logits
    fuse_activations(model)
    assert type(model.transformer.h[1].mlp.act) is torch.nn.GELU
    assert_close(model(IDS).logits, plain, rtol=0.0, atol=1e-12)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).activation_function == "gelu_new"


@pytest.mark.parametrize(
    "model",
    [
        tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
        tiny_model("llama", attention_dropout=0.5),  # a plain number in the configuration, not a module
        CausalLMRewardModel.from_causal_lm(tiny_model("gpt2", resid_pdrop=0.5)),
    ],
    ids=["modules", "numbers", "reward model"],
)
def test_without_dropout_train_computes_as_eval(model):
    disable_dropout(model)
    assert torch.equal(model.train()(IDS).logits, model.eval()(IDS).logits)


def test_loading_changes_nothing_in_the_models_directory(tmp_path):
    source = save(tmp_path / "model", tiny_model("gpt2", reward=True, num_labels=1), word_tokenizer(pad_token=None))
    before = digest(source)
    handle = PretrainedHandle(source)
    handle.config(), handle.generation_config(), handle.tokenizer(), handle.reward_model(), handle.fingerprint()
    assert digest(source) == before


def test_the_tokenizer_has_a_pad_token_and_pads_on_the_left(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model(), word_tokenizer(pad_token=None)))
    assert handle.tokenizer().pad_token == "<unk>"
    assert handle.tokenizer().padding_side == "left"


def test_a_tokenizer_is_read_once_while_its_files_are_the_same_and_each_handle_has_its_own(tmp_path, monkeypatch):
    folder, read = save(tmp_path / "model", tiny_model(), word_tokenizer()), []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **options: read.append(a) or load(*a, **options))
    first, second = (PretrainedHandle(str(folder)).tokenizer() for _ in range(2))
    first.padding_side, first.pad_token, first.chat_template = "right", first.eos_token, "other"
    assert (second.padding_side, second.pad_token_id, second.chat_template) == ("left", PAD, None)
    assert same_vocabulary(first, second)
    assert len(read) == 1
    word_tokenizer(pad_token="</s>").save_pretrained(folder)
    assert PretrainedHandle(str(folder)).tokenizer().pad_token_id == END
    assert len(read) == 2


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", tiny_model(vocab_size=len(VOCABULARY) - 2)))
    with pytest.raises(ModelError, match=r"\b24\b.*\b23\b"):
        handle.tokenizer()
    check_vocabulary(word_tokenizer(), LlamaConfig(vocab_size=len(VOCABULARY) + 40), "spare rows are fine")


def test_the_generation_config_comes_from_the_configuration_where_there_is_none(tmp_path):
    source = save(tmp_path / "model", tiny_model(eos_token_id=7))
    assert PretrainedHandle(source).generation_config().eos_token_id == 7
    Path(source, "generation_config.json").unlink()
    assert PretrainedHandle(source).generation_config().eos_token_id == 7
    Path(source, "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation configuration"):
        PretrainedHandle(source).generation_config()


def _drop_a_layer(folder: Path) -> None:
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "layers.1" not in n}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _diverge(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _only_index(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def _config(**values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return damage


def _weight(tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | {"model.layers.1.mlp.up_proj.weight": tensor}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _into_a_version(folder: Path) -> None:
    version = folder / "2026-01-01T00.00.00.000Z"
    version.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(version / name)


NESTED = "[" * 100_000  # deeper than Python's json parser can read
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "convert pickled weights"),
        (_into_a_version, r"holds 1 models?. Name one, such as 2026-01-01T00\.00\.00\.000Z\.$"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "damaged"),
        (lambda f: (f / "model.safetensors").write_text(POINTER), "git lfs pull"),
        (_only_index(INDEX), "model-00001-of-00002.safetensors"),
        (_only_index("[]"), "not an index"),
        (_only_index(NESTED), "not an index"),
        (lambda f: (f / "config.json").write_text(NESTED), "configuration"),
        (_drop_a_layer, "9 weights"),
        (_diverge, "up_proj.weight.*NaN"),
        (_weight(torch.zeros(3, 4)), r"layers\.1\.mlp\.up_proj\.weight has the shape \(3, 4\), .* \(24, 16\)$"),
        (_weight(torch.zeros(0)), r"layers\.1\.mlp\.up_proj\.weight has the shape \(0,\), .* \(24, 16\) .*ZeRO-3"),
        (_config(vocab_size=30), r"\(25, 16\), .* \(30, 16\), and 1 more"),
        (_config(num_hidden_layers=1_000_000), "num_hidden_layers=1000000, the folder has 21 weights"),
        (_config(num_hidden_layers=0), "num_hidden_layers=0"),
        (_config(rms_norm_eps=float("nan")), "rms_norm_eps=NaN"),
        (_only_index(json.dumps({"metadata": 3, "weight_map": {}})), "not an index"),
    ],
)
def test_a_broken_directory_is_refused_in_one_line(tmp_path, damage, message):
    source = save(tmp_path / "model", tiny_model())
    damage(Path(source))
    with pytest.raises(ModelError, match=message) as caught:
        PretrainedHandle(source).causal_lm()
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weight_of_an_expert_that_does_not_fit_is_named_with_both_shapes(tmp_path):
    """transformers stacks the experts' weights while it loads them."""
    source = save(tmp_path / "model", named_model("Mixtral", num_local_experts=2))
    tensors = load_file(Path(source, "model.safetensors"))
    tensors["model.layers.0.block_sparse_moe.experts.0.w1.weight"] = torch.zeros(3, 4)
    save_file(tensors, Path(source, "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts.*\[3, 4\].*\[24, 16\]") as refused:
        PretrainedHandle(source).causal_lm()
    assert "\n" not in str(refused.value)
    assert "above report" not in str(refused.value)


def test_an_index_that_an_older_save_left_is_not_read_as_transformers_does_not_read_it(tmp_path):
    source = save(tmp_path / "model", tiny_model())
    before = PretrainedHandle(source).fingerprint()
    Path(source, "model.safetensors.index.json").write_text(INDEX)
    assert PretrainedHandle(source).fingerprint() == before
    weights = load_file(Path(source, "model.safetensors"))
    loaded = PretrainedHandle(source).causal_lm().state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_a_loaded_model_that_has_diverged_is_refused():
    model = tiny_model()
    model.lm_head.weight.data[0, 0] = float("inf")
    with pytest.raises(ModelError, match=r"the policy: .*lm_head\.weight.*NaN"):
        prepare(model, "the policy")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="tokenizer"):
        PretrainedHandle(str(tmp_path / "model")).tokenizer()


def test_a_file_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelError, match="no such"):
        check_model_directory(tmp_path / "model")


def test_a_models_own_code_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    folder = save_with_own_code(tmp_path / "own", monkeypatch)
    with pytest.raises(ModelError, match="trust_remote_code=true") as caught:
        PretrainedHandle(str(folder)).config()
    assert "\n" not in str(caught.value)
    assert PretrainedHandle(str(folder), trust_remote_code=True).config().model_type == "own_llama"


def test_a_folder_with_signs_of_a_pattern_in_its_name_is_the_model_that_is_read(tmp_path):
    for name, seed in (("run[1]?*", 0), ("run1xy", 1)):
        save(tmp_path / name, tiny_model(seed=seed))
    handle = PretrainedHandle(str(tmp_path / "run[1]?*"))
    assert torch.equal(handle.causal_lm()(IDS).logits, tiny_model()(IDS).logits)
    assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()


def test_hub_ids_and_paths_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert [is_local(s) for s in ("gpt2", "org/name", "org/name-1.5B_x", "org/name@refs/pr/3")] == [False] * 4
    assert [is_local(s) for s in ("data/model", "./gpt2", "/a/b", "a/b/c", "~/m", "data")] == [True] * 6
    with pytest.raises(ModelError, match="hub id"):
        PretrainedHandle("modles/mine").config()


def test_a_classifier_on_the_hub_is_judged_by_the_header_of_its_weights_alone(on_the_hub, monkeypatch):
    for name in ("org/one", "org/five"):
        folder = on_the_hub(name, "main", "0")
        tiny_model("gpt2", reward=True, num_labels=5).config.save_pretrained(folder)
        (folder / "config.json").write_text(
            json.dumps(
                {**json.loads((folder / "config.json").read_text()), "architectures": ["GPT2ForSequenceClassification"]}
            )
        )
    shapes = {"org/one": [1, 16], "org/five": [5, 16]}

    def header(name: str, revision: str) -> SimpleNamespace:
        assert revision == "main"
        file = SimpleNamespace(tensors={"score.weight": SimpleNamespace(shape=shapes[name])})
        return SimpleNamespace(files_metadata={"model.safetensors": file})

    monkeypatch.setattr("ppo_rlhf.models.model_kinds.get_safetensors_metadata", header)
    monkeypatch.setattr("ppo_rlhf.models.model_kinds.hub_answers", lambda: True)
    PretrainedHandle("org/one").check_reward_model()
    with pytest.raises(ModelError, match=r"num_labels=1.* 5"):
        PretrainedHandle("org/five").check_reward_model()


@pytest.mark.parametrize("source", ["m" * 300, f"./{'m' * 300}", f"{'m' * 300}/model"])
def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line(source):
    with pytest.raises(ModelError, match=rf"^{source}: .*no such"):
        PretrainedHandle(source).tokenizer()


def test_a_hub_that_does_not_answer_is_asked_once_and_the_cache_is_read(on_the_hub, monkeypatch, caplog):
    save(on_the_hub("org/model", "main", "0"), tiny_model())
    asked = []

    class NoNetwork:
        def head(self, url: str, **_: object) -> None:
            asked.append(url)
            raise ConnectionError("no network")

        get = request = stream = head

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for place in ("huggingface_hub.utils._http.get_session", "ppo_rlhf.models.directories.get_session"):
        monkeypatch.setattr(place, NoNetwork)
    hub_answers.cache_clear()
    try:
        handle = PretrainedHandle("org/model")
        assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()
        assert handle.record() is None
        assert torch.equal(handle.causal_lm()(IDS).logits, tiny_model()(IDS).logits)
        with pytest.raises(ModelError, match=r"^modles/mine: .*hub id") as refused:
            PretrainedHandle("modles/mine").tokenizer()
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__
    finally:
        hub_answers.cache_clear()
    assert asked == ["https://huggingface.co"]
    assert [line for line in caplog.messages if "does not answer" in line] == [
        "https://huggingface.co does not answer (no network): models are read from the cache."
    ]


def test_a_hub_model_is_loaded_in_the_revision_that_is_named(on_the_hub):
    models = {"main": tiny_model(), "v2": tiny_model(seed=1), "refs/pr/3": tiny_model(seed=2)}
    for commit, (revision, model) in enumerate(models.items()):
        save(on_the_hub("org/model", revision, str(commit)), model)
    logits = {revision: model(IDS).logits for revision, model in models.items()}
    sources = {"org/model": "main", f"org/model@{'1' * 40}": "v2", **{f"org/model@{name}": name for name in models}}
    for source, revision in sources.items():
        handle = PretrainedHandle(source)
        assert torch.equal(handle.causal_lm()(IDS).logits, logits[revision]), source
        assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()
    with pytest.raises(ModelError, match=r"org/model@v3: .*configuration"):
        PretrainedHandle("org/model@v3").config()


def test_of_a_hub_model_too_only_safetensors_are_loaded(tmp_path, monkeypatch):
    """Pickled weights may run code. The cache is laid out as the hub's client does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("safe", "pickled"):
        cached = tmp_path / f"models--org--{name}"
        save(cached / "snapshots" / ("0" * 40), model := tiny_model())
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    torch.save(model.state_dict(), cached / "snapshots" / ("0" * 40) / "pytorch_model.bin")
    assert torch.equal(PretrainedHandle("org/safe").causal_lm()(IDS).logits, model(IDS).logits)
    with pytest.raises(ModelError, match=r"org/pickled: .*safetensors"):
        PretrainedHandle("org/pickled").causal_lm()


def test_reward_models_of_transformers_and_ours_are_loaded(tmp_path):
    theirs = save(tmp_path / "a", tiny_model("gpt2", reward=True, num_labels=1), word_tokenizer(pad_token=None))
    model = PretrainedHandle(theirs).reward_model()
    assert isinstance(model, GPT2ForSequenceClassification)
    assert model(IDS.repeat(2, 1)).logits.shape == (2, 1)  # a batch of two needs a pad id
    ours = save(tmp_path / "b", CausalLMRewardModel.from_causal_lm(tiny_model()))
    assert isinstance(PretrainedHandle(ours).reward_model(), CausalLMRewardModel)


def test_a_reward_model_needs_one_label_and_a_head(tmp_path):
    with pytest.raises(ModelError, match=r"num_labels=1.* 2"):
        PretrainedHandle(save(tmp_path / "a", tiny_model("gpt2", reward=True, num_labels=2))).reward_model()
    for labels in (1, 2):
        with pytest.raises(ModelError, match="GPT2LMHeadModel"):
            PretrainedHandle(save(tmp_path / "b", tiny_model("gpt2", num_labels=labels))).reward_model()
    nobody_says_of_what_class = save(tmp_path / "c", tiny_model("gpt2", num_labels=1))
    config = Path(nobody_says_of_what_class, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    with pytest.raises(ModelError, match=r"score\.weight"):
        PretrainedHandle(nobody_says_of_what_class).reward_model()


@pytest.mark.parametrize("labels", [{}, {"num_labels": 2}, {"id2label": {"0": "bad", "1": "good"}}], ids=str)
@pytest.mark.parametrize("shards", [False, True])
def test_a_reward_model_has_one_label_if_its_head_has_one_row_whatever_its_configuration_says(tmp_path, labels, shards):
    """Configurations without labels have two by default."""
    original = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=0)
    original.save_pretrained(tmp_path, max_shard_size="2KB" if shards else "1GB")
    assert Path(tmp_path, "model.safetensors").is_file() is not shards
    word_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if "label" not in key}
    path.write_text(json.dumps(config | labels))
    model = PretrainedHandle(str(tmp_path)).reward_model()
    assert model.config.num_labels == 1
    assert_close(model(IDS).logits, original(IDS).logits)


def test_a_head_with_two_rows_is_no_reward_model_though_its_configuration_has_one_label(tmp_path):
    save(tmp_path, tiny_model("gpt2", reward=True, num_labels=2))
    path = tmp_path / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if "label" not in key}
    path.write_text(json.dumps(config | {"num_labels": 1}))
    with pytest.raises(ModelError, match=r"num_labels=1.* 2"):
        PretrainedHandle(str(tmp_path)).check_reward_model()


def test_our_reward_model_cannot_be_a_policy(tmp_path):
    handle = PretrainedHandle(save(tmp_path / "model", CausalLMRewardModel.from_causal_lm(tiny_model())))
    with pytest.raises(ModelError, match="cannot generate"):
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
    assert usable_context(config) == (length, "")


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 25}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
ORIGINAL = {"original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
TWO_ROPES = {"full_attention": DYNAMIC, "sliding_attention": {**LONGROPE, **ORIGINAL, "rope_theta": 1e4}}
PHI3 = Phi3Config(**SMALL, **ORIGINAL, max_position_embeddings=64, pad_token_id=0, rope_scaling=LONGROPE)


def llama_config(rope: dict, context: int = 64) -> LlamaConfig:
    return LlamaConfig(**SMALL, max_position_embeddings=context, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (PHI3, 8),
        (llama_config(DYNAMIC, context=16), 16),
        (Gemma3TextConfig(**SMALL, head_dim=8, max_position_embeddings=64, rope_parameters=TWO_ROPES), 8),
        (llama_config({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}), 64),
        (llama_config({**LONGROPE, "original_max_position_embeddings": 128, "rope_theta": 1e4}), 64),
    ],
    ids=["longrope", "dynamic", "by layer type", "linear", "first trained on longer sequences"],
)
def test_ppo_stops_where_rope_starts_to_depend_on_the_batch_and_says_why(config, length):
    context, why = usable_context(config)
    assert context == length
    assert ("RoPE" in why) == (length < 64)


@pytest.mark.parametrize("model_class", [Phi3ForCausalLM, LlamaForCausalLM])
def test_just_beyond_that_length_a_sequence_depends_on_its_neighbours(model_class):
    config = PHI3 if model_class is Phi3ForCausalLM else llama_config(DYNAMIC, context=8)
    model = draw_weights(model_class(config).eval(), 0.4, seed=1)
    limit, _ = usable_context(config)
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


def test_progress_bars_are_off_inside_and_as_before_outside():
    before = is_progress_bar_enabled()
    with quiet_transformers():
        assert not is_progress_bar_enabled()
    assert is_progress_bar_enabled() == before
