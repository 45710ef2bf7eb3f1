"""A catalog entry for the model card of an exported policy."""

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from ppo_rlhf.datasets.paths import expand_home
from ppo_rlhf.models.loading import CARD
from ppo_rlhf.whole_files import written_whole


class ModelCardDataset(AbstractDataset[tuple[str | None, str], str]):
    """A card: a page of text, also written as README.md into the policy's own directory.

    That is done only below `path`, where the project exports its policies. A policy elsewhere is a person's, and its
    directory is left as it is. Saving takes (directory of the policy or None, text). Example:

    ```yaml
    model_card:
      type: ppo_rlhf.datasets.ModelCardDataset
      filepath: data/08_reporting/model_card.md
      path: data/06_models/ppo_policy
    ```
    """

    def __init__(self, filepath: str, path: str, metadata: dict[str, Any] | None = None) -> None:
        """Name the file of the card and the folder of the policies; `metadata` is read by Kedro-Viz."""
        self._filepath = Path(filepath)  # kedro-mlflow logs the file with this name
        self._policies = Path(expand_home(path)).resolve()
        self.metadata = metadata

    def save(self, data: tuple[str | None, str]) -> None:
        """Write the card, and into the policy's directory if it is the project's."""
        directory, text = data
        is_ours = directory is not None and self._policies in Path(directory).resolve().parents
        for path in (self._filepath, *([Path(str(directory)) / CARD] if is_ours else [])):
            with written_whole(path) as draft:
                draft.write_text(text, encoding="utf-8")

    def load(self) -> str:
        """Return the card."""
        return self._filepath.read_text(encoding="utf-8")

    def _exists(self) -> bool:
        return self._filepath.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath), "path": str(self._policies)}
