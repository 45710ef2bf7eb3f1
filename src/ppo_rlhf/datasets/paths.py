"""Paths as a person wrote them: Kedro puts the project in front of every relative `filepath`."""

from pathlib import Path


def expand_home(filepath: str) -> str:
    """Return a path that a person began with `~` below their home directory, any other as it is."""
    parts = Path(filepath).parts
    return str(Path(*parts[parts.index("~") :]).expanduser()) if "~" in parts else filepath
