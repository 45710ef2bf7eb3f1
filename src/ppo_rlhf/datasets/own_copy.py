"""Two runs at once in one project: each reads what it wrote itself, and no file is ever half of one run's.

Tables and reports lie at one path for all runs, the last one to write it wins. While a run goes on, `OwnCopy` stands
in for such a dataset.
"""

import copy
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from kedro.io import AbstractDataset, AbstractVersionedDataset, CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf.datasets.fingerprints import Fingerprints
from ppo_rlhf.datasets.private_folders import private_folder, put


class OwnCopy(AbstractDataset[Any, Any]):
    """A dataset of one file during one run.

    Saving writes the file under its own name in a folder of this process's own, then renames it to its place. An
    artifact is logged from there, so kedro-mlflow never logs what another run wrote in between. Loading gives what
    this run saved, as it reads back from the file: a slice of the pipeline that starts from the file gets the same.

    Attributes:
        wrapped: The dataset of the catalog. Whatever this class does not have is looked up there.
        fingerprint: SHA-256 of what this run saved or took, None before.
    """

    def __init__(self, wrapped: AbstractDataset[Any, Any], is_read: bool) -> None:
        """Stand in for `wrapped`; `is_read` says whether this run loads it, so that a copy has to be kept."""
        self.wrapped = wrapped
        self.fingerprint: str | None = None
        self._is_read = is_read
        self._kept = MemoryDataset()

    @property
    def place(self) -> Path:
        """Where the file lies for everybody."""
        return Path(self.wrapped._filepath)  # type: ignore[attr-defined]  # datasets of one file have it

    def save(self, data: Any) -> None:
        """Write the file, keep it for this run, and put it in its place."""
        target = Path(os.path.realpath(self.place))  # a link stays a link
        with private_folder(target.parent) as folder:
            private = self._at(folder / self.place.name)
            private.save(data)
            self._keep(private)
            if target.is_dir():  # some datasets write folders, and only an empty one can be replaced in one step
                os.replace(target, folder / "replaced")
            put(Path(private._filepath), target)

    def take(self, fingerprint: str) -> bool:
        """Keep what lies at its place for this run if that has this fingerprint; return whether it has."""
        if self.fingerprint == fingerprint and (self._kept.exists() or not self._is_read):
            return True
        if not self.place.exists():
            return False
        with private_folder(Path(os.path.realpath(self.place)).parent) as folder:
            private = self._at(folder / self.place.name)
            _copy(self.place, Path(private._filepath))  # the original may be replaced while it is read
            if Fingerprints().path(Path(private._filepath)) != fingerprint:
                return False
            self._keep(private)
        return True

    def load(self) -> Any:
        """Return what this run saved; what lies on the disk if it has saved nothing."""
        return self._kept.load() if self._kept.exists() else self.wrapped.load()

    def _keep(self, private: Any) -> None:
        self.fingerprint = Fingerprints().path(Path(private._filepath))
        if self._is_read:
            self._kept.save(private.load())

    def _at(self, path: Path) -> Any:
        private: Any = copy.copy(self.wrapped)
        private._filepath = PurePosixPath(path)
        return private

    def _exists(self) -> bool:
        return self._kept.exists() or self.wrapped._exists()

    def _release(self) -> None:
        self._kept.release()
        self.wrapped.release()

    def _describe(self) -> dict[str, Any]:
        return self.wrapped._describe()

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not there yet: the object is just being made
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def read_own_writes(catalog: CatalogProtocol, pipeline: Pipeline) -> None:
    """Let an `OwnCopy` stand in for each dataset of a local file that the pipeline writes.

    Models, checkpoints and evaluation logs need none: they are written by version or by run. Neither do Kedro's
    versioned datasets, and remote storage has no renaming.
    """
    read = {name for node in pipeline.nodes for name in node.inputs}
    for name in sorted(pipeline.all_outputs()):
        dataset = catalog.get(name)
        if is_local_file(dataset) and not isinstance(dataset, OwnCopy):
            named = {"__module__": type(dataset).__module__}
            kind = type(type(dataset).__name__, (OwnCopy,), named)  # logs and hooks know a dataset by its class's name
            catalog._datasets[name] = kind(dataset, name in read)  # the public way warns, and drops its validator


def is_local_file(dataset: Any) -> bool:
    """Return whether a catalog entry is one path on this machine, without versions."""
    if isinstance(dataset, OwnCopy):
        return True
    is_unversioned = isinstance(dataset, AbstractVersionedDataset) and not dataset._version
    return is_unversioned and getattr(dataset, "_protocol", None) == "file"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
