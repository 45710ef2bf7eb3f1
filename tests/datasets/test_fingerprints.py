import hashlib
import sys
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset
from ppo_rlhf.datasets.fingerprints import Fingerprints, functions_in, origin, source_file
from ppo_rlhf.models.loading import PretrainedHandle
from tests.tiny_models import save, tiny_model


def test_a_files_fingerprint_is_the_sha_256_of_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert Fingerprints().path(tmp_path / "x") == expected
    assert origin(RecordsDataset(str(tmp_path / "x"))) == (str(tmp_path / "x"), expected)


def test_a_file_is_read_again_only_after_it_changed(tmp_path, monkeypatch):
    fingerprints, path = Fingerprints(), tmp_path / "x"
    path.write_bytes(b"one")
    first = fingerprints.path(path)
    with monkeypatch.context() as context:
        context.setattr(hashlib, "file_digest", None)
        assert fingerprints.path(path) == first
    path.write_bytes(b"two")
    assert fingerprints.path(path) == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(FileNotFoundError):
        fingerprints.path(tmp_path / "missing")


def change_one_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_folders_fingerprint_tells_contents_and_names(tmp_path):
    for name, files in {"a": {"x": "1", "y": "2"}, "b": {"x": "1", "y": "2"}, "c": {"x": "2", "y": "1"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    one, same, swapped = (Fingerprints().path(tmp_path / name) for name in "abc")
    assert one == same
    assert one != swapped


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_every_file_that_a_model_is_read_from_counts(tmp_path, file):
    """`PretrainedHandle.fingerprint`, for tags, reads the first and last mebibyte of weights, and no tokenizer."""
    handle = PretrainedHandle(str(save(tmp_path / "model", tiny_model())))
    before = Fingerprints().model(handle)
    assert Fingerprints().model(PretrainedHandle(handle.source)) == before
    path = Path(handle.source) / file
    if file == "config.json":
        path.write_text(path.read_text().replace("}", " }"))
    else:
        change_one_byte(path, path.stat().st_size // 2)
    assert Fingerprints().model(handle) != before


def test_a_change_amid_large_weights_counts_that_the_cheap_fingerprint_passes_over(tmp_path):
    source = Path(save(tmp_path / "model", tiny_model(hidden_size=256, vocab_size=4096)))
    weights, handle = source / "model.safetensors", PretrainedHandle(str(source))
    assert weights.stat().st_size > 4 * 2**20
    cheap, whole = handle.fingerprint(), Fingerprints().model(handle)
    change_one_byte(weights, weights.stat().st_size // 2)
    assert handle.fingerprint() == cheap
    assert Fingerprints().model(handle) != whole


def test_what_else_lies_with_a_model_does_not_count(tmp_path):
    source = Path(save(tmp_path / "model", tiny_model()))
    before = Fingerprints().model(PretrainedHandle(str(source)))
    (source / "README.md").write_text("notes")
    (source / "pytorch_model.bin").write_text("never read")
    (source / "original").mkdir()
    assert Fingerprints().model(PretrainedHandle(str(source))) == before


def test_a_missing_model_has_no_fingerprint(tmp_path):
    with pytest.raises(ModelError, match="there is no such model directory"):
        Fingerprints().model(PretrainedHandle(str(tmp_path / "missing")))
    assert origin(PretrainedModelDataset(str(tmp_path / "missing"))) == (str(tmp_path / "missing"), None)
    assert origin(PretrainedModelDataset(None)) == (None, None)
    assert origin(None) == (None, None)


def test_functions_are_found_wherever_parameters_name_them():
    parameters = {
        "judge": "my.functions:polite",
        "rates": {"a": "rates:a_b", "b": None},
        "components": [{"function": "mine:f", "weight": 1.0}, {"type": "model"}],
        "url": "https://host:80/x",
        "text": "a sentence: with words",
        "pair": ("c:\\models", "tuples:too"),
    }
    assert sorted(functions_in(parameters)) == ["mine:f", "my.functions:polite", "rates:a_b", "tuples:too"]


def test_the_source_of_a_function_is_found_without_importing_it(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    for folder, name in ((tmp_path, "mine.py"), (tmp_path / "src", "in_src.py"), (elsewhere, "on_path.py")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('imported')")
    package = tmp_path / "bundle" / "inner"
    package.mkdir(parents=True)
    for file in (tmp_path / "bundle" / "__init__.py", package / "__init__.py", package / "judge.py"):
        file.write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(elsewhere))
    found = {
        reference: source_file(reference, tmp_path)
        for reference in (
            "mine:f",
            "in_src:f",
            "on_path:f",
            "bundle.inner.judge:f",
            "bundle.inner:f",
            "missing:f",
            "a.b:f",
        )
    }
    assert found == {
        "mine:f": tmp_path / "mine.py",
        "in_src:f": tmp_path / "src" / "in_src.py",
        "on_path:f": elsewhere / "on_path.py",
        "bundle.inner.judge:f": package / "judge.py",
        "bundle.inner:f": package / "__init__.py",
        "missing:f": None,
        "a.b:f": None,
    }
    assert not {"mine", "in_src", "on_path", "bundle"} & set(sys.modules)


def test_the_source_of_the_projects_own_labeller_is_found(tmp_path):
    found = source_file("ppo_rlhf.demo.judge:gold_score", tmp_path)
    assert found is not None
    assert "def gold_score(" in found.read_text()
    assert source_file("sys:exit", tmp_path) is None
