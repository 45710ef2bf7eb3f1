"""Print the installed packages whose version differs from constraints.txt, or that constraints.txt lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = {"ppo-rlhf", "pip", "setuptools"}
"""Packages that are not pinned: the project itself, and the packages of a new virtual environment."""


def pins(text: str) -> dict[str, Requirement]:
    """Return the pinned version of each package in a file of constraints, by its normalised name."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, filter(None, lines))}


def changes(pinned: Mapping[str, Requirement], installed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each installed package whose version is not the pinned version; suffixes as +cpu are ignored."""
    for name, version in sorted(installed.items()):
        if name not in pinned:
            yield f"{name}: not pinned -> {version}"
        elif not pinned[name].specifier.contains(version, prereleases=True):
            yield f"{name}: {str(pinned[name].specifier).removeprefix('==')} -> {version}"


if __name__ == "__main__":
    found = {canonicalize_name(package.name): package.version for package in distributions()}
    constraints = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    for change in changes(constraints, {name: version for name, version in found.items() if name not in OURS}):
        print(change)
