"""Paths: of catalog entries, and as they are shown."""

import os
from pathlib import Path
from typing import Any

SHIPPED_CONF = Path(__file__).parents[1] / "starter" / "project" / "conf"
"""The configuration that this package comes with: a copy of the repository's conf/base and of the files beside it."""

DOCS = Path(__file__).parents[1] / "docs"
"""The pages that messages name as docs/…, likewise."""


def expand_home(filepath: str) -> str:
    """Return a path that begins with `~` below the user's home directory, any other as it is.

    Kedro puts the project in front of every relative `filepath`, and of these, too. A path that exists is that path.
    """
    path = Path(filepath)
    if "~" not in path.parts or os.path.exists(path):
        return filepath
    return str(Path(*path.parts[path.parts.index("~") :]).expanduser())


def restore_hub_name(filepath: str) -> str:
    """Undo what Kedro does to a name on the hub: it makes every relative `filepath` absolute below the project.

    `name` and `organisation/name`, with or without `@revision`, are names on the hub where neither they nor their first
    part exist in the project.
    """
    path = Path(filepath)
    if not path.is_absolute() or os.path.exists(path):
        return filepath
    for depth, parent in enumerate(path.parents, start=1):
        if os.path.isfile(parent / "pyproject.toml"):
            name = "/".join(path.parts[-depth:])
            return name if name.partition("@")[0].count("/") < 2 else filepath
        if os.path.exists(parent):
            break
    return filepath


def last_name(path: str) -> str:
    """Return the last part of a path, or a name on the hub without its owner."""
    name, at, revision = path.partition("@")
    return Path(path).name if Path(path).is_absolute() else f"{Path(name).name}{at}{revision}"


def path_of(dataset: Any) -> str | None:
    """Return the path or hub id of a catalog entry; None if it has none, or there is no entry.

    A dataset tells its path only by `_describe`, with which Kedro prints it.
    """
    path = None if dataset is None else dataset._describe().get("filepath")
    return None if path is None else str(path)


def shown(path: str | Path, project: Path | None = None) -> str:
    """Return a path below the project (None: the working directory) relative to it; another one, or a hub id, as is."""
    return str(path).removeprefix(f"{project or os.getcwd()}{os.sep}")
