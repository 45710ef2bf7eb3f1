"""One run of a pipeline: what comes before the loop, its iterations, what comes after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline.node import Node
from kedro.runner.task import Task

from ppo_rlhf.runner.forecast import Forecast
from ppo_rlhf.runner.hook_calls import WatchedHooks, without_records
from ppo_rlhf.runner.plan import CARRY_IN, CARRY_OUT, METRICS, LoopPlan
from ppo_rlhf.runner.progress import Reporter, reporting
from ppo_rlhf.runner.shutdown import CHECKPOINT, LoopState, Shutdown
from ppo_rlhf.runner.signals import TerminationSignal, asking_before_stop, logging_from_handlers

NODE_LOGGERS = ("kedro.pipeline.node", "kedro.io.data_catalog")  # one INFO line a node, a load and a save


class Fold:
    """The three phases of a plan, on one catalog.

    Attributes:
        done: Nodes that will not run again.
    """

    def __init__(
        self,
        plan: LoopPlan,
        catalog: CatalogProtocol,
        is_async: bool,
        run_id: str | None,
        logger: logging.Logger,
        after_node: Callable[[Node], None],
    ) -> None:
        """Take what Kedro's tasks need, the runner's logger, and what is to be called when a node is done for good."""
        self.done: set[Node] = set()
        self._plan, self._catalog, self._is_async, self._run_id, self._logger = plan, catalog, is_async, run_id, logger
        self._after_node = after_node

    def run(self, hooks: Any) -> None:
        """Run all phases.

        Raises:
            TerminationSignal: SIGTERM or SIGINT came; the loop may first have finished and saved its iteration.
        """
        plan = self._plan
        self._run_once(plan.upstream, hooks)
        if plan.iteration:
            with _silenced(NODE_LOGGERS):
                self._loop(hooks)
            self.done.update(plan.iteration)
            self._release(plan.release_after_loop)
        self._run_once(plan.downstream, hooks)

    def _run_once(self, nodes: Iterable[Node], hooks: Any) -> None:
        total = len(self._plan.upstream) + len(self._plan.iteration) + len(self._plan.downstream)
        for node in nodes:
            started = time.perf_counter()
            self._run_node(node, hooks)
            self.done.add(node)
            self._after_node(node)
            seconds = time.perf_counter() - started
            self._logger.info("Completed node %d of %d: %s (%.1f s)", len(self.done), total, node.name, seconds)

    def _loop(self, hooks: Any) -> None:
        state: LoopState = self._catalog.load(CARRY_IN)
        if state.iteration > 0:
            self._complete_iteration(state, hooks if state.finished else without_records(hooks))
        if state.finished:
            self._logger.info("No iteration is left to do: %d of %d are done.", state.iteration, state.total_iterations)
            self._catalog.save(CARRY_OUT, state)
            return
        self._logger.info("Training: %d iterations.", state.total_iterations - state.iteration)
        with (
            logging_from_handlers(self._logger.info) as say,
            reporting(state.iteration, state.total_iterations) as reporter,
        ):
            shutdown = Shutdown(Forecast([node.name for node in self._plan.to_next_state]), say)
            with asking_before_stop(shutdown.may_finish):
                try:
                    self._iterate(state, hooks, shutdown, reporter)
                except TerminationSignal as stop:
                    if shutdown.save_first(stop):
                        self._save_checkpoint(shutdown, hooks)
                    raise

    def _complete_iteration(self, state: LoopState, hooks: Any) -> None:
        """Run what lies behind the making of this state, which comes from a checkpoint.

        The checkpoint was saved before these nodes ran; whether they did is not known, and they may run twice.
        """
        self._catalog.save(CARRY_OUT, state)
        for node in self._plan.tail:
            self._run_node(node, hooks)

    def _iterate(self, state: LoopState, hooks: Any, shutdown: Shutdown, reporter: Reporter) -> None:
        plan, watched = self._plan, WatchedHooks(hooks, shutdown)
        in_later_iterations = WatchedHooks(without_records(hooks), shutdown)
        while not state.finished:
            if CHECKPOINT in plan.to_next_state[-1].outputs:
                shutdown.iteration_starts(state)
            for node in plan.to_next_state:
                with shutdown.forecast.timing(node.name):
                    self._run_node(node, watched)
            signum = shutdown.state_is_made()
            state = self._catalog.load(CARRY_OUT)
            if signum is not None:
                if shutdown.unsaved is not None:  # the signal came when the state had been found not to be due
                    self._save_checkpoint(shutdown, watched)
                reporter.update(state.iteration, self._metrics())
                raise TerminationSignal(signum)
            for node in plan.behind_it:
                self._run_node(node, watched)
            self._catalog.save(CARRY_IN, state)
            reporter.update(state.iteration, self._metrics())
            watched = in_later_iterations

    def _save_checkpoint(self, shutdown: Shutdown, hooks: Any) -> None:
        saver = self._plan.to_next_state[-1]
        call: dict[str, Any] = {"dataset_name": CHECKPOINT, "data": shutdown.unsaved, "node": saver}
        hooks.hook.before_dataset_saved(**call)
        self._catalog.save(CHECKPOINT, call["data"])
        hooks.hook.after_dataset_saved(**call)

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
