"""The catalog as one run uses it: one process writes, and a resumed run knows what it has written before."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol

from ppo_rlhf import processes
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.whole_files import written_whole

CHECKPOINT = "checkpoint"
OUTPUTS = "outputs.json"

logger = logging.getLogger(__name__)


class RunCatalog:
    """A Kedro catalog with two differences.

    Of several processes only the main one writes persistent datasets; the others wait until it has, then read the same
    file. A run that is resumed knows which datasets this MLflow run has written, if they are unchanged.
    """

    def __init__(self, catalog: CatalogProtocol, outputs: StageOutputs | None = None, *, is_resumed: bool = False):
        """Stand in for `catalog`; without `outputs` nothing is remembered."""
        self._catalog, self._outputs = catalog, outputs
        self._found: dict[str, str] = {}
        self._checkpoint: Any = None
        self._was_checkpoint_due = True
        if outputs is not None and is_resumed:
            self._found = processes.from_main(outputs.find(catalog))
            for name, path in self._found.items():
                dataset = catalog.get(name)
                if isinstance(dataset, PretrainedModelDataset):
                    dataset.pin(Path(path))

    def has_written(self, name: str) -> bool:
        """Return whether this is a resumed run that has written the dataset before."""
        return name in self._found

    def save(self, name: str, data: Any) -> None:
        """Save on every process what stays in memory, and on the main one what does not."""
        if name == CHECKPOINT:
            self._checkpoint, self._was_checkpoint_due = data, data.due
        dataset = self._catalog.get(name)
        if getattr(dataset, "_EPHEMERAL", False):
            self._catalog.save(name, data)
            return
        if processes.is_main_process():
            self._catalog.save(name, data)
            if self._outputs is not None:
                self._outputs.note(name, dataset)
        processes.wait_for_all()

    def save_checkpoint_not_due(self) -> None:
        """Save the last checkpoint request if it was not due then but is now, because the run was asked to stop."""
        if not processes.from_main(self._was_checkpoint_due):
            self.save(CHECKPOINT, self._checkpoint)

    def __contains__(self, name: str) -> bool:
        return name in self._catalog

    def __getitem__(self, name: str) -> Any:
        return self._catalog[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


class StageOutputs:
    """The persistent outputs of the stages before the loop that one MLflow run has written, in its `outputs.json`.

    Whether one is unchanged is told by its size and its time of modification.
    """

    def __init__(self, folder: Path, names: Set[str], read: Set[str]) -> None:
        """Take what may be remembered.

        Args:
            folder: The run's own folder.
            names: Datasets that a resumed run need not write again.
            read: Datasets that nodes of this pipeline read. The others may have been overwritten by another run.
        """
        self._file, self._names, self._read = folder / OUTPUTS, names, read

    def note(self, name: str, dataset: Any) -> None:
        """Remember that this run has written a dataset. If that fails, a resumed run writes it again."""
        path = _written_path(dataset)
        if name not in self._names or path is None:
            return
        entry = {"path": os.path.relpath(path, self._file.parent), **_state_of(path)}
        try:
            with written_whole(self._file) as draft:
                draft.write_text(json.dumps({**self._noted(), name: entry}, indent=1), encoding="utf-8")
        except OSError as error:
            logger.warning("%s: cannot be written, so a resumed run will write %s again: %s", self._file, name, error)

    def forget(self, names: Set[str]) -> None:
        """Let a resumed run write these datasets again."""
        left = {name: entry for name, entry in self._noted().items() if name not in names}
        with written_whole(self._file) as draft:
            draft.write_text(json.dumps(left, indent=1), encoding="utf-8")

    def find(self, catalog: CatalogProtocol) -> dict[str, str]:
        """Return the paths of those that this run has written and nobody has changed, by dataset."""
        found = {}
        for name, entry in self._noted().items():
            path = Path(os.path.normpath(self._file.parent / entry["path"]))
            is_unchanged = entry == {"path": entry["path"], **_state_of(path)}
            if name in self._names and (is_unchanged or name not in self._read) and _lies_in(path, catalog.get(name)):
                found[name] = str(path)
        return found

    def _noted(self) -> dict[str, Any]:
        try:
            noted: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be read, so no stage is skipped: %s", self._file, error)
            return {}
        return noted


def _written_path(dataset: Any) -> Path | None:
    """Return the file or folder that a dataset was saved to; None if it has versions or is not on this machine."""
    if isinstance(dataset, PretrainedModelDataset):
        return dataset.saved
    described = dataset._describe()
    if described.get("protocol") != "file" or described.get("version") is not None:
        return None
    return Path(described["filepath"])


def _lies_in(path: Path, dataset: Any) -> bool:
    """Return whether the catalog entry still names this path."""
    if isinstance(dataset, PretrainedModelDataset):
        return str(path.parent) == os.path.abspath(dataset._describe()["filepath"])
    written = _written_path(dataset)
    return written is not None and os.path.abspath(written) == str(path)


def _state_of(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    status = [file.stat() for file in files]
    newest = max((file.st_mtime_ns for file in status), default=0)
    return {"files": len(files), "bytes": sum(file.st_size for file in status), "mtime_ns": newest}
