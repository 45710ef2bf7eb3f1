"""The hook of every process but the main one, which alone checks, logs and tracks a run of several processes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, cast

from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import LaunchError
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.hooks.policy_settings import use_policy_settings
from ppo_rlhf.hooks.process import prepare_process
from ppo_rlhf.hooks.run_description import settle_dtype
from ppo_rlhf.runtime import paths, processes
from ppo_rlhf.runtime.names import POLICY, RESUME_CHECKPOINT, RUN_ID


def agree_on_run(
    run_id: str = "", checkpoint: Path | None = None, folder: Path | None = None, dtype: str | None = None
) -> tuple[Path | None, str | None]:
    """Share the main process's run with all processes; return the run's checkpoint and precision.

    Every process calls this function, a collective; only the main process's arguments count: the run's id, the
    checkpoint to resume from, the run's folder of checkpoints, and the precision. The function puts the run's id into
    an environment variable of each process.

    Raises:
        LaunchError: A process does not see the run's folder of checkpoints.
    """
    if processes.process_count() > 1:
        os.environ[RUN_ID], checkpoint, folder, dtype = processes.from_main((run_id, checkpoint, folder, dtype))
        sees = processes.from_all(folder is None or folder.is_dir())
        if not all(sees):
            missing = f"process {sees.index(False)} does not see {folder}"
            raise LaunchError(f"{missing}: all machines must see the project in the same shared folder.")
    return checkpoint, dtype


class WorkerHook:
    """The only hook of a process other than the main process."""

    _loader: OmegaConfigLoader

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Log only errors, because the main process logs everything once."""
        prepare_process()
        # OmegaConfigLoader is Kedro's default config loader, which settings.py does not replace
        self._loader = cast(OmegaConfigLoader, context.config_loader)
        for name in ("kedro", "ppo_rlhf"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # worker processes must show the warning that processes.py logs if the main process is silent
        logging.getLogger(processes.__name__).setLevel(logging.WARNING)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Make a worker process wait until the main process has checked the run and opened the MLflow run."""
        from ppo_rlhf.datasets import ResumeCheckpointDataset

        paths.running.project, paths.running.environment = Path(run_params["project_path"]), run_params["env"]
        checkpoint, dtype = agree_on_run()
        if POLICY in pipeline.inputs():
            # Collectives are forbidden here, because the main process runs the block before the other processes do
            with processes.alone():
                use_policy_settings(pipeline, catalog, OwnSettings(self._loader), lambda _: True)
        settle_dtype(catalog, dtype)
        entry = catalog.get(RESUME_CHECKPOINT)
        if isinstance(entry, ResumeCheckpointDataset):
            entry.resolve(checkpoint)
