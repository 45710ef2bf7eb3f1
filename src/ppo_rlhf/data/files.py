"""Find the files of a user's table: a file, a glob, or a folder with its splits and configurations."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.runtime.manifests import sha256_of

FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Maps endings of files to the builder of `datasets` that reads the file."""
COMPRESSIONS = (".gz", ".bz2", ".xz")
"""Endings of compressed files of the builders json, csv and text."""
HUB = "hf://datasets/"
HUB_NAME = re.compile(
    r"(?P<path>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?(#(?P<name>[\w.-]+))?(:(?P<split>.+))?"
)
_ENDINGS = f"{', '.join(FORMATS)}, texts also as {', '.join(COMPRESSIONS)}"
_HUB_FILE = re.compile(HUB + r"(?P<repo_id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
_IN_FOLDER = re.compile(r"(?P<path>.+?)(#(?P<name>[\w.-]+))?(:(?P<split>[^/]+))?")
_SPLIT = re.compile(r"(?P<name>\w[\w.-]*)(?P<part>\[[^]]*\])?")


class Found(NamedTuple):
    """Where a table is on this machine."""

    files: list[Path]
    saved: Path | None = None  # the folder that `save_to_disk` wrote; `files` are its Arrow files
    split: str | None = None  # the split of a saved folder; None: not given
    part: str = ""  # a part of the rows, such as [:10%]; "": all rows


def is_hub_name(source: str) -> bool:
    """Return whether a source that is not a file can be the name of a dataset on the hub.

    `folder/name` is no name on the hub if `folder` exists: a mistyped path must not be looked up on the hub.
    """
    match = HUB_NAME.fullmatch(source)
    return (
        match is not None and kind_of(Path(source)) not in FORMATS and not os.path.isdir(os.path.dirname(match["path"]))
    )


def kind_of(file: Path) -> str:
    """Return the ending of a file, of a compressed text the ending before `COMPRESSIONS`, in small letters."""
    inner = Path(file.stem).suffix.lower()
    is_packed = file.suffix in COMPRESSIONS and FORMATS.get(inner) in ("json", "csv", "text")
    return inner if is_packed else file.suffix.lower()


def digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of several files' SHA-256: the key of each cache of their table."""
    digests = [sha256_of(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def find(source: str, split: str | None = None) -> Found | None:
    """Return the files of a source, or None for a dataset on the hub.

    `folder#configuration:split` names a part of a folder; `split` says the split in place of the name. Like on the hub,
    `train` is read if no split is named, and a log line names the files of the folder that are not read.

    Raises:
        DataError: The source or the split does not exist, several splits could be meant, or the files cannot be read as
            one table.
    """
    if source.startswith(HUB):
        return _of_files(source, [_downloaded(source)], split)
    path, name = Path(source).expanduser(), None
    try:
        exists = path.exists()
    except OSError as error:  # the operating system refuses the path, for example because the name is too long
        raise DataError(f"{source}: this path cannot be looked up: {error.strerror}. Give {_ENDINGS}.") from error
    if not exists and (match := _IN_FOLDER.fullmatch(str(path))) and Path(match["path"]).is_dir():
        path, name = Path(match["path"]), match["name"]
        if split and match["split"]:
            raise DataError(f"{source}: the name and load_args both give split. Remove the load_args of this name.")
        split = match["split"] or split
    elif "::" in source and exists:
        raise DataError(
            f"{source}: `datasets` and fsspec read :: in a path as a file inside an archive. Rename the file."
        )
    if path.is_file():
        return _of_files(source, [path], split)
    if path.is_dir():
        return _of_folder(source, path, name, split)
    base = next(parent for parent in path.parents if parent.is_dir())
    files = _matching(base, path)
    if not files and is_hub_name(source):
        return None
    if not files:
        raise DataError(f"{source}: this data file does not exist. Give {_ENDINGS}, or a name on the hub.")
    if len(files) > 1:
        _say(f"{source}: read as one table: {_listed(files, base)}.")
    return _of_files(source, files, split)


def _matching(base: Path, pattern: Path) -> list[Path]:
    """Return the files of a glob, sorted; `base`, the folder above the first wildcard, is taken literally."""
    escaped = os.path.join(glob.escape(str(base)), pattern.relative_to(base))
    return sorted({Path(match) for match in glob.glob(escaped, recursive=True) if os.path.isfile(match)})


def _of_files(source: str, files: list[Path], split: str | None) -> Found:
    name, part = _split_and_part(source, split)
    if name not in (None, "train"):
        raise DataError(f"{source}: files have the split `train` only, not `{name}`. Name the files of this split.")
    return Found(_of_one_kind(source, files), part=part)


def _of_folder(source: str, folder: Path, configuration: str | None, split: str | None) -> Found:
    wanted, part = _split_and_part(source, split)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        if configuration is not None:
            raise DataError(
                f"{source}: a folder that save_to_disk wrote has no configurations. Leave out `#{configuration}`."
            )
        return Found(sorted(folder.rglob("*.arrow")), folder, wanted, part)
    inside = _data_files(folder)
    if not inside:
        raise DataError(f"{source}: this folder has no file of a supported kind. Give {_ENDINGS}.")
    splits = _splits(source, folder, configuration, inside)
    beside = [file for file in inside if not any(file in files for files in splits.values())]
    if wanted is None:
        wanted = "train" if "train" in splits else next(iter(splits))
        if wanted != "train" and (len(splits) > 1 or beside):
            others = f", and files of no split: {_listed(beside, folder)}" if beside else ""
            raise DataError(
                f"{source}: the folder has the splits {', '.join(splits)}{others}. Name one split, as in "
                f"{folder}:{wanted}, or give a glob of the files."
            )
    elif wanted not in splits:
        raise DataError(f"{source}: the folder has no split `{wanted}`; its splits are {', '.join(splits)}.")
    files = _of_one_kind(source, splits[wanted])
    left = [file for file in inside if file not in files]
    if left or len(files) > 1:
        beyond = f"; not read: {_listed(left, folder)}" if left else ""
        _say(f"{source}: the split `{wanted}` is read from {_listed(files, folder)}{beyond}.")
    return Found(files, part=part)


def _data_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its sub-folders that can hold rows."""
    from datasets.data_files import FILES_TO_IGNORE

    def is_data(file: Path) -> bool:
        is_hidden = any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
        return kind_of(file) in FORMATS and file.name not in FILES_TO_IGNORE and not is_hidden and file.is_file()

    return sorted(filter(is_data, folder.rglob("*")))


def _splits(source: str, folder: Path, configuration: str | None, inside: list[Path]) -> dict[str, list[Path]]:
    """Return the splits of a folder: those of a configuration in README.md, else those that `datasets` finds."""
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns

    settings = _configured(source, folder, configuration)
    base = glob.escape(str((folder / str(settings.get("data_dir") or "")).absolute()))
    given = settings.get("data_files")
    try:
        patterns = sanitize_patterns(given) if given else get_data_patterns(base)
        resolved = {str(split): files for split, files in DataFilesDict.from_patterns(patterns, base).items()}
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: its splits cannot be found: {in_one_line(error)}") from error
    by_path = {file.absolute(): file for file in inside}
    if given:
        if missing := [split for split, files in resolved.items() if not files]:
            raise DataError(f"{source}: README.md names no file that exists for the split {missing[0]}.")
        return {split: [by_path.get(Path(file), Path(file)) for file in files] for split, files in resolved.items()}
    splits = {split: [by_path[path] for path in by_path if str(path) in files] for split, files in resolved.items()}
    return {split: files for split, files in splits.items() if files} or {"train": inside}


def _configured(source: str, folder: Path, configuration: str | None) -> dict[str, Any]:
    """Return the settings of a configuration in the folder's README.md; empty without configurations."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    try:
        card = DatasetCard.load(readme).data if readme.is_file() else None
        configurations = MetadataConfigs() if card is None else MetadataConfigs.from_dataset_card_data(card)
        default = configurations.get_default_config_name()
    except Exception as error:  # the YAML at the top of the file can be damaged in many ways
        raise DataError(f"{readme}: its configurations cannot be read: {in_one_line(error)}") from error
    if not configurations and configuration is None:
        return {}
    name = configuration or default
    if name not in configurations:
        has = f"has the configurations {', '.join(configurations)}" if configurations else "has no configurations"
        raise DataError(f"{source}: README.md {has}. Name one, as in {folder}#<configuration>.")
    settings: dict[str, Any] = dict(configurations[name])
    if unknown := settings.keys() - {"data_files", "data_dir", "default", "description", "version"}:
        raise DataError(
            f"{source}: the configuration `{name}` in README.md sets {', '.join(sorted(unknown))}, which is not read. "
            "Give a glob of the files."
        )
    return settings


def _split_and_part(source: str, split: str | None) -> tuple[str | None, str]:
    if split is None:
        return None, ""
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise DataError(f"{source}: a split is given as train or train[:10%], not as {split!r}.")
    return match["name"], match["part"] or ""


def _of_one_kind(source: str, files: list[Path]) -> list[Path]:
    kinds = {kind_of(file) for file in files}
    if len({FORMATS.get(kind, kind) for kind in kinds}) > 1:
        raise DataError(f"{source}: files of several kinds ({', '.join(sorted(kinds))}). Give files of one kind.")
    if not kinds <= FORMATS.keys():
        (kind,) = kinds
        raise DataError(f"{source}: files ending in {kind or 'nothing'} cannot be read. Give {_ENDINGS}.")
    return files


def _listed(files: Iterable[Path], folder: Path, most: int = 6) -> str:
    names = [str(file.relative_to(folder)) for file in files]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _say(line: str) -> None:
    from ppo_rlhf.runtime.log_lines import say_once

    say_once(line)


def _downloaded(source: str) -> Path:
    from huggingface_hub import hf_hub_download

    address = _HUB_FILE.fullmatch(source)
    if address is None:
        raise DataError(
            f"{source}: a file on the hub is named {HUB}<owner>/<name>/<file>, or …<name>@<revision>/<file>."
        )
    try:
        repository, revision, file = address.group("repo_id", "revision", "filename")
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    # The hub, the network, the local cache or HF_HUB_OFFLINE can make the download fail
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be downloaded: {in_one_line(error)}") from None
