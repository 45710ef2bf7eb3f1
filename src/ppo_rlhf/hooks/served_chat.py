"""Loads a logged chat policy for `mlflow models serve`; MLflow copies this file into the logged model.

The file imports only MLflow, because a server need not have ppo_rlhf. MLflow's own loader has one setting for the
`model` of an answer and for the place of the tokenizer that it loads again for a request with stop texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow.transformers

NAME = "source_model_name"


class _Served:
    """MLflow's wrapper of a chat policy, whose answers have the policy's name."""

    def __init__(self, wrapper: Any, folder: str) -> None:
        self._wrapper, self._name = wrapper, wrapper.flavor_config[NAME]
        wrapper.flavor_config = {**wrapper.flavor_config, NAME: str(Path(folder, "components", "tokenizer"))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the answers of MLflow's wrapper with the policy's name as `model`."""
        return [{**answer, "model": self._name} for answer in self._wrapper.predict(data, params)]


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> _Served:
    return _Served(mlflow.transformers._load_pyfunc(path, model_config), path)
