"""Several processes in one run: the main one tells the others which run it is; they track, print and check nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol

from ppo_rlhf import processes
from ppo_rlhf.core.errors import LaunchError
from ppo_rlhf.hooks.run_description import settle_dtype
from ppo_rlhf.names import RESUME_CHECKPOINT, RUN_ID


def announce(run_id: str, checkpoint: Path | None, folder: Path | None = None, dtype: str | None = None) -> None:
    """Tell the other processes the run's id, the checkpoint that it resumes from, its folder, and its precision.

    The main process calls it.

    Raises:
        LaunchError: A process does not see the folder.
    """
    if processes.process_count() > 1:
        _from_main(run_id, checkpoint, folder, dtype)


class WorkerHook:
    """The only hook of a process that is not the main one."""

    @hook_impl(tryfirst=True)
    def after_context_created(self) -> None:
        """Keep quiet: the main process says everything once."""
        for name in ("kedro", "ppo_rlhf"):
            logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(processes.__name__).setLevel(logging.WARNING)  # which names the main process, too

    @hook_impl
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Wait for the main process to have checked the run and opened it in MLflow."""
        from ppo_rlhf.datasets import ResumeCheckpointDataset  # heavy: only a run pays for it

        checkpoint, dtype = _from_main("", None, None, None)
        settle_dtype(catalog, dtype)
        entry = catalog.get(RESUME_CHECKPOINT)
        if isinstance(entry, ResumeCheckpointDataset):
            entry.resolve(checkpoint)


def _from_main(*of_this_process: Any) -> Any:
    """Take the run's id from the main process, and return the checkpoint and the precision."""
    os.environ[RUN_ID], checkpoint, folder, dtype = processes.from_main(of_this_process)
    sees = processes.from_all(folder is None or folder.is_dir())
    if not all(sees):
        missing = f"process {sees.index(False)} does not see {folder}"
        raise LaunchError(f"{missing}: all nodes need the project in one folder that they share.")
    return checkpoint, dtype
