"""LoopRunner: Kedro's sequential runner, except that PPO's iteration is repeated until training is finished.

The loop is a part of the DAG with the tag `iteration`, and a carry: the `next_training_state` of one iteration is the
`training_state` of the next. Kedro's DAG knows nothing of the carry: a slice, a plot and Kedro-Viz see one iteration.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl
from kedro.framework.session import KedroSession
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro.runner import SequentialRunner
from kedro.runner.task import Task
from pluggy import PluginManager

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.epilogue import Epilogue
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import EVALUATION_METRICS, ITERATION_METRICS, NEXT_STATE, RESUME_CHECKPOINT, STATE
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.progress import reporting, say, silenced
from ppo_rlhf.runtime.signals import (
    RunInterruptedError,
    TerminationSignal,
    as_error,
    finishing_first,
    raising_on_signals,
    time_is_over,
)

if TYPE_CHECKING:
    from ppo_rlhf.datasets.run_catalog import RunCatalog
    from ppo_rlhf.ppo.callbacks import Callbacks
    from ppo_rlhf.ppo.state import TrainingState

ITERATION_TAG = "iteration"
PPO = "ppo"
NODE_LOGGERS = ("kedro.pipeline.node", "kedro.io.data_catalog")  # one INFO line a node, a load and a save


@dataclass(frozen=True)
class LoopPlan:
    """The nodes of each phase, in Kedro's topological order.

    A resumed run executes `rerun_on_resume` once: its checkpoint was saved before them.
    """

    upstream: tuple[Node, ...]  # run once before the loop, including those that have nothing to do with it
    until_update: tuple[Node, ...] = ()  # tagged, up to the one that makes the next state
    after_update: tuple[Node, ...] = ()  # tagged, and depend on the next state
    rerun_on_resume: tuple[Node, ...] = ()  # those of `after_update` that read only the next state
    downstream: tuple[Node, ...] = ()  # untagged, and depend on an iteration

    @property
    def iteration(self) -> tuple[Node, ...]:
        """The tagged nodes; none if the pipeline does not contain the closed loop."""
        return self.until_update + self.after_update


def plan_loop(pipeline: Pipeline) -> LoopPlan | None:
    """Return how to run a pipeline that contains the closed loop, or None if it does not.

    The loop is closed if an untagged node of this pipeline makes the first `training_state`, a tagged one loads it, and
    a tagged one makes `next_training_state`.

    Raises:
        ConfigError: An untagged node is between tagged ones, so no phase could run it.
    """
    tagged = [node for node in pipeline.nodes if ITERATION_TAG in node.tags]
    untagged = [node for node in pipeline.nodes if ITERATION_TAG not in node.tags]
    carry = next((node for node in tagged if NEXT_STATE in node.outputs), None)
    is_begun = any(STATE in node.outputs for node in untagged)
    if carry is None or not is_begun or not any(STATE in node.inputs for node in tagged):
        return None
    inside = pipeline.from_nodes(*(node.name for node in tagged)).nodes
    of_next_state = pipeline.from_nodes(carry.name).nodes
    after = [node for node in tagged if node in of_next_state and node is not carry]
    downstream = [node for node in untagged if node in inside]
    for node in tagged:
        if between := sorted(parent.name for parent in pipeline.node_dependencies[node] if parent in downstream):
            raise ConfigError(
                f"The loop's node {node.name} needs {', '.join(between)}, which depends on an iteration but has no tag "
                f"'{ITERATION_TAG}'. Tag it, or take {node.name} out of the loop."
            )
    of_iteration = {name for node in tagged for name in node.outputs} - {NEXT_STATE} | {STATE}
    return LoopPlan(
        upstream=tuple(node for node in untagged if node not in inside),
        until_update=(*(node for node in tagged if node is not carry and node not in after), carry),
        after_update=tuple(after),
        rerun_on_resume=tuple(node for node in after if of_iteration.isdisjoint(node.inputs)),
        downstream=tuple(downstream),
    )


class LoopRunner(SequentialRunner):
    """Runs the nodes before the loop once, the nodes tagged `iteration` until training is finished, then the rest once.

    A run that is resumed skips nodes before the loop whose outputs the same MLflow run has written, except those in the
    namespace `ppo`. A pipeline without the closed loop runs as under Kedro's SequentialRunner.

    The first SIGTERM or Ctrl-C in the loop lets the iteration finish and be saved; the second one, or the end of
    `shutdown_grace_s`, stops the run at once. Outside the loop the first one does.
    """

    def __init__(self, is_async: bool = False) -> None:
        """Take Kedro's option.

        Raises:
            ConfigError: Datasets are to be saved in threads. MLflow gives each thread a run of its own, and checkpoints
                are named by the run.
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
            RunInterruptedError: A signal came, or nobody reads the output; a TrainingError for other BaseExceptions.
        """
        try:
            with raising_on_signals(), ending_children():
                if only_missing_outputs:  # in their usual places
                    pipeline = self._filter_pipeline_for_missing_outputs(pipeline, catalog)
                own = _catalog_of_run(pipeline, catalog)
                made = super().run(_without_finished(pipeline, own), own, hook_manager, run_id)
                own.finish()
                return made
        except BaseException as stop:
            raise _first_error(stop)  # noqa: B904  # as_error sets the cause

    def _run(
        self,
        pipeline: Pipeline,
        catalog: Any,  # a RunCatalog, which Kedro's types do not know
        hook_manager: PluginManager | None = None,
        run_id: str | None = None,
    ) -> None:
        plan = plan_loop(pipeline)
        if plan is None:
            if any(ITERATION_TAG in node.tags for node in pipeline.nodes):
                say("These nodes are not the whole loop: the ones of its iteration run once.")
            plan = LoopPlan(upstream=tuple(pipeline.nodes))
        loads = Counter(name for node in pipeline.nodes for name in node.inputs)

        def execute(node: Node) -> None:
            own = copy(node)  # the pipeline's is run again
            if not inspect.isgeneratorfunction(node.func):  # Kedro asks the function whether it is one
                own.func = ending_children()(node.func)
            Task(own, catalog, self._is_async, hook_manager, run_id).execute()

        # it counts all stages of a run that reads it; for others Kedro leaves the group a mapping
        hours = catalog.load("params:ppo").max_time if "params:ppo" in pipeline.inputs() else None
        done = ""

        def run_once(nodes: Iterable[Node], first: int) -> None:
            nonlocal done
            for number, node in enumerate(nodes, first):
                stage = (node.namespace or "").split(".")[0]
                if done and stage != done:
                    _stop_if_over(hours, node.name)
                done = stage
                started = time.perf_counter()
                execute(node)
                self._release_datasets(node, catalog, loads, pipeline)
                seconds = time.perf_counter() - started
                say(f"Completed node {number} of {len(pipeline.nodes)}: {node.name} ({seconds:.1f} s)")

        run_once(plan.upstream, 1)
        if plan.iteration:
            with silenced(NODE_LOGGERS):
                _repeat(plan, catalog, execute)
            for node in plan.iteration:
                self._release_datasets(node, catalog, loads, pipeline)
        run_once(plan.downstream, 1 + len(plan.upstream) + len(plan.iteration))


class LoopSession(KedroSession):
    """Kedro's session, but with LoopRunner where no runner is given. Kedro has no setting for that."""

    def run(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Run as `KedroSession.run` does (the runner is its fourth argument); tell `on_session_error` of any error."""
        if len(args) < 4 and options.get("runner") is None:
            options["runner"] = LoopRunner()
        try:
            return super().run(*args, **options)
        except BaseException as stop:
            error = _first_error(stop)
            for hook in self._hook_manager.get_plugins():
                getattr(hook, "on_session_error", lambda error: None)(error)
            raise error  # noqa: B904  # as_error sets the cause

    def prepare(self, **options: Any) -> PreparedRun:
        """Return the run that `run` with the same options would start, with validated parameters; nothing is run."""

        class BeforeTheRun:
            """Ends a run before every other hook, as the hook that was registered last."""

            @hook_impl(tryfirst=True)
            def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: Any) -> None:
                raise PreparedRun(run_params, pipeline, catalog)

        self._hook_manager.register(BeforeTheRun())  # Kedro has neither a dry run nor a public hook manager
        try:
            self.run(**options)
        except PreparedRun as prepared:
            return prepared
        raise RuntimeError("Kedro did not call before_pipeline_run")


class PreparedRun(Exception):  # noqa: N818  # no error: the way out of Kedro's session
    """A run before its first hook and node: what Kedro gives `before_pipeline_run`."""

    def __init__(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        super().__init__()
        self.run_params, self.pipeline, self.catalog = run_params, pipeline, catalog


def _first_error(stop: BaseException) -> Exception:
    error = as_error(stop)
    return processes.first_error(error, was_stopped=isinstance(error, RunInterruptedError))


def _catalog_of_run(pipeline: Pipeline, catalog: CatalogProtocol) -> Any:
    """Return the catalog to run with; Kedro's types do not know it."""
    from ppo_rlhf.datasets import ResumeCheckpointDataset  # heavy: not for commands that run nothing
    from ppo_rlhf.datasets.checkpoints import run_directory
    from ppo_rlhf.datasets.run_catalog import RunCatalog, StageOutputs

    plan, resume = plan_loop(pipeline), catalog.get(RESUME_CHECKPOINT)
    if plan is None or not isinstance(resume, ResumeCheckpointDataset):
        return RunCatalog(catalog, pipeline)
    reusable = {name for node in plan.upstream if (node.namespace or "").split(".")[0] != PPO for name in node.outputs}
    outputs = StageOutputs(run_directory(resume.root), reusable)
    return RunCatalog(catalog, pipeline, outputs, resume.requested is not None)


def _without_finished(pipeline: Pipeline, catalog: RunCatalog) -> Pipeline:
    """Return the nodes to run; a node is skipped if each output is written before, or read only by skipped nodes."""
    skipped: set[Node] = set()
    for node in reversed(pipeline.nodes):
        readers = {name: {each for each in pipeline.nodes if name in each.inputs} for name in node.outputs}
        if node.outputs and all(name in catalog.written or (of and of <= skipped) for name, of in readers.items()):
            skipped.add(node)
    if not skipped:
        return pipeline
    say(f"Skipping {len(skipped)} nodes: this MLflow run has written their outputs.")
    return pipeline.filter(node_names=[node.name for node in pipeline.nodes if node not in skipped])


def _stop_if_over(hours: float | None, next_node: str) -> None:
    if hours is None:
        return
    for why in processes.from_all(time_is_over(hours)):
        if why:
            say(f"{why} are over: the run stops before {next_node}. What was written is kept.")
            raise TerminationSignal(signal.SIGTERM, why)


def _repeat(plan: LoopPlan, catalog: RunCatalog, execute: Callable[[Node], None]) -> None:
    """Run iterations until the state is finished, or until a signal came to any process and the last one is saved."""
    from ppo_rlhf.ppo.callbacks import Callbacks, own_callbacks, reporting_callbacks  # heavy

    state: TrainingState = catalog.load(STATE)
    own, reporters = own_callbacks(state.config), reporting_callbacks(state.config)
    all_callbacks = Callbacks(state, own, reporters, catalog.run_folder, catalog.save_checkpoint)
    with (
        contextlib.closing(all_callbacks) as callbacks,
        state.captures.during(),
        ending_children(),  # a forked process would close its parent's
    ):
        _iterate(plan, catalog, execute, state, callbacks)


def _iterate(
    plan: LoopPlan, catalog: RunCatalog, execute: Callable[[Node], None], state: TrainingState, callbacks: Callbacks
) -> None:
    is_complete = state.finished
    is_resumed = state.iteration > 0 or is_complete
    if not is_complete:
        say(f"Training: {state.total_iterations - state.iteration} iterations.")
    if is_resumed:
        catalog.save(NEXT_STATE, state)
    epilogue = _NodesAfterUpdate(plan, catalog, execute, state, callbacks)
    epilogue.begin(is_resumed=is_resumed)
    if is_complete:
        say(f"Training is already complete ({state.iteration} of {state.total_iterations} iterations).")
        return
    epilogue.nodes = plan.after_update
    has_metrics = any(ITERATION_METRICS in node.outputs for node in plan.iteration)
    with (
        reporting(state.iteration, state.total_iterations) as show,
        finishing_first(state.config.shutdown_grace_s, epilogue.ask, say),
    ):
        epilogue.show = show
        while not state.finished:
            epilogue.iteration = state.iteration + 1
            for node in plan.until_update:
                execute(node)
            state = epilogue.state = catalog.load(NEXT_STATE)
            epilogue.after_iteration(catalog.load(ITERATION_METRICS) if has_metrics else {})
            catalog.save(STATE, state)
    callbacks.end()


class _NodesAfterUpdate(Epilogue):
    """What follows an iteration of the pipeline: its last nodes evaluate, and a signal is finished first.

    The checkpoint is an output of the update's node, so it is saved before, if it is due.
    """

    def __init__(
        self,
        plan: LoopPlan,
        catalog: RunCatalog,
        execute: Callable[[Node], None],
        state: TrainingState,
        callbacks: Callbacks,
    ) -> None:
        super().__init__(state, callbacks, catalog.save_checkpoint)
        self._catalog, self._execute = catalog, execute
        self.nodes = plan.rerun_on_resume  # until the first iteration
        self.iteration = state.iteration + 1  # the one at hand
        self._signum: int | None = None
        evaluates = any(EVALUATION_METRICS in node.outputs for node in plan.after_update)
        self._is_told = evaluates and not callbacks.is_empty

    def save_if_due(self) -> bool:
        return self._catalog.is_checkpoint_saved

    def evaluate(self) -> Mapping[str, Any] | None:
        for node in self.nodes:
            self._execute(node)
        rows = self._catalog.load(EVALUATION_METRICS) if self._is_told else None
        return rows[-1] if rows and isinstance(rows, list) else rows

    def asked_by(self) -> int | None:
        return self._signum

    def ask(self, signum: int) -> str:
        """Ask for the end of the run and return the line that says so; called in the signal handler."""
        self._signum = signum
        self.state.stop_requested = True
        now = f"{signal.Signals(signum).name}: finishing iteration {self.iteration} and saving it, then stopping"
        return f"{now}; a second signal stops at once."
