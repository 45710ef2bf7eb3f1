"""The rules that the project's configuration keeps, as functions that return what breaks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

LAYER = re.compile(r"0[1-8]_[a-z_]+")


def undeclared_datasets(used: Iterable[str], declared: Iterable[str]) -> list[str]:
    """Datasets that a pipeline names and the catalog does not: typos would become datasets in memory."""
    return sorted({name for name in used if not name.startswith("params:")} - set(declared))


def unused_entries(used: Iterable[str], declared: Iterable[str]) -> list[str]:
    """Catalog entries that no pipeline reads or writes."""
    return sorted(set(declared) - set(used))


def file_paths(entry: Mapping[str, Any]) -> list[str]:
    """Paths that an entry, or the dataset that it wraps, names."""
    inner = entry.get("dataset")
    own = [str(entry["filepath"])] if entry.get("filepath") else []
    return own + (file_paths(inner) if isinstance(inner, Mapping) else [])


def layer_of(entry: Mapping[str, Any]) -> str | None:
    """The layer that Kedro-Viz shows an entry in."""
    layer = entry.get("metadata", {}).get("kedro-viz", {}).get("layer")
    return str(layer) if layer else None


def layer_problems(catalog: Mapping[str, Mapping[str, Any]], in_memory: str = "MemoryDataset") -> list[str]:
    """Entries whose layer is missing, is none of Kedro's, or is not the folder that the file lies in."""
    problems = []
    for name, entry in catalog.items():
        if entry["type"].endswith(in_memory):
            continue
        layer = layer_of(entry)
        if layer is None or not LAYER.fullmatch(layer):
            problems.append(f"{name}: layer {layer}")
            continue
        folders = [part for path in file_paths(entry) for part in PurePosixPath(path).parts if LAYER.fullmatch(part)]
        problems += [f"{name}: lies in {folder}, layer {layer}" for folder in folders if folder != layer]
    return problems


def undescribed_entries(catalog: Mapping[str, Mapping[str, Any]], in_memory: str = "MemoryDataset") -> list[str]:
    """Persisted entries without a description."""
    return [
        name
        for name, entry in catalog.items()
        if not entry["type"].endswith(in_memory) and not entry.get("metadata", {}).get("description")
    ]


def shared_paths(catalog: Mapping[str, Mapping[str, Any]], allowed: Iterable[frozenset[str]] = ()) -> list[list[str]]:
    """Groups of entries that name one path: Kedro says nothing, and the last one to save wins."""
    by_path: dict[str, list[str]] = {}
    for name, entry in catalog.items():
        for path in file_paths(entry):
            by_path.setdefault(path, []).append(name)
    return [sorted(names) for names in by_path.values() if len(names) > 1 and frozenset(names) not in set(allowed)]


def unknown_parameters(
    base: Mapping[str, Any], other: Mapping[str, Any], known: Mapping[str, Iterable[str]]
) -> list[str]:
    """Groups, and keys of groups, that an environment sets and nothing reads."""
    problems = [group for group in other if group not in base]
    for group, values in other.items():
        if group in known and isinstance(values, Mapping):
            problems += [f"{group}.{key}" for key in values if key not in set(known[group])]
    return problems


def documented_metrics(markdown: str) -> set[str]:
    """Keys in the first column of a Markdown document's tables."""
    keys = set()
    for line in markdown.splitlines():
        if line.startswith("| `"):
            keys.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return keys


def metric_problems(emitted: Iterable[str], documented: set[str]) -> list[str]:
    """Metrics that are logged and not documented, or documented and never logged; `<name>` stands for any word."""
    patterns = {
        key: re.compile(re.sub(r"<\w+>", r"[^/]+", re.escape(key).replace(r"\<", "<").replace(r"\>", ">")))
        for key in documented
    }
    emitted = set(emitted)
    undocumented = [key for key in emitted if not any(pattern.fullmatch(key) for pattern in patterns.values())]
    never = [key for key, pattern in patterns.items() if not any(pattern.fullmatch(name) for name in emitted)]
    return sorted(f"not documented: {key}" for key in undocumented) + sorted(f"never logged: {key}" for key in never)
