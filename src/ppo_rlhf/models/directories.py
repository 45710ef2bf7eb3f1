"""Checks model directories (config.json, and safetensors in one file or in shards with an index) and finds their files.

Also finds and checks GGUF files, which `gguf` turns into model directories.

For a model on the hub, `find_file` reads single files from the hub or from the local cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from huggingface_hub import constants, file_exists, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.runtime.manifests import MANIFEST, checked_manifest

log = logging.getLogger(__name__)

PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
"""The end of the name of one part of a GGUF file that llama.cpp has split."""
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(@[\w][\w./-]*)?")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF, MAGIC = ".gguf", b"GGUF"
JOIN = "Join the parts with llama-gguf-split --merge."
MEBIBYTE = 2**20
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_QUANTISATION = "quantization_config.json"
"""A file in the directory of an adapter that was trained on 4-bit weights."""
VALUE_HEAD_FILE = "value_head.safetensors"
"""LLaMA-Factory's name for the file of a value head in the directory of a language model or an adapter."""
AVERAGE, CARD = "ema", "README.md"
RECORD = "ppo_rlhf.json"
"""File that records how a policy was trained, with the values for which `generation_config.json` has no fields
(`checkpoints.training_record`)."""
_HUB_TIMEOUT_S = 10.0


def is_local(source: str) -> bool:
    """Return whether `source` is, or looks like, a path rather than a hub id (`[organisation/]name[@revision]`).

    Names of data sets on the hub follow another rule, `data.files.is_hub_name`: a data set's name has an owner, a
    configuration and a split, and no file extension. Kedro changes hub names of models and data sets, so
    `paths.restore_hub_name` must be called before `is_local` and before `is_hub_name`.
    """
    if os.path.exists(Path(source).expanduser()) or not HUB_ID.fullmatch(source) or source.endswith(GGUF):
        return True
    first, _, rest = source.partition("/")
    return bool(rest) and os.path.isdir(first)


def gguf_file(source: str | Path) -> Path | None:
    """Return the GGUF file that `source` names: the file, or a folder with this one and no other kind of model.

    The file is known by its suffix, or by its first bytes, as Ollama's files have no suffix. The function returns None
    if `source` is anything else, for example a folder that also has safetensors.
    """
    place = Path(source).expanduser()
    if not os.path.isdir(place):
        return place if place.suffix == GGUF or _begins_as_gguf(place) else None
    files = list(place.glob(f"*{GGUF}"))
    return files[0] if len(files) == 1 and not any(place.glob("*.safetensors*")) else None


def _begins_as_gguf(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:  # ValueError: a path with a null byte
        return file.read(len(MAGIC)) == MAGIC
    return False


def check_gguf(path: Path) -> None:
    """Raise `ModelError` unless `path` is a whole GGUF file, and the package that reads GGUF files is installed."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: this GGUF file cannot be read ({error.strerror}). Correct the path.") from None
    if magic != MAGIC:
        raise ModelError(
            f"{path}: this is no GGUF file but perhaps a Git LFS pointer. Copy it again, or run git lfs pull."
        )
    if PART.search(path.stem):
        raise ModelError(f"{path}: this is one part of a model. {JOIN}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f'{path}: the package gguf, which reads GGUF files, is missing: pip install "ppo_rlhf[gguf]"')


def check_model_directory(source: str | Path) -> None:
    """Raise `ModelError` unless a local `source` has a configuration and readable safetensors, or is a GGUF file.

    Hub ids always pass.
    """
    if not is_local(str(source)):
        return
    if (file := gguf_file(source)) is not None:
        return check_gguf(file)
    folder = Path(source).expanduser()
    if not os.path.isdir(folder):  # os.path.isdir, because Path.is_dir raises an error for a name that is too long
        raise ModelError(f"{source}: there is no such model directory. Give a directory with config.json, or a hub id.")
    check_one_model(str(source), lambda name: (folder / name).is_file())
    has_weights = any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
    if not is_adapter(folder) and not (has_weights and (folder / CONFIG).is_file()):
        if files := sorted(folder.glob(f"*{GGUF}")):
            fix = JOIN if PART.search(files[0].stem) else f"Give one, such as {files[0].name}."
            raise ModelError(f"{source}: {len(files)} GGUF files and no whole model. {fix}")
        if versions := sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}")):
            raise ModelError(f"{source}: this folder holds {len(versions)} models. Name one, such as {versions[-1]}.")
        hint = "A model directory has config.json and safetensors; convert pickled weights with save_pretrained"
        raise ModelError(f"{source}: no {CONFIG if has_weights else WEIGHTS} in this directory. {hint}.")
    for file in weight_files(folder):
        try:
            # safe_open reads the file's header and compares it with the file's size
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{source}: the weights file {file.name} is missing, damaged or a Git LFS pointer "
                f"({in_one_line(error)}). Copy the model again, or run git lfs pull."
            ) from error


def check_of_checkpoint(folder: Path) -> None:
    """Check the digests of the model that a checkpoint holds (`<checkpoint>/policy`). Any other folder passes.

    Raises:
        CheckpointError: A file of the model differs from the checkpoint's manifest.
    """
    model = folder.expanduser().resolve()
    # Other programs' folders may have a manifest.json, too
    if all((model.parent / name).is_file() for name in (MANIFEST, "state.json")):
        checked_manifest(model.parent, model.name)


def check_one_model(source: str, has: Callable[[str], bool]) -> None:
    """Raise `ModelError` if whole weights lie beside an adapter: transformers would apply the adapter to the weights.

    `has` tells whether `source` has the file of a name. An adapter alone may have a config.json, as axolotl saves one,
    or, without config.json, a `pytorch_model.bin` with a value head alone, as TRL 0.11 saves one.
    """
    names = (WEIGHTS, WEIGHTS_INDEX, *(PICKLED if has(CONFIG) else ())) if has(ADAPTER_CONFIG) else ()
    if (weights := next(filter(has, names), None)) is not None:
        raise ModelError(
            f"{source}: {weights} lies beside an adapter ({ADAPTER_CONFIG}), which would be applied to these weights. "
            f"If it is merged into them already, remove {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}; if not, give the "
            "adapter in a folder of its own, whose base_model_name_or_path names the folder of the weights."
        )


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the files that should hold a model's weights, which may be missing.

    A value head's own file (`VALUE_HEAD_FILE`) is included if it exists.

    Raises:
        ModelError: The index of the shards cannot be read.
    """
    head = [folder / VALUE_HEAD_FILE] if (folder / VALUE_HEAD_FILE).is_file() else []
    if is_adapter(folder):
        return [folder / ADAPTER_WEIGHTS, *head]
    whole, index = folder / WEIGHTS, folder / WEIGHTS_INDEX
    # If a folder has both, prefer the single weights file to the index of shards, as transformers does
    if whole.is_file() or not index.is_file():
        return [whole, *head]
    try:
        content = json.loads(index.read_bytes())
        content["metadata"].keys()  # transformers needs this mapping, which may be empty
        return sorted({folder / shard for shard in content["weight_map"].values()}) + head
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of weights. Copy the model again.") from error


def number_of_weights(folder: Path) -> int | None:
    """Return the number of weights in a model directory, by the headers of its weights files; None without files."""
    files, total = weight_files(folder), 0
    if not all(file.is_file() for file in files):  # a GGUF file's configuration is read before its weights are written
        return None
    for file in files:
        with safe_open(file, framework="pt") as weights:
            total += len(weights.keys())
    return total


def ends_of_weights(folder: Path) -> Iterator[bytes]:
    """Yield, for each weights file, its name and size, its first mebibyte, and its last mebibyte."""
    for path in weight_files(folder):
        size = path.stat().st_size
        yield f"{path.name}:{size}".encode()
        with path.open("rb") as file:
            yield file.read(MEBIBYTE)
            file.seek(max(0, size - MEBIBYTE))
            yield file.read(MEBIBYTE)


def follow_umask(folder: Path) -> None:
    """Give a folder's safetensors files the mode of its JSON files: safetensors ignores the umask and sets 0600."""
    mode = next(folder.rglob("*.json")).stat().st_mode
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)


@cache
def hub_answers() -> bool:
    """Return whether the hub answers. If the hub does not answer, this process reads models from the local cache only.

    Without `hub_answers`, the hub's client would retry each request for half a minute, even for cached files.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return False
    # The hub client's HTTP library decides the error's type: requests in old versions, httpx in new versions
    except Exception as error:
        log.warning("%s does not answer (%s): models are read from the cache.", constants.ENDPOINT, in_one_line(error))
        return False
    return True


def find_file(place: str, revision: str, name: str, *, local_files_only: bool = False) -> Path | None:
    """Return the path of a file of a model, after downloading the file if needed; None if the file does not exist."""
    try:
        path = cached_file(
            place,
            name,
            revision=revision,
            local_files_only=local_files_only or Path(place).is_dir() or not hub_answers(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # the repository does not exist or is gated: loading the model raises an error that the user sees
        return None
    return None if path is None else Path(path)


def has_file(place: str, revision: str, name: str) -> bool:
    """Return whether a model has a file, without downloading the file."""
    if find_file(place, revision, name, local_files_only=True) is not None:
        return True
    return not Path(place).is_dir() and hub_answers() and file_exists(place, name, revision=revision)


def check_on_hub(place: str, revision: str) -> None:
    """Raise `OSError` if neither the hub nor the local cache has a model's configuration."""
    if not any(find_file(place, revision, name, local_files_only=True) for name in (CONFIG, ADAPTER_CONFIG)):
        cached_file(place, CONFIG, revision=revision, local_files_only=not hub_answers())


def why_unreadable(error: Exception) -> str:
    """Return in one line why transformers could not read a model."""
    # transformers' advice on trust_remote_code follows the first line of its message
    if "trust_remote_code=True" in str(error):
        return (
            "Python code in the model's repository would have to run. If you trust that code, give "
            "PPOTrainer the loaded model, or set the pipeline's global trust_remote_code=true"
        )
    return _first_misfit(error) or in_one_line(error) or type(error).__name__


def _first_misfit(error: Exception) -> str | None:
    """Return the first weight whose shape does not fit; None if transformers' error has another cause.

    transformers prints the shapes in a report, and its error only points at the report. The report is a local variable
    of the function that raised the error.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        report = frame.f_locals.get("loading_info")
        if misfits := sorted(getattr(report, "mismatched_keys", ())):
            name, saved, expected = misfits[0]
            rest = f", and {len(misfits) - 1} more weights do not fit" if len(misfits) > 1 else ""
            why = " (DeepSpeed ZeRO-3 saves empty weights: gather them with zero_to_fp32.py)" if 0 in saved else ""
            return f"{name} has the shape {tuple(saved)}, its {CONFIG} needs {tuple(expected)}{why}{rest}"
        if problems := sorted(getattr(report, "conversion_errors", {}).items()):
            name, text = problems[0]
            # The last lines of the text are the cause, and what was done with which weight
            return f"{name}: {' '.join(text.strip().splitlines()[-2:])}"
    return None
