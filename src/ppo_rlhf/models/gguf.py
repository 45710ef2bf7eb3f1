"""Turns a GGUF file, the model file of llama.cpp and Ollama, into a model directory that all other code reads.

The directory first has the file's configuration and tokenizer; the weights are added, as float32, when a model is
loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from transformers import AutoConfig

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.models.directories import WEIGHTS, check_gguf, gguf_file
from ppo_rlhf.models.gguf_header import GGUFHeader, read_header
from ppo_rlhf.models.gguf_model import described, write_weights
from ppo_rlhf.runtime.locks import one_at_a_time
from ppo_rlhf.runtime.log_lines import quiet_transformers, say_once
from ppo_rlhf.runtime.manifests import sha256_of
from ppo_rlhf.runtime.whole_files import drafted, publish, written_whole

log = logging.getLogger(__name__)

SOURCE = "gguf.json"
"""File of an unpacked directory that says what the GGUF file was: its hash, its license, and the types of its tensors.
It is written last."""
READING = 1
"""Number of the way in which files are read: another way, for example with other tokens, makes another directory."""

_directories: dict[tuple[Path, tuple[int, ...]], Path] = {}
"""The directories that this process has unpacked or found, by path and state of the GGUF file."""
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
        key = (self.path.resolve(), _state(self.path))
        known = _directories.get(key)
        if known is not None and (known / SOURCE).is_file() and self.kept_in in (None, known.parent):
            return known
        with self.path.open("rb") as file:
            before, digest = _state(file), sha256_of(file)
            if (kept_in := self.kept_in) is None:
                _temporary.append(tempfile.TemporaryDirectory(prefix="ppo_rlhf_gguf_", ignore_cleanup_errors=True))
                kept_in = Path(_temporary[-1].name)
            folder = kept_in / hashlib.sha256(f"{READING}:{digest}".encode()).hexdigest()[:16]
            if not (folder / SOURCE).is_file():
                log.info("%s: its configuration and tokenizer are read.", self.path)
                try:
                    with _errors_of(self.path, "configuration or its tokenizer"), written_whole(folder) as draft:
                        _write_header(file, digest, draft)
                        self._check_same(_state(file) == before)
                except ModelError:
                    # Another process of this run may have unpacked the same file meanwhile
                    if not (folder / SOURCE).is_file():
                        raise
        _directories[key] = folder
        return folder

    @cached_property
    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.directory / SOURCE).read_bytes())
        return facts

    @property
    def counts(self) -> dict[str, int]:
        """The number of the file's tensors of each type, the most frequent first."""
        counts: dict[str, int] = self._facts["types"]
        return counts

    @property
    def license(self) -> str | None:
        """The license of the model, as the file names it; None if it names none."""
        name: str | None = self._facts["license"]
        return name

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
        with (
            _errors_of(self.path, "weights"),
            drafted(folder / "weights") as draft,
            self.path.open("rb") as file,
        ):
            before = _state(file)
            self._check_same(sha256_of(file) == self._facts["sha256"])
            draft.mkdir()
            with quiet_transformers():
                config = AutoConfig.from_pretrained(folder)
            write_weights(file, read_header(file), config, draft / WEIGHTS)
            self._check_same(_state(file) == before)
            publish(draft / WEIGHTS, folder / WEIGHTS)

    def _check_same(self, is_same: bool) -> None:
        if not is_same:
            raise ModelError(f"{self.path}: this GGUF file was replaced or written to while it was read. Start again.")


def _write_header(file: BinaryIO, digest: str, folder: Path) -> None:
    header: GGUFHeader = read_header(file)
    found = described(header, file)
    folder.mkdir()
    found.config.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)
    if found.generation_config is not None:
        found.generation_config.save_pretrained(folder)
    types = Counter(tensor.type for tensor in header.tensors.values())
    facts = {"sha256": digest, "license": found.license, "types": dict(types.most_common())}
    (folder / SOURCE).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _state(file: BinaryIO | Path) -> tuple[int, ...]:
    """Return numbers that change whenever a file is replaced or written to; programs can set all times but ctime."""
    stat = os.stat(file if isinstance(file, Path) else file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextmanager
def _errors_of(path: Path, what: str) -> Iterator[None]:
    """Turn every error of the block into a `ModelError` of one line."""
    try:
        yield
    except ModelError:
        raise
    # transformers, tokenizers and gguf raise ValueError, KeyError, IndexError and other types for what they cannot read
    except Exception as error:
        raise ModelError(
            f"{path}: its {what} cannot be read from GGUF ({in_one_line(error)}). Give a directory with safetensors."
        ) from error
