"""Model directories on disk: config.json beside safetensors in one file, or in shards that an index names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ppo_rlhf.core.errors import ModelError, in_one_line

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(@[\w][\w./-]*)?")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MEBIBYTE = 2**20
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_QUANTISATION = "quantization_config.json"
"""Beside an adapter that was trained on 4-bit weights."""


def is_local(source: str) -> bool:
    """Return whether `source` is, or looks like, a path rather than a hub id (`organisation/name@revision` or less)."""
    if os.path.exists(Path(source).expanduser()) or not HUB_ID.fullmatch(source):
        return True
    first, _, rest = source.partition("/")
    return bool(rest) and os.path.isdir(first)


def check_model_directory(source: str | Path) -> None:
    """Raise `ModelError` unless a local `source` has a configuration and readable safetensors; ignore hub ids."""
    if not is_local(str(source)):
        return
    folder = Path(source).expanduser()
    if not os.path.isdir(folder):  # Path's raises for a name that is too long
        raise ModelError(f"{source}: there is no such model directory. Give a directory with config.json, or a hub id.")
    has_weights = any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
    if not is_adapter(folder) and not (has_weights and (folder / CONFIG).is_file()):
        hint = "A model directory has config.json and safetensors; convert pickled weights with save_pretrained"
        raise ModelError(f"{source}: no {CONFIG if has_weights else WEIGHTS} in this directory. {hint}.")
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{source}: the weights file {file.name} is missing, damaged or a Git LFS pointer "
                f"({in_one_line(error)}). Copy the model again, or run git lfs pull."
            ) from error


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has a LoRA adapter and no whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights, whether or not they exist.

    Raises:
        ModelError: The index of the shards cannot be read.
    """
    if is_adapter(folder):
        return [folder / ADAPTER_WEIGHTS]
    whole, index = folder / WEIGHTS, folder / WEIGHTS_INDEX
    if whole.is_file() or not index.is_file():  # transformers reads no index beside the one file
        return [whole]
    try:
        return sorted({folder / shard for shard in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of weights. Copy the model again.") from error


def ends_of_weights(folder: Path) -> Iterator[bytes]:
    """Yield each weights file's name with its size, its first and its last mebibyte."""
    for path in weight_files(folder):
        size = path.stat().st_size
        yield f"{path.name}:{size}".encode()
        with path.open("rb") as file:
            yield file.read(MEBIBYTE)
            file.seek(max(0, size - MEBIBYTE))
            yield file.read(MEBIBYTE)


def follow_umask(folder: Path) -> None:
    """Give a folder's safetensors files the mode of its JSON files: safetensors writes 0600 whatever the umask."""
    mode = next(folder.rglob("*.json")).stat().st_mode
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)
