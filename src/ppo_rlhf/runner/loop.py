"""LoopRunner: Kedro's sequential runner, except that PPO's iteration runs until the training state says it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import kedro.framework.session.service_session
import kedro.framework.session.session
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro.runner import SequentialRunner
from kedro.runner.task import Task
from pluggy import PluginManager

from ppo_rlhf.runner.plan import CARRY_IN, CARRY_OUT, ITERATION_TAG, METRICS, LoopPlan, plan_loop
from ppo_rlhf.runner.progress import reporting
from ppo_rlhf.runner.signals import RunInterruptedError, TerminationSignal, raising_on_signals

NODE_LOGGERS = ("kedro.pipeline.node", "kedro.io.data_catalog")  # one INFO line a node, a load and a save
RECORDS_EVERY_CALL = "kedro_viz"
RECORDED_CALLS = (
    "before_dataset_loaded",
    "after_dataset_loaded",
    "before_dataset_saved",
    "after_dataset_saved",
    "before_node_run",
    "after_node_run",
)


class LoopState(Protocol):
    """What the runner asks of the carried state."""

    iteration: int
    """Iterations completed."""
    total_iterations: int
    finished: bool


class LoopRunner(SequentialRunner):
    """Runs what the loop depends on once, the nodes tagged `iteration` until training is finished, then the rest once.

    After each iteration the dataset `next_training_state` becomes `training_state`. If the first state is finished
    already, it is handed on as it is. A pipeline without the closed loop runs as under Kedro's SequentialRunner.
    """

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
        plan = plan_loop(pipeline)
        if plan is None:
            if any(ITERATION_TAG in node.tags for node in pipeline.nodes):
                self._logger.info("These nodes are not the whole loop: the ones of its iteration run once.")
            super()._run(pipeline, catalog, hook_manager, run_id)
            return
        fold = _Fold(plan, catalog, self._is_async, run_id, self._logger)
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
        """
        kept = (name for node in done_nodes for name in node.outputs)
        if any(not getattr(catalog.get(name), "_EPHEMERAL", False) for name in kept):
            super()._suggest_resume_scenario(pipeline, done_nodes, catalog)


class _Fold:
    """One run of a pipeline with the closed loop."""

    def __init__(
        self, plan: LoopPlan, catalog: CatalogProtocol, is_async: bool, run_id: str | None, logger: logging.Logger
    ) -> None:
        self.done: set[Node] = set()
        """Nodes that will not run again."""
        self._plan, self._catalog, self._is_async, self._run_id, self._logger = plan, catalog, is_async, run_id, logger

    def run(self, hooks: Any) -> None:
        plan = self._plan
        self._run_once(plan.upstream, hooks)
        with _silenced(NODE_LOGGERS):
            self._iterate(hooks)
        self.done.update(plan.iteration)
        self._release(plan.release_after_loop)
        self._run_once(plan.downstream, hooks)

    def _run_once(self, nodes: Iterable[Node], hooks: Any) -> None:
        total = len(self._plan.upstream) + len(self._plan.iteration) + len(self._plan.downstream)
        for node in nodes:
            started = time.perf_counter()
            self._run_node(node, hooks)
            self.done.add(node)
            seconds = time.perf_counter() - started
            self._logger.info("Completed node %d of %d: %s (%.1f s)", len(self.done), total, node.name, seconds)

    def _iterate(self, hooks: Any) -> None:
        state: LoopState = self._catalog.load(CARRY_IN)
        if state.finished:
            self._logger.info("No iteration is left to do: %d of %d are done.", state.iteration, state.total_iterations)
            self._catalog.save(CARRY_OUT, state)
            return
        self._logger.info("Training: %d iterations.", state.total_iterations - state.iteration)
        with reporting(state.iteration, state.total_iterations) as reporter:
            while not state.finished:
                for node in self._plan.iteration:
                    self._run_node(node, hooks)
                state = self._catalog.load(CARRY_OUT)
                self._catalog.save(CARRY_IN, state)
                reporter.update(state.iteration, self._metrics())
                hooks = _without_records(hooks)

    def _run_node(self, node: Node, hooks: Any) -> None:
        Task(node, self._catalog, self._is_async, hooks, self._run_id).execute()
        self._release(self._plan.release_after_node.get(node.name, ()))

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            self._catalog.release(name)

    def _metrics(self) -> Mapping[str, float]:
        """Return what the last iteration measured, if it measures and keeps that in memory."""
        if not any(METRICS in node.outputs for node in self._plan.iteration):
            return {}
        return self._catalog.load(METRICS) if getattr(self._catalog.get(METRICS), "_EPHEMERAL", False) else {}


class _Hooks:
    """A hook manager for iterations after the first: one plugin no longer hears of every load, save and node.

    Kedro-Viz keeps a record of each such call until the run ends: some 60 an iteration, without bound. It still hears
    of errors.
    """

    def __init__(self, manager: PluginManager, left_out: list[object]) -> None:
        self._all = manager.hook
        self.hook = self
        for name in RECORDED_CALLS:
            setattr(self, name, manager.subset_hook_caller(name, left_out))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)


def _without_records(hooks: Any) -> Any:
    if not isinstance(hooks, PluginManager):
        return hooks
    left_out = [plugin for plugin in hooks.get_plugins() if type(plugin).__module__.startswith(RECORDS_EVERY_CALL)]
    return _Hooks(hooks, left_out)


@contextmanager
def _silenced(names: Iterable[str]) -> Iterator[None]:
    """Let these loggers through only from WARNING on, unless they were set to DEBUG."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        if logger.getEffectiveLevel() > logging.DEBUG:
            logger.setLevel(max(logging.WARNING, logger.level))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
