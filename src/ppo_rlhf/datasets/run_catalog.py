"""The catalog of one run: each run reads the data that it wrote itself, even if other runs write the same catalog
entries.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol, DatasetError
from kedro.pipeline import Pipeline

from ppo_rlhf.checkpoints.model_files import gathered
from ppo_rlhf.checkpoints.store import mark_of
from ppo_rlhf.datasets.checkpoints import RunDataset, run_directory
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.ppo.checkpointer import Checkpointer
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.metrics_file import metrics_of
from ppo_rlhf.runtime.names import CHECKPOINT
from ppo_rlhf.runtime.paths import path_of
from ppo_rlhf.runtime.whole_files import delete, written_whole

OUTPUTS = "outputs.json"
REPORTS = "08_reporting"
"""The folder of reports. Each run that has ended keeps a copy of its reports in its own folder."""

logger = logging.getLogger(__name__)


class RunCatalog:
    """A Kedro catalog that differs from Kedro's in three points.

    1. A run reads back the data that it wrote, even if other runs write the same catalog entries meanwhile. A run
       writes each file to its own path `runs/<MLflow run id>/<name>` beside the usual path, then copies the file to the
       usual path atomically. The catalog entry's `_filepath` is the run's own path, so hooks read the run's own file. A
       model, or another versioned catalog entry, is read in the version that the run wrote. A model that the run only
       reads is read in the version that was the newest at the start of the run.
    2. In a distributed run only the main process writes persistent datasets. All processes except the main process wait
       until the main process has written the file, and then read the file.
    3. A resumed run knows which datasets its MLflow run has already written.
    """

    def __init__(
        self,
        catalog: CatalogProtocol,
        pipeline: Pipeline,
        outputs: StageOutputs | None = None,
        *,
        resumed: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        """Wrap `catalog` while `pipeline` runs. `outputs`, if given, records the run's datasets for a resumed run.

        A `resumed` run goes on behind its `checkpoint`, if it has one.

        Raises:
            CheckpointError: The checkpoint's metrics.jsonl is missing, damaged or of another run.
        """
        self._catalog: Any = catalog
        entry: Callable[[str], Any] = catalog.get
        self._outputs = outputs
        self._checkpointer: Checkpointer | None = None
        self._unpublished: set[str] = set()
        # Folder of this run's checkpoints and metrics; None: the pipeline has none
        self.run_folder = None if outputs is None else outputs.folder
        self._files = [name for name in sorted(pipeline.all_outputs()) if file_of(entry(name)) is not None]
        for dataset in map(entry, self._files):
            usual = getattr(dataset, "_usual_filepath", dataset._filepath)
            dataset._usual_filepath = usual
            dataset._filepath = type(usual)(run_directory(Path(usual).parent / "runs") / Path(usual).name)
        for dataset in map(entry, sorted(pipeline.datasets())):
            if isinstance(dataset, RunDataset):
                dataset.folder = self.run_folder = run_directory(dataset.root)
        if outputs is not None and processes.is_main_process():
            metrics_of(outputs.folder).cut(mark_of(checkpoint, outputs.folder))
        newest: dict[str, str] = {}
        for name in pipeline.inputs():
            handle = entry(name).load() if is_model(entry(name)) else None
            if handle is not None:
                newest[name] = handle.source
        written = outputs.find(catalog) if outputs is not None and resumed else {}
        # `self.written` has the path of each dataset that a resumed run had written before the interruption
        self.written, versions = processes.from_main((written, {**newest, **written}))
        for name, path in versions.items():
            if is_model(dataset := entry(name)):
                dataset.pinned = Path(path)

    def save(self, name: str, data: Any) -> None:
        """Save a dataset: in-memory datasets in every process, persistent datasets only in the main process.

        The node that updates the policy outputs the state as the checkpoint in each iteration. In the loop `RunControl`
        asks the checkpointer whether to save it; outside of the loop, where the node runs once, it is asked here.
        """
        if name != CHECKPOINT:
            self._save(name, data)
        elif self._checkpointer is None:
            self.checkpointer_of(data).iteration_ended()

    def checkpointer_of(self, state: TrainingState) -> Checkpointer:
        """Return the run's checkpointer, which saves `state` as the catalog entry `checkpoint`."""
        if self._checkpointer is None:
            write = (lambda: self._save(CHECKPOINT, gathered(state))) if CHECKPOINT in self else None
            self._checkpointer = Checkpointer(state.progress, self.run_folder, write)
        return self._checkpointer

    def _save(self, name: str, data: Any) -> None:
        dataset = self._catalog.get(name)
        if getattr(dataset, "_EPHEMERAL", False):
            self._catalog.save(name, data)
            return
        if processes.is_main_process():
            self._catalog.save(name, data)
            if name in self._files and REPORTS in Path(dataset._filepath).parts:
                self._is_published(name)
            elif name in self._files:
                self._publish(name)
            if self._outputs is not None:
                self._outputs.note(name, dataset)
        processes.wait_for_all()
        # Pin every process to the version that the main process wrote, because another run may write a newer version
        if is_model(dataset):
            dataset.pinned = processes.from_main(dataset.pinned)
        elif getattr(dataset, "_version", None) is not None:
            version = processes.from_main(dataset.resolve_save_version())
            dataset._version = dataset._version._replace(load=version)

    def finish(self) -> None:
        """Copy the files of a completed run to the usual paths again, so that all usual paths hold files of one run.

        After copying, the files at the run's own paths are deleted, with three exceptions: reports that are not in
        MLflow, outputs from which a longer run would resume, and files that cannot be copied. A failed copy, for
        example because the disk is full, does not fail a completed run.
        """
        processes.wait_for_all()
        for name in self._files:
            dataset = self._catalog.get(name)
            run_file, usual = Path(dataset._filepath), dataset._usual_filepath
            if processes.is_main_process() and not self._is_published(name):
                continue
            # `_logging_activated` is set by kedro-mlflow on datasets that are logged as artifacts
            is_in_mlflow = getattr(dataset, "_logging_activated", False)
            if (REPORTS not in run_file.parts or is_in_mlflow) and (
                self._outputs is None or name not in self._outputs.names
            ):
                dataset._filepath = usual
                if processes.is_main_process():
                    delete(run_file)
                    # rmdir fails if the folder does not exist, or still holds other files of this run
                    with contextlib.suppress(OSError):
                        run_file.parent.rmdir()

    def _is_published(self, name: str) -> bool:
        """Copy a dataset's file to the usual path; if copying fails, warn once where the run's own file is, and return
        False.
        """
        dataset = self._catalog.get(name)
        try:
            self._publish(name)
        except DatasetError as error:
            if name not in self._unpublished:
                logger.warning("%s: %s; the file of this run is %s.", error, error.__cause__, dataset._filepath)
            self._unpublished.add(name)
            return False
        return True

    def _publish(self, name: str) -> None:
        dataset = self._catalog.get(name)
        run_file, usual = Path(dataset._filepath), Path(dataset._usual_filepath)
        try:
            if run_file.is_dir():
                shutil.copytree(run_file, usual, dirs_exist_ok=True)
            elif run_file.exists():  # a node that had nothing to save has written no file
                with written_whole(usual) as draft:
                    shutil.copyfile(run_file, draft)
        except OSError as error:
            raise DatasetError(f"{name} cannot be copied to its usual path") from error

    def __contains__(self, name: str) -> bool:
        return name in self._catalog

    def __getitem__(self, name: str) -> Any:
        return self._catalog[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


class StageOutputs:
    """The record, in `outputs.json`, of the persistent outputs that an MLflow run has written before the PPO loop.

    The outputs recorded in `outputs.json` are written only by the run itself. The record has the size of each output,
    because a run that is killed while it rewrites an output leaves an incomplete output.
    """

    def __init__(self, folder: Path, names: Set[str]) -> None:
        """Take the run's folder, and the names of the datasets that a resumed run need not write again."""
        self.folder, self._file, self.names = folder, folder / OUTPUTS, names

    def note(self, name: str, dataset: Any) -> None:
        """Record that the run has written a dataset. If recording fails, a resumed run writes the dataset again."""
        path = getattr(dataset, "pinned", None) or file_of(dataset)
        if name not in self.names or path is None:
            return
        try:
            with written_whole(self._file) as draft:
                draft.write_text(json.dumps({**self._recorded(), name: self._entry(path)}, indent=1), encoding="utf-8")
        except OSError as error:
            logger.warning("%s: cannot be written, so a resumed run will write %s again: %s", self._file, name, error)

    def forget(self, names: Set[str]) -> None:
        """Remove datasets from the record, so that a resumed run writes them again."""
        remaining = {name: entry for name, entry in self._recorded().items() if name not in names}
        with written_whole(self._file) as draft:
            draft.write_text(json.dumps(remaining, indent=1), encoding="utf-8")

    def find(self, catalog: CatalogProtocol) -> dict[str, str]:
        """Return the paths of the datasets that this run has written completely, by dataset name."""
        paths = {}
        for name, entry in self._recorded().items():
            path = Path(os.path.normpath(self._file.parent / entry["path"]))
            usual = os.path.abspath(path_of(catalog.get(name)) or "")
            is_of_entry = usual in (str(path), str(path.parent))
            if name in self.names and is_of_entry and entry == self._entry(path):
                paths[name] = str(path)
        return paths

    def _entry(self, path: Path) -> dict[str, Any]:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        return {"path": os.path.relpath(path, self._file.parent), "files": len(files), "bytes": size}

    def _recorded(self) -> dict[str, Any]:
        try:
            recorded = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): {**entry, "path": str(entry["path"])} for name, entry in recorded.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s: cannot be read, so no stage is skipped: %s", self._file, error)
            return {}


def file_of(dataset: Any) -> Path | None:
    """Return the local file of a catalog entry; None if the entry is versioned or has no local file."""
    path = getattr(dataset, "_filepath", None)
    is_local = getattr(dataset, "_protocol", "file") == "file" and getattr(dataset, "_version", None) is None
    return Path(path) if path is not None and is_local else None


def is_model(dataset: Any) -> bool:
    return isinstance(dataset, PretrainedModelDataset)
