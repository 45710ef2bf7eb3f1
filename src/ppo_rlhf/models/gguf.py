"""Turns a GGUF file, the model file of llama.cpp and Ollama, into a model directory that all other code reads.

transformers reads the configuration, the tokenizer and the weights of the file, with the package gguf. The directory
first has the file's configuration and tokenizer; the weights are added, as float32, when a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.models.directories import WEIGHTS, check_gguf, gguf_file
from ppo_rlhf.runtime.locks import one_at_a_time
from ppo_rlhf.runtime.log_lines import errors_only, quiet_transformers, say_once
from ppo_rlhf.runtime.whole_files import drafted, publish, written_whole

log = logging.getLogger(__name__)

SOURCE = "gguf.json"
"""File of an unpacked directory that says which types the tensors of the GGUF file had. It is written last."""
LINK = "model.gguf"
ONE_FILE = "100TB"

_directories: dict[tuple[Path, int, int], Path] = {}
"""The directories that this process has unpacked or found, by path, size and time of the GGUF file."""
_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Directories of files that are not kept; they are deleted when the process ends."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, which is unpacked below `kept_in`, or if `kept_in` is None in a temporary directory."""

    path: Path
    kept_in: Path | None = None

    @classmethod
    def at(cls, source: str, kept_in: Path | None) -> GGUFFile | None:
        """Return the GGUF file that a source names (`directories.gguf_file`), or None if the source is another."""
        path = gguf_file(source)
        return None if path is None else cls(path, kept_in)

    @cached_property
    def directory(self) -> Path:
        """The directory with the file's configuration, tokenizer and chat template, which is written if it is missing.

        Raises:
            ModelError: The file cannot be read, or is not a model that transformers can read from GGUF.
        """
        check_gguf(self.path)
        stat = self.path.stat()
        key = (self.path.resolve(), stat.st_size, stat.st_mtime_ns)
        known = _directories.get(key)
        if known is not None and (known / SOURCE).is_file() and self.kept_in in (None, known.parent):
            return known
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if (kept_in := self.kept_in) is None:
            _temporary.append(tempfile.TemporaryDirectory(prefix="ppo_rlhf_gguf_", ignore_cleanup_errors=True))
            kept_in = Path(_temporary[-1].name)
        folder = kept_in / digest[:16]
        if not (folder / SOURCE).is_file():
            log.info("%s: its configuration and tokenizer are read.", self.path)
            try:
                with _errors_of(self.path, "configuration or its tokenizer"), written_whole(folder) as draft:
                    self._write_header(draft)
            except ModelError:
                # Another process of this run may have unpacked the same file meanwhile
                if not (folder / SOURCE).is_file():
                    raise
        _directories[key] = folder
        return folder

    @property
    def counts(self) -> dict[str, int]:
        """The number of the file's tensors of each type, the most frequent first."""
        counts: dict[str, int] = json.loads((self.directory / SOURCE).read_bytes())["types"]
        return counts

    @property
    def types(self) -> str:
        """The types of the file's tensors, the most frequent first, such as `Q4_1 (210 tensors), F32 (61)`."""
        (first, count), *rest = self.counts.items()
        return ", ".join([f"{first} ({count} tensor{'s' * (count > 1)})", *(f"{name} ({n})" for name, n in rest)])

    def dequantise(self) -> None:
        """Add the file's weights to the directory as float32, unless they are there.

        Of the processes that share the directory, one adds them.

        Raises:
            ModelError: The weights cannot be read or cannot be written.
        """
        folder = self.directory
        kept = "" if self.kept_in is None else f"; they are kept in {folder}"
        say_once(f"{self.path}: weights of the types {self.types} are dequantised to float32{kept}.")
        with one_at_a_time(folder):
            if not (folder / WEIGHTS).is_file():
                self._add_weights(folder)

    def _add_weights(self, folder: Path) -> None:
        with _errors_of(self.path, "weights"), drafted(folder / "weights") as draft:
            draft.mkdir()
            model = _dequantised(self.path, draft)
            with quiet_transformers():
                model.save_pretrained(draft, max_shard_size=ONE_FILE)
            publish(draft / WEIGHTS, folder / WEIGHTS)

    def _write_header(self, folder: Path) -> None:
        import gguf  # imported inside the function, because the package is an extra

        folder.mkdir()
        (folder / LINK).symlink_to(self.path.resolve())
        reader = gguf.GGUFReader(folder / LINK)
        counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
        with _parsed_once(reader), quiet_transformers(), errors_only("transformers"):
            config = AutoConfig.from_pretrained(folder, gguf_file=LINK)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=LINK)
        (folder / LINK).unlink()
        config.dtype = torch.float32
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            config.architectures = [architecture.__name__]
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / SOURCE).write_text(json.dumps({"types": dict(counts.most_common())}) + "\n", encoding="utf-8")


def _dequantised(path: Path, folder: Path) -> PreTrainedModel:
    """Return the language model in a GGUF file as a plain model in float32; `folder` gets a link for a moment."""
    import gguf  # imported inside the function, because the package is an extra

    link = folder / LINK
    link.symlink_to(path.resolve())
    options: dict[str, Any] = {"gguf_file": LINK, "dtype": torch.float32}
    # Newer versions of transformers could keep the weights of some architectures quantised
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    load: Any = AutoModelForCausalLM.from_pretrained
    with _parsed_once(gguf.GGUFReader(link)), quiet_transformers(), errors_only("transformers"):
        model, report = load(folder, output_loading_info=True, **options)
    link.unlink()
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    # save_pretrained refuses a model with a quantiser, although its weights are plain
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return cast(PreTrainedModel, model)


@contextmanager
def _parsed_once(reader: Any) -> Iterator[None]:
    """Let transformers use the parsed `reader`: it would parse the file again, which takes seconds each time."""
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = lambda path: reader  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


@contextmanager
def _errors_of(path: Path, what: str) -> Iterator[None]:
    """Turn every error of the block into a `ModelError` of one line."""
    try:
        yield
    # transformers and gguf raise ValueError, KeyError, IndexError and other types for files that they cannot read
    except Exception as error:
        raise ModelError(
            f"{path}: its {what} cannot be read from GGUF ({in_one_line(error)}). Give a directory with safetensors."
        ) from error
