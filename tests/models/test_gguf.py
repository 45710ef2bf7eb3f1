"""GGUF files as models: what is read from them, what is kept, and what is refused."""

import importlib.util
import os
import shutil
import struct
import tracemalloc
import unicodedata
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import gguf as module
from ppo_rlhf.models.gguf_header import GGUFHeader
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from tests.tiny_models import CHATML, save, tiny_model, write_gguf

CHAT = [{"role": "user", "content": "the hat"}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("llama.cpp") / "tiny.Q4_1.gguf"
    return file, write_gguf(file)


ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LINEAR = {**ROPE, "rope_type": "linear", "factor": 4.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors() -> np.ndarray:
    """Return by how much transformers divides the frequencies of `LLAMA3`, as llama.cpp stores it."""
    plain, scaled = (
        LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=rope)).inv_freq
        for rope in (ROPE, LLAMA3)
    )
    return (plain / scaled).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantised": "F16"},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"architecture": "qwen2"},
        {"architecture": "qwen3", "rope_parameters": ROPE},
        {
            "rope_parameters": LINEAR,
            "keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        },
        {"keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}},
        {
            "architecture": "qwen2",
            "rope_parameters": YARN,
            "keys": {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 64,
            },
        },
        {"rope_parameters": LLAMA3, "extra": {"rope_freqs.weight": llama3_factors()}},
        {"extra": {"rope_freqs.weight": np.ones(4, np.float32)}},
    ],
    ids=["Q4_1", "F16", "untied", "qwen2", "qwen3", "linear", "linear by 0", "yarn", "llama 3", "factors of one"],
)
def test_a_gguf_file_gives_the_numbers_that_it_holds(tmp_path, options):
    model = write_gguf(tmp_path / "m.gguf", **options)
    loaded = PretrainedHandle(str(tmp_path / "m.gguf"), gguf_cache=tmp_path / "kept").causal_lm()
    ids = torch.randint(3, 250, (2, 120), generator=torch.Generator().manual_seed(1))
    assert loaded.dtype == torch.float32
    for name, weight in model.named_parameters():
        assert_close(loaded.get_parameter(name), weight, rtol=0.0, atol=0.0)
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("split", "text", "tokens"),
    [
        # GPT-2's split of "a  5" gives the second space to the digit
        ("smollm", "a  5", ["a", "ĠĠ", "5"]),
        ("gpt-2", "a  5", ["a", "Ġ", "Ġ", "5"]),
        ("smollm", "x123", ["x", "1", "2", "3"]),
        ("gpt-2", "x1231", ["x", "123", "1"]),
        ("llama-bpe", "1231 123", ["123", "1", "Ġ", "123"]),
        ("qwen2", "x123", ["x", "1", "2", "3"]),
        # "hat" is a token that no merges make
        ("llama-bpe", "hat", ["hat"]),
        ("qwen2", "hat", ["h", "a", "t"]),
        # e and a combining acute accent
        ("qwen2", "e\u0301", ["Ã©"]),
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_a_text_gets_the_tokens_of_the_split_that_the_file_names(tmp_path, split, text, tokens):
    write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": split})
    tokenizer = PretrainedHandle(str(tmp_path / "m.gguf")).tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC" if split == "qwen2" else "NFD", text)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["a"]),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.pre": "llama-bpe"}, ["a"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["<|im_start|>", "a"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["<|im_start|>", "a"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["a", "<|im_end|>"]),
    ],
)
def test_a_text_gets_the_begin_and_end_that_the_file_asks_for(tmp_path, keys, expected):
    write_gguf(tmp_path / "m.gguf", keys=keys)
    tokenizer = PretrainedHandle(str(tmp_path / "m.gguf")).tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"]) == expected


PIECES = {"<unk>": 2, "<s>": 3, "</s>": 3, "<0xC3>": 6, "<0xA9>": 6, "<sep>": 4, "▁": 1, "h": 1, "a": 1, "t": 1}
MERGED = ["at", "▁a", "hat", "ha"]
"""Pieces of two and more letters."""


def write_pieces(path: Path, scores: list[float], **flags: bool) -> None:
    """Write a model with the tokenizer of SentencePiece that has `PIECES` and, with these scores, `MERGED`."""
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*PIECES, *MERGED],
        "tokenizer.ggml.token_type": [*PIECES.values(), *[1] * len(MERGED)],
        "tokenizer.ggml.scores": [0.0] * len(PIECES) + scores,
        "tokenizer.ggml.merges": None,
        "llama.vocab_size": len(PIECES) + len(MERGED),
        **{f"tokenizer.ggml.{flag}": value for flag, value in flags.items()},
    }
    write_gguf(path, keys=keys, vocab_size=len(PIECES) + len(MERGED))


@pytest.mark.parametrize(
    ("flags", "text", "tokens"),
    [
        ({}, "a hat", ["<s>", "▁a", "▁", "hat"]),
        ({"add_bos_token": False}, "ha", ["▁", "ha"]),
        ({"add_bos_token": False, "add_space_prefix": False}, "ha at", ["ha", "▁", "at"]),
        ({"add_bos_token": False, "add_space_prefix": False}, "haé", ["ha", "<0xC3>", "<0xA9>"]),
        ({"add_eos_token": True, "add_bos_token": False}, "a", ["▁a", "</s>"]),
        ({"add_bos_token": False}, "a<sep>a", ["▁a", "<sep>", "▁a"]),
    ],
)
def test_a_text_gets_the_pieces_with_the_highest_scores_and_a_space_before_it(tmp_path, flags, text, tokens):
    """Expected by hand: the pair that makes the piece with the highest score is joined first."""
    write_pieces(tmp_path / "m.gguf", [0.0, -1.0, -2.0, -3.0], **flags)
    tokenizer = PretrainedHandle(str(tmp_path / "m.gguf")).tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == tokens
    if "<" not in text:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ([0.0, -1.0, -1.0, -2.0], "tokenizer.ggml.scores has -1 for both '▁a' and 'hat'"),
        ([0.0, -1.0, -2.0, float("nan")], "tokenizer.ggml.scores has 14 entries, not 14 finite numbers"),
    ],
)
def test_scores_that_leave_the_order_of_two_merges_open_are_refused(tmp_path, scores, named):
    """In "hat" with ha and at of one score llama.cpp joins ha, and in "ath" at: the one that stands first."""
    write_pieces(tmp_path / "m.gguf", scores)
    assert named in refused(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keys": {"tokenizer.ggml.pre": "falcon"}}, "tokenizer.ggml.pre=falcon, a split of texts into words that is"),
        ({"keys": {"tokenizer.ggml.pre": "default"}}, "tokenizer.ggml.pre=default"),
        ({"keys": {"tokenizer.ggml.pre": None}}, "the key tokenizer.ggml.pre is missing"),
        ({"keys": {"tokenizer.ggml.model": "t5"}}, "tokenizer.ggml.model=t5"),
        ({"keys": {"tokenizer.ggml.add_space_prefix": True}}, "tokenizer.ggml.add_space_prefix=True"),
        ({"keys": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}}, "bos_token_id is mis"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 999}}, "tokenizer.ggml.eos_token_id=999"),
        ({"keys": {"tokenizer.ggml.eot_token_id": 999}}, "tokenizer.ggml.eot_token_id=999"),
        ({"keys": {"tokenizer.ggml.precompiled_charsmap": "x"}}, "tokenizer.ggml.precompiled_charsmap='x'"),
        ({"keys": {"general.type": "adapter"}}, "general.type='adapter'"),
        ({"keys": {"split.count": 2}}, "split.count=2"),
        ({"keys": {"llama.expert_count": 8}}, "llama.expert_count=8"),
        ({"keys": {"llama.attention.sliding_window": 32}}, "llama.attention.sliding_window=32"),
        (
            {"keys": {"llama.logit_scale": 2.0, "llama.x": 1}},
            "llama.logit_scale=2.0 has no counterpart, and 1 more key",
        ),
        ({"keys": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count=4"),
        ({"keys": {"llama.attention.value_length": 4}}, "llama.attention.value_length=4"),
        ({"keys": {"llama.vocab_size": 7}}, "llama.vocab_size=7"),
        ({"keys": {"llama.block_count": 2**31}}, "llama.block_count=2147483648 for 20 tensors"),
        ({"keys": {"llama.block_count": 1}}, "the tensor blk.1."),
        ({"keys": {"llama.block_count": 3}}, "the weight model.layers.2."),
        ({"keys": {"llama.feed_forward_length": 32}}, "has the shape (64, 32), not (32, 32)"),
        ({"keys": {"llama.context_length": "many"}}, "llama.context_length='many'"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "llama.rope.scaling.type=longrope"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type=yarn"),
        (
            {"keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.5}},
            "linear with the factor 0.5 ",
        ),
        ({"keys": {"llama.rope.scaling.factor": 2.0}}, "with the factor 2 has no counterpart"),
        ({"extra": {"rope_freqs.weight": np.array([1, 1, 1, 8], np.float32)}}, "rope_freqs.weight does not extend"),
        ({"keys": {"tokenizer.ggml.merges": None}}, "tokenizer.ggml.merges is missing"),
        (
            {
                "rope_parameters": LLAMA3,
                "keys": {"llama.rope.scaling.factor": 4.0},
                "extra": {"rope_freqs.weight": llama3_factors()},
            },
            "rope_freqs.weight does not extend",
        ),
        ({"extra": {"rope_factors_long.weight": np.ones(4, np.float32)}}, "the tensor rope_factors_long.weight has no"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "the tensor blk.0.attn_q.bias has no counterpart"),
        (
            {"architecture": "gemma3"},
            "general.architecture=gemma3, which is not known here; known: llama, qwen2, qwen3",
        ),
    ],
)
def test_a_key_or_tensor_without_a_counterpart_is_refused_by_its_name(tmp_path, options, named):
    write_gguf(tmp_path / "m.gguf", **options)
    assert named in refused(tmp_path / "m.gguf")


def test_each_token_that_ends_a_text_or_a_turn_is_a_stop(tmp_path):
    write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    assert PretrainedHandle(str(tmp_path / "m.gguf")).generation_config().eos_token_id == [2, 5]


def test_keys_that_change_nothing_are_allowed(tmp_path):
    about = {"general.type": "model", "general.tags": ["chat"], "quantize.imatrix.file": "x", "split.count": 0}
    write_gguf(tmp_path / "m.gguf", keys={**about, "tokenizer.ggml.fim_pre_token_id": 7, "llama.expert_count": 0})
    assert PretrainedHandle(str(tmp_path / "m.gguf")).config().num_hidden_layers == 2


def replaced(file: Path, other: Path) -> None:
    os.replace(other, file)


def overwritten(file: Path, other: Path) -> None:
    """Write into the same file, and restore its times."""
    stat = file.stat()
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, overwritten])
def test_a_file_that_changes_after_its_configuration_was_read_never_gives_its_weights_to_the_old_one(tmp_path, change):
    first, second = (write_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    file = Path(shutil.copy(tmp_path / "1.gguf", tmp_path / "m.gguf"))
    handle = PretrainedHandle(str(file), gguf_cache=tmp_path / "kept")
    handle.config()
    change(file, Path(shutil.copy(tmp_path / "2.gguf", tmp_path / "copy.gguf")))
    assert "was replaced or written to while it was read. Start again." in refused_by(handle.causal_lm)
    for name, model in ((tmp_path / "1.gguf", first), (file, second)):
        loaded = PretrainedHandle(str(name), gguf_cache=tmp_path / "kept").causal_lm()
        assert_close(loaded.lm_head.weight, model.lm_head.weight, rtol=0.0, atol=0.0)


def test_a_file_that_is_written_to_while_its_weights_are_read_gives_none(written, tmp_path, monkeypatch):
    file = Path(shutil.copy(written[0], tmp_path / "m.gguf"))
    handle = PretrainedHandle(str(file), gguf_cache=tmp_path / "kept")
    handle.config()
    write_weights = module.write_weights

    def with_a_writer(*args):
        with file.open("r+b") as writer:
            writer.seek(-4, os.SEEK_END)
            writer.write(b"0000")
        write_weights(*args)

    monkeypatch.setattr(module, "write_weights", with_a_writer)
    assert "was replaced or written to while it was read" in refused_by(handle.causal_lm)
    assert not list((tmp_path / "kept").rglob("*.safetensors"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


@pytest.mark.parametrize(
    ("tensors", "keys", "body"),
    [
        (0, 2, ARCHITECTURE + text("x") + struct.pack("<IIQ", 9, 0, 2**40)),
        (0, 2, ARCHITECTURE + text("x") + struct.pack("<IIQ", 9, 8, 2**40)),
        (0, 2, ARCHITECTURE + text("x") + struct.pack("<IIQ", 9, 9, 2**40)),
        (0, 2, ARCHITECTURE + struct.pack("<Q", 2**63)),
        (0, 2**60, ARCHITECTURE),
        (2**60, 1, ARCHITECTURE),
        (1, 1, ARCHITECTURE + text("t") + struct.pack("<I", 2**32 - 1)),
        (1, 1, ARCHITECTURE + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
    ],
)
def test_a_count_that_the_file_is_too_short_for_is_refused_at_once(tmp_path, tensors, keys, body):
    file = tmp_path / "bomb.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body)
    tracemalloc.start()
    try:
        assert "cannot be read from GGUF" in refused(file)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_two_tensors_in_one_place_are_refused(tmp_path):
    entry = [text(name) + struct.pack("<IQIQ", 1, 8, 0, 0) for name in "ab"]
    body = ARCHITECTURE + b"".join(entry)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + body + bytes(128))
    assert "the tensor b lies outside the file or in another tensor" in refused(tmp_path / "m.gguf")


def test_the_tokenizer_and_the_chat_template_come_from_the_file(written):
    file, model = written
    handle = PretrainedHandle(str(file))
    tokenizer = handle.tokenizer()
    assert tokenizer.chat_template == CHATML
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nthe hat<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[0] == "<|im_start|>"
    assert "the" in words
    assert words.count("<|im_end|>") == 1
    assert handle.generation_config().eos_token_id == model.config.eos_token_id


def test_a_folder_with_one_gguf_file_is_read_and_safetensors_beside_it_come_first(written, tmp_path):
    shutil.copy(written[0], tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert PretrainedHandle(str(tmp_path)).config().hidden_size == 32
    save(tmp_path, tiny_model())
    assert PretrainedHandle(str(tmp_path)).config().hidden_size == 16


def test_weights_are_dequantised_once_and_read_from_the_kept_directory_afterwards(written, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    PretrainedHandle(str(written[0]), gguf_cache=kept).causal_lm()
    (folder,) = kept.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("chat_template.jinja", "config.json", "gguf.json", "model.safetensors", "tokenizer.json"),
        "tokenizer_config.json",
    ]

    def fail(*args):
        raise AssertionError("the file was unpacked again")

    monkeypatch.setattr(module, "write_weights", fail)
    monkeypatch.setattr(module, "_write_header", fail)
    copy = shutil.copy(written[0], tmp_path / "another name.gguf")
    model = PretrainedHandle(str(copy), gguf_cache=kept).causal_lm()
    assert_close(model.lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    shutil.rmtree(kept)
    with pytest.raises(ModelError, match="unpacked again"):
        PretrainedHandle(str(copy), gguf_cache=kept).causal_lm()


def test_a_process_that_waited_for_another_one_does_not_dequantise_again(written, tmp_path, monkeypatch):
    handle = PretrainedHandle(str(written[0]), gguf_cache=tmp_path)
    one_at_a_time, write_weights, times = module.one_at_a_time, module.write_weights, list[Path]()

    @contextmanager
    def after_another(folder: Path):
        with one_at_a_time(folder):
            if not times:
                handle.gguf._add_weights(folder)
            yield

    def counted(file: BinaryIO, header: GGUFHeader, config: PretrainedConfig, path: Path):
        times.append(path)
        write_weights(file, header, config, path)

    monkeypatch.setattr(module, "one_at_a_time", after_another)
    monkeypatch.setattr(module, "write_weights", counted)
    assert_close(handle.causal_lm().lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    assert len(times) == 1


def test_a_file_without_a_suffix_is_known_by_its_first_bytes_as_ollama_keeps_it(written, tmp_path):
    blob = shutil.copy(written[0], tmp_path / "sha256-4711")
    assert_close(PretrainedHandle(str(blob)).causal_lm().lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    (tmp_path / "text").write_text("GGU")
    assert "there is no such model directory" in refused(tmp_path / "text")


def test_an_interrupted_write_is_not_read(written, tmp_path, monkeypatch):
    handle = PretrainedHandle(str(written[0]), gguf_cache=tmp_path)

    def interrupted(file: BinaryIO, header: GGUFHeader, config: PretrainedConfig, path: Path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.causal_lm()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert_close(handle.causal_lm().lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)


def test_the_configuration_is_read_without_weights(written, tmp_path):
    handle = PretrainedHandle(str(written[0]), gguf_cache=tmp_path)
    assert handle.config().num_hidden_layers == 2
    assert handle.tokenizer().eos_token_id == 2
    assert handle.empty_causal_lm().num_parameters() == written[1].num_parameters()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_one_line_says_from_which_types_and_where_the_weights_are_kept(written, tmp_path, caplog):
    PretrainedHandle(str(written[0]), gguf_cache=tmp_path).causal_lm()
    (folder,) = tmp_path.iterdir()
    line = f"{written[0]}: weights of the types Q4_1 (14 tensors), F32 (5), Q8_0 (1) are dequantised to float32"
    assert f"{line}; they are kept in {folder}." in caplog.messages


def test_a_model_from_a_gguf_file_is_saved_as_an_ordinary_directory(written, tmp_path):
    handle = PretrainedHandle(str(written[0]))
    model = handle.causal_lm()
    assert model.name_or_path == str(written[0])
    TrainedModel(model, handle.tokenizer()).save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert_close(again.lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == CHATML


def test_the_fingerprint_is_of_the_whole_file(written, tmp_path):
    write_gguf(tmp_path / "other.gguf", seed=1)
    same, other = shutil.copy(written[0], tmp_path / "same.gguf"), tmp_path / "other.gguf"
    prints = [PretrainedHandle(str(file)).fingerprint() for file in (written[0], same, other)]
    assert prints[0] == prints[1] != prints[2]


def refused(source: Path, check: str = "config") -> str:
    return refused_by(getattr(PretrainedHandle(str(source)), check))


def refused_by(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_read_is_refused_in_one_line(written, tmp_path, monkeypatch):
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "none.gguf")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refused(tmp_path / "lfs.gguf")
    (tmp_path / "half.gguf").write_bytes(written[0].read_bytes()[:3000])
    assert "half.gguf: its configuration or its tokenizer cannot be read from GGUF" in refused(tmp_path / "half.gguf")
    write_gguf(tmp_path / "new.gguf", architecture="newest")
    assert "general.architecture=newest, which is not known here" in refused(tmp_path / "new.gguf")
    part = shutil.copy(written[0], tmp_path / "m-00001-of-00002.gguf")
    assert "llama-gguf-split --merge" in refused(part)
    assert "4 GGUF files and no whole model. Give one, such as half.gguf." in refused(tmp_path)
    (tmp_path / "parts").mkdir()
    for number in (1, 2):
        shutil.copy(written[0], tmp_path / f"parts/m-0000{number}-of-00002.gguf")
    assert refused(tmp_path / "parts").endswith("no whole model. Join the parts with llama-gguf-split --merge.")
    assert "a GGUF file has no score head, so it is no reward model" in refused(written[0], "check_reward_model")
    assert "so it is no critic" in refused(written[0], "check_critic")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    assert refused(written[0]).endswith('is missing: pip install "ppo_rlhf[gguf]"')
