"""Manifests: a folder's list of its files with size and SHA-256, against which the files are checked before use."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

from ppo_rlhf.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"


def write_manifest(folder: Path, **about: Any) -> None:
    """Write the manifest of the files that a folder has now. `about` is stored in the manifest, too."""
    sizes = {path.relative_to(folder).as_posix(): _size_and_hash(path) for path in _files(folder)}
    entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sizes.items()}
    manifest = {"format": FORMAT, **about, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def checked_manifest(folder: Path, part: str = "") -> dict[str, Any]:
    """Check every file of a folder against the folder's manifest, and return the manifest.

    With `part`, the name of a folder within, only the files of this part are checked.

    Raises:
        CheckpointError: A file is missing, truncated, changed or added, or cannot be read. The message names the file.
    """
    path = folder / MANIFEST
    manifest: dict[str, Any] = read_json(path)
    try:
        format_ = manifest["format"]
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's manifest ({error!r})") from None
    if format_ != FORMAT:
        raise CheckpointError(f"{path}: format {format_}; this version reads format {FORMAT}")
    expected = {name: entry for name, entry in expected.items() if not part or name.startswith(f"{part}/")}
    if not expected:
        raise CheckpointError(f"{path}: lists no files{f' of {part}' if part else ''}")
    try:
        files = {file.relative_to(folder).as_posix(): file for file in _files(folder / part)}
        for name, size_and_hash in expected.items():
            if name not in files:
                raise CheckpointError(f"{folder / name}: missing, though the manifest lists it")
            if size_and_hash != _size_and_hash(files[name]):
                raise CheckpointError(f"{files[name]}: damaged; its size or SHA-256 differs from the manifest")
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be read ({error.strerror})") from error
    for name, file in files.items():
        # Hidden files come from the file system or the desktop, such as .DS_Store, and are not part of a checkpoint
        is_hidden = any(each.startswith(".") for each in Path(name).parts)
        if name not in expected and name != MANIFEST and not is_hidden:
            raise CheckpointError(f"{file}: not in the manifest; remove the file from the checkpoint")
    return manifest


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint's JSON ({error})") from None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _size_and_hash(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256_of(path)


def sha256_of(file: Path | BinaryIO) -> str:
    """Return the SHA-256 of a file, which is read in pieces, because it may be larger than the memory."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
        return hashlib.file_digest(cast(Any, opened), "sha256").hexdigest()
