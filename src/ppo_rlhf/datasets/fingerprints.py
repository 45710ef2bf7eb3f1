"""Fingerprints of what runs read and write: equal if and, but for chance, only if the content is equal."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ppo_rlhf.models.loading import PretrainedHandle, check_model_directory, is_local

_MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".tiktoken", ".jinja", ".py")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def origin(dataset: Any) -> tuple[str | None, str | None]:
    """Return (path or hub id, fingerprint) of a catalog entry, None for what it does not have; cheap, for tags.

    The fingerprint is the SHA-256 of a file's bytes; of a model, what its handle gives (configuration and weights).
    """
    described = dataset._describe() if dataset is not None else {}
    source = described.get("filepath")
    if source is None:
        return None, None
    if Path(source).is_file():
        return str(source), _sha256(Path(source))
    loaded = dataset.load() if dataset._exists() else None
    fingerprint = getattr(loaded, "fingerprint", None)
    return str(source), fingerprint() if callable(fingerprint) else None


class Fingerprints:
    """SHA-256 of files, folders and models, every byte of them; a file is read again only if it has changed."""

    def __init__(self) -> None:
        """Start without having read anything."""
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def path(self, path: Path) -> str:
        """Return the fingerprint of a file, or of all files below a folder with their names.

        Raises:
            OSError: It is not there or cannot be read.
        """
        if path.is_dir():
            return self._files(path, [file for file in path.rglob("*") if file.is_file()])
        status = path.stat()
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known, digest = self._known.get(path, (None, ""))
        if known != signature:
            digest = _sha256(path)
            self._known[path] = signature, digest
        return digest

    def model(self, handle: PretrainedHandle) -> str:
        """Return the fingerprint of a model: of a directory all that is read from it, of a hub id its commit.

        `PretrainedHandle.fingerprint` reads less: weights in part, and no tokenizer.

        Raises:
            ModelError: There is no such model.
        """
        if is_local(handle.source):
            check_model_directory(handle.source)
            folder = Path(handle.source).expanduser()
            return self._files(folder, [file for file in folder.iterdir() if file.suffix in _MODEL_FILES])
        commit = getattr(handle.config(), "_commit_hash", None)
        return _digest(f"{handle.source}@{commit}:{handle.fingerprint()}")

    def _files(self, folder: Path, files: list[Path]) -> str:
        files = sorted(files)
        with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock alone, so shards are read side by side
            digests = list(pool.map(self.path, files))
        return _digest(*(f"{file.relative_to(folder)}:{sha}" for file, sha in zip(files, digests, strict=True)))


def functions_in(value: Any) -> Iterator[str]:
    """Yield every text of the form `module:name` in nested lists and mappings: how parameters name functions."""
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from functions_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from functions_in(part)


def source_file(reference: str, project_path: Path) -> Path | None:
    """Return the file that `module:name` lies in, None if there is none; nothing is imported.

    It is looked up as `training.rewards.functions.load_function` does: in the project, its `src`, the Python path.
    """
    first, *inner = reference.partition(":")[0].split(".")
    spec = PathFinder.find_spec(first, [str(project_path), str(project_path / "src"), *sys.path])
    try:
        spec = spec or importlib.util.find_spec(first)  # packages that are installed in place have finders of their own
    except ValueError:  # a module that was not imported from a file
        return None
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    found = None if spec is None or spec.origin is None else Path(spec.origin)
    return found if found is not None and found.is_file() else None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
