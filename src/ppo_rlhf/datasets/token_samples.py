"""A catalog entry for sample responses token by token, of which a run keeps its first and its newest."""

import json
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from ppo_rlhf.token_view import TokenSamples
from ppo_rlhf.whole_files import written_whole


class TokenSamplesDataset(AbstractDataset[TokenSamples, list[TokenSamples]]):
    """Samples of a run's first iteration and of its newest.

    Saving an empty dict (no samples were due) changes nothing. Without a file, loading gives an empty list. Example:

    ```yaml
    token_samples:
      type: ppo_rlhf.datasets.TokenSamplesDataset
      filepath: data/08_reporting/token_samples.json
    ```
    """

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Name the file of the samples; `metadata` is read by Kedro-Viz."""
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: TokenSamples) -> None:
        """Write an iteration's samples beside those of the run's first one."""
        if not data:
            return
        earlier = [shown for shown in self.load() if shown["iteration"] < data["iteration"]]
        with written_whole(self._filepath) as draft:
            draft.write_text(json.dumps([*earlier[:1], data]), encoding="utf-8")

    def load(self) -> list[TokenSamples]:
        """Return the samples, the oldest iteration first; none if no run has made any."""
        if not self._filepath.is_file():
            return []
        samples: list[TokenSamples] = json.loads(self._filepath.read_text(encoding="utf-8"))
        return samples

    def _exists(self) -> bool:
        """Return True: no file is no samples, with which a report is made as well."""
        return True

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}
