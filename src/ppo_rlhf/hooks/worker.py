"""Several processes in one run: the main one tells the others which run it is; they track, print and check nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import cast

from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import LaunchError
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.hooks.policy_settings import use_policy_settings
from ppo_rlhf.hooks.run_description import settle_dtype
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import POLICY, RESUME_CHECKPOINT, RUN_ID


def agree_on_run(
    run_id: str = "", checkpoint: Path | None = None, folder: Path | None = None, dtype: str | None = None
) -> tuple[Path | None, str | None]:
    """Take the main process's run: its id, the checkpoint that it resumes from, its folder, and its precision.

    Every process calls it, and gets the checkpoint and the precision.

    Raises:
        LaunchError: A process does not see the folder.
    """
    if processes.process_count() > 1:
        os.environ[RUN_ID], checkpoint, folder, dtype = processes.from_main((run_id, checkpoint, folder, dtype))
        sees = processes.from_all(folder is None or folder.is_dir())
        if not all(sees):
            missing = f"process {sees.index(False)} does not see {folder}"
            raise LaunchError(f"{missing}: all nodes need the project in one folder that they share.")
    return checkpoint, dtype


class WorkerHook:
    """The only hook of a process that is not the main one."""

    _loader: OmegaConfigLoader

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Keep quiet: the main process says everything once."""
        self._loader = cast(OmegaConfigLoader, context.config_loader)  # settings.py keeps Kedro's own
        for name in ("kedro", "ppo_rlhf"):
            logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(processes.__name__).setLevel(logging.WARNING)  # which names the main process, too

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Wait for the main process to have checked the run and opened it in MLflow."""
        from ppo_rlhf.datasets import ResumeCheckpointDataset  # heavy: only a run pays for it

        checkpoint, dtype = agree_on_run()
        if POLICY in pipeline.inputs():
            with processes.alone():  # the main one has done so before, and may have refused
                use_policy_settings(pipeline, catalog, OwnSettings(self._loader), lambda _: True)
        settle_dtype(catalog, dtype)
        entry = catalog.get(RESUME_CHECKPOINT)
        if isinstance(entry, ResumeCheckpointDataset):
            entry.resolve(checkpoint)
