"""Catalog entries for files of the reports that kedro-datasets does not have."""

import json
from pathlib import Path
from typing import Any, TypeVar

from kedro.io import AbstractDataset

from ppo_rlhf.models.loading import CARD
from ppo_rlhf.reporting.token_view import TokenSamples
from ppo_rlhf.runtime.paths import expand_home
from ppo_rlhf.runtime.whole_files import written_whole

Saved = TypeVar("Saved")
Loaded = TypeVar("Loaded")


class ReportFile(AbstractDataset[Saved, Loaded]):
    """A text file, written whole. A run gives it a place of its own by `_filepath`."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def _exists(self) -> bool:
        return self._filepath.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}


class ModelCardDataset(ReportFile[tuple[str | None, str], str]):
    """The model card of an exported policy: a page of text, also written as README.md into the policy's own directory.

    That is done only below `path`, where the project exports its policies. A policy elsewhere is the user's, and its
    directory is left as it is. Saving takes (directory of the policy or None, text). Example:

    ```yaml
    model_card:
      type: ppo_rlhf.datasets.ModelCardDataset
      filepath: data/08_reporting/model_card.md
      path: data/06_models/ppo_policy
    ```
    """

    def __init__(self, filepath: str, path: str, metadata: dict[str, Any] | None = None) -> None:
        super().__init__(filepath, metadata)
        self._policies = Path(expand_home(path)).resolve()

    def save(self, data: tuple[str | None, str]) -> None:
        """Write the card, and into the policy's directory if it is the project's."""
        directory, text = data
        is_ours = directory is not None and self._policies in Path(directory).resolve().parents
        for path in (self._filepath, *([Path(str(directory)) / CARD] if is_ours else [])):
            with written_whole(path) as draft:
                draft.write_text(text, encoding="utf-8")

    def load(self) -> str:
        return self._filepath.read_text(encoding="utf-8")


class TokenSamplesDataset(ReportFile[TokenSamples, list[TokenSamples]]):
    """Sample responses token by token, of a run's first iteration and of its newest.

    Saving an empty dict (no samples were due) changes nothing. Without a file, loading gives an empty list. Example:

    ```yaml
    token_samples:
      type: ppo_rlhf.datasets.TokenSamplesDataset
      filepath: data/08_reporting/token_samples.json
    ```
    """

    def save(self, data: TokenSamples) -> None:
        """Write an iteration's samples beside those of the run's first one."""
        if data:
            earlier = [shown for shown in self.load() if shown["iteration"] < data["iteration"]]
            with written_whole(self._filepath) as draft:
                draft.write_text(json.dumps([*earlier[:1], data]), encoding="utf-8")

    def load(self) -> list[TokenSamples]:
        """Return the samples, the oldest iteration first; none if no run has made any."""
        return json.loads(self._filepath.read_text(encoding="utf-8")) if self._filepath.is_file() else []

    def _exists(self) -> bool:
        return True  # no file is no samples, with which a report is made as well


class OptionalJSONDataset(ReportFile[dict[str, Any], dict[str, Any]]):
    """A JSON file that one run needs and another does not: it loads as an empty dict until it is written. Example:

    ```yaml
    human_evaluation:
      type: ppo_rlhf.datasets.OptionalJSONDataset
      filepath: data/08_reporting/human_evaluation.json
    ```
    """

    def save(self, data: dict[str, Any]) -> None:
        """Write the file."""
        with written_whole(self._filepath) as draft:
            draft.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")

    def load(self) -> dict[str, Any]:
        return json.loads(self._filepath.read_text(encoding="utf-8")) if self._filepath.is_file() else {}

    def _exists(self) -> bool:
        return True  # no file is an empty dict
