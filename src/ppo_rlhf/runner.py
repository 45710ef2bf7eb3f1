"""LoopRunner: Kedro's sequential runner, except that PPO's iteration is repeated until training is finished.

The loop consists of the nodes with the tag `iteration` and of a carry: the `next_training_state` of one iteration is
the `training_state` of the next. The carry from one iteration to the next is not in Kedro's DAG, so a slice, a plot and
Kedro-Viz show one iteration.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.session import KedroSession
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro.runner import SequentialRunner
from kedro.runner.task import Task
from pluggy import PluginManager

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.run_control import RunControl
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.launcher import ending_together
from ppo_rlhf.runtime.names import (
    EVALUATION_METRICS,
    ITERATION_METRICS,
    NEXT_STATE,
    RESUME_CHECKPOINT,
    STATE,
)
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.progress_display import reporting, say, silenced
from ppo_rlhf.runtime.signals import RunInterruptedError, as_error, finishing_first, raising_on_signals, time_is_over
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.datasets.run_catalog import RunCatalog
    from ppo_rlhf.evaluation.policy import EvaluationConfig
    from ppo_rlhf.ppo.callbacks import Callbacks
    from ppo_rlhf.ppo.training_state import TrainingState
    from ppo_rlhf.rewards.config import RewardConfig

ITERATION_TAG = "iteration"
REWARD, EVALUATION = "params:reward", "params:evaluation"
PPO = "ppo"
# Kedro's loggers that log an INFO line for each node, each load and each save
NODE_LOGGERS = ("kedro.pipeline.node", "kedro.io.data_catalog")


@dataclass(frozen=True)
class LoopPlan:
    """The nodes of each phase, in Kedro's topological order.

    A resumed run executes `rerun_on_resume` once, because the run's checkpoint was saved before the nodes in
    `rerun_on_resume` ran.
    """

    # Nodes that run once, before the training loop: untagged nodes that do not depend on an iteration
    upstream: tuple[Node, ...]
    until_update: tuple[Node, ...] = ()  # nodes of each iteration, up to the node that makes the next training state
    after_update: tuple[Node, ...] = ()  # nodes of each iteration that depend on the next training state
    # Nodes of `after_update` that read no other output of the iteration, so that a resumed run can run them again
    rerun_on_resume: tuple[Node, ...] = ()
    # Nodes that run once, after the training loop: untagged nodes that depend on an iteration
    downstream: tuple[Node, ...] = ()

    @property
    def iteration(self) -> tuple[Node, ...]:
        """The nodes with the tag `iteration`; empty if the pipeline does not contain the closed loop."""
        return self.until_update + self.after_update


def plan_loop(pipeline: Pipeline) -> LoopPlan | None:
    """Return the plan of a pipeline that contains PPO's closed loop; None for any other pipeline.

    PPO's loop is closed if a node without the tag `iteration` makes the first `training_state`, a node with the tag
    loads the state, and a node with the tag makes `next_training_state`.

    Raises:
        ConfigError: A node without the tag `iteration` depends on a node with the tag, and another node with the tag
            depends on the node without the tag.
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
                f"'{ITERATION_TAG}'. Tag {', '.join(between)}, or take {node.name} out of the loop."
            )
    iteration_data = {name for node in tagged for name in node.outputs} - {NEXT_STATE} | {STATE}
    return LoopPlan(
        upstream=tuple(node for node in untagged if node not in inside),
        until_update=(*(node for node in tagged if node is not carry and node not in after), carry),
        after_update=tuple(after),
        rerun_on_resume=tuple(node for node in after if iteration_data.isdisjoint(node.inputs)),
        downstream=tuple(downstream),
    )


class LoopRunner(SequentialRunner):
    """Runs the nodes before the loop once, the nodes tagged `iteration` until training is finished, then the rest once.

    A resumed run skips nodes before the loop whose outputs the same MLflow run has written, except nodes in the
    namespace `ppo`. A pipeline without the closed loop runs as under Kedro's SequentialRunner.

    After the first SIGTERM or Ctrl-C in the loop, the run stops with its last complete iteration saved; an update that
    runs is finished first. A second signal, or the end of `shutdown_grace_s`, stops the run at once. Outside the loop
    the first signal stops the run at once.
    """

    def __init__(self, is_async: bool = False) -> None:
        """Create the runner. `is_async` is Kedro's option `--async`.

        Raises:
            ConfigError: `is_async` is True, so that datasets would be saved in threads. MLflow gives each thread its
            own run, and checkpoints are named by the MLflow run.
        """
        if is_async:
            raise ConfigError("--async: LoopRunner saves a node's outputs before the next node runs; drop --async.")
        super().__init__()

    def __str__(self) -> str:
        """Name both classes: Kedro-Viz records the status of a run only if the text names Kedro's own runner."""
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
            RunInterruptedError: A signal came, or the reader of the output closed the pipe.
            TrainingError: Another BaseException that is no Exception was raised.
        """
        try:
            with raising_on_signals(), ending_together(), ending_children():
                # For --only-missing-outputs, look for the outputs in their usual paths, not in the run's own folder
                if only_missing_outputs:
                    pipeline = self._filter_pipeline_for_missing_outputs(pipeline, catalog)
                run_catalog = _catalog_of_run(pipeline, catalog)
                outputs = super().run(_without_finished(pipeline, run_catalog), run_catalog, hook_manager, run_id)
                run_catalog.finish()
                return outputs
        except BaseException as stop:
            raise _first_error(stop)  # noqa: B904  # `as_error` has set the cause

    def _run(
        self,
        pipeline: Pipeline,
        catalog: Any,  # a RunCatalog: Kedro's annotations do not know this class, so the type is Any
        hook_manager: PluginManager | None = None,
        run_id: str | None = None,
    ) -> None:
        plan = plan_loop(pipeline)
        if plan is None:
            if any(ITERATION_TAG in node.tags for node in pipeline.nodes):
                say("The nodes of this run are not the whole loop, so nodes of the iteration run only once.")
            plan = LoopPlan(upstream=tuple(pipeline.nodes))
        loads = Counter(name for node in pipeline.nodes for name in node.inputs)

        def execute(node: Node) -> None:
            node_copy = copy(node)  # change only a copy of the node, because the pipeline runs the node again
            # Kedro recognises a generator function by inspection, and would not recognise a wrapped one
            if not inspect.isgeneratorfunction(node.func):
                node_copy.func = ending_children()(node.func)
            Task(node_copy, catalog, self._is_async, hook_manager, run_id).execute()

        # `ppo.max_time` limits all stages of a run that reads the parameter group `ppo`.
        # Kedro makes the parameter group `ppo` a PPOConfig only if a node reads the group.
        hours = catalog.load("params:ppo").max_time if "params:ppo" in pipeline.inputs() else None
        last_stage = ""

        def run_once(nodes: Iterable[Node], first: int) -> None:
            nonlocal last_stage
            for number, node in enumerate(nodes, first):
                stage = (node.namespace or "").split(".")[0]
                if last_stage and stage != last_stage:
                    _stop_if_over(hours, node.name)
                last_stage = stage
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
    """Kedro's session with LoopRunner as the default runner. Kedro has no setting for the default runner."""

    def run(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Run as `KedroSession.run` does, whose fourth argument is the runner.

        Every error, also outside the nodes, is passed to the method `on_session_error` of the hooks that have one.
        """
        if len(args) < 4 and options.get("runner") is None:
            options["runner"] = LoopRunner()
        try:
            return super().run(*args, **options)
        except BaseException as stop:
            error = _first_error(stop)
            for hook in self._hook_manager.get_plugins():
                getattr(hook, "on_session_error", lambda error: None)(error)
            raise error  # noqa: B904  # `as_error` has set the cause


def _first_error(stop: BaseException) -> Exception:
    error = as_error(stop)
    return processes.first_error(error, was_stopped=isinstance(error, RunInterruptedError))


def _catalog_of_run(pipeline: Pipeline, catalog: CatalogProtocol) -> Any:
    """Return the RunCatalog of a run; the annotation is Any, because Kedro's annotations do not allow a RunCatalog."""
    from ppo_rlhf.datasets import ResumeCheckpointDataset
    from ppo_rlhf.datasets.checkpoints import run_directory
    from ppo_rlhf.datasets.run_catalog import RunCatalog, StageOutputs

    plan, resume = plan_loop(pipeline), catalog.get(RESUME_CHECKPOINT)
    if plan is None or not isinstance(resume, ResumeCheckpointDataset):
        return RunCatalog(catalog, pipeline)
    reusable = {name for node in plan.upstream if (node.namespace or "").split(".")[0] != PPO for name in node.outputs}
    outputs = StageOutputs(run_directory(resume.root), reusable)
    resumed = resume.requested is not None
    return RunCatalog(catalog, pipeline, outputs, resumed=resumed, checkpoint=resume.load() if resumed else None)


def _without_finished(pipeline: Pipeline, catalog: RunCatalog) -> Pipeline:
    """Return the pipeline without finished nodes.

    A node is skipped if each of its outputs was written before, or is read only by skipped nodes.
    """
    skipped: set[Node] = set()
    for node in reversed(pipeline.nodes):
        readers = {name: {each for each in pipeline.nodes if name in each.inputs} for name in node.outputs}
        if node.outputs and all(
            name in catalog.written or (nodes and nodes <= skipped) for name, nodes in readers.items()
        ):
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
    """Run iterations until training is finished, or until a process got a signal and the last iteration is saved."""
    from ppo_rlhf.checkpoints.store import check_kept_best, load_best
    from ppo_rlhf.ppo.callbacks import Callbacks, own_callbacks, reporting_callbacks

    state: TrainingState = catalog.load(STATE)
    own, reporters = own_callbacks(state.config), reporting_callbacks(state.config)
    best_in = catalog.run_folder if _stops_at_exploitation(plan, catalog) else None
    if best_in is not None and state.progress.iteration:
        check_kept_best(state.progress)
    parts = state.learner, state.sampler, state.progress
    checkpointer = catalog.checkpointer_of(state)
    all_callbacks = Callbacks(*parts, own, reporters, catalog.run_folder, checkpointer)
    with (
        contextlib.closing(all_callbacks) as callbacks,
        # A forked child process must end inside this block, otherwise the child would close the callbacks of its parent
        ending_children(),
    ):
        _iterate(plan, catalog, execute, state, callbacks, best_in)
        if best_in is not None:
            best = catalog.load(NEXT_STATE)
            load_best(best_in, best.learner, best.progress)
        callbacks.end()


def _stops_at_exploitation(plan: LoopPlan, catalog: RunCatalog) -> bool:
    """Return whether the loop evaluates with `evaluation.on_exploitation=stop`."""
    if not _evaluates(plan) or EVALUATION not in catalog:
        return False
    return getattr(catalog.load(EVALUATION), "on_exploitation", "off") == "stop"


def _evaluates(plan: LoopPlan) -> bool:
    return any(EVALUATION_METRICS in node.outputs for node in plan.after_update)


def _iterate(
    plan: LoopPlan,
    catalog: RunCatalog,
    execute: Callable[[Node], None],
    state: TrainingState,
    callbacks: Callbacks,
    best_in: Path | None,
) -> None:
    from ppo_rlhf.checkpoints.store import check_best

    is_complete = state.progress.finished
    is_resumed = state.progress.iteration > 0 or is_complete
    if not is_complete:
        say(f"Training: {state.progress.total_iterations - state.progress.iteration} iterations.")
    if is_resumed:
        catalog.save(NEXT_STATE, state)
    control = _NodesAfterUpdate(plan, catalog, execute, state, callbacks, keeps_best=best_in is not None)
    control.begin(is_resumed=is_resumed)
    if best_in is not None:
        check_best(best_in, state.progress)
    if is_complete:
        done = f"{state.progress.iteration} of {state.progress.total_iterations} iterations"
        if state.progress.requests.restore_best:
            say(f"evaluation.on_exploitation stopped this run ({done}): its best policy is exported again.")
        else:
            say(f"Training is already complete ({done}).")
        return
    control.nodes = plan.after_update
    reward, evaluation = (catalog.load(name) if name in catalog else None for name in (REWARD, EVALUATION))
    ask = partial(
        control.ask,
        asked_again=_asked_again(state.config, reward),
        by_evaluation=_asked_by_evaluation(state.config, reward, evaluation),
    )
    has_metrics = any(ITERATION_METRICS in node.outputs for node in plan.iteration)
    with (
        reporting(state.progress.iteration, state.progress.total_iterations) as show,
        finishing_first(state.config.shutdown_grace_s, ask, say),
    ):
        control.show = show
        while not state.progress.finished:
            with control.iteration():
                for node in plan.until_update:
                    execute(node)
            state = catalog.load(NEXT_STATE)
            metrics = catalog.load(ITERATION_METRICS) if has_metrics else {}
            control.say_if_long(metrics)
            control.after_iteration(metrics)
            catalog.save(STATE, state)


def _asked_again(config: PPOConfig, reward: RewardConfig | None) -> list[str]:
    """Return what is asked outside of this process again if an iteration is repeated."""
    environment = [] if config.environment is None else [f"the environment {config.environment}"]
    return [*_sampler(config), *environment, *_language_models(reward, None)]


def _asked_by_evaluation(
    config: PPOConfig, reward: RewardConfig | None, evaluation: EvaluationConfig | None
) -> list[str]:
    """Return what is asked outside of this process again if an evaluation is repeated."""
    return [*_sampler(config), *_language_models(reward, evaluation)]


def _sampler(config: PPOConfig) -> list[str]:
    return ["vLLM"] if config.rollout_engine == "vllm" else []


def _language_models(reward: RewardConfig | None, evaluation: EvaluationConfig | None) -> list[str]:
    """Return the language models that score and judge, in words. Answers in a cache are not asked for again."""
    terms = [] if reward is None else [term.llm for term in reward.components]
    judges = [getattr(evaluation, "judge", None), *getattr(evaluation, "judges", {}).values()]
    models = [each for each in (*terms, *judges) if each is not None and not isinstance(each, str)]
    words = (f"the language model {m.model}{' (answers in its cache are kept)' if m.cache else ''}" for m in models)
    return list(dict.fromkeys(words))


class _NodesAfterUpdate(RunControl):
    """The control of an iteration of the pipeline: runs the nodes after the update, and stops after a signal."""

    def __init__(
        self,
        plan: LoopPlan,
        catalog: RunCatalog,
        execute: Callable[[Node], None],
        state: TrainingState,
        callbacks: Callbacks,
        *,
        keeps_best: bool,
    ) -> None:
        super().__init__(state.progress, callbacks, catalog.checkpointer_of(state), keeps_best=keeps_best)
        self._catalog, self._execute = catalog, execute
        # `_iterate` replaces these nodes by `after_update` before the first iteration
        self.nodes = plan.rerun_on_resume
        self._loads_evaluation = _evaluates(plan) and (keeps_best or not callbacks.is_empty)

    def evaluate(self) -> Mapping[str, Any] | None:
        for node in self.nodes:
            self._execute(node)
        rows = self._catalog.load(EVALUATION_METRICS) if self._loads_evaluation else None
        return rows[-1] if rows and isinstance(rows, list) else rows
