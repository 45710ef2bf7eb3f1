"""How long the runner expects it to take until an iteration is saved."""

from __future__ import annotations

import pytest

from ppo_rlhf.runner.forecast import Forecast


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def forecast(clock: FakeClock) -> Forecast:
    return Forecast(["generate", "optimise"], clock)


def iterate(forecast: Forecast, clock: FakeClock, generate: float, optimise: float, save: float | None = None) -> None:
    with forecast.timing("generate"):
        clock.now += generate
    with forecast.timing("optimise"):
        clock.now += optimise
        if save is not None:
            forecast.save_starts()
            clock.now += save
            forecast.save_ends()


def test_nothing_is_known_before_the_first_iteration_is_complete(forecast, clock):
    assert forecast.until_saved_s() is None
    with forecast.timing("generate"):
        clock.now += 2
    with forecast.timing("optimise"):
        assert forecast.until_saved_s() is None


def test_the_time_until_saved_is_the_rest_of_the_running_node_the_nodes_behind_it_and_the_save(forecast, clock):
    iterate(forecast, clock, generate=5, optimise=3, save=2)
    with forecast.timing("generate"):
        clock.now += 1
        assert forecast.until_saved_s() == 4 + 3 + 2
        clock.now += 4
    with forecast.timing("optimise"):
        clock.now += 1
        assert forecast.until_saved_s() == 2 + 2
        clock.now += 2
        forecast.save_starts()
        clock.now += 0.5
        assert forecast.until_saved_s() == 1.5


def test_a_save_that_was_never_timed_is_taken_to_need_as_long_as_the_node_that_makes_the_state_ever_did(
    forecast, clock
):
    iterate(forecast, clock, generate=5, optimise=4)
    for _ in range(5):
        iterate(forecast, clock, generate=5, optimise=3)
    assert forecast.save_s() == 4
    iterate(forecast, clock, generate=5, optimise=3, save=0.5)
    assert forecast.save_s() == 0.5


def test_a_first_save_that_is_running_is_taken_to_need_as_long_as_its_node_has_run(forecast, clock):
    with forecast.timing("generate"):
        clock.now += 1
    with forecast.timing("optimise"):
        clock.now += 3
        forecast.save_starts()
        clock.now += 1
        assert forecast.until_saved_s() == 4 - 1


@pytest.mark.parametrize(("later", "expected"), [([1, 3], 60 + 30 + 1), ([1, 3, 2], 3 + 1 + 1)])
def test_a_slow_first_iteration_counts_until_there_are_three_more(forecast, clock, later, expected):
    iterate(forecast, clock, generate=60, optimise=30, save=1)
    for seconds in later:
        iterate(forecast, clock, generate=seconds, optimise=1)
    with forecast.timing("generate"):
        assert forecast.until_saved_s() == expected  # by the longest of the last three


def test_a_save_does_not_make_its_node_look_slow(forecast, clock):
    iterate(forecast, clock, generate=1, optimise=2, save=50)
    with forecast.timing("optimise"):
        assert forecast.until_saved_s() == 2 + 50


def test_a_node_that_is_past_its_time_is_expected_to_need_as_long_again(forecast, clock):
    iterate(forecast, clock, generate=5, optimise=1, save=1)
    with forecast.timing("generate"):
        clock.now += 40
        assert forecast.until_saved_s() == 40 + 1 + 1
