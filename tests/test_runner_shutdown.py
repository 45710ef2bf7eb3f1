"""A signal in the loop: the iteration is finished and saved, then the run stops; a second signal stops at once."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import AbstractDataset, DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.ppo import stop_requests
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runner import ITERATION_TAG, LoopRunner, _asked_again, _asked_by_evaluation
from ppo_rlhf.runtime import signals
from ppo_rlhf.runtime.signals import RunInterruptedError
from tests.bare_state import bare_state


@dataclass
class Scene:
    """What happens in a loop: `at` holds what to do at a moment such as `"generate 2"` or `"save 3"`."""

    state: TrainingState
    at: dict[str, Callable[[], None]] = field(default_factory=dict)
    happened: list[str] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    signum: int | None = None

    def reach(self, place: str, iteration: int) -> None:
        self.happened.append(f"{place} {iteration}")
        self.at.get(self.happened[-1], lambda: None)()


class Saves(AbstractDataset[TrainingState, Any]):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def save(self, data: TrainingState) -> None:
        self._scene.reach("save", data.progress.iteration)
        self._scene.saved.append(data.progress.iteration)

    def load(self) -> None: ...

    def _describe(self) -> dict[str, Any]:
        return {}


def loop(scene: Scene) -> tuple[Pipeline, DataCatalog]:
    def initialise() -> TrainingState:
        scene.reach("initialise", scene.state.progress.iteration)
        return scene.state

    def generate(state: TrainingState) -> int:
        scene.reach("generate", state.progress.iteration + 1)
        return 0

    def optimise(state: TrainingState, rollouts: int) -> tuple[TrainingState, TrainingState]:
        state.progress.iteration += 1
        scene.reach("optimise", state.progress.iteration)
        return state, state

    def evaluate(state: TrainingState) -> float:
        scene.reach("evaluate", state.progress.iteration)
        return 0.0

    def export(state: TrainingState) -> int:
        scene.reach("export", state.progress.iteration)
        return state.progress.iteration

    iteration = [
        Node(generate, "training_state", "rollouts", name="generate"),
        Node(optimise, ["training_state", "rollouts"], ["next_training_state", "checkpoint"], name="optimise"),
        Node(evaluate, "next_training_state", "evaluation", name="evaluate"),
    ]
    once = [
        Node(initialise, None, "training_state", name="initialise"),
        Node(export, "next_training_state", "exported", name="export"),
    ]
    pipeline = Pipeline([*once, *Pipeline(iteration, tags=ITERATION_TAG).nodes])
    memory = {name: MemoryDataset(copy_mode="assign") for name in pipeline.datasets()}
    return pipeline, DataCatalog(memory | {"checkpoint": Saves(scene)})


def play(grace: float = 25.0, **at: str | Callable[[], None]) -> Scene:
    """Run the loop with signals (by name) or actions at the given moments until it is interrupted."""
    scene = Scene(bare_state(6, save_interval=2, shutdown_grace_s=grace))
    for moment, action in at.items():
        raised = None if callable(action) else signal.Signals[action]
        scene.at[moment.replace("_", " ")] = action if callable(action) else lambda s=raised: signal.raise_signal(s)
    pipeline, catalog = loop(scene)
    with pytest.raises(RunInterruptedError) as stopped:
        LoopRunner().run(pipeline, catalog, _create_hook_manager())
    scene.signum = stopped.value.signum
    return scene


@pytest.fixture(autouse=True)
def no_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal counts however soon it comes: these loops take no time."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_first_signal_lets_the_iteration_finish_and_saves_it(name, caplog):
    with caplog.at_level(logging.INFO):
        scene = play(optimise_3=name)
    assert scene.signum == signal.Signals[name]
    assert scene.saved == [2, 3]
    assert "evaluate 3" not in scene.happened  # the run that resumes evaluates it
    assert len([line for line in caplog.messages if line.startswith(f"{name}: finishing iteration 3 ")]) == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_an_update_saves_the_iteration_before_and_stops_at_once(name, caplog):
    with caplog.at_level(logging.INFO):
        scene = play(generate_4=name)
    assert scene.signum == signal.Signals[name]
    assert scene.happened[-2:] == ["generate 4", "save 3"]
    assert scene.saved == [2, 3]
    (line,) = [
        line for line in caplog.messages if line.startswith(f"{name}: stopping before the update of iteration 4;")
    ]
    assert "iteration 3 is saved" in line


def test_before_an_update_an_iteration_that_is_saved_is_not_saved_again_and_without_one_nothing_is(caplog):
    assert play(generate_3="SIGTERM").happened[-2:] == ["evaluate 2", "generate 3"]
    with caplog.at_level(logging.INFO):
        assert play(generate_1="SIGTERM").happened == ["initialise 0", "generate 1"]
    assert "iteration 1; no iteration is complete;" in caplog.text


def test_the_grace_holds_for_the_save_of_a_run_that_stops_before_an_update():
    started = time.monotonic()
    scene = play(grace=0.3, generate_4="SIGTERM", save_3=lambda: time.sleep(120))
    assert 0.3 <= time.monotonic() - started < 60
    assert scene.saved == [2]


def test_ctrl_c_at_a_terminal_waits_as_long_as_the_update_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals.os, "isatty", lambda descriptor: descriptor == 0)

    def slow() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.5)

    assert play(grace=0.1, optimise_3=slow).saved == [2, 3]


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_stops_at_once(second):
    scene = play(optimise_3="SIGINT", save_3=second)
    assert scene.signum == signal.Signals[second]
    assert scene.happened[-1] == "save 3"
    assert scene.saved == [2]


@pytest.mark.parametrize("moment", ["initialise_0", "export_6"])
def test_a_signal_outside_the_loop_stops_at_once(moment):
    assert play(**{moment: "SIGTERM"}).happened[-1] == moment.replace("_", " ")


def test_a_hanging_node_is_stopped_when_the_grace_is_over_and_the_last_checkpoint_stands(caplog):
    def hang() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(120)

    started = time.monotonic()
    with caplog.at_level(logging.INFO):
        scene = play(grace=0.3, optimise_3=hang)
    assert 0.3 <= time.monotonic() - started < 60
    assert scene.saved == [2]
    assert any(line.startswith("SIGTERM: shutdown_grace_s=0.3 ") for line in caplog.messages)


@pytest.mark.parametrize("meeting", [7, 8, 9])
def test_a_process_stops_with_another_one_that_got_the_signal(monkeypatch: pytest.MonkeyPatch, meeting: int):
    """The processes meet at an iteration's end, after the callbacks and after the evaluation; no checkpoint was due."""
    asked = iter([[None, None]] * (meeting - 1) + [[None, (signal.SIGINT, "")]] * 3)
    monkeypatch.setattr(stop_requests, "from_all", lambda value: next(asked))
    scene = Scene(bare_state(6, save_interval=100))
    pipeline, catalog = loop(scene)
    with pytest.raises(RunInterruptedError, match="SIGINT"):
        LoopRunner().run(pipeline, catalog, _create_hook_manager())
    assert scene.saved == [3]


def test_a_save_ends_after_the_first_signal_and_an_evaluation_does_not_and_the_iteration_is_saved_once(caplog):
    assert play(save_2="SIGTERM").saved == [2]
    ended = []
    with caplog.at_level(logging.INFO):
        scene = play(evaluate_3=lambda: signal.raise_signal(signal.SIGTERM) or ended.append("evaluation"))
    assert (scene.saved, ended) == ([2, 3], [])
    assert scene.happened[-2:] == ["evaluate 3", "save 3"]
    assert "SIGTERM: stopping in the evaluation of iteration 3; iteration 3 is saved" in caplog.text
    assert play(evaluate_2="SIGTERM").saved == [2]


def test_after_max_time_the_iteration_is_saved_and_the_run_ends_as_after_a_signal(caplog):
    scene = Scene(bare_state(6, save_interval=100, max_time=1e-9))
    pipeline, catalog = loop(scene)
    with caplog.at_level(logging.INFO), pytest.raises(RunInterruptedError) as stopped:
        LoopRunner().run(pipeline, catalog, _create_hook_manager())
    assert scene.saved == [1]
    assert scene.happened[-1] == "save 1"
    assert stopped.value.exit_code == 143
    assert str(stopped.value) == "The run was stopped by ppo.max_time=1e-09 hours."
    assert any(re.match("ppo.max_time=1e-09 .*iteration 1 ", line) for line in caplog.messages)


@pytest.mark.parametrize(
    ("hours", "made"), [(1e-9, ["first"]), (1000.0, ["first", "second"]), (None, ["first", "second"])]
)
def test_before_the_loop_max_time_ends_the_run_after_a_stage(hours: float | None, made: list[str], caplog):
    done: list[str] = []

    def stage(name: str, *inputs: str) -> Node:
        return Node(lambda *_: done.append(name) or name, [*inputs], name, name=name, namespace=f"{name}_stage")

    catalog = DataCatalog({"params:ppo": MemoryDataset(PPOConfig(max_time=hours))})
    stages = Pipeline([stage("first"), stage("second", "first", "params:ppo")], prefix_datasets_with_namespace=False)
    run = partial(LoopRunner().run, stages, catalog, _create_hook_manager())
    if hours == 1e-9:
        with caplog.at_level(logging.INFO), pytest.raises(RunInterruptedError):
            run()
        assert re.search(r"ppo\.max_time=.* second_stage\.second", caplog.text)
    else:
        run()
    assert done == made


def test_a_run_that_does_not_read_the_settings_of_ppo_has_no_max_time():
    """`kedro run --pipelines data_preparation`: Kedro makes no PPOConfig of a group that no node reads."""
    catalog = DataCatalog({"params:ppo": MemoryDataset({"max_time": 1e-9})})
    made = LoopRunner().run(Pipeline([Node(lambda: 1, None, "rows", name="rows")]), catalog, _create_hook_manager())
    assert made["rows"].load() == 1


def test_the_line_names_what_is_asked_again():
    config = PPOConfig(environment="rooms:reply", turn_length=4)
    assert _asked_again(config, None) == ["the environment rooms:reply"]
    scored, judged = (
        LLMJudgeConfig(model=name, base_url="http://localhost:8000/v1", cache=cache)
        for name, cache in (("judge-7b", None), ("judge-70b", "answers.sqlite"))
    )
    reward = SimpleNamespace(components=[SimpleNamespace(llm=scored), SimpleNamespace(llm=None)])
    assert _asked_again(PPOConfig(), reward) == ["the language model judge-7b"]
    assert _asked_again(PPOConfig(), None) == _asked_by_evaluation(config, None, None) == []
    evaluation = SimpleNamespace(judge="mine:judge", judges={"strict": judged, "again": scored})
    assert _asked_by_evaluation(PPOConfig(), reward, evaluation) == [
        "the language model judge-7b",
        "the language model judge-70b (answers in its cache are kept)",
    ]
