"""What a person sees of the loop while it runs."""

from __future__ import annotations

import io
import logging

import pytest
import rich
from rich.console import Console

from ppo_rlhf.runner.progress import LineReporter, RemainingTime, reporting


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_many_iterations_are_thinned_to_a_line_every_two_seconds_and_the_last_is_always_shown(caplog):
    clock = FakeClock()
    reporter = LineReporter(0, 100, clock=clock)
    with caplog.at_level(logging.INFO):
        for iteration in range(1, 101):
            clock.now += 0.5
            reporter.update(iteration, {})
    shown = [int(r.getMessage().split("/")[0].split()[1]) for r in caplog.records]
    assert shown[:3] == [1, 5, 9]
    assert len(shown) == 26
    assert shown[-1] == 100


def test_the_last_iteration_of_a_loop_that_fails_is_shown(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError), reporting(0, 100) as reporter:  # noqa: PT012
        reporter.update(1, {})
        reporter.update(2, {})
        raise RuntimeError
    assert [r.getMessage().split(",")[0] for r in caplog.records] == ["Iteration 1/100", "Iteration 2/100"]


def test_time_left_is_the_mean_time_of_an_iteration_times_those_left():
    clock = FakeClock()
    remaining = RemainingTime(10, 110, clock)
    clock.now = 40.0  # 20 iterations, 2 s each; 80 are left
    assert remaining.after(30) == "2:40"
    clock.now = 20 * 3600.0
    assert remaining.after(30) == "80:00:00"


def test_a_terminal_gets_one_bar_with_the_readings(monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=160)
    monkeypatch.setattr(rich, "get_console", lambda: terminal)
    readings = {
        "objective/scores": 0.5,
        "objective/kl": 4.25,
        "objective/entropy": 1.5,
        "throughput/episodes_per_s": 320.0,
    }
    with reporting(0, 2) as reporter:
        reporter.update(1, readings)
    shown = terminal.file.getvalue()
    assert "1/2" in shown
    assert "reward 0.500, KL 4.25, entropy 1.50, 320.0 episodes/s" in shown
