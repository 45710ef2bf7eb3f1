"""LoopRunner: Kedro's sequential runner, except that PPO's iteration runs until the training state says it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import kedro.framework.session.service_session
import kedro.framework.session.session
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro.runner import SequentialRunner
from pluggy import PluginManager

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.runner.fold import Fold
from ppo_rlhf.runner.plan import ITERATION_TAG, plan_loop, plan_once
from ppo_rlhf.runner.signals import RunInterruptedError, TerminationSignal, raising_on_signals

if TYPE_CHECKING:
    from ppo_rlhf.runner.finished import FinishedWork

RESUME = "resume_checkpoint"
FINISHED_WORK = "finished_work"


class LoopRunner(SequentialRunner):
    """Runs what the loop depends on once, the nodes tagged `iteration` until training is finished, then the rest once.

    After each iteration the dataset `next_training_state` becomes `training_state`. If the first state is finished
    already, it is handed on as it is. A first state that has done iterations comes from a checkpoint: what lies behind
    the saving of it is made up for. A pipeline without the closed loop runs as under Kedro's SequentialRunner.
    """

    def __init__(self, is_async: bool = False) -> None:
        """Take Kedro's option.

        Raises:
            ConfigError: Datasets are to be saved in threads, of which MLflow gives each a run of its own: checkpoints
                would lie where no run looks for them.
        """
        if is_async:
            raise ConfigError("--async: LoopRunner saves what a node made before the next one runs; drop it.")
        super().__init__()

    def __str__(self) -> str:
        """Name both classes: Kedro-Viz records the status of a run only if it finds Kedro's own in here."""
        return "<ppo_rlhf.runner.LoopRunner, a kedro.runner.sequential_runner.SequentialRunner object>"

    __repr__ = __str__

    def run(
        self,
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        hook_manager: PluginManager | None = None,
        run_id: str | None = None,
        only_missing_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the pipeline as `AbstractRunner.run` does.

        Raises:
            RunInterruptedError: SIGTERM or SIGINT came.
        """
        try:
            with raising_on_signals():
                return super().run(pipeline, catalog, hook_manager, run_id, only_missing_outputs)
        except TerminationSignal as stop:
            raise RunInterruptedError(stop.signum) from None

    def _run(
        self,
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        hook_manager: PluginManager | None = None,
        run_id: str | None = None,
    ) -> None:
        from ppo_rlhf.datasets.own_copy import read_own_writes  # heavy: not for commands that run nothing

        read_own_writes(catalog, pipeline)
        work, is_resumed = _finished_work(pipeline, catalog)
        if work is not None and is_resumed:
            pipeline = work.remaining()
        plan = plan_loop(pipeline)
        if plan is None:
            if any(ITERATION_TAG in node.tags for node in pipeline.nodes):
                self._logger.info("These nodes are not the whole loop: the ones of its iteration run once.")
            plan = plan_once(pipeline)
        after_node = _nothing if work is None else work.record
        fold = Fold(plan, catalog, self._is_async, run_id, self._logger, after_node)
        try:
            fold.run(hook_manager)
        except Exception:
            self._suggest_resume_scenario(pipeline, fold.done, catalog)
            raise

    def _suggest_resume_scenario(
        self, pipeline: Pipeline, done_nodes: Iterable[Node], catalog: CatalogProtocol
    ) -> None:
        """Name the nodes to go on from, if that spares any work: if something that was done is on disk.

        An iteration is never such a node: its state lives in memory, so Kedro's search goes back to what makes it.
        Where a run can be resumed nothing is named: `resume=latest` spares more, and is what the hooks advise.
        """
        if catalog.get(RESUME) is not None:
            return
        kept = (name for node in done_nodes for name in node.outputs)
        if any(not getattr(catalog.get(name), "_EPHEMERAL", False) for name in kept):
            super()._suggest_resume_scenario(pipeline, done_nodes, catalog)


def _finished_work(pipeline: Pipeline, catalog: CatalogProtocol) -> tuple[FinishedWork | None, bool]:
    """Return the records of finished nodes, which lie beside the checkpoints, and whether this run goes on from one.

    Without the entry `resume_checkpoint` nothing is recorded.
    """
    from ppo_rlhf.datasets import ResumeCheckpointDataset  # heavy, too
    from ppo_rlhf.runner.finished import FinishedWork

    resume = catalog.get(RESUME)
    if not isinstance(resume, ResumeCheckpointDataset):
        return None, False
    return FinishedWork(resume.root.parent / FINISHED_WORK, pipeline, catalog), resume.requested is not None


def _nothing(node: Node) -> None:
    """Leave a node at that."""


def make_session_default() -> None:
    """Let sessions that are given no runner use LoopRunner, as in a notebook's `session.run()`.

    `KedroSession.run` says `runner or SequentialRunner()` and has no setting for it. A SESSION_CLASS of ours would do
    for `%load_ext kedro.ipython`, but not for the `KedroSession.create()` of Kedro's documentation, so the name that
    the sessions look up is replaced. LoopRunner is a SequentialRunner, and equal to it where there is no loop.
    """
    for module in (kedro.framework.session.session, kedro.framework.session.service_session):
        if not hasattr(module, "SequentialRunner"):
            raise RuntimeError(f"{module.__name__} no longer takes its default runner from the name SequentialRunner.")
        module.SequentialRunner = LoopRunner  # type: ignore[attr-defined]
