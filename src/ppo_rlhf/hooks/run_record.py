"""`run.json` in a run's folder: its settings, which models and checkpoints it reads, and which models it has written.

A run that resumes another one is compared with the settings here. `kedro clean` reads nothing else to decide whether a
run belongs to the project, and what the run needs of other runs. The paths of inputs and outputs in the project are
relative to the project, so that they hold after the project was moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.runtime.paths import readable_path
from ppo_rlhf.runtime.whole_files import written_whole

RUN_FILE = "run.json"
RUN_FOLDERS = "checkpoints"
"""The tag of an MLflow run with the folder that holds the folders of all runs, each named by the run's id."""


@dataclass
class RunRecord:
    """The record of one run.

    Attributes:
        project: The project's folder.
        folder: The run's folder, with its checkpoints, its lock and `run.json`.
        params: The run's params as JSON has them (`RunDescription.params`).
        tags: The run's tags, such as the fingerprints of its data.
        can_resume: Whether an unfinished run can be resumed.
        reads: The paths of the run's inputs, or their names on the hub.
        writes: The folders of the models that the run has written, oldest first.
    """

    project: Path
    folder: Path
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    can_resume: bool = False
    reads: frozenset[Path] = frozenset()
    writes: tuple[Path, ...] = ()

    @classmethod
    def of_folder(cls, folder: Path, project: Path) -> RunRecord | None:
        """Return the record in a run's folder; None if the folder has none.

        Raises:
            ConfigError: `run.json` is damaged.
        """
        file = folder / RUN_FILE
        try:
            noted = json.loads(file.read_text(encoding="utf-8"))
            paths = [[project / path for path in noted[name]] for name in ("reads", "writes")]
            settings = {**noted["params"]}, {**noted["tags"]}
            return cls(project, folder, *settings, noted["can_resume"] is True, frozenset(paths[0]), tuple(paths[1]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            line = f"{file}: cannot be read ({type(error).__name__}), so nobody knows what the run needs."
            raise ConfigError(f"{line} Delete {folder} if you need neither the run nor its models.") from error

    @classmethod
    def of_run(cls, run: Run, project: Path) -> RunRecord | None:
        """Return the record of an MLflow run; None if the run has no folder here, as a run of another project.

        Raises:
            ConfigError: `run.json` is damaged.
        """
        folder = run_folder(run, project)
        return None if folder is None else cls.of_folder(folder, project)

    def note(self, *, reads: Iterable[str] = (), writes: Iterable[Path] = ()) -> None:
        """Add paths to the record, and write the record.

        Raises:
            OSError: `run.json` cannot be written.
        """
        self.reads |= {self.project / path for path in reads}
        self.writes = tuple(dict.fromkeys([*self.writes, *writes]))
        named = {"reads": sorted(map(self._named, self.reads)), "writes": [*map(self._named, self.writes)]}
        with written_whole(self.folder / RUN_FILE) as draft:
            settings = {"params": self.params, "tags": self.tags, "can_resume": self.can_resume}
            draft.write_text(json.dumps({**settings, **named}, indent=1), encoding="utf-8")

    def _named(self, path: Path) -> str:
        return readable_path(path, self.project)


def run_folder(run: Run, project: Path) -> Path | None:
    """Return where a run's folder is, if it is here; None if the run has none."""
    root = run.data.tags.get(RUN_FOLDERS)
    return None if root is None else project / root / run.info.run_id
