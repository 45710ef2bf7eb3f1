"""LoopRunner: toy loops through the real runner, catalog and hook manager."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from kedro.runner import SequentialRunner
from kedro_datasets.json import JSONDataset

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.runner import (
    ITERATION_TAG,
    LoopRunner,
    plan_loop,
)


@dataclass
class CountingState:
    """A training state that is changed in place, as PPO's is."""

    total_iterations: int
    iteration: int = 0
    stopping: bool = False
    shutdown_grace_s: float = 25.0

    @property
    def finished(self) -> bool:
        return self.iteration >= self.total_iterations


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

    def initialise(config: int, reference: Payload) -> CountingState:
        journal.note("initialise")
        return CountingState(config)

    def generate(state: CountingState, reference: Payload) -> Payload:
        journal.note("generate")
        return journal.payload()

    def score(rollouts: Payload, state: CountingState) -> Payload:
        journal.note("score")
        return journal.payload()

    def optimise(state: CountingState, scores: Payload, rollouts: Payload) -> tuple[CountingState, dict[str, float]]:
        journal.note("optimise")
        state.iteration += 1
        return state, {"objective/scores": float(state.iteration)}

    def evaluate(state: CountingState, reference: Payload) -> float:
        journal.note("evaluate")
        return state.iteration / 10

    def export(state: CountingState, reference: Payload) -> str:
        journal.note("export")
        return f"exported after {state.iteration}"

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


def test_nodes_that_run_once_keep_the_order_of_kedros_topological_sort(journal):
    pipeline = loop_pipeline(journal)
    LoopRunner().run(pipeline, catalog_for(pipeline))
    sorted_by_kedro = [node.name.removeprefix("toy.") for node in pipeline.nodes]
    once = [name for name in journal.calls if name not in ("generate", "score", "optimise", "evaluate")]
    assert once == [name for name in sorted_by_kedro if name in once]


def test_a_state_that_is_finished_before_the_first_iteration_is_handed_on_as_it_is(journal):
    pipeline = loop_pipeline(journal)
    outputs = LoopRunner().run(pipeline, catalog_for(pipeline, iterations=0))
    assert "generate" not in journal.calls
    assert outputs["page"].load() == "report: exported after 0"


def test_a_state_that_starts_in_the_middle_does_only_the_iterations_that_are_left(journal):
    pipeline = loop_pipeline(journal)
    resumed = resumed_at(pipeline, 2)
    LoopRunner().run(resumed, catalog_for(resumed, iterations=5))
    assert journal.calls.count("optimise") == 3


def resumed_at(pipeline: Pipeline, iteration: int) -> Pipeline:
    """The pipeline with a first state that has done so many iterations already."""

    def resume(config: int, reference: Payload) -> CountingState:
        return CountingState(config, iteration)

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
def test_a_resumed_run_first_makes_up_for_what_lay_behind_the_state_that_was_saved(journal, caplog, done, calls):
    pipeline = resumed_at(loop_pipeline(journal), done)
    with caplog.at_level(logging.INFO):
        outputs = LoopRunner().run(pipeline, catalog_for(pipeline, iterations=3))
    in_the_loop = {"generate", "score", "optimise", "evaluate"}
    assert [name for name in journal.calls if name in in_the_loop] == calls
    assert outputs["evaluation"].load() == 0.3
    assert outputs["page"].load() == "report: exported after 3"
    lines = [message.split(",")[0] for message in caplog.messages if message.startswith("Iteration")]
    assert lines == [f"Iteration {i}/3" for i in range(done + 1, 4)]  # making up is no iteration


def test_made_up_for_is_what_needs_the_next_state_but_nothing_else_of_its_iteration():
    def node(name: str, inputs: list[str]) -> Node:
        return Node(lambda *_: 0, inputs, f"{name}_out", name=name, tags=ITERATION_TAG)

    pipeline = Pipeline(
        [
            Node(lambda: 0, None, "training_state", name="initialise"),
            Node(lambda: 0, None, "prompts", name="read_prompts"),
            Node(lambda s: 0, "training_state", "rollouts", name="generate", tags=ITERATION_TAG),
            Node(
                lambda s, r: (0, 0),
                ["training_state", "rollouts"],
                ["next_training_state", "ppo_metrics"],
                name="optimise",
                tags=ITERATION_TAG,
            ),
            node("evaluate", ["next_training_state", "prompts", "params:evaluation"]),
            node("judge", ["evaluate_out"]),
            node("show_rollouts", ["rollouts"]),
            node("show_metrics", ["ppo_metrics"]),
            node("compare_with_rollouts", ["next_training_state", "rollouts"]),
            node("compare_states", ["next_training_state", "training_state"]),
            node("judge_comparison", ["evaluate_out", "compare_states_out"]),
        ]
    )
    plan = plan_loop(pipeline)
    assert plan is not None
    assert [made_up.name for made_up in plan.tail] == ["evaluate", "judge"]
    # what does not need the next state comes before it, wherever Kedro sorts it
    assert {before.name for before in plan.to_next_state[:-1]} == {"generate", "show_rollouts"}
    assert plan.to_next_state[-1].name == "optimise"
    assert len(plan.behind_it) == 6


def test_the_carried_state_is_the_same_object_in_every_iteration(journal):
    pipeline = loop_pipeline(journal)
    seen: list[int] = []

    class Watcher:
        @hook_impl
        def after_dataset_loaded(self, dataset_name: str, data: object) -> None:
            if dataset_name in ("training_state", "next_training_state"):
                seen.append(id(data))

    manager = _create_hook_manager()
    manager.register(Watcher())
    LoopRunner().run(pipeline, catalog_for(pipeline), hook_manager=manager)
    assert len(seen) == 3 * 4 + 1  # three nodes load training_state, one next_training_state; export once
    assert len(set(seen)) == 1


def test_what_an_iteration_makes_is_dropped_within_it_and_what_the_loop_needs_lives_until_its_last_use(journal):
    pipeline = loop_pipeline(journal)
    living: dict[str, list[int]] = {}

    class Watcher:
        @hook_impl
        def before_node_run(self, node: Node) -> None:
            living.setdefault(node.name.removeprefix("toy."), []).append(journal.living())

    manager = _create_hook_manager()
    manager.register(Watcher())
    LoopRunner().run(pipeline, catalog_for(pipeline, iterations=50), hook_manager=manager)
    # Alive at the start of each iteration: the reference alone. Before the update: reference, rollouts, scores.
    assert living["generate"] == [1] * 50
    assert living["optimise"] == [3] * 50
    assert living["evaluate"] == [1] * 50
    assert living["export"] == [1]
    assert journal.living() == 0


def test_datasets_are_released_after_their_last_use_in_any_phase(journal):
    pipeline = loop_pipeline(journal)
    plan = plan_loop(pipeline)
    assert plan is not None
    assert plan.release_after_node == {
        "toy.initialise": ["config"],
        "toy.optimise": ["rollouts", "scores"],
        "toy.export": ["reference", "next_training_state"],
        "toy.report": ["exported"],
    }
    assert plan.release_after_loop == ["training_state"]


def test_a_dataset_loaded_before_the_loop_in_it_and_after_it_is_there_each_time(journal):
    # `reference` is loaded by initialise, generate, evaluate and export: Kedro's counts per phase would drop it.
    pipeline = loop_pipeline(journal)
    LoopRunner().run(pipeline, catalog_for(pipeline, iterations=2))
    assert journal.calls.count("export") == 1


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
    given = {"training_state": CountingState(3), "next_training_state": CountingState(3)}
    for name in pipeline.inputs() - {"params:iterations"}:
        catalog[name] = MemoryDataset(given.get(name, Payload()), copy_mode="assign")
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog)
    assert sorted(journal.calls) == sorted(expected)
    assert "the ones of its iteration run once" in caplog.text


def test_a_slice_that_leaves_the_cycle_whole_still_loops(journal):
    pipeline = loop_pipeline(journal).filter(to_nodes=["toy.optimise"])
    LoopRunner().run(pipeline, catalog_for(pipeline, iterations=4))
    assert journal.calls.count("optimise") == 4
    assert "evaluate" not in journal.calls


def test_a_pipeline_without_a_loop_runs_as_under_kedros_sequential_runner(journal):
    pipeline = loop_pipeline(journal).filter(node_names=["toy.configure", "toy.aside"])
    ours = LoopRunner().run(pipeline, catalog_for(pipeline))
    theirs = SequentialRunner().run(pipeline, catalog_for(pipeline))
    assert {name: dataset.load() for name, dataset in ours.items()} == {
        name: dataset.load() for name, dataset in theirs.items()
    }


def test_an_untagged_node_between_tagged_ones_is_refused(journal):
    pipeline = loop_pipeline(journal)
    score = next(node for node in pipeline.nodes if node.name == "toy.score")
    untagged = Pipeline([node for node in pipeline.nodes if node is not score] + [score._copy(tags=set())])
    with pytest.raises(
        ConfigError, match=r"toy\.optimise needs toy\.score, which depends on an iteration but has no tag"
    ):
        plan_loop(untagged)


@pytest.mark.parametrize(("node", "call"), [("generate", 1), ("optimise", 3)])
def test_a_failure_in_the_loop_suggests_starting_behind_what_is_on_disk(tmp_path, journal, caplog, node, call):
    pipeline = loop_pipeline(journal)
    catalog = catalog_for(pipeline, iterations=5)
    catalog["config"] = JSONDataset(filepath=str(tmp_path / "config.json"))
    journal.fail_at = (node, call)
    with pytest.raises(RuntimeError, match=f"{node} fails"):
        LoopRunner().run(pipeline, catalog)
    # No iteration can be entered from outside: its state is in memory. What makes that state is named instead.
    suggestion = caplog.text.split('--from-nodes "')[1].split('"')[0]
    assert suggestion == "toy.load_reference"


@pytest.mark.parametrize("node", ["configure", "generate", "export"])
def test_nothing_is_suggested_where_starting_anew_costs_no_more(journal, caplog, node):
    pipeline = loop_pipeline(journal)
    journal.fail_at = (node, 1)
    with pytest.raises(RuntimeError):
        LoopRunner().run(pipeline, catalog_for(pipeline))
    assert "--from-nodes" not in caplog.text
    assert "No nodes ran" not in caplog.text


def test_node_lines_are_silent_in_the_loop_but_warnings_of_nodes_are_not(journal, caplog):
    pipeline = loop_pipeline(journal)
    caplog.set_level(logging.INFO, logger="kedro.pipeline.node")  # as a person may set it in conf/logging.yml
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
    assert len(running) == 6  # those that run once
    assert caplog.text.count("a warning from toy.generate") == 3
    assert {name: logging.getLogger(name).level for name in before} == before


def test_each_iteration_is_one_line_where_there_is_no_terminal(journal, caplog):
    pipeline = loop_pipeline(journal)
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog_for(pipeline))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Iteration")]
    assert [line.split(",")[0] for line in lines] == ["Iteration 1/3", "Iteration 2/3", "Iteration 3/3"]
    assert "reward 3.000" in lines[-1]
    assert "left" not in lines[-1]


def test_kedro_viz_recognises_the_runner_as_sequential():
    from kedro_viz.integrations.kedro.hooks_utils import is_sequential_runner

    assert is_sequential_runner({"runner": getattr(LoopRunner(), "__name__", str(LoopRunner()))})


def test_kedro_viz_records_one_iteration_however_many_there_are(journal):
    from kedro_viz.integrations.kedro.run_hooks import PipelineRunStatusHook

    def events(iterations: int) -> list[dict[str, object]]:
        pipeline = loop_pipeline(Journal())
        viz, manager = PipelineRunStatusHook(), _create_hook_manager()
        manager.register(viz)
        catalog = catalog_for(pipeline, iterations)
        viz.after_catalog_created(catalog)
        viz.before_pipeline_run({"runner": str(LoopRunner())}, pipeline)
        LoopRunner().run(pipeline, catalog, hook_manager=manager)
        return [{k: v for k, v in e.items() if k not in ("timestamp", "duration")} for e in viz._events]

    assert events(9) == events(1)


def test_sessions_that_are_given_no_runner_take_the_loop_runner(monkeypatch):
    from kedro.framework.session import service_session, session

    from ppo_rlhf.runner import make_session_default

    for module in (session, service_session):
        monkeypatch.setattr(module, "SequentialRunner", SequentialRunner)
    make_session_default()
    assert session.SequentialRunner is LoopRunner
    assert service_session.SequentialRunner is LoopRunner
