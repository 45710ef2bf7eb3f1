"""The progress bar on a terminal, which the pipeline and PPOTrainer share."""

from __future__ import annotations

import logging
import re
from io import StringIO

import pytest
import rich
from rich.console import Console

from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.rows import in_passes
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.runtime.progress_display import readings, reporting, watching

METRICS = {
    "objective/scores": 1.234,
    "objective/kl": -12.34,
    "objective/entropy": 1.23,
    "response/length": 123.4,
    "throughput/episodes_per_s": 12.3,
}
READINGS = ["score 1.234", "KL -12.34", "entropy 1.23", "length 123.4", "12.3 episodes/s"]


def last_line(width: int, total: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the bar on a terminal of a width, after half of `total` iterations."""
    screen = StringIO()
    console = Console(file=screen, width=width, force_terminal=True)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    with reporting(0, total) as show:
        show(total // 2, METRICS)
        show(total // 2, {})  # a step without metrics leaves the last ones on the bar
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip()][-1].rstrip()


@pytest.mark.parametrize("total", [6, 10_000])
@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_bar_shows_the_time_left_and_as_many_whole_metrics_as_fit(total, width, monkeypatch):
    assert readings(METRICS) == READINGS
    line = last_line(width, total, monkeypatch)
    assert len(line) <= width
    shown = re.fullmatch(rf"PPO \d:\d\d:\d\d [━╸╺]{{10}} +{total // 2}/{total} \d:\d\d:\d\d left(.*)", line)
    assert shown is not None, line
    texts = shown[1].removeprefix(", ").split(", ")
    assert texts == READINGS[: len(texts)]
    assert len(texts) == len(READINGS) or len(line) + len(f", {READINGS[len(texts)]}") > width


def test_a_slow_run_shows_its_speed_too():
    assert readings({"throughput/episodes_per_s": 0.0345}) == ["0.0345 episodes/s"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    return now


def test_steps_between_two_logged_losses_get_a_line_by_time_and_reach_no_listener(clock, caplog, monkeypatch):
    told: list[int] = []
    monkeypatch.setattr(progress_display, "listeners", [lambda metrics, step: told.append(step)])
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"), watching("SFT", 40) as report:
        for step in range(1, 41):
            clock[0] += 12.0
            report(step, {"sft/loss": 2.0} if step % 20 == 0 else {})
    # 12 s a step: a line at the first step that is 30 s after the last line
    steps = [int(line.removeprefix("SFT step ").split("/")[0]) for line in caplog.messages]
    assert steps == [3, 6, 9, 12, 15, 18, 20, 23, 26, 29, 32, 35, 38, 40]
    assert caplog.messages[0] == "SFT step 3/40, 0:07:24 left"
    assert told == [20, 40]


def test_passes_of_rows_say_every_half_minute_how_far_they_are(clock, caplog):
    def compute(groups):
        for group in groups:
            clock[0] += 20.0
            yield sum(group)

    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        in_passes(range(10), 2, compute, Halving("scoring of pairs"))
        in_passes(range(2), 2, compute, Halving("scoring of pairs"))
    assert caplog.messages == [
        "Scoring of pairs, row 4/10, 0:01:00 left",
        "Scoring of pairs, row 8/10, 0:00:20 left",
    ]
