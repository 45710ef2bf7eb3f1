"""Records of finished nodes: small JSON files that say of which inputs a node made what."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppo_rlhf.datasets.checkpoints import run_directory
from ppo_rlhf.datasets.private_folders import private_folder, put

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """What a node wrote: a file, or a version of a model."""

    path: Path
    fingerprint: str


@dataclass(frozen=True)
class Record:
    """One node, finished in one run.

    Attributes:
        read: Fingerprints of what the node read that other nodes of its run had written, by dataset.
        outputs: What it wrote, by dataset.
    """

    read: Mapping[str, str]
    outputs: Mapping[str, Output]


class WorkRecords:
    """The records of all runs, in one folder: a file for each node, its inputs, and MLflow run.

    Two runs with the same inputs may make models that differ (on a GPU, sums have no fixed order), so each has its own.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; it is made with the first record."""
        self._folder = folder.absolute()

    def find(self, node: str, inputs: str) -> list[Record]:
        """Return the records of a node finished with these inputs: this run's own first, then the newest."""
        own = self._file(node, inputs)
        found = [(path == own, self._time(path), path) for path in self._files(node)]
        return [record for *_, path in sorted(found, reverse=True) if (record := self._read(path, node, inputs))]

    def write(self, node: str, inputs: str, record: Record) -> None:
        """Write a record, whole or not at all, and delete those of the node that nothing is left of.

        Raises:
            OSError: It cannot be written.
        """
        content = {
            "node": node,
            "inputs": inputs,
            "read": dict(record.read),
            "outputs": {
                name: {"path": os.path.relpath(output.path, self._folder), "fingerprint": output.fingerprint}
                for name, output in record.outputs.items()
            },
        }
        with private_folder(self._folder) as private:
            draft = private / "record.json"
            draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
            put(draft, self._file(node, inputs))
        self._sweep(node, self._file(node, inputs), record)

    def _sweep(self, node: str, newest: Path, record: Record) -> None:
        """Delete the records of a node all of whose outputs are gone, or were overwritten just now."""
        overwritten = {output.path for output in record.outputs.values()}
        for path in self._files(node):
            old = None if path == newest else self._read(path, node)
            if old and all(output.path in overwritten or not output.path.exists() for output in old.outputs.values()):
                path.unlink(missing_ok=True)

    def _file(self, node: str, inputs: str) -> Path:
        return self._folder / f"{node}-{inputs[:16]}-{run_directory(self._folder).name}.json"

    def _files(self, node: str) -> list[Path]:
        return list(self._folder.glob(f"{glob.escape(node)}-*.json"))

    def _time(self, path: Path) -> int:
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:  # another run deleted it
            return 0

    def _read(self, path: Path, node: str, inputs: str | None = None) -> Record | None:
        """Return the record in a file, None if it is of another node or of other inputs, or cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["node"] != node or inputs not in (None, content["inputs"]):
                return None
            outputs = {
                name: Output(Path(os.path.normpath(self._folder / output["path"])), output["fingerprint"])
                for name, output in content["outputs"].items()
            }
            return Record(dict(content["read"]), outputs)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s: this record of finished work cannot be read and is left out: %s", path, error)
            return None
