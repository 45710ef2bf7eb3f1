"""The catalog entry for the checkpoint that a run resumes from."""

from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset, DatasetError

from ppo_rlhf.checkpoints.files import MANIFEST


class ResumeCheckpointDataset(AbstractDataset[NoReturn, Path | None]):
    """The checkpoint that `resume` asks for, None for a run from the beginning.

    Which one that is depends on the runs in MLflow, so a hook resolves it before the first node and sets `checkpoint`.
    Without a hook a checkpoint's own path still works. Example:

    ```yaml
    resume_checkpoint:
      type: ppo_rlhf.datasets.ResumeCheckpointDataset
      filepath: data/06_models/ppo_checkpoints
      resume: ${runtime_params:resume, ${globals:resume}}
    ```

    Attributes:
        root: Holds the checkpoints of all runs.
        requested: What a user asked for: None, `latest`, a checkpoint's directory, or an MLflow run id.
        checkpoint: What that is, once it is known.
    """

    def __init__(self, filepath: str, resume: str | None = None, metadata: dict[str, Any] | None = None) -> None:
        """Describe what is asked for; nothing is read. `metadata` is read by Kedro-Viz."""
        self.root = Path(filepath)
        self.requested = None if resume is None else str(resume)
        self.checkpoint: Path | None = None
        self.metadata = metadata
        self._is_resolved = False

    def resolve(self, checkpoint: Path | None) -> None:
        """Set what the run resumes from; None starts at the beginning."""
        self.checkpoint, self._is_resolved = checkpoint, True

    def load(self) -> Path | None:
        """Return the checkpoint's directory.

        Raises:
            DatasetError: Only MLflow would know which one, and no hook has asked it.
        """
        if self._is_resolved or self.requested is None:
            return self.checkpoint
        path = Path(self.requested).expanduser()
        if not (path / MANIFEST).is_file():
            raise DatasetError(f"resume={self.requested}: without MLflow, give the directory of a checkpoint.")
        return path

    def save(self, data: NoReturn) -> None:
        raise DatasetError("resume_checkpoint is only read; checkpoints are written by the entry `checkpoint`.")

    def _exists(self) -> bool:
        return self.requested is not None

    def _describe(self) -> dict[str, Any]:
        return {"root": str(self.root), "resume": self.requested}
