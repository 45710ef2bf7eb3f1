"""Each hyperparameter as an MLflow param of its own, named `group.key`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kedro.io import CatalogProtocol, DatasetError
from kedro.pipeline import Pipeline

PREFIX = "params:"


def parameter_groups(pipeline: Pipeline, catalog: CatalogProtocol) -> dict[str, Any]:
    """Return the parameter groups that the pipeline's nodes read, by name: dataclasses where Kedro validated them."""
    groups = {name.removeprefix(PREFIX).split(".")[0] for name in pipeline.inputs() if name.startswith(PREFIX)}
    return {group: parameter(catalog, group) for group in sorted(groups)}


def parameter(catalog: CatalogProtocol, name: str) -> Any:
    """Return a parameter or group by name, None if there is none; unlike `catalog.load`, no log line tells of it."""
    try:
        dataset = catalog.get(f"{PREFIX}{name}")
        return None if dataset is None else dataset.load()
    except DatasetError:
        return None


def hyperparameters(groups: Mapping[str, Any]) -> dict[str, str]:
    """Return one `group.key: value` for each entry of each group, defaults included; lists and mappings become JSON."""
    return {
        (f"{group}.{key}" if key else group): _text(value)
        for group, values in groups.items()
        for key, value in _entries(values)
    }


def changed_settings(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return PPO's settings that differ from PPOConfig's defaults; empty if the run has none."""
    ppo: Any = groups.get("ppo")
    return ppo.not_default() if hasattr(ppo, "not_default") else {}


def _entries(values: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return [(field.name, getattr(values, field.name)) for field in dataclasses.fields(values)]
    if isinstance(values, Mapping):
        return [(str(key), value) for key, value in values.items()]
    return [("", values)]


def _text(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value):
        return json.dumps(value, default=_jsonable)
    return str(value)


def _jsonable(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
