"""LoopRunner: toy loops through the real runner, catalog and hook manager."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.framework.session import KedroSession
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from kedro.runner import SequentialRunner

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runner import ITERATION_TAG, LoopRunner, LoopSession, plan_loop
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.runtime.progress_display import reporting, silenced
from tests.bare_state import bare_state


class Payload:
    """Something that a weak reference can follow."""


class Journal:
    """Counts calls and lets a node fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.alive: list[weakref.ref[Payload]] = []
        self.fail_at: tuple[str, int] | None = None

    def note(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at == (name, self.calls.count(name)):
            raise RuntimeError(f"{name} fails")

    def payload(self) -> Payload:
        made = Payload()
        self.alive.append(weakref.ref(made))
        return made

    def living(self) -> int:
        return sum(reference() is not None for reference in self.alive)


def loop_pipeline(journal: Journal) -> Pipeline:
    """configure → initialise → (generate → score → optimise → evaluate)* → export → report; aside stands alone."""

    def configure(limit: int) -> int:
        journal.note("configure")
        return limit

    def load_reference() -> Payload:
        journal.note("load_reference")
        return journal.payload()

    def initialise(config: int, reference: Payload) -> TrainingState:
        journal.note("initialise")
        return bare_state(config)

    def generate(state: TrainingState, reference: Payload) -> Payload:
        journal.note("generate")
        return journal.payload()

    def score(rollouts: Payload, state: TrainingState) -> Payload:
        journal.note("score")
        return journal.payload()

    def optimise(state: TrainingState, scores: Payload, rollouts: Payload) -> tuple[TrainingState, dict[str, float]]:
        journal.note("optimise")
        state.progress.iteration += 1
        return state, {"objective/scores": float(state.progress.iteration)}

    def evaluate(state: TrainingState, reference: Payload) -> float:
        journal.note("evaluate")
        return state.progress.iteration / 10

    def export(state: TrainingState, reference: Payload) -> str:
        journal.note("export")
        return f"exported after {state.progress.iteration}"

    def report(exported: str) -> str:
        journal.note("report")
        return f"report: {exported}"

    def aside(limit: int) -> int:
        journal.note("aside")
        return -limit

    iteration = Pipeline(
        [
            Node(generate, ["training_state", "reference"], "rollouts", name="generate"),
            Node(score, ["rollouts", "training_state"], "scores", name="score"),
            Node(
                optimise,
                ["training_state", "scores", "rollouts"],
                ["next_training_state", "ppo_metrics"],
                name="optimise",
            ),
            Node(evaluate, ["next_training_state", "reference"], "evaluation", name="evaluate"),
        ],
        tags=ITERATION_TAG,
    )
    once = Pipeline(
        [
            Node(configure, "params:iterations", "config", name="configure"),
            Node(load_reference, None, "reference", name="load_reference"),
            Node(initialise, ["config", "reference"], "training_state", name="initialise"),
            Node(export, ["next_training_state", "reference"], "exported", name="export"),
            Node(report, "exported", "page", name="report"),
            Node(aside, "params:iterations", "negated", name="aside"),
        ]
    )
    return Pipeline([*once.nodes, *iteration.nodes], namespace="toy", prefix_datasets_with_namespace=False)


def catalog_for(pipeline: Pipeline, iterations: int = 3) -> DataCatalog:
    names = pipeline.datasets() - {"params:iterations"}
    datasets = {name: MemoryDataset(copy_mode="assign") for name in names}
    return DataCatalog({"params:iterations": MemoryDataset(iterations), **datasets})


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_nodes_before_the_loop_and_after_it_run_once_and_those_in_it_until_the_state_is_finished(journal):
    pipeline = loop_pipeline(journal)
    outputs = LoopRunner().run(pipeline, catalog_for(pipeline, iterations=3))
    before, inside, after = journal.calls[:4], journal.calls[4:16], journal.calls[16:]
    assert sorted(before) == ["aside", "configure", "initialise", "load_reference"]
    assert inside == ["generate", "score", "optimise", "evaluate"] * 3
    assert after == ["export", "report"]
    assert outputs["page"].load() == "report: exported after 3"
    assert outputs["evaluation"].load() == 0.3


def resumed_at(pipeline: Pipeline, iteration: int) -> Pipeline:
    """The pipeline, whose first training state has `done` iterations."""

    def resume(config: int, reference: Payload) -> TrainingState:
        return bare_state(config, iteration)

    initialise = next(node for node in pipeline.nodes if node.name == "toy.initialise")
    return Pipeline([node for node in pipeline.nodes if node is not initialise] + [initialise._copy(func=resume)])


@pytest.mark.parametrize(
    ("done", "calls"),
    [
        (0, ["generate", "score", "optimise", "evaluate"] * 3),
        (2, ["evaluate", "generate", "score", "optimise", "evaluate"]),
        (3, ["evaluate"]),
    ],
    ids=["fresh", "resumed", "resumed when finished"],
)
def test_a_resumed_run_first_evaluates_its_checkpoint_which_was_saved_before_that(journal, caplog, done, calls):
    pipeline = resumed_at(loop_pipeline(journal), done)
    with caplog.at_level(logging.INFO):
        outputs = LoopRunner().run(pipeline, catalog_for(pipeline, iterations=3))
    in_the_loop = {"generate", "score", "optimise", "evaluate"}
    assert [name for name in journal.calls if name in in_the_loop] == calls
    assert outputs["evaluation"].load() == 0.3
    assert outputs["page"].load() == "report: exported after 3"
    lines = [message.split(",")[0] for message in caplog.messages if message.startswith("Iteration")]
    assert lines == [f"Iteration {i}/3" for i in range(done + 1, 4)]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (lambda p: p.filter(from_nodes=["toy.score"]), ["score", "optimise", "evaluate", "export", "report"]),
        (lambda p: p.filter(to_nodes=["toy.generate"]), ["configure", "load_reference", "initialise", "generate"]),
        (lambda p: p.filter(node_names=["toy.score", "toy.optimise"]), ["score", "optimise"]),
        (
            lambda p: p.filter(from_nodes=["toy.generate"]),
            ["generate", "score", "optimise", "evaluate", "export", "report"],
        ),
    ],
    ids=["from the middle", "up to the first node", "two nodes", "without the first state"],
)
def test_a_slice_that_cuts_the_loop_open_runs_its_nodes_once(
    journal: Journal, cut: Callable[[Pipeline], Pipeline], expected: list[str], caplog: pytest.LogCaptureFixture
):
    pipeline = cut(loop_pipeline(journal))
    catalog = catalog_for(pipeline)
    given = {"training_state": bare_state(3), "next_training_state": bare_state(3)}
    for name in pipeline.inputs() - {"params:iterations"}:
        catalog[name] = MemoryDataset(given.get(name, Payload()), copy_mode="assign")
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog)
    assert sorted(journal.calls) == sorted(expected)
    assert re.search("not the whole loop.* once", caplog.text)


def test_an_untagged_node_between_tagged_ones_is_refused(journal):
    pipeline = loop_pipeline(journal)
    score = next(node for node in pipeline.nodes if node.name == "toy.score")
    untagged = Pipeline([node for node in pipeline.nodes if node is not score] + [score._copy(tags=set())])
    with pytest.raises(ConfigError, match=r"toy\.optimise .*toy\.score.* 'iteration'"):
        plan_loop(untagged)


def test_node_lines_are_silent_in_the_loop_but_warnings_of_nodes_are_not(journal, caplog):
    pipeline = loop_pipeline(journal)
    caplog.set_level(logging.INFO, logger="kedro.pipeline.node")  # as a user may set it in conf/logging.yml
    before = {name: logging.getLogger(name).level for name in ("kedro.pipeline.node", "kedro.io.data_catalog")}

    class Watcher:
        @hook_impl
        def before_node_run(self, node: Node) -> None:
            logging.getLogger("kedro.pipeline.node").warning("a warning from %s", node.name)

    manager = _create_hook_manager()
    manager.register(Watcher())
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog_for(pipeline), hook_manager=manager)
    running = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Running node")]
    assert len(running) == 6  # the nodes outside the loop
    assert caplog.text.count("a warning from toy.generate") == 3
    assert {name: logging.getLogger(name).level for name in before} == before


@pytest.mark.parametrize(
    ("level", "within"),
    [(logging.DEBUG, logging.DEBUG), (logging.INFO, logging.WARNING), (logging.ERROR, logging.ERROR)],
)
def test_loggers_that_were_set_to_debug_or_above_warnings_keep_their_level_in_the_loop(level: int, within: int):
    logger = logging.getLogger("tests.silenced")
    logger.setLevel(level)
    with silenced([logger.name]):
        assert logger.level == within
    assert logger.level == level


def test_each_iteration_is_one_line_where_there_is_no_terminal(journal, caplog):
    pipeline = loop_pipeline(journal)
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog_for(pipeline))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Iteration")]
    assert [line.split(",")[0] for line in lines] == ["Iteration 1/3", "Iteration 2/3", "Iteration 3/3"]
    assert "score 3.000" in lines[-1]
    assert "left" not in lines[-1]


def test_the_data_of_an_iteration_are_overwritten_in_the_next_and_released_after_the_loop(journal):
    pipeline = loop_pipeline(journal)
    living: dict[str, list[int]] = {}

    class Watcher:
        @hook_impl
        def before_node_run(self, node: Node) -> None:
            living.setdefault(node.name.removeprefix("toy."), []).append(journal.living())

    manager = _create_hook_manager()
    manager.register(Watcher())
    LoopRunner().run(pipeline, catalog_for(pipeline, iterations=9), hook_manager=manager)
    # the reference, and from the second iteration on the rollouts and scores of the one before
    assert living["generate"] == [1] + [3] * 8
    assert living["export"] == [1]
    assert journal.living() == 0


class Noted:
    """Writes the process of each call into a file, which forked ones share."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, *_: object, **__: object) -> None:
        with self.file.open("a") as opened:
            opened.write(f"{os.getpid()}\n")

    @hook_impl
    def after_node_run(self) -> None:
        self.note()

    @hook_impl
    def on_node_error(self) -> None:
        self.note()

    @hook_impl
    def after_dataset_saved(self) -> None:
        self.note()

    def processes(self) -> list[int]:
        return [int(line) for line in self.file.read_text().split()]


def forked(end: BaseException | None) -> int:
    """Return the exit code of a forked process, which raises `end` or returns 99."""
    child = os.fork()
    if child == 0:
        if end is not None:
            raise end
        return 99
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("end", "code"), [(SystemExit(3), 3), (ValueError("no"), 1), (None, 1)])
def test_a_process_that_a_node_forks_does_not_go_on_with_the_run(tmp_path: Path, end: BaseException | None, code: int):
    catalog = DataCatalog({"end": MemoryDataset(end, copy_mode="assign"), "code": MemoryDataset()})
    parent, noted = os.getpid(), Noted(tmp_path / "noted")
    manager = _create_hook_manager()
    manager.register(noted)
    try:
        LoopRunner().run(Pipeline([Node(forked, "end", "code")]), catalog, manager)
    finally:
        if os.getpid() != parent:
            os._exit(99)  # it would go on with the tests
    assert catalog.load("code") == code
    assert noted.processes() == [parent, parent]  # that it ran, and was saved


def test_a_process_that_is_forked_in_the_loop_leaves_the_callbacks_alone(journal, tmp_path: Path, monkeypatch):
    noted, codes, parent = Noted(tmp_path / "noted"), [], os.getpid()
    monkeypatch.setattr(Callbacks, "close", noted.note)

    class Forking(MemoryDataset):
        def load(self) -> Payload:
            codes.append(forked(ValueError("no")))
            return super().load()

    pipeline = loop_pipeline(journal)
    catalog = catalog_for(pipeline, iterations=1)
    catalog["rollouts"] = Forking(copy_mode="assign")
    try:
        LoopRunner().run(pipeline, catalog)
    finally:
        if os.getpid() != parent:
            os._exit(99)  # it would go on with the tests
    assert set(codes) == {1}
    assert noted.processes() == [parent]


def test_a_session_without_a_runner_gets_the_loop_runner(monkeypatch):
    given = []
    monkeypatch.setattr(KedroSession, "run", lambda self, *args, **options: given.append((args, options)) or {})
    session, other = LoopSession.__new__(LoopSession), SequentialRunner()
    session.run(["ppo"])
    session.run(runner=other)
    session.run(None, ["ppo"], None, other)
    assert isinstance(given[0][1]["runner"], LoopRunner)
    assert given[1:] == [((), {"runner": other}), ((None, ["ppo"], None, other), {})]


def test_many_iterations_are_thinned_to_a_line_every_two_seconds_and_the_last_is_always_shown(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), reporting(0, 100) as report:
        for iteration in range(1, 101):
            now[0] += 0.5
            report(iteration, {"objective/kl": 1.0})
    shown = [int(message.split("/")[0].split()[1]) for message in caplog.messages]
    assert shown == [*range(1, 100, 4), 100]
    assert "0:00:48 left" in caplog.messages[1]  # 95 iterations of half a second
