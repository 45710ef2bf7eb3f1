"""The rules that the project's configuration and documents keep, as functions that return what breaks them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
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


CODE = re.compile(r"`((?:core|models|training|compat|datasets|preflight|runner|hooks|cli|demo|ppo_rlhf)(?:\.\w+)+)")
TEST = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`")
SETTING = re.compile(r"`ppo\.([a-z]\w*)(?![\w*])")
# conf/local and data are a person's own: a file there may be absent
FILE = re.compile(r"`((?!conf/local/|data/)(?:\w+/)+(?!test_)\w+\.(?:py|yml|ipynb|json))`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def missing_code(markdown: str, package: str) -> list[str]:
    """Names such as `core.kl.kl_estimate` in a document that the package does not have."""
    names = {name.removeprefix(f"{package}.") for name in CODE.findall(markdown)}
    return sorted(name for name in names if not _exists(f"{package}.{name}"))


def _exists(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            declared = getattr(found, "__annotations__", {})  # a field without a default is no attribute of its class
            if not hasattr(found, attribute) and attribute not in declared:
                return False
            found = getattr(found, attribute, None)
        return True
    return False


def missing_tests(markdown: str, tests: Path) -> list[str]:
    """Tests such as `core/test_kl.py::test_…` in a document that do not exist below `tests`."""
    missing = set()
    for path, name in TEST.findall(markdown):
        file = tests / path
        if not file.is_file() or (name and f"\ndef {name}(" not in file.read_text(encoding="utf-8")):
            missing.add(f"{path}::{name}" if name else path)
    return sorted(missing)


def unknown_settings(markdown: str, known: Iterable[str]) -> list[str]:
    """Settings such as `ppo.kl_coef` in a document that are not known."""
    return sorted(set(SETTING.findall(markdown)) - set(known))


def missing_files(markdown: str, page: Path, roots: Iterable[Path]) -> list[str]:
    """Files that a page links to, or names by a path below one of the roots, and that are not there."""
    links = {link for link in LINK.findall(markdown) if not (page.parent / link).exists()}
    return sorted(links | {f for f in FILE.findall(markdown) if not any((root / f).exists() for root in roots)})
