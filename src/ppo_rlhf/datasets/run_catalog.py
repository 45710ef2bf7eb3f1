"""The catalog as one run uses it: other runs may write the same entries meanwhile, and each reads what it wrote."""

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
from ppo_rlhf.datasets.checkpoints import run_directory
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import CHECKPOINT
from ppo_rlhf.runtime.paths import path_of
from ppo_rlhf.runtime.whole_files import delete, written_whole

OUTPUTS = "outputs.json"
REPORTS = "08_reporting"
"""The folder of reports, of which one copy stays for each run that has ended."""

logger = logging.getLogger(__name__)


class RunCatalog:
    """A Kedro catalog with three differences.

    What a run writes it reads back, whatever other runs write meanwhile. A file that it writes is in a place of its
    own, `runs/<MLflow run id>/<name>` beside its usual one, to which it is copied, by a rename, as soon as it is whole.
    Kedro's catalog names the run's own file, so that hooks read it, too. A model, or another entry with versions, is
    read in the version that this run wrote; a model that it only reads in the one that was the newest as it began.

    Of several processes only the main one writes persistent datasets; the others wait until it has, then read the same
    file. A run that is resumed knows which datasets this MLflow run has written.
    """

    def __init__(
        self, catalog: CatalogProtocol, pipeline: Pipeline, outputs: StageOutputs | None = None, resumed: bool = False
    ) -> None:
        """Stand in for `catalog` while `pipeline` runs; without `outputs` nothing is remembered."""
        self._catalog: Any = catalog
        entry: Callable[[str], Any] = catalog.get
        self._outputs, self._checkpoint = outputs, None
        self._unpublished: set[str] = set()
        self.run_folder = None if outputs is None else outputs.folder  # of its checkpoints; None if it saves none
        self.is_checkpoint_saved = True  # whether the last iteration's was due
        self._files = [name for name in sorted(pipeline.all_outputs()) if file_of(entry(name)) is not None]
        for dataset in map(entry, self._files):
            usual = getattr(dataset, "_usual_filepath", dataset._filepath)
            dataset._usual_filepath = usual
            dataset._filepath = type(usual)(run_directory(Path(usual).parent / "runs") / Path(usual).name)
        newest: dict[str, str] = {}
        for name in pipeline.inputs():
            handle = entry(name).load() if is_model(entry(name)) else None
            if handle is not None:
                newest[name] = handle.source
        found = outputs.find(catalog) if outputs is not None and resumed else {}
        # `written`: the datasets that a resumed run has written before
        self.written, versions = processes.from_main((found, {**newest, **found}))
        for name, path in versions.items():
            if is_model(dataset := entry(name)):
                dataset.pinned = Path(path)

    def save(self, name: str, data: Any) -> None:
        """Save on every process what stays in memory, and on the main one what does not."""
        if name == CHECKPOINT:
            self._checkpoint, self.is_checkpoint_saved = data, data.checkpoint_due
        dataset = self._catalog.get(name)
        if getattr(dataset, "_EPHEMERAL", False):
            self._catalog.save(name, data)
            return
        if name == CHECKPOINT and data.checkpoint_due:
            data = gathered(data)
        if processes.is_main_process():
            self._catalog.save(name, data)
            if name in self._files and REPORTS in Path(dataset._filepath).parts:
                self._is_published(name)
            elif name in self._files:
                self._publish(name)
            if self._outputs is not None:
                self._outputs.note(name, dataset)
        processes.wait_for_all()
        # every process reads the version that the main one has just written, though another run may write a newer one
        if is_model(dataset):
            dataset.pinned = processes.from_main(dataset.pinned)
        elif getattr(dataset, "_version", None) is not None:
            version = processes.from_main(dataset.resolve_save_version())
            dataset._version = dataset._version._replace(load=version)

    def finish(self) -> None:
        """Publish the files of a run that ended well once more, so that the usual places hold those of one run.

        Its own copies are deleted, except reports that MLflow does not have, outputs from which a longer run of it
        would resume, and what cannot be copied: a run that is done does not fail by a full disk.
        """
        processes.wait_for_all()
        for name in self._files:
            dataset = self._catalog.get(name)
            own, usual = Path(dataset._filepath), dataset._usual_filepath
            if processes.is_main_process() and not self._is_published(name):
                continue
            is_in_mlflow = getattr(dataset, "_logging_activated", False)  # set by kedro-mlflow
            if (REPORTS not in own.parts or is_in_mlflow) and (
                self._outputs is None or name not in self._outputs.names
            ):
                dataset._filepath = usual
                if processes.is_main_process():
                    delete(own)
                    with contextlib.suppress(OSError):  # it holds another file of this run, or was never made
                        own.parent.rmdir()

    def _is_published(self, name: str) -> bool:
        """Publish a file, or say once that it is only in this run's own place."""
        dataset = self._catalog.get(name)
        try:
            self._publish(name)
        except DatasetError as error:
            if name not in self._unpublished:
                logger.warning("%s: %s; this run's is %s.", error, error.__cause__, dataset._filepath)
            self._unpublished.add(name)
            return False
        return True

    def _publish(self, name: str) -> None:
        dataset = self._catalog.get(name)
        own, usual = Path(dataset._filepath), Path(dataset._usual_filepath)
        try:
            if own.is_dir():
                shutil.copytree(own, usual, dirs_exist_ok=True)
            elif own.exists():  # else nothing was due
                with written_whole(usual) as draft:
                    shutil.copyfile(own, draft)
        except OSError as error:
            raise DatasetError(f"{name} cannot be copied to its usual place") from error

    def save_checkpoint(self) -> None:
        """Save the last checkpoint request, which must be due; before the first iteration there is none."""
        if self._checkpoint is not None:
            self.save(CHECKPOINT, self._checkpoint)

    def __contains__(self, name: str) -> bool:
        return name in self._catalog

    def __getitem__(self, name: str) -> Any:
        return self._catalog[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


class StageOutputs:
    """The persistent outputs of the stages before the loop that one MLflow run has written, in its `outputs.json`.

    No other run writes them. Their size tells whether they are whole: a kill may have come while one was written anew.
    """

    def __init__(self, folder: Path, names: Set[str]) -> None:
        """Take the run's own folder, and the names of datasets that a resumed run need not write again."""
        self.folder, self._file, self.names = folder, folder / OUTPUTS, names

    def note(self, name: str, dataset: Any) -> None:
        """Remember that this run has written a dataset. If that fails, a resumed run writes it again."""
        path = getattr(dataset, "pinned", None) or file_of(dataset)
        if name not in self.names or path is None:
            return
        try:
            with written_whole(self._file) as draft:
                draft.write_text(json.dumps({**self._noted(), name: self._entry(path)}, indent=1), encoding="utf-8")
        except OSError as error:
            logger.warning("%s: cannot be written, so a resumed run will write %s again: %s", self._file, name, error)

    def forget(self, names: Set[str]) -> None:
        """Let a resumed run write these datasets again."""
        left = {name: entry for name, entry in self._noted().items() if name not in names}
        with written_whole(self._file) as draft:
            draft.write_text(json.dumps(left, indent=1), encoding="utf-8")

    def find(self, catalog: CatalogProtocol) -> dict[str, str]:
        """Return the paths of those that this run has written, by dataset."""
        found = {}
        for name, entry in self._noted().items():
            path = Path(os.path.normpath(self._file.parent / entry["path"]))
            usual = os.path.abspath(path_of(catalog.get(name)) or "")
            is_the_entrys = usual in (str(path), str(path.parent))
            if name in self.names and is_the_entrys and entry == self._entry(path):
                found[name] = str(path)
        return found

    def _entry(self, path: Path) -> dict[str, Any]:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        return {"path": os.path.relpath(path, self._file.parent), "files": len(files), "bytes": size}

    def _noted(self) -> dict[str, Any]:
        try:
            noted = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): {**entry, "path": str(entry["path"])} for name, entry in noted.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s: cannot be read, so no stage is skipped: %s", self._file, error)
            return {}


def file_of(dataset: Any) -> Path | None:
    """Return the file that an entry has on this machine; None if it has versions, or is none of a file."""
    path = getattr(dataset, "_filepath", None)
    is_local = getattr(dataset, "_protocol", "file") == "file" and getattr(dataset, "_version", None) is None
    return Path(path) if path is not None and is_local else None


def is_model(dataset: Any) -> bool:
    return isinstance(dataset, PretrainedModelDataset)
