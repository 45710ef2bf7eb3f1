"""Paths of catalog entries and of settings, and how messages show paths."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ppo_rlhf.core.addresses import without_secrets

SHIPPED_CONF = Path(__file__).parents[1] / "starter" / "project" / "conf"
"""The configuration in the installed package: a copy of the repository's conf/base and of the files beside
conf/base."""

DOCS = Path(__file__).parents[1] / "docs"
"""The documentation in the installed package: the pages that messages refer to as docs/…."""

running = SimpleNamespace(project=None, environment=None)
"""`project`: the folder of the Kedro project whose pipeline runs; `environment`: what `--env` names. Hooks set both,
which are None outside of a run."""


def project_above(folder: Path) -> Path:
    """Return the nearest folder with a pyproject.toml, from `folder` upwards; return `folder` if no folder has one."""
    return next((path for path in (folder, *folder.parents) if (path / "pyproject.toml").is_file()), folder)


def project_folder() -> Path:
    """Return the folder of the project that runs; outside of a run the nearest at or above the working directory."""
    return running.project or project_above(Path.cwd())


def in_project(path: str | Path, project: Path | None = None) -> Path:
    """Return where the path of a setting leads: a relative path below the project, also from a sub-folder of it.

    Preflight checks and nodes both call this function, so that what is checked is what is read or written. `project`
    defaults to `project_folder`.
    """
    return (project or project_folder()) / Path(path).expanduser()


def below_project(source: str, project: Path | None = None) -> str:
    """Return where a setting's source leads, as `in_project`; return a name on the hub unchanged.

    A relative path that exists only below the working directory counts as missing in the project.
    """
    inside = in_project(source, project)
    return str(inside) if inside.exists() or os.path.exists(source) else expand_home(source)


def expand_home(filepath: str) -> str:
    """Return a path that begins with `~` as a path below the user's home directory; return other paths unchanged.

    `~` may be any part of the path, because Kedro prepends the project's path to every relative `filepath`, also to a
    `filepath` that begins with `~`. A path that exists is returned unchanged.
    """
    path = Path(filepath)
    if "~" not in path.parts or os.path.exists(path):
        return filepath
    return str(Path(*path.parts[path.parts.index("~") :]).expanduser())


def restore_hub_name(filepath: str) -> str:
    """Return the name on the hub that Kedro has made absolute; return other paths unchanged.

    Kedro makes every relative `filepath` absolute below the project. `name` and `organisation/name`, with or without
    `@revision`, are names on the hub if the project has neither the path nor the first folder of the path.
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
    """Return the last part of a path, or a name on the hub without the owner."""
    name, at, revision = path.partition("@")
    return Path(path).name if Path(path).is_absolute() else f"{Path(name).name}{at}{revision}"


def path_of(dataset: Any) -> str | None:
    """Return the path or hub id of a catalog entry; None if the entry is None or has no path.

    Kedro has no public way to read the path of a dataset, so `path_of` calls `_describe`, whose result Kedro prints.
    """
    path = None if dataset is None else dataset._describe().get("filepath")
    return None if path is None else str(path)


def readable_path(path: str | Path, project: Path | None = None) -> str:
    """Return a path below the project relative to the project; return other paths and hub ids unchanged.

    `project` defaults to `project_folder`.
    """
    return str(path).removeprefix(f"{project or project_folder()}{os.sep}")


def place(source: str) -> str:
    """Return a hub id unchanged, a path without the names of this machine's folders, and an address without secrets.

    A path below the working directory becomes a relative path. Of a path outside the working directory only the last
    part is kept.
    """
    shown = without_secrets(readable_path(source))
    path = Path(shown).expanduser()
    return path.name if path.is_absolute() else shown
