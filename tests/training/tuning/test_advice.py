"""What a person reads: first things first, each setting once; and what measured runs of the demo are told."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.training.tuning import RULES, SHOWN, Stage, advise, in_words
from tests.training.tuning.support import config, curve, history

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "tests" / "data" / "tuning"
DEMO = {"total_episodes": 5120, "missing_eos_penalty": 1.0, "value_model": "reward_init"}
BROKEN = {  # speaks in every stage
    "policy/rollout_logprob_gap": curve(0.1),
    "objective/kl": curve(30),
    "eval/distinct_2": [0.1] * 4,
    "policy/approxkl_avg": curve(0.2),
    "policy/clipfrac_avg": curve(0.5),
    "response/truncated_fraction": curve(0.9),
}


def words(settings: dict[str, Any], rows: list[dict[str, float]], most: int | None = SHOWN) -> list[str]:
    return in_words(config(**settings), advise(config(**settings), rows), rows, most)


def measured(name: str) -> list[dict[str, float]]:
    with (MEASURED / f"{name}.csv").open() as file:
        return [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(file)]


def told(name: str, settings: dict[str, Any], iterations: int | None = None) -> list[tuple[str, str]]:
    """Which rules speak of a measured run, and which setting each would move."""
    advice = advise(config(**DEMO | settings), measured(name)[:iterations])
    return [(item.rule.name, item.change.setting if item.change else "") for item in advice]


@pytest.mark.parametrize("iterations", [0, 1, 5, 10, 20, 30, 40, 60, 80])
def test_the_demo_as_it_is_shipped_is_told_nothing_at_any_time(iterations: int):
    assert told("demo", {}, iterations) == []


def test_a_run_without_penalty_at_ten_times_the_rate_is_told_kl_first_and_the_rate_second():
    settings = {"kl_coef": 0.0, "learning_rate": 4e-3}
    assert told("no_penalty_ten_times_the_rate", settings) == [
        ("kl_alarm", "kl_coef"),
        ("reward_hacked", "kl_coef"),
        ("diversity_lost", "kl_coef"),
        ("update_too_large", "learning_rate"),
    ]
    lines = words(DEMO | settings, measured("no_penalty_ten_times_the_rate"))
    assert "Raise ppo.kl_coef from 0 to 0.05." in lines[0]
    assert "KL is 166 nats per response" in lines[0]
    assert [line[:9] for line in lines] == ["1. [KL: k", "   [also ", "   [also ", "2. [learn"]
    assert "Lower ppo.learning_rate from 0.004 to 0.00086." in lines[3]


def test_a_run_without_penalty_is_told_so_by_its_judge_its_phrases_and_its_entropy():
    assert [rule for rule, setting in told("no_penalty", {"kl_coef": 0.0, "total_episodes": 7680})] == [
        "kl_alarm",
        "reward_hacked",
        "diversity_lost",
        "entropy_collapsed",
    ]


def test_a_run_at_a_hundredth_of_the_rate_is_told_to_raise_it():
    assert told("hundredth_of_the_rate", {"learning_rate": 4e-6}) == [("update_too_small", "learning_rate")]


def test_a_run_under_sixty_times_the_penalty_is_told_to_lower_it():
    assert told("sixty_times_the_penalty", {"kl_coef": 5.0}) == [("kl_penalty_too_strong", "kl_coef")]


def test_nothing_to_change_is_said_with_the_number_of_iterations_that_says_so():
    assert words({}, history()) == [
        "Nothing to change: over 40 iterations no rule of the tuning guide objects to the curves."
    ]
    assert words({}, history(iterations=20)) == [
        "Nothing to change so far: over 20 iterations no rule of the tuning guide objects to the curves."
    ]


@pytest.mark.parametrize(("iterations", "shown"), [(0, "0 iterations"), (1, "1 iteration "), (9, "9 iterations")])
def test_a_short_run_is_called_too_short_instead_of_well(iterations: int, shown: str):
    [line] = words({}, history(iterations=iterations))
    assert line.startswith(shown)
    assert "too early to judge" in line


def test_iterations_of_the_critics_warm_up_do_not_make_a_run_long_enough():
    [line] = words({"critic_warmup_iterations": 35}, history())
    assert line.startswith("5 iterations of the policy: too early")


def test_an_alarm_is_given_even_if_the_run_is_too_short_for_the_rest():
    first, second = words({}, history({"objective/kl": curve(30)}, iterations=3))
    assert "too early" in first
    assert second.startswith("1. [KL: kl_alarm] KL is 30 nats per response")


def test_advice_comes_in_the_order_of_the_guide_and_at_most_three_settings_at_a_time():
    lines = words({}, history(BROKEN))
    assert [line for line in lines if re.match(r"\d\.", line)] == lines[:2] + lines[3:4]
    assert [line.split(":")[0] for line in (lines[0], lines[1], lines[3])] == [
        "1. [before tuning",
        "2. [KL",
        "3. [learning rates and batch sizes",
    ]
    assert lines[2].startswith("   [also diversity_lost]")
    assert lines[4] == "2 more after that: kedro advise --all"


def test_all_advice_is_shown_on_request():
    lines = [line for line in words({}, history(BROKEN), most=None) if re.match(r"\d\.", line)]
    assert [re.search(r"\[([^:]*):", line)[1] for line in lines] == [stage.value for stage in Stage]  # type: ignore[index]


def test_a_setting_is_moved_once_and_the_first_rule_decides_where_to():
    spoilt = {"objective/kl": curve(30), "objective/entropy": curve(1.5, 0.2)}
    lines = words({}, history(spoilt))
    assert len(lines) == 2
    assert "from 0.08 to 0.24." in lines[0]
    assert lines[1].startswith("   [also entropy_collapsed]")
    assert "Raise" not in lines[1]


def test_a_later_rule_that_would_move_a_setting_the_other_way_is_not_heard():
    # skipped steps ask for a lower learning rate, a flat score under tiny updates for a higher one
    flat = {"policy/approxkl_avg": curve(1e-6), "objective/kl": curve(0.01), "eval/reward": [0.0] * 4}
    spoilt = flat | {"optimiser/skipped_steps": (0.0, 3.0)}
    rows = history(spoilt)
    assert [item.rule.name for item in advise(config(), rows)] == ["steps_skipped", "update_too_small"]
    [line] = words({}, rows)
    assert "Lower ppo.learning_rate from 0.0004 to 0.0002." in line


def test_the_history_may_come_in_any_order_and_is_left_as_it_was():
    rows = history(BROKEN)
    before = [dict(row) for row in rows]
    shuffled = [rows[i] for i in (7 * step % 40 for step in range(40))]
    assert [str(item) for item in advise(config(), shuffled)] == [str(item) for item in advise(config(), rows)]
    assert all(a.items() >= {k: v for k, v in b.items() if v == v}.items() for a, b in zip(rows, before, strict=True))


def test_the_page_for_readers_has_every_rule_in_order_with_its_threshold_and_source():
    page = (ROOT / "docs" / "tuning.md").read_text()
    rows = re.findall(r"^\| `([a-z_0-9]+)` \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [rule.name for rule in RULES]
    for rule, (_, row) in zip(RULES, rows, strict=True):
        cells = row.split(" | ")
        assert cells[0] == ", ".join(f"`{key}`" for key in rule.looks_at), rule.name
        shown = f"`ppo.{rule.threshold}`" if isinstance(rule.threshold, str) else f"{rule.threshold:.3g}"
        assert cells[1] == shown, rule.name
        assert cells[2] == str(rule.iterations), rule.name
        assert cells[3] == rule.meaning, rule.name
        assert cells[4] == rule.source, rule.name


def test_no_two_rules_share_a_name():
    assert not [name for name, group in itertools.groupby(sorted(rule.name for rule in RULES)) if len([*group]) > 1]
