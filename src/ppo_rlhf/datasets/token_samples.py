"""A catalog entry for sample responses token by token, of which a run keeps its first and its newest."""

import json
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from ppo_rlhf.datasets.checkpoints import run_directory
from ppo_rlhf.token_view import TokenSamples
from ppo_rlhf.whole_files import written_whole


class TokenSamplesDataset(AbstractDataset[TokenSamples, list[TokenSamples]]):
    """Samples of a run's first iteration and of its newest: those of the newest run at `filepath`, and each run's own
    at `runs/<MLflow run id>/` beside it, from which a resumed run goes on.

    Saving an empty dict (no samples were due) changes nothing. Loading gives the active run's samples, else the newest
    run's, else an empty list. Example:

    ```yaml
    token_samples:
      type: ppo_rlhf.datasets.TokenSamplesDataset
      filepath: data/08_reporting/token_samples.json
    ```
    """

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Name the file of the newest run's samples; `metadata` is read by Kedro-Viz."""
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: TokenSamples) -> None:
        """Write an iteration's samples beside those of the run's first one."""
        if not data:
            return
        earlier = [shown for shown in _read(self._own()) if shown["iteration"] < data["iteration"]]
        text = json.dumps([*earlier[:1], data])
        for path in (self._own(), self._filepath):
            with written_whole(path) as draft:
                draft.write_text(text, encoding="utf-8")

    def load(self) -> list[TokenSamples]:
        """Return the samples, the oldest iteration first; none if no run has made any."""
        return _read(self._own()) or _read(self._filepath)

    def _own(self) -> Path:
        return run_directory(self._filepath.parent / "runs") / self._filepath.name

    def _exists(self) -> bool:
        """Return True: no file is no samples, with which a report is made as well."""
        return True

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}


def _read(path: Path) -> list[TokenSamples]:
    if not path.is_file():
        return []
    samples: list[TokenSamples] = json.loads(path.read_text(encoding="utf-8"))
    return samples
