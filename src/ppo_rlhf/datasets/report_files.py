"""Catalog entries for report files that kedro-datasets lacks."""

import json
from pathlib import Path
from typing import Any, TypeVar

from kedro.io import AbstractDataset
from kedro_datasets._typing import PlotlyPreview
from kedro_datasets.plotly import JSONDataset

from ppo_rlhf.models.directories import CARD
from ppo_rlhf.reporting.charts import first_curves
from ppo_rlhf.reporting.token_view import TokenSamples
from ppo_rlhf.runtime.paths import expand_home
from ppo_rlhf.runtime.whole_files import written_whole

Saved = TypeVar("Saved")
Loaded = TypeVar("Loaded")


class ReportFile(AbstractDataset[Saved, Loaded]):
    """A text file, written atomically. `RunCatalog` sets `_filepath` to a file that only the active run writes."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def _exists(self) -> bool:
        return self._filepath.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}


class ModelCardDataset(ReportFile[tuple[str | None, str], str]):
    """The model card of an exported policy, a page of text.

    The card is also written as README.md into the policy's directory if that directory lies below `path`, where the
    project exports its policies. Policy directories that are not below `path` belong to the user and are never changed.
    `save` takes (directory of the policy or None, text). Example:

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
        """Write the card, and a copy into the policy's directory if the project exported the policy."""
        directory, text = data
        is_exported = directory is not None and self._policies in Path(directory).resolve().parents
        for path in (self._filepath, *([Path(str(directory)) / CARD] if is_exported else [])):
            with written_whole(path) as draft:
                draft.write_text(text, encoding="utf-8")

    def load(self) -> str:
        return self._filepath.read_text(encoding="utf-8")


class TrainingCurvesDataset(JSONDataset):
    """The training curves as plotly's JSON, of which Kedro-Viz shows the first panels. Example:

    ```yaml
    training_curves_plot:
      type: ppo_rlhf.datasets.TrainingCurvesDataset
      filepath: data/08_reporting/training_curves_plot.json
    ```
    """

    def preview(self) -> PlotlyPreview:
        """Return the first panels as a figure that can be read in Kedro-Viz."""
        return PlotlyPreview(json.loads(first_curves(self.load()).to_json()))


class TokenSamplesDataset(ReportFile[TokenSamples, list[TokenSamples]]):
    """Sample responses token by token, from the first and the newest sampled iteration of a run.

    A node saves an empty dict if no samples were due; saving an empty dict changes nothing. Loading a missing file
    returns an empty list. Example:

    ```yaml
    token_samples:
      type: ppo_rlhf.datasets.TokenSamplesDataset
      filepath: data/08_reporting/token_samples.json
    ```
    """

    def save(self, data: TokenSamples) -> None:
        """Write the samples of an iteration, and keep the samples of the run's first iteration."""
        if data:
            earlier = [samples for samples in self.load() if samples["iteration"] < data["iteration"]]
            with written_whole(self._filepath) as draft:
                draft.write_text(json.dumps([*earlier[:1], data]), encoding="utf-8")

    def load(self) -> list[TokenSamples]:
        """Return the samples, the oldest iteration first; an empty list if no run has saved samples."""
        return json.loads(self._filepath.read_text(encoding="utf-8")) if self._filepath.is_file() else []

    def _exists(self) -> bool:
        return True  # tell Kedro that the file exists: a missing file loads as an empty list, which the report accepts


class OptionalJSONDataset(ReportFile[dict[str, Any], dict[str, Any]]):
    """A JSON file for an optional input; a missing file loads as an empty dict. Example:

    ```yaml
    human_evaluation:
      type: ppo_rlhf.datasets.OptionalJSONDataset
      filepath: data/08_reporting/human_evaluation.json
    ```
    """

    def save(self, data: dict[str, Any]) -> None:
        """Write the JSON file."""
        with written_whole(self._filepath) as draft:
            draft.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")

    def load(self) -> dict[str, Any]:
        return json.loads(self._filepath.read_text(encoding="utf-8")) if self._filepath.is_file() else {}

    def _exists(self) -> bool:
        return True  # tell Kedro that the file exists: a missing file loads as an empty dict, which the report accepts
