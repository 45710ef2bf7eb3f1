"""Model directories: config.json beside safetensors in one file, or in shards that an index names.

Of a model on the hub single files are read, from there or from the cache.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ppo_rlhf.core.errors import ModelError, in_one_line

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(@[\w][\w./-]*)?")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MEBIBYTE = 2**20
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_QUANTISATION = "quantization_config.json"
"""Beside an adapter that was trained on 4-bit weights."""
VALUE_HEAD_FILE = "value_head.safetensors"
"""LLaMA-Factory's name for a value head beside a language model or an adapter."""
_PATIENCE_S = 10.0  # for the hub's first answer


def is_local(source: str) -> bool:
    """Return whether `source` is, or looks like, a path rather than a hub id (`organisation/name@revision` or less).

    `data.sources.is_hub_name` is the rule of data sets: they have an owner, a configuration and a split, and no ending
    of a file. `paths.restore_hub_name` undoes what Kedro does to either, before one of the two is asked.
    """
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
    """Return the files that hold a model's weights, whether or not they exist, and a value head's beside them.

    Raises:
        ModelError: The index of the shards cannot be read.
    """
    head = [folder / VALUE_HEAD_FILE] if (folder / VALUE_HEAD_FILE).is_file() else []
    if is_adapter(folder):
        return [folder / ADAPTER_WEIGHTS, *head]
    whole, index = folder / WEIGHTS, folder / WEIGHTS_INDEX
    if whole.is_file() or not index.is_file():  # transformers reads no index beside the one file
        return [whole, *head]
    try:
        return sorted({folder / shard for shard in json.loads(index.read_bytes())["weight_map"].values()}) + head
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


@cache
def hub_answers() -> bool:
    """Return whether the hub answers; without an answer the cache alone is read for the rest of the process.

    The client repeats each question for half a minute, also for files that are in the cache.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except OfflineModeIsEnabled:
        return False
    except Exception as error:  # of the client's library, which was requests and is httpx
        log.warning("%s does not answer (%s): models are read from the cache.", constants.ENDPOINT, in_one_line(error))
        return False
    return True


def find_file(place: str, revision: str, name: str, *, local_files_only: bool = False) -> Path | None:
    """Return a file of a model, from the hub if need be; None if it is not there."""
    try:
        found = cached_file(
            place,
            name,
            revision=revision,
            local_files_only=local_files_only or Path(place).is_dir() or not hub_answers(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no such repository, or a gated one: whatever reads the model says so
        return None
    return None if found is None else Path(found)


def check_on_hub(place: str, revision: str) -> None:
    """Raise `OSError` if the hub does not have a model, or does not answer and the cache has nothing of it."""
    if not any(find_file(place, revision, name, local_files_only=True) for name in (CONFIG, ADAPTER_CONFIG)):
        cached_file(place, CONFIG, revision=revision, local_files_only=not hub_answers())


def why_unreadable(error: Exception) -> str:
    """Return in one line why transformers could not read a model."""
    if "trust_remote_code=True" in str(error):  # transformers' advice, lines below the first
        return (
            "Python code in the model's repository would have to run. If you trust that code, give "
            "PPOTrainer the loaded model, or set the pipeline's global trust_remote_code=true"
        )
    return in_one_line(error) or type(error).__name__
