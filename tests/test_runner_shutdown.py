"""What a signal does to a running loop: finish and save the iteration if there is time, else stop at once."""

from __future__ import annotations

import functools
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import AbstractDataset, DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.runner import ITERATION_TAG, LoopRunner, RunInterruptedError, deferring_signals, fold, signals
from ppo_rlhf.runner.forecast import Forecast

ITERATION_S = {"generate": 4.0, "optimise": 2.0, "evaluate": 8.0}
SAVE_S = 1.0


@dataclass
class State:
    """A state that is changed in place, as PPO's is."""

    total_iterations: int
    shutdown_grace_s: float
    save_interval: int
    iteration: int = 0
    stopping: bool = False

    @property
    def finished(self) -> bool:
        return self.iteration >= self.total_iterations


@dataclass
class SaveRequest:
    state: State

    @property
    def due(self) -> bool:
        state = self.state
        return state.finished or state.stopping or state.iteration % state.save_interval == 0


@dataclass
class Scene:
    """A loop on a clock of its own, and what happened in it.

    Attributes:
        at: What to do at a moment, named by where and in which iteration: `"generate 2"`, `"save 3"`, `"saved 3"`.
        happened: All moments that were reached.
        saved: Iterations of which the save was completed.
        signum: The signal that the run says it was stopped by.
    """

    state: State
    at: dict[str, Callable[[], None]] = field(default_factory=dict)
    now: float = 100.0
    happened: list[str] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    signum: int | None = None

    def reach(self, place: str, iteration: int) -> None:
        moment = f"{place} {iteration}"
        self.happened.append(moment)
        if moment in self.at:
            self.at[moment]()

    def work(self, place: str, iteration: int) -> None:
        self.now += ITERATION_S[place] / 2
        self.reach(place, iteration)
        self.now += ITERATION_S[place] / 2

    def node_calls(self) -> list[str]:
        return [moment for moment in self.happened if "save" not in moment]


class Saves(AbstractDataset[SaveRequest, Any]):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def save(self, data: SaveRequest) -> None:
        if data.due:
            self._scene.now += SAVE_S / 2
            self._scene.reach("save", data.state.iteration)
            self._scene.now += SAVE_S / 2
            self._scene.saved.append(data.state.iteration)
        else:
            self._scene.reach("skip", data.state.iteration)

    def load(self) -> None: ...

    def _describe(self) -> dict[str, Any]:
        return {}


def loop(scene: Scene, *, saves: bool = True) -> tuple[Pipeline, DataCatalog]:
    def initialise() -> State:
        scene.reach("initialise", scene.state.iteration)
        return scene.state

    def generate(state: State) -> int:
        scene.work("generate", state.iteration + 1)
        return 0

    def optimise(state: State, rollouts: int) -> dict[str, Any]:
        state.iteration += 1
        scene.work("optimise", state.iteration)
        made = {"state": state, "metrics": {"objective/scores": 0.5}}
        return made | {"checkpoint": SaveRequest(state)} if saves else made

    def evaluate(state: State) -> float:
        scene.work("evaluate", state.iteration)
        return 0.0

    def export(state: State) -> int:
        scene.reach("export", state.iteration)
        return state.iteration

    iteration = [
        Node(generate, "training_state", "rollouts", name="generate"),
        Node(
            optimise,
            ["training_state", "rollouts"],
            {"state": "next_training_state", "metrics": "ppo_metrics"}
            | ({"checkpoint": "checkpoint"} if saves else {}),
            name="optimise",
        ),
        Node(evaluate, "next_training_state", "evaluation", name="evaluate"),
    ]
    once = [
        Node(initialise, None, "training_state", name="initialise"),
        Node(export, "next_training_state", "exported", name="export"),
    ]
    pipeline = Pipeline([*once, *Pipeline(iteration, tags=ITERATION_TAG).nodes])
    memory = {name: MemoryDataset(copy_mode="assign") for name in pipeline.datasets()}
    return pipeline, DataCatalog(memory | ({"checkpoint": Saves(scene)} if saves else {}))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    """Run a loop of ten iterations with signals at the given moments, and return what happened."""

    def run(
        *,
        stops: bool = True,
        saves: bool = True,
        grace: float = 25.0,
        save_interval: int = 2,
        start: int = 0,
        hooks: Callable[[Scene], object] | None = None,
        **at: str | Callable[[Scene], None],
    ) -> Scene:
        scene = Scene(State(10, grace, save_interval, iteration=start))
        for moment, action in at.items():
            act = functools.partial(signal.raise_signal, signal.Signals[action]) if isinstance(action, str) else None
            scene.at[moment.replace("_", " ")] = act or functools.partial(action, scene)  # type: ignore[arg-type]
        monkeypatch.setattr(fold, "Forecast", functools.partial(Forecast, clock=lambda: scene.now))
        monkeypatch.setattr(signals, "monotonic", lambda: scene.now)
        manager = _create_hook_manager()
        if hooks is not None:
            manager.register(hooks(scene))
        pipeline, catalog = loop(scene, saves=saves)
        if not stops:
            LoopRunner().run(pipeline, catalog, manager)
            return scene
        with pytest.raises(RunInterruptedError) as stopped:
            LoopRunner().run(pipeline, catalog, manager)
        scene.signum = stopped.value.signum
        return scene

    return run


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines that speak of signals."""
    caplog.set_level(logging.INFO)
    return lambda: [message for message in caplog.messages if message.startswith(("SIGTERM:", "SIGINT:"))]


@pytest.mark.parametrize(
    ("name", "moment", "seconds"),
    [
        ("SIGTERM", "generate_5", 2 + 2 + 1),
        ("SIGINT", "generate_5", 2 + 2 + 1),
        ("SIGTERM", "optimise_5", 1 + 1),
    ],
)
def test_with_time_enough_the_iteration_is_finished_and_saved_and_then_the_run_stops(
    play, lines, caplog, name, moment, seconds
):
    scene = play(**{moment: name})
    assert scene.signum == signal.Signals[name]
    assert scene.saved == [2, 4, 5]
    assert scene.node_calls()[-2:] == ["generate 5", "optimise 5"]  # the evaluation is left to the run that resumes
    assert lines() == [
        f"{name}: finishing iteration 5 (about {seconds} s) and saving it, then stopping; "
        "a second signal stops at once."
    ]
    assert any(message.startswith("Iteration 5/10, reward 0.500") for message in caplog.messages)


def test_the_line_is_logged_while_the_iteration_goes_on(play, lines):
    seen: list[int] = []

    def look(scene: Scene) -> None:
        give_up = time.monotonic() + 10
        while not lines() and time.monotonic() < give_up:
            time.sleep(0.001)
        seen.append(len(lines()))

    play(generate_5="SIGTERM", optimise_5=look)
    assert seen == [1]


def test_without_time_enough_the_run_stops_at_once_and_says_why(play, lines):
    scene = play(generate_5="SIGTERM", grace=4.9)
    assert scene.happened[-1] == "generate 5"
    assert scene.saved == [2, 4]
    assert lines() == [
        "SIGTERM: stopping now; until iteration 5 is saved it would take about 5 s, and shutdown_grace_s is 4.9."
    ]


def test_time_that_is_just_enough_is_enough(play):
    assert play(generate_5="SIGTERM", grace=5.0).saved == [2, 4, 5]


def test_in_the_first_iteration_the_run_stops_at_once_because_nothing_is_known_of_its_length(play, lines):
    scene = play(optimise_1="SIGTERM", grace=1e9)
    assert (scene.happened[-1], scene.saved) == ("optimise 1", [])
    assert lines() == ["SIGTERM: stopping now; no iteration is complete, so how long this one takes is not known."]


def test_before_the_first_save_it_is_taken_to_need_as_long_as_the_node_that_makes_the_state(play):
    # 2 s to the end of generate, 2 s of optimise, and 2 s for a save of which only the first will show that it takes 1
    assert play(generate_2="SIGTERM", save_interval=100, grace=6.0).saved == [2]
    assert play(generate_2="SIGTERM", save_interval=100, grace=5.9).saved == []


def test_a_signal_during_a_save_lets_it_end_and_stops_behind_it(play):
    scene = play(save_4="SIGTERM", grace=0.5)
    assert scene.saved == [2, 4]
    assert scene.happened[-1] == "save 4"


def test_a_signal_during_a_save_that_takes_too_long_cuts_it_off(play):
    scene = play(save_4="SIGTERM", grace=0.4)
    assert scene.saved == [2]
    assert scene.happened[-1] == "save 4"


def test_a_signal_just_after_the_state_was_found_not_to_be_due_saves_it_all_the_same(play):
    scene = play(skip_3="SIGTERM", grace=SAVE_S)
    assert scene.saved == [2, 3]
    assert scene.happened[-1] == "save 3"


def test_a_signal_in_the_evaluation_saves_the_state_that_is_evaluated_and_stops(play, lines):
    scene = play(evaluate_5="SIGTERM", grace=SAVE_S)
    assert scene.saved == [2, 4, 5]
    assert scene.happened[-2:] == ["evaluate 5", "save 5"]
    assert lines() == ["SIGTERM: saving iteration 5 (about 1 s), then stopping; a second signal stops at once."]


def test_a_signal_in_the_evaluation_of_a_state_that_is_saved_stops_at_once(play, lines):
    scene = play(evaluate_4="SIGTERM")
    assert scene.saved == [2, 4]
    assert scene.happened[-1] == "evaluate 4"
    assert lines() == []


def test_a_signal_in_the_evaluation_stops_at_once_if_a_save_takes_too_long(play, lines):
    scene = play(evaluate_5="SIGTERM", grace=0.9)
    assert scene.saved == [2, 4]
    assert scene.happened[-1] == "evaluate 5"
    assert lines() == [
        "SIGTERM: stopping now without saving iteration 5, which would take about 1 s; shutdown_grace_s is 0.9."
    ]


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_stops_at_once(play, second):
    scene = play(generate_5="SIGINT", optimise_5=second)
    assert scene.signum == signal.Signals[second]
    assert scene.happened[-1] == "optimise 5"
    assert scene.saved == [2, 4]


def test_a_second_signal_stops_at_once_in_the_save_that_the_first_one_waits_for(play):
    for moment in ("generate_5", "evaluate_5"):
        scene = play(**{moment: "SIGINT"}, save_5="SIGINT")
        assert scene.happened[-1] == "save 5"
        assert scene.saved == [2, 4]


def test_a_signal_that_comes_twice_at_once_is_one_request(play):
    def twice(scene: Scene) -> None:
        signal.raise_signal(signal.SIGTERM)
        scene.now += 0.09
        signal.raise_signal(signal.SIGTERM)

    assert play(generate_5=twice).saved == [2, 4, 5]


@pytest.mark.parametrize("moment", ["initialise_0", "export_10"])
def test_a_signal_outside_the_loop_stops_at_once(play, moment):
    scene = play(**{moment: "SIGTERM"})
    assert scene.happened[-1] == moment.replace("_", " ")


def test_a_signal_in_what_a_resumed_run_makes_up_for_stops_at_once(play):
    scene = play(evaluate_4="SIGTERM", start=4)
    assert scene.happened == ["initialise 4", "evaluate 4"]
    assert scene.saved == []


def test_hooks_hear_of_a_save_that_is_made_up_for_as_of_any_other(play):
    heard: list[tuple[str, str, bool, str]] = []

    class Listener:
        @hook_impl
        def before_dataset_saved(self, dataset_name: str, data: Any, node: Node) -> None:
            if dataset_name == "checkpoint":
                heard.append(("before", node.name, data.due, f"{data.state.iteration}"))

        @hook_impl
        def after_dataset_saved(self, dataset_name: str, data: Any, node: Node) -> None:
            if dataset_name == "checkpoint":
                heard.append(("after", node.name, data.due, f"{data.state.iteration}"))

    play(evaluate_5="SIGTERM", hooks=lambda _: Listener())
    assert heard[-2:] == [("before", "optimise", True, "5"), ("after", "optimise", True, "5")]
    assert len(heard) == 2 * (5 + 1)


def test_what_hooks_do_before_a_save_is_part_of_its_time(play):
    class Flush:
        def __init__(self, scene: Scene) -> None:
            self._scene = scene

        @hook_impl
        def before_dataset_saved(self, dataset_name: str, data: Any) -> None:
            if dataset_name == "checkpoint" and data.due:
                self._scene.now += 6

    assert play(evaluate_5="SIGTERM", grace=6 + 1, hooks=Flush).saved == [2, 4, 5]
    assert play(evaluate_5="SIGTERM", grace=6 + 0.9, hooks=Flush).saved == [2, 4]


class SignalAfterCheckpoint:
    """A hook that signals half a second after the entry `checkpoint` was handed iteration 3, which is not due."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        if dataset_name == "checkpoint" and self._scene.happened[-1] == "skip 3":
            self._scene.now += 0.5
            signal.raise_signal(signal.SIGTERM)


def test_once_the_state_was_found_not_to_be_due_it_is_saved_even_if_there_is_no_time_for_the_rest_of_its_node(play):
    assert play(hooks=SignalAfterCheckpoint, grace=SAVE_S).saved == [2, 3]


def test_a_second_signal_stops_at_once_where_the_first_waits_for_a_state_that_was_not_due(play):
    scene = play(skip_3="SIGTERM", hooks=SignalAfterCheckpoint)
    assert scene.saved == [2]
    assert scene.happened[-1] == "skip 3"


def test_a_signal_that_may_wait_does_so_where_signals_are_held_back_too(play):
    def held(scene: Scene) -> None:
        with deferring_signals():
            signal.raise_signal(signal.SIGTERM)

    assert play(generate_5=held).saved == [2, 4, 5]
    assert play(generate_5=held, grace=0).saved == [2, 4]


def test_a_loop_that_saves_no_state_stops_at_once(play, lines):
    scene = play(generate_5="SIGTERM", saves=False)
    assert scene.happened[-1] == "generate 5"
    assert lines() == []


def test_a_run_without_signals_ends_with_everything_done(play):
    scene = play(stops=False)
    assert scene.saved == [2, 4, 6, 8, 10]
    assert scene.happened[-1] == "export 10"
