"""Alarms on the KL: what triggers each alarm, one line per crossing, and the setting that the line names."""

import logging

import numpy as np
import pytest

from ppo_rlhf.advice import advise
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.kl_alarms import KLAlarms
from ppo_rlhf.ppo.progress import Progress


def rows(curve: list[float], coefficient: float = 0.05) -> list[dict[str, float]]:
    return [{"objective/kl": kl, "objective/kl_coef": coefficient} for kl in curve]


def lines(curve: list[float], **settings) -> dict[int, list[str]]:
    """Return the alarm lines by iteration, counted from 1; iterations without a line are left out."""
    return said(PPOConfig(**settings), rows(curve))


def said(config: PPOConfig, history: list[dict[str, float]]) -> dict[int, list[str]]:
    alarms = KLAlarms(config)
    actual = {iteration: alarms.after(row) for iteration, row in enumerate(history, start=1)}
    return {iteration: lines for iteration, lines in actual.items() if lines}


def test_a_usual_curve_raises_nothing():
    rising = [0.0, 0.0, 0.1, 0.4, 0.9, 1.6, 2.5, 3.4, 4.2, 4.8, 5.2, *[5.5, 6.1, 5.8] * 10]
    assert lines(rising) == {}
    assert lines([0.0] * 40) == {}
    assert lines([*[15.0] * 20]) == {}  # the limit itself is not above the limit


def test_the_warning_is_given_once_and_again_only_after_the_kl_came_back():
    actual = lines([14.0, 16.0, 17.0, 18.0, 14.9, 15.1, 15.2])
    assert list(actual) == [2, 6]
    assert [line.startswith("KL warning: KL is 16 ") for line in actual[2]] == [True]
    assert actual[2][0].endswith("Raise ppo.kl_coef by about a factor of 1.6 (now 0.05).")


def test_the_alarm_is_given_once_and_no_warning_on_the_way_down():
    actual = lines([14.0, 16.0, 21.0, 25.0, 18.0, 17.0, 22.0])
    assert list(actual) == [2, 3, 7]
    assert [line.startswith("KL alarm: KL is 21 ") for line in actual[3]] == [True]
    assert actual[3][0].endswith("Raise ppo.kl_coef by about a factor of 2.1 (now 0.05).")
    assert list(lines([14.0, 30.0, 16.0, 14.0, 16.0])) == [2, 5]


def test_with_the_adaptive_controller_its_target_or_if_that_is_low_enough_its_start_is_the_setting_to_move():
    [line] = lines([30.0], kl_controller="adaptive", kl_target=20.0)[1]
    assert line.endswith("Lower ppo.kl_target by about a factor of 3 (now 20).")
    [line] = lines([30.0], kl_controller="adaptive", kl_target=6.0)[1]
    assert line.endswith("Halve ppo.kl_horizon (now 10000).")
    [line] = lines([16.0], kl_controller="adaptive", kl_target=15.0)[1]
    assert line.endswith("Lower ppo.kl_target by about a factor of 1.6 (now 15).")
    config = PPOConfig(kl_controller="adaptive", kl_target=6.0)
    [line] = KLAlarms(config).after(rows([30.0], coefficient=0.2)[0])
    assert line.endswith("Raise ppo.kl_coef by about a factor of 4 (now 0.05).")


@pytest.mark.parametrize("kl", [16.0, 25.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"kl_controller": "adaptive", "kl_target": 17.0},  # once the alarm named kl_coef and the advice kl_target
        {"kl_controller": "adaptive", "kl_target": 6.0},
        {"kl_controller": "adaptive", "kl_target": 21.0},
        {"kl_coef": 0.05},
        {"kl_coef": 0.0, "reward_scale": 3.0},
    ],
)
def test_an_alarm_names_the_change_that_the_advice_names_for_the_same_kl(settings, kl):
    config, history = PPOConfig(**settings), rows([kl] * 3, settings.get("kl_coef", 0.05))
    [advice] = advise(config, history)
    [line] = KLAlarms(config).after(history[0])
    assert advice.rule.name == f"kl_{'alarm' if kl > 20 else 'warning'}"
    assert advice.change is not None
    assert line.endswith(f" {advice.change}")


def test_a_collapse_is_a_running_mean_below_a_tenth_of_the_highest():
    """Over ten iterations: after ten at 4, the mean falls below 0.4 once at most one of the ten is left."""
    actual = lines([*[4.0] * 10, *[0.0] * 25])
    assert list(actual) == [20]
    assert actual[20][0].endswith("undo each other.")  # no setting is named: none is known to help
    assert lines([*[0.4] * 10, *[0.0] * 25]) == {}  # KL was never above MOVED, so it cannot collapse
    assert lines([*[4.0] * 10, *[0.5] * 25]) == {}


def test_a_running_mean_below_zero_says_where_responses_come_from():
    actual = lines([-0.3, -0.4] * 10, top_k=50)
    assert list(actual) == [10]
    assert "policy/rollout_logprob_gap" in actual[10][0]
    assert actual[10][0].endswith("Set ppo.top_k to 0 (now 50).")
    assert lines([-0.3, -0.4] * 10)[10][0].endswith("too.")  # no filter is on
    assert lines([-0.04] * 20) == {}
    assert lines([-2.0, 1.8] * 10) == {}  # its mean of -0.1 is well within its noise


def test_a_mean_below_zero_is_an_alarm_only_beyond_three_of_its_standard_errors():
    """Ten iterations alternate by ± 0.3 around the mean: s = 0.3 √(10/9); three standard errors 3 s / √10 are 0.3."""
    for mean, expected in ((-0.299, []), (-0.301, [10])):
        assert list(lines([mean - 0.3, mean + 0.3] * 5)) == expected


def test_limits_are_the_settings():
    assert list(lines([3.0, 5.0, 9.0], kl_warning=4.0, kl_alarm=8.0)) == [2, 3]
    assert list(lines([12.0], kl_alarm=10.0)) == [1]  # an alarm below the usual warning


def test_a_run_logs_its_alarms_as_warnings(make_run, caplog):
    run = make_run(kl_warning=1e-4, kl_alarm=50.0, learning_rate=3e-2)
    with caplog.at_level(logging.WARNING):
        while not run.state.progress.finished:
            run.iteration()
    crossed = [line for line in caplog.messages if line.startswith("KL warning: ")]
    above = [row["objective/kl"] > 1e-4 for row in run.state.progress.history]
    assert len(crossed) == sum(now and not before for before, now in zip([False, *above], above, strict=False)) > 0


def alarmed(batch: int, kl: float, iterations: int = 300, runs: int = 40) -> float:
    """Share of runs with an alarm, at any iteration, if only noise moves the KL.

    The log-ratio of a response is normal with mean KL and variance 2 KL, as between two normal distributions.
    """
    config, rng, alarms = PPOConfig(per_device_train_batch_size=batch), np.random.default_rng(0), 0
    for _ in range(runs):
        curve = rng.normal(kl, np.sqrt(2.0 * kl), size=(iterations, batch)).mean(axis=1)
        alarms += bool(said(config, rows(curve.tolist())))
    return alarms / runs


@pytest.mark.parametrize("batch", [1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (2, 4, 7))])
def test_noise_of_a_small_batch_is_no_alarm(batch: int):
    """With means of ten iterations, batches of 1 alarmed in 95 % and more of these runs, batches of 7 in 5 to 13 %."""
    assert max(alarmed(batch, kl) for kl in (0.02, 0.2, 0.5)) <= 0.05


def test_a_kl_that_is_negative_or_collapses_is_an_alarm_in_a_small_batch_too():
    config, rng = PPOConfig(per_device_train_batch_size=1), np.random.default_rng(0)
    negative = rows(rng.normal(-0.5, 0.5, size=100).tolist())
    assert ["KL negative" in line for line in said(config, negative)[80]] == [True]
    collapsing = rows([*rng.normal(2.0, 1.0, size=160), *rng.normal(0.02, 0.2, size=120)])
    assert ["KL collapsed" in line for lines in said(config, collapsing).values() for line in lines] == [True]


def test_a_run_that_goes_on_from_any_checkpoint_says_what_an_undisturbed_one_says_and_nothing_twice(caplog):
    curve = [14.0, 16.0, 17.0, *[4.0] * 10, *[0.0] * 25, *[-0.3] * 12, 30.0]
    history = [{"iteration": float(number), **row} for number, row in enumerate(rows(curve), start=1)]
    expected = said(PPOConfig(), history)
    assert len(expected) >= 4
    for begun in range(len(curve) + 1):
        progress = Progress(PPOConfig(), iteration=begun)
        progress.restore_history(history[:begun])
        caplog.clear()
        for row in history[begun:]:
            progress.complete({name: value for name, value in row.items() if name != "iteration"})
        assert caplog.messages == [line for number, lines in expected.items() if number > begun for line in lines]
        assert progress.history == history
