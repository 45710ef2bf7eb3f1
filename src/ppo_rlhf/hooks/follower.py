"""Several processes in one run: the main one tells the others which run it is; they track, print and check nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol

from ppo_rlhf import processes

RUN_ID = "PPO_RLHF_RUN_ID"
"""The environment variable that names the MLflow run in every process, by which checkpoints are found."""


def announce(run_id: str, checkpoint: Path | None) -> None:
    """Tell the other processes the run's id and the checkpoint that it goes on from; in the main process."""
    if processes.process_count() > 1:
        os.environ[RUN_ID] = run_id
        processes.from_main((run_id, checkpoint))


class FollowerHook:
    """The only hook of a process that is not the main one."""

    @hook_impl(tryfirst=True)
    def after_context_created(self) -> None:
        """Keep quiet: the main process says everything once."""
        for name in ("kedro", "ppo_rlhf"):
            logging.getLogger(name).setLevel(logging.ERROR)

    @hook_impl
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Wait for the main process to have checked the run and opened it in MLflow."""
        from ppo_rlhf.datasets import ResumeCheckpointDataset  # heavy: only a run pays for it

        run_id, checkpoint = processes.from_main(("", None))
        os.environ[RUN_ID] = run_id
        entry = catalog.get("resume_checkpoint")
        if isinstance(entry, ResumeCheckpointDataset):
            entry.resolve(checkpoint)
