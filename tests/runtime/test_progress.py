"""The progress bar on a terminal, which the pipeline and PPOTrainer share."""

from __future__ import annotations

import re
from io import StringIO

import pytest
import rich
from rich.console import Console

from ppo_rlhf.runtime.progress_display import readings, reporting

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
