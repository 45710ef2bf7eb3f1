"""GGUF files as models: what is read from them, what is kept, and what is refused."""

import importlib.util
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import gguf as module
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from tests.tiny_models import CHATML, save, tiny_model, write_gguf

CHAT = [{"role": "user", "content": "the hat"}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("llama.cpp") / "tiny.Q4_1.gguf"
    return file, write_gguf(file)


@pytest.mark.parametrize("quantised", ["Q4_1", "F16"])
def test_a_gguf_file_gives_the_numbers_that_it_holds(tmp_path, quantised):
    model = write_gguf(tmp_path / "m.gguf", quantised=quantised)
    loaded = PretrainedHandle(str(tmp_path / "m.gguf"), gguf_cache=tmp_path / "kept").causal_lm()
    ids = torch.arange(40).reshape(2, 20)
    assert loaded.dtype == torch.float32
    for name, weight in model.named_parameters():
        assert_close(loaded.get_parameter(name), weight, rtol=0.0, atol=0.0)
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0.0, atol=1e-5)


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

    monkeypatch.setattr(module, "_dequantised", fail)
    monkeypatch.setattr(module.GGUFFile, "_write_header", fail)
    copy = shutil.copy(written[0], tmp_path / "another name.gguf")
    model = PretrainedHandle(str(copy), gguf_cache=kept).causal_lm()
    assert_close(model.lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    shutil.rmtree(kept)
    with pytest.raises(ModelError, match="unpacked again"):
        PretrainedHandle(str(copy), gguf_cache=kept).causal_lm()


def test_a_process_that_waited_for_another_one_does_not_dequantise_again(written, tmp_path, monkeypatch):
    handle = PretrainedHandle(str(written[0]), gguf_cache=tmp_path)
    one_at_a_time, dequantised, times = module.one_at_a_time, module._dequantised, list[Path]()

    @contextmanager
    def after_another(folder: Path):
        with one_at_a_time(folder):
            if not times:
                handle.gguf._add_weights(folder)
            yield

    def counted(path: Path, folder: Path):
        times.append(folder)
        return dequantised(path, folder)

    monkeypatch.setattr(module, "one_at_a_time", after_another)
    monkeypatch.setattr(module, "_dequantised", counted)
    assert_close(handle.causal_lm().lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    assert len(times) == 1


def test_a_file_without_a_suffix_is_known_by_its_first_bytes_as_ollama_keeps_it(written, tmp_path):
    blob = shutil.copy(written[0], tmp_path / "sha256-4711")
    assert_close(PretrainedHandle(str(blob)).causal_lm().lm_head.weight, written[1].lm_head.weight, rtol=0.0, atol=0.0)
    (tmp_path / "text").write_text("GGU")
    assert "there is no such model directory" in refused(tmp_path / "text")


def test_an_interrupted_write_is_not_read(written, tmp_path, monkeypatch):
    handle = PretrainedHandle(str(written[0]), gguf_cache=tmp_path)

    def interrupted(path: Path, folder: Path):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "_dequantised", interrupted)
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
    with pytest.raises(ModelError) as error:
        getattr(PretrainedHandle(str(source)), check)()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_read_is_refused_in_one_line(written, tmp_path, monkeypatch):
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "none.gguf")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refused(tmp_path / "lfs.gguf")
    (tmp_path / "half.gguf").write_bytes(written[0].read_bytes()[:3000])
    assert "half.gguf: its configuration or its tokenizer cannot be read from GGUF" in refused(tmp_path / "half.gguf")
    write_gguf(tmp_path / "new.gguf", architecture="newest")
    assert "architecture newest is not supported" in refused(tmp_path / "new.gguf")
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
