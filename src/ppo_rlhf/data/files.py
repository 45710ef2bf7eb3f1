"""Find the files of a user's table: a file, a glob, or a folder with its splits and configurations."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ppo_rlhf.core.errors import DataError, in_one_line

FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Maps endings of files to the builder of `datasets` that reads the file."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
HUB = "hf://datasets/"
HUB_NAME = re.compile(
    r"(?P<path>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?(#(?P<name>[\w.-]+))?(:(?P<split>.+))?"
)
_ENDINGS = f"{', '.join(FORMATS)}, plain or as {', '.join(COMPRESSIONS)}"
_HUB_FILE = re.compile(HUB + r"(?P<repo_id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
_IN_FOLDER = re.compile(r"(?P<path>.+?)(#(?P<name>[\w.-]+))?(:(?P<split>[^/]+))?")
_SPLIT = re.compile(r"(?P<name>\w[\w.-]*)(?P<part>\[[^]]*\])?")
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}\b.*")


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
    """Return the ending of a file without the ending of a compression, in small letters."""
    return (Path(file.stem) if file.suffix in COMPRESSIONS else file).suffix.lower()


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
    files = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
    if not files and is_hub_name(source):
        return None
    if not files:
        raise DataError(f"{source}: this data file does not exist. Give {_ENDINGS}, or a name on the hub.")
    named = {_keyword(file.name) for file in files} - {None}
    if len(named) > 1:
        _say(f"{source}: the files of the splits {', '.join(sorted(map(str, named)))} are read as one table.")
    return _of_files(source, files, split)


def _of_files(source: str, files: list[Path], split: str | None) -> Found:
    name, part = _split_and_part(source, split)
    if name not in (None, "train"):
        raise DataError(f"{source}: files have the split `train` only, not `{name}`. Name the files of this split.")
    return Found(_of_one_kind(source, files), part=part)


def _of_folder(source: str, folder: Path, configuration: str | None, split: str | None) -> Found:
    wanted, part = _split_and_part(source, split)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return Found(sorted(folder.rglob("*.arrow")), folder, wanted, part)
    inside = _data_files(folder)
    if not inside:
        raise DataError(f"{source}: this folder has no file of a supported kind. Give {_ENDINGS}.")
    card = _configured(source, folder, inside, configuration)
    splits = _splits(folder, inside) if card is None else card
    beside = [file for file in inside if not any(file in files for files in splits.values())]
    names = ", ".join(splits)
    if wanted is None:
        wanted = "train" if "train" in splits else next(iter(splits))
        if wanted != "train" and (len(splits) > 1 or (beside and card is None)):
            others = f", and files of no split: {_listed(beside, folder)}" if beside else ""
            raise DataError(
                f"{source}: the folder has the splits {names}{others}. Name one split, as in {folder}:{wanted}, or "
                "give a glob of the files."
            )
    elif wanted not in splits:
        raise DataError(f"{source}: the folder has no split `{wanted}`; its splits are {names}.")
    files = _of_one_kind(source, splits[wanted])
    if left := [file for file in inside if file not in files]:
        _say(f"{source}: the split `{wanted}` is read; not read: {_listed(left, folder)}.")
    if len(places := dict.fromkeys(str(file.parent.relative_to(folder)) for file in files)) > 1:
        _say(f"{source}: the files of the folders {', '.join(places)} are read as one table.")
    return Found(files, part=part)


def _data_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its sub-folders that can hold rows."""
    from datasets.data_files import FILES_TO_IGNORE

    def is_data(file: Path) -> bool:
        is_hidden = any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
        return kind_of(file) in FORMATS and file.name not in FILES_TO_IGNORE and not is_hidden and file.is_file()

    return sorted(filter(is_data, folder.rglob("*")))


def _splits(folder: Path, inside: list[Path]) -> dict[str, list[Path]]:
    """Return the splits of a folder by the names that `datasets` knows.

    Names of shards count first, then names of sub-folders, then names of files. Without any such name all files of the
    folder itself are `train`, or all files of the sub-folders if the folder itself has none.
    """
    places = {file: file.relative_to(folder) for file in inside}
    shards = {file: match["split"] for file in inside if (match := _SHARD.fullmatch(file.name))}
    keywords = {file: _keyword(file.name) for file in inside}
    folders = {file: next(filter(None, map(_keyword, place.parent.parts)), None) for file, place in places.items()}
    if any(keywords[file] or file.parent.name == "data" for file in shards):
        named: dict[Path, str | None] = {**shards}
    else:
        named = folders if any(folders.values()) else keywords
    splits: dict[str, list[Path]] = {}
    for file, split in named.items():
        if split is not None:
            splits.setdefault(split, []).append(file)
    return splits or {"train": [file for file in inside if file.parent == folder] or inside}


def _keyword(name: str) -> str | None:
    """Return the split that the name of a file or folder says by `datasets`' rules; None if the name says none."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    for split, keywords in SPLIT_KEYWORDS.items():
        if re.fullmatch(
            rf"(.*[{NON_WORDS_CHARS}])?({'|'.join(keywords)})([{NON_WORDS_CHARS}].*)?", name, re.IGNORECASE
        ):
            return str(split)
    return None


def _configured(
    source: str, folder: Path, inside: list[Path], configuration: str | None
) -> dict[str, list[Path]] | None:
    """Return the splits that a configuration in the folder's README.md names; None without configurations."""
    from datasets.data_files import resolve_pattern, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    try:
        configurations = MetadataConfigs()
        if readme.is_file():
            configurations = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
        default = configurations.get_default_config_name()
    except Exception as error:  # the YAML at the top of the file can be damaged in many ways
        raise DataError(f"{readme}: its configurations cannot be read: {in_one_line(error)}") from error
    if not configurations and configuration is None:
        return None
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
    base = folder / str(settings.get("data_dir") or "")
    if "data_files" not in settings:
        return _splits(base, [file for file in inside if file.is_relative_to(base)])
    splits: dict[str, list[Path]] = {}
    for split, patterns in sanitize_patterns(settings["data_files"]).items():
        for pattern in patterns:
            try:
                found = resolve_pattern(pattern, glob.escape(str(base.absolute())))
            except (OSError, ValueError) as error:
                raise DataError(f"{source}: README.md names {pattern}: {in_one_line(error)}") from error
            splits.setdefault(split, []).extend(map(Path, found))
    by_path = {file.absolute(): file for file in inside}
    return {split: [by_path.get(file, file) for file in dict.fromkeys(files)] for split, files in splits.items()}


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
    from ppo_rlhf.models.quiet import say_once

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
