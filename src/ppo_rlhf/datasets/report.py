"""A catalog entry for a page that later runs do not overwrite."""

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from ppo_rlhf.datasets.checkpoints import run_directory
from ppo_rlhf.whole_files import written_whole


class ReportDataset(AbstractDataset[str, str]):
    """A page of text: the newest run's at `filepath`, and each run's at `runs/<MLflow run id>/` beside it.

    ```yaml
    report:
      type: ppo_rlhf.datasets.ReportDataset
      filepath: data/08_reporting/report.html
    ```
    """

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Name the file of the newest page; `metadata` is read by Kedro-Viz."""
        self._filepath = Path(filepath)  # kedro-mlflow logs the file with this name
        self.metadata = metadata

    def save(self, data: str) -> None:
        """Write the page of this run, and make it the newest."""
        own = run_directory(self._filepath.parent / "runs") / self._filepath.name
        for path in (own, self._filepath):
            with written_whole(path) as draft:
                draft.write_text(data, encoding="utf-8")

    def load(self) -> str:
        """Return the newest page."""
        return self._filepath.read_text(encoding="utf-8")

    def _exists(self) -> bool:
        return self._filepath.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}
