"""The lines that a user reads, and the advice on measured runs of the demo."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.advice import SHOWN, Stage, advise, in_words
from tests.advice.support import ADAPTIVE, config, curve, history

MEASURED = Path(__file__).parents[1] / "data" / "tuning"
DEMO = {"total_episodes": 5120, "missing_eos_penalty": 1.0, "value_model": "reward_init"}
PENALISE = "Set ppo.kl_coef to 0.05 (now 0.0)."
BROKEN = {  # a rule of every stage fires
    "policy/rollout_logprob_gap": curve(0.1),
    "objective/kl": curve(30),
    "eval/distinct_2": [0.1] * 4,
    "policy/approxkl_avg": curve(0.2),
    "policy/clipfrac_avg": curve(0.5),
    "response/truncated_fraction": curve(0.9),
}


def words(settings: dict[str, Any], rows: list[dict[str, float]], most: int | None = SHOWN) -> list[str]:
    return in_words(config(**settings), rows, most)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("demo", {}, []),
        (
            "no_penalty_ten_times_the_rate",
            {"kl_coef": 0.0, "learning_rate": 4e-3},
            [
                ("kl_alarm", PENALISE),
                ("reward_hacked", PENALISE),
                ("diversity_lost", PENALISE),
                ("entropy_collapsed", PENALISE),
                ("update_too_large", "Lower ppo.learning_rate by about a factor of 4.4 (now 0.004)."),
            ],
        ),
        (
            "no_penalty",
            {"kl_coef": 0.0, "total_episodes": 7680},
            [(rule, PENALISE) for rule in ("kl_alarm", "reward_hacked", "diversity_lost", "entropy_collapsed")],
        ),
        (
            "hundredth_of_the_rate",
            {"learning_rate": 4e-6},
            [("update_too_small", "Raise ppo.learning_rate by about a factor of 10 (now 4e-06).")],
        ),
        (
            "sixty_times_the_penalty",
            {"kl_coef": 5.0},
            [("kl_penalty_too_strong", "Lower ppo.kl_coef by about a factor of 10 (now 5).")],
        ),
    ],
)
def test_measured_runs_get_the_advice_that_helped_them(name: str, settings: dict[str, Any], expected: list[Any]):
    with (MEASURED / f"{name}.csv").open() as file:
        rows = [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(file)]
    for row in rows:  # recorded before a run decided while it trained whether it exploits its reward
        fell = row["eval/since_best_p"] < 0.0025 and row["eval/since_best_reward"] >= 0.0
        row |= {"eval/since_best_exploits": float(fell)} if row["eval/since_best_p"] <= 1.0 else {}
        row["eval/since_best_trained_reward"] = row["eval/since_best_reward"]
    advice = advise(config(**DEMO | settings), rows)
    assert [(item.rule.name, str(item.change)) for item in advice if item.change] == expected
    if not expected:
        for iterations in range(0, len(rows), 5):
            assert advise(config(**DEMO), rows[:iterations]) == []


@pytest.mark.parametrize(
    ("iterations", "settings", "begins"),
    [
        (40, {}, "Nothing to change: "),
        (15, {}, "Nothing to change so far: "),
        (9, {}, "9 iterations of the policy: too early"),
        (1, {}, "1 iteration of the policy: too early"),
        (0, {}, "0 iterations of the policy: too early"),
        (40, {"critic_warmup_iterations": 35}, "5 iterations of the policy: too early"),
    ],
)
def test_a_run_without_advice_is_well_or_too_short(iterations: int, settings: dict[str, Any], begins: str):
    [line] = words(settings, history(iterations=iterations))
    assert line.startswith(begins)


def test_an_alarm_is_given_even_if_the_run_is_too_short_for_the_rest():
    first, second = words({}, history({"objective/kl": curve(30)}, iterations=3))
    assert "too early" in first
    assert second.startswith("1. [KL: kl_alarm] KL is 30 nats per response, above 20: ")
    assert second.endswith("Raise ppo.kl_coef by about a factor of 3 (now 0.08).")


def test_an_answer_that_the_audit_warned_of_is_named_before_any_setting():
    rows = [{"eval/attack_share": 0.21, "eval/attack_share_sft": 0.07, "eval/attack_share_p": 0.001}] * 12
    (line, *_) = in_words(config(), rows)
    assert line == (
        "21% of the answers do what the audit found to be a hole of the reward (SFT's: 7%): mend the reward before you "
        "change a setting."
    )
    for silent in ({"eval/attack_share_p": 0.02}, {"eval/attack_share": 0.07}):
        assert "audit" not in in_words(config(), [rows[0] | silent] * 12)[0]


def test_three_settings_at_a_time_are_shown_in_the_order_of_the_stages():
    lines = words({}, history(BROKEN))
    assert [line[:22] for line in lines] == [
        "1. [before tuning: rol",
        "2. [KL: kl_alarm] KL i",
        "   [also diversity_los",
        "3. [learning rates and",
        "2 more after that: ked",
    ]
    everything = [line for line in words({}, history(BROKEN), most=None) if re.match(r"\d\.", line)]
    assert [line[4:].split(":")[0] for line in everything] == [stage.value for stage in Stage]


@pytest.mark.parametrize(
    ("now", "begins"),
    [
        (1.0, "All responses are cut off (25% at the start)"),
        (0.75, "75% of the responses are cut off (25% at the start)"),
    ],
)
def test_how_many_responses_are_cut_off_is_said_in_words(now: float, begins: str):
    (advice,) = advise(config(), history({"response/truncated_fraction": curve(0.25, now)}))
    assert advice.seen == begins


def test_a_setting_is_changed_once_and_a_rule_that_would_move_it_the_other_way_is_left_out():
    # a KL above its target asks for a lower learning rate, updates too small to move the policy for a higher one
    rows = history({"objective/kl": curve(0.4), "objective/kl_coef": (0.05, 0.8), "policy/approxkl_avg": curve(1e-6)})
    rows = [row | {"eval/reward": row["eval/reward"] * 0.0} for row in rows]
    settings = ADAPTIVE | {"kl_target": 0.1}
    assert [item.rule.name for item in advise(config(**settings), rows)] == ["kl_off_target", "update_too_small"]
    [line] = words(settings, rows)
    assert "Halve ppo.learning_rate (now 0.0004)." in line


def test_the_history_may_come_in_any_order_and_as_any_iterable():
    rows = history(BROKEN)
    shuffled = (rows[7 * step % 40] for step in range(40))
    assert [str(item) for item in advise(config(), shuffled)] == [str(item) for item in advise(config(), rows)]
