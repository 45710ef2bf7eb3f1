"""The order of the steps after an iteration, and the step at which a run stops if it was asked to."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo import stop_requests
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.run_control import RunControl
from ppo_rlhf.runtime import processes, signals
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal

METRICS, ROW = {"objective/kl": 0.5}, {"iteration": 3.0, "eval/reward": 1.0}


class Noting(RunControl):
    """Records its steps in `happened`; a signal comes at the step `asks_at`."""

    def __init__(self, *, is_due: bool = False, asks_at: str = "", **settings: Any) -> None:
        self.happened: list[str] = []
        self.is_due, self.asks_at = is_due, asks_at
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
        state = Progress(PPOConfig(total_episodes=36, **sizes, **settings), iteration=3)
        super().__init__(state, Told(self), Saver(self))  # type: ignore[arg-type]
        self.show = lambda iteration, metrics: self.note(f"show {iteration} {metrics}")

    def note(self, what: str) -> None:
        self.happened.append(what)
        if self.asks_at and what.startswith(self.asks_at):
            self.progress.requests.signum = signal.SIGINT

    def evaluate(self) -> Mapping[str, Any] | None:
        self.note("evaluate")
        return ROW


class Saver:
    """A checkpointer that only records its calls."""

    can_save = True

    def __init__(self, control: Noting) -> None:
        self._control, self.is_saved, self.left = control, True, None

    def iteration_ended(self) -> None:
        self.is_saved = False
        if self._control.is_due:
            self.save()

    def save(self) -> None:
        self.is_saved = True
        self._control.note("save")

    def save_if_new(self) -> None:
        if not self.is_saved:
            self.save()

    def update_left(self) -> float | None:
        return self.left


class Told:
    """Callbacks that only record their calls."""

    def __init__(self, control: Noting) -> None:
        self._note = control.note

    def begin(self) -> None:
        self._note("begin")

    def iteration_ended(self, metrics: Mapping[str, float]) -> None:
        self._note(f"told {metrics}")

    def evaluated(self, row: Mapping[str, Any] | None) -> None:
        self._note(f"told {row}")


SHOWN, ENDED, EVALUATED = f"show 3 {METRICS}", f"told {METRICS}", f"told {ROW}"


BETTER, EQUAL, WORSE = ({"iteration": 3.0, "eval/since_best_score": change} for change in (0.1, 0.0, -0.1))
EARLIER = {"iteration": 2.0, "eval/since_best_score": 0.1}


@pytest.mark.parametrize(
    ("row", "best"), [(BETTER, 3), (EQUAL, 1), (WORSE, 1), (ROW, 1), (EARLIER, 1), (None, 1)], ids=str
)
def test_with_stop_only_an_evaluation_of_this_iteration_that_is_above_the_best_is_kept(
    monkeypatch: pytest.MonkeyPatch, row: Mapping[str, Any] | None, best: int
):
    control, saved = Noting(), []
    control._keeps_best, control.progress.best_evaluation = True, 1
    control.callbacks.save = lambda: saved.append(3)  # type: ignore[method-assign]
    monkeypatch.setattr(control, "evaluate", lambda: row)
    control.after_iteration(METRICS)
    assert control.progress.best_evaluation == best
    assert saved == [3] * (best == 3)


def test_an_iteration_is_shown_saved_told_and_then_evaluated():
    control = Noting(is_due=True)
    control.after_iteration(METRICS)
    assert control.happened == [SHOWN, "save", ENDED, "evaluate", EVALUATED]


@pytest.mark.parametrize(
    ("asks_at", "is_due", "happened"),
    [
        ("show", False, [SHOWN, ENDED, "save"]),
        ("show", True, [SHOWN, "save", ENDED]),
        ("evaluate", False, [SHOWN, ENDED, "evaluate", EVALUATED, "save"]),
        ("evaluate", True, [SHOWN, "save", ENDED, "evaluate", EVALUATED]),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_the_iteration_once_and_stops_at_the_next_of_two_places(
    asks_at: str, is_due: bool, happened: list[str]
):
    control = Noting(is_due=is_due, asks_at=asks_at)
    with pytest.raises(TerminationSignal) as stopped:
        control.after_iteration(METRICS)
    assert stopped.value.signum == signal.SIGINT
    assert control.happened == happened


def test_a_run_whose_time_is_over_stops_before_the_evaluation_unless_it_is_finished(caplog: pytest.LogCaptureFixture):
    control = Noting(max_time=1e-9)
    with caplog.at_level(logging.INFO), pytest.raises(TerminationSignal) as stopped:
        control.after_iteration(METRICS)
    assert (stopped.value.signum, stopped.value.why) == (signal.SIGTERM, "ppo.max_time=1e-09 hours")
    assert control.happened == [SHOWN, ENDED, "save"]
    (line,) = caplog.messages
    assert re.search(r"ppo\.max_time=1e-09 .*iteration 3 ", line)
    finished = Noting(max_time=1e-9)
    finished.progress.requests.end = True
    finished.after_iteration(METRICS)
    assert finished.happened == [SHOWN, ENDED, "evaluate", EVALUATED]


def test_a_process_stops_by_the_signal_that_another_one_got(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop_requests, "from_all", lambda own: [own, (signal.SIGHUP, ""), (signal.SIGINT, "")])
    control = Noting()
    with pytest.raises(TerminationSignal) as stopped:
        control.after_iteration(METRICS)
    assert stopped.value.signum == signal.SIGHUP
    assert control.happened == [SHOWN, ENDED, "save"]


def in_update(left: float | None, **settings: Any) -> Noting:
    control = Noting(**settings)
    control.progress.updating, control.checkpointer.left = True, left  # type: ignore[attr-defined]
    return control


@pytest.mark.parametrize(
    ("left", "signum", "line"),
    [
        (12.4, signal.SIGTERM, "SIGTERM: finishing iteration 4 and saving it in about 12 s, then stopping; a second"),
        (48.0, signal.SIGTERM, r"in about 48 s \(shutdown_grace_s=25 ends before: .*last checkpoint\), then stopping"),
        (48.0, signal.SIGINT, "SIGINT: finishing iteration 4 and saving it in about 48 s, then stopping; a second"),
        (None, signal.SIGTERM, "time is not known"),
    ],
)
def test_in_an_update_the_line_says_how_long_it_will_take_against_the_grace(monkeypatch, left, signum, line):
    """Ctrl-C at a terminal has no grace."""
    monkeypatch.setattr(signals.os, "isatty", lambda descriptor: True)
    control = in_update(left)
    with control.stoppable("before the update of iteration 4"):
        said, stop = control.ask(signum)
    assert stop is None
    assert re.search(line, said)
    assert control.progress.requests.signum == signum


@pytest.mark.parametrize(
    ("count", "where", "goes_on"), [(1, "4;", False), (2, "4, where the processes next meet;", True)]
)
def test_before_an_update_one_process_stops_at_once_and_several_where_they_meet(monkeypatch, count, where, goes_on):
    monkeypatch.setattr(processes, "process_count", lambda: count)
    control = Noting()
    control.progress.updating = False
    with control.stoppable("before the update of iteration 4"):
        said, stop = control.ask(signal.SIGTERM, ["vLLM", "the language model m"])
    kept = "iteration 3 is saved" + (" if they meet within 25 s" if goes_on else "")
    assert said.startswith(f"SIGTERM: stopping before the update of iteration {where} {kept}; ")
    assert "asks vLLM and the language model m again" in said
    assert (stop is None) is goes_on
    with control.stoppable("in the evaluation of iteration 3"):
        said, _ = control.ask(signal.SIGTERM, ["the environment e"], ["the language model judge"])
    assert "asks the language model judge again" in said


def test_a_run_whose_updates_take_longer_than_the_grace_says_so_once(caplog: pytest.LogCaptureFixture):
    control = Noting()
    with caplog.at_level(logging.INFO):
        for seconds in (24.0, 26.4, 90.0):
            control.say_if_long({"time/optimise_s": seconds})
        Noting(shutdown_grace_s=0.0).say_if_long({"time/optimise_s": 90.0})  # this run never waits for an update
        Noting().say_if_long({})
    (line,) = caplog.messages
    assert line.startswith("An update takes about 26 s, ppo.shutdown_grace_s=25: ")


@pytest.mark.parametrize(
    ("is_resumed", "is_finished", "happened"),
    [
        (False, False, ["begin"]),
        (True, False, ["begin", "evaluate", EVALUATED]),
        (True, True, ["evaluate", EVALUATED]),
    ],
)
def test_a_resumed_run_makes_up_for_the_evaluation_and_a_finished_one_does_not_begin(
    is_resumed: bool, is_finished: bool, happened: list[str]
):
    control = Noting()
    control.progress.requests.end = is_finished
    control.begin(is_resumed=is_resumed)
    assert control.happened == happened
