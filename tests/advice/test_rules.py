"""Each rule fires on a curve that calls for it, advises a change worked out by hand, and is silent just below."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from ppo_rlhf.advice import RULES, Advice, Change, Stage, advise
from ppo_rlhf.config import PPOConfig
from tests.advice.support import ADAPTIVE, ITERATIONS, Spoilt, config, curve, history
from tests.advice.test_obeyed import CASES as OBEYED
from tests.contracts.checkers import documented_metrics

DOCS = Path(__file__).parents[2] / "docs"
NOISE = [1.0, -1.0] * (ITERATIONS // 2)
FLAT_SCORE = {"eval/reward": [0.0] * 4}


@dataclass
class Case:
    """Curves on which the rule must fire, the change it must advise, and curves on which it must not fire."""

    fires: Spoilt
    silent: Spoilt
    change: tuple[Any, ...] | None  # setting, present value, factor, value
    settings: dict[str, Any] = field(default_factory=dict)
    settings_silent: dict[str, Any] = field(default_factory=dict)


CASES = {
    "rollout_mismatch": Case(
        {"policy/rollout_logprob_gap": curve(2e-3)},
        {"policy/rollout_logprob_gap": curve(9e-4)},
        ("rollout_engine", "static", None, "hf"),
    ),
    "kl_negative": Case(
        {"objective/kl": [-0.6 + 0.5 * n for n in NOISE]},  # the window's error is 0.5 x (10 / 9)^0.5 / 10^0.5 = 0.17
        {"objective/kl": [-0.4 + 0.5 * n for n in NOISE]},  # below 0 throughout, but by less than three errors
        ("top_k", 50, None, 0),
        {"top_k": 50},
    ),
    "kl_alarm": Case({"objective/kl": curve(30)}, {"objective/kl": curve(19.9)}, ("kl_coef", 0.08, 3.0)),
    "kl_warning": Case({"objective/kl": curve(18)}, {"objective/kl": curve(14.9)}, ("kl_coef", 0.08, 1.8)),
    "kl_penalty_too_strong": Case(
        # 40 iterations of 15 tokens, 3e-4 / (7 / 32) nats per token each: the updates come to 0.82 nats, or to 1.6
        {"objective/kl": curve(0.4), "policy/approxkl_avg": curve(6e-4), **FLAT_SCORE},
        {"objective/kl": curve(0.4), "policy/approxkl_avg": curve(3e-4), **FLAT_SCORE},
        ("kl_coef", 0.5, 0.2),
        {"kl_coef": 0.5},
    ),
    "kl_off_target": Case(
        {"objective/kl": curve(8), "objective/kl_coef": curve(0.05)},
        {"objective/kl": curve(7.4), "objective/kl_coef": curve(0.05)},
        ("kl_horizon", 200.0, 0.5),
        ADAPTIVE,
    ),
    "reward_hacked": Case(
        {"eval/since_best_score": [0.2, 0.3, -0.1, -0.2], "eval/since_best_exploits": [0.0, 0.0, 0.0, 1.0]},
        {"eval/since_best_score": [0.2, 0.3, -0.3, -0.2], "eval/since_best_exploits": [0.0, 0.0, 1.0, 0.0]},
        ("kl_coef", 0.08, 2.0),
    ),
    "diversity_lost": Case(
        {"eval/distinct_2": [0.23, 0.2, 0.15, 0.11]},
        {"eval/distinct_2": [0.23, 0.1, 0.15, 0.12]},
        ("kl_coef", 0.08, 1.5),
    ),
    "entropy_collapsed": Case(
        {"objective/entropy": curve(1.5, 0.49)},
        {"objective/entropy": curve(1.5, 0.51)},
        ("kl_coef", 0.08, 1.5),
    ),
    "steps_skipped": Case(
        {"optimiser/skipped_steps": (0.0, 8.0)},
        {"optimiser/skipped_steps": [0.0, 4.0, *[8.0] * 38]},  # finding its scale
        ("dtype", "float16", None, "bfloat16"),
        {"dtype": "float16"},
    ),
    "update_too_large": Case(
        {"policy/approxkl_avg": curve(0.32)},  # (0.02 / 0.32) ** 0.5 = 1/4
        {"policy/approxkl_avg": curve(0.9, 0.05, 0.05, 0.0)},  # a start that calms down
        ("learning_rate", 4e-4, 0.25),
    ),
    "update_too_small": Case(
        {"policy/approxkl_avg": curve(4e-5), "objective/kl": curve(0.01), **FLAT_SCORE},
        {"policy/approxkl_avg": curve(4e-5), "objective/kl": curve(0.01), "eval/reward": [0.0, 0.1, 0.2, 0.3]},
        ("learning_rate", 4e-4, 5.0),  # (1e-3 / 4e-5) ** 0.5 = 5
    ),
    "critic_explains_nothing": Case(
        {"val/explained_variance": (0.0, 0.15)},  # median 0.075, end 0.13
        {"val/explained_variance": (0.0, 0.25)},  # median 0.125
        ("value_learning_rate", 5e-4, 3.0),
    ),
    "much_clipped": Case(
        {"policy/clipfrac_avg": curve(0.31)},
        {"policy/clipfrac_avg": curve(0.5, 0.2, 0.2, 0.1)},
        ("num_ppo_epochs", 4, 0.5),
    ),
    "values_much_clipped": Case(
        {"val/clipfrac_avg": curve(0.7, 0.1)}, {"val/clipfrac_avg": curve(0.59)}, ("cliprange_value", 0.2, 2.0)
    ),
    "truncated": Case(
        {"response/truncated_fraction": curve(0.1, 0.6)},
        {"response/truncated_fraction": curve(0.1, 0.49)},
        ("missing_eos_penalty", None, None, 1.0),
    ),
    "length_drifted": Case(
        {"response/length": curve(10, 21)}, {"response/length": curve(10, 5.1)}, ("kl_coef", 0.08, 1.5)
    ),
    "reward_is_blind": Case(
        {"eval/judge_gap": [-0.1, -0.1, -0.1, -0.07], "eval/judge_gap_p": [0.5, 0.5, 0.5, 0.009]},
        {"eval/judge_gap": [-0.1, -0.1, -0.1, -0.05], "eval/judge_gap_p": [0.001, 0.001, 0.001, 0.009]},
        None,
    ),
    "spread_lost": Case(
        {"objective/scores_std": curve(1.0, 0.09)},  # from iteration 21 on
        {"objective/scores_std": curve(1.0, 0.11)},
        None,
    ),
}


def same_change(change: Change | None, expected: tuple[Any, ...] | None) -> bool:
    if change is None or expected is None:
        return change is expected
    wanted = Change(*expected)
    is_close = math.isclose(change.factor or 0.0, wanted.factor or 0.0, rel_tol=1e-4)
    return is_close and replace(change, factor=wanted.factor) == wanted


def fired(settings: dict[str, Any], spoilt: Spoilt | None = None, iterations: int = ITERATIONS) -> dict[str, Advice]:
    return {item.rule.name: item for item in advise(config(**settings), history(spoilt, iterations))}


@pytest.mark.parametrize("iterations", [0, 1, 9, 20, ITERATIONS])
def test_no_rule_fires_on_a_healthy_run(iterations: int):
    assert fired({}, iterations=iterations) == {}


def test_every_rule_has_a_case():
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_fires_where_it_must_and_nowhere_else(rule):
    case = CASES[rule.name]
    advice = fired(case.settings, case.fires)[rule.name]
    assert same_change(advice.change, case.change)
    assert re.search(r"\d", advice.seen)
    assert rule.name not in fired(case.settings_silent or case.settings, case.silent)
    assert rule.name not in fired(case.settings, case.fires, rule.iterations - 1)
    unmeasured = [{"iteration": i} | dict.fromkeys(history()[0].keys() - {"iteration"}, math.nan) for i in range(40)]
    assert rule.name not in {item.rule.name for item in advise(config(**case.settings), unmeasured)}


def test_rules_stand_in_the_order_of_their_stages_and_read_metrics_and_settings_that_exist():
    assert [rule.stage for rule in RULES] == sorted((rule.stage for rule in RULES), key=list(Stage).index)
    metrics = documented_metrics((DOCS / "metrics.md").read_text())
    settings = {f"ppo.{entry.name}" for entry in fields(PPOConfig)}
    for rule in RULES:
        assert set(rule.reads) <= metrics | settings, rule.name


HIGH, LOW = {"objective/kl": curve(12)}, {"objective/kl": curve(2)}
CUT = {"response/truncated_fraction": curve(0.1, 0.8)}
SHARED, USELESS = {"value_model": "shared", "learning_rate": 1e-5}, {"val/explained_variance": (0.0, 0.15)}
FAST_HEAD = SHARED | {"value_learning_rate": 3e-4}

# rule, settings, curves, the change
BRANCHES: list[tuple[str, dict[str, Any], Spoilt, tuple[Any, ...] | None]] = [
    ("kl_alarm", {"kl_coef": 0.05}, {"objective/kl": curve(500)}, ("kl_coef", 0.05, 4.0)),  # fourfold at most
    ("kl_alarm", {"kl_coef": 0.0}, {"objective/kl": curve(25)}, ("kl_coef", 0.0, None, 0.05)),
    ("kl_alarm", ADAPTIVE | {"kl_target": 30.0}, {"objective/kl": curve(25)}, ("kl_target", 30.0, 0.4)),
    ("kl_alarm", ADAPTIVE, {"objective/kl": curve(25), "objective/kl_coef": curve(0.05)}, ("kl_horizon", 200.0, 0.5)),
    ("kl_off_target", ADAPTIVE, HIGH | {"objective/kl_coef": (0.05, 0.1)}, ("kl_coef", 0.05, 1.8846)),
    ("kl_off_target", ADAPTIVE, LOW | {"objective/kl_coef": (0.05, 0.025)}, ("kl_coef", 0.05, 0.5577)),
    ("kl_off_target", ADAPTIVE, HIGH | {"objective/kl_coef": (0.05, 0.8)}, ("learning_rate", 4e-4, 0.5)),
    ("kl_off_target", ADAPTIVE | {"kl_horizon": 128.0}, LOW | {"objective/kl_coef": curve(0.05)},
     ("learning_rate", 4e-4, 2.0)),
    ("rollout_mismatch", {"rollout_engine": "hf"}, {"policy/rollout_logprob_gap": curve(0.2)}, None),
    ("rollout_mismatch", {}, {"policy/rollout_logprob_gap": [1e-2, *[1e-7] * 39]},
     ("rollout_engine", "static", None, "hf")),
    ("truncated", {"missing_eos_penalty": 1.0}, CUT, ("missing_eos_penalty", 1.0, 2.0)),
    ("truncated", {}, {"response/truncated_fraction": curve(0.9, 0.8)}, ("response_length", 36, 1.5)),
    ("truncated", {"truncated_responses": "mask"}, CUT, ("response_length", 36, 1.5)),  # excludes the penalty
    ("critic_explains_nothing", {"value_learning_rate": None}, USELESS, ("value_learning_rate", None, None, 1.2e-3)),
    ("critic_explains_nothing", SHARED | {"value_learning_rate": None}, USELESS,
     ("value_learning_rate", None, None, 2e-4)),
    ("critic_explains_nothing", SHARED | {"value_learning_rate": 3e-5}, USELESS,  # what conf/base sets
     ("value_learning_rate", 3e-5, None, 2e-4)),
    ("critic_explains_nothing", SHARED | {"value_learning_rate": 1e-4}, USELESS, ("vf_coef", 0.1, None, 0.4)),
    ("critic_explains_nothing", FAST_HEAD, USELESS, ("vf_coef", 0.1, None, 0.4)),  # 0.15 / the median 0.375
    ("critic_explains_nothing", FAST_HEAD, USELESS | {"loss/value_avg": curve(0.05)}, ("vf_coef", 0.1, None, 3.0)),
    ("critic_explains_nothing", FAST_HEAD, USELESS | {"loss/value_avg": curve(1e-3)}, ("vf_coef", 0.1, None, 3.0)),
    ("critic_explains_nothing", FAST_HEAD, USELESS | {"loss/value_avg": curve(0.8)},
     ("value_learning_rate", 3e-4, 3.0)),
    ("critic_explains_nothing", FAST_HEAD, USELESS | {"loss/value_avg": curve(0.0)},
     ("value_learning_rate", 3e-4, 3.0)),
    ("critic_explains_nothing", FAST_HEAD, USELESS | {"loss/value_avg": curve(math.nan)},
     ("value_learning_rate", 3e-4, 3.0)),
    ("critic_explains_nothing", FAST_HEAD | {"whiten_advantages": False}, USELESS, ("value_learning_rate", 3e-4, 3.0)),
    ("critic_explains_nothing", FAST_HEAD | {"vf_coef": 1.5}, USELESS | {"loss/value_avg": curve(0.05)},
     ("vf_coef", 1.5, None, 3.0)),
    ("critic_explains_nothing", FAST_HEAD | {"vf_coef": 3.0}, USELESS | {"loss/value_avg": curve(1e-3)},
     ("value_learning_rate", 3e-4, 3.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "curves", "change"), BRANCHES)
def test_the_change_depends_on_the_settings_and_the_curves(name: str, settings: Any, curves: Spoilt, change: Any):
    assert same_change(fired(settings, curves)[name].change, change)


@pytest.mark.parametrize(
    ("name", "settings", "curves"),
    [
        ("rollout_mismatch", {"dtype": "bfloat16"}, {"policy/rollout_logprob_gap": curve(0.04)}),
        ("steps_skipped", {}, {"optimiser/skipped_steps": (0.0, 8.0)}),  # no range is at fault
        ("truncated", {"stop_token": "none"}, {"response/truncated_fraction": curve(1.0)}),
        ("spread_lost", {"total_episodes": 40, "per_device_train_batch_size": 1}, {"objective/scores_std": curve(0.0)}),
        ("spread_lost", {}, {"objective/scores_std": [0.0] * 3 + [0.4] * 37}),  # a sparse reward
        ("reward_hacked", {}, {"eval/since_best_p": [0.0001] * 4}),  # what the run decided while it trained counts
        ("kl_negative", {}, {"objective/kl": curve(-0.04)}),
        ("entropy_collapsed", {}, {"objective/entropy": curve(1.5, 0.4), "objective/kl": curve(0.4)}),  # has not moved
        ("much_clipped", {"num_ppo_epochs": 1, "num_mini_batches": 2}, {"policy/clipfrac_avg": curve(0.5)}),
    ],
)
def test_a_rule_does_not_fire_where_its_metric_says_nothing(name: str, settings: Any, curves: Spoilt):
    assert name not in fired(settings, curves)


@pytest.mark.parametrize(
    ("planned", "iterations", "fires"),
    [(16, 16, True), (16, 12, False), (10, 10, True), (9, 9, False), (40, 16, False), (40, 29, False), (40, 30, True)],
)
def test_a_critic_that_explains_nothing_is_named_at_the_end_of_a_short_run_or_after_thirty_iterations(
    planned: int, iterations: int, fires: bool
):
    """Before, a run of 16 iterations with an explained variance of 0 had nothing to change."""
    settings = {"total_episodes": 64 * planned}
    useless = {"val/explained_variance": (0.0, 0.0)}
    assert ("critic_explains_nothing" in fired(settings, useless, iterations)) is fires


@pytest.mark.parametrize("noise", [pytest.param(0.05, marks=pytest.mark.slow), 0.3])
def test_a_critic_that_explains_a_third_is_rarely_named_whatever_the_noise(noise: float):
    """Each iteration's explained variance is 0.3 with noise, in runs of 16 iterations."""
    rng, named = np.random.default_rng(0), 0
    for _ in range(200):
        noisy = {"val/explained_variance": list(0.3 + noise * rng.normal(size=ITERATIONS))}
        named += "critic_explains_nothing" in fired({"total_episodes": 64 * 16}, noisy, 16)
    assert named <= binom.ppf(0.999, 200, 0.02)


@pytest.mark.parametrize("kl_coef", [0.05, 0.5, 5.0])
def test_a_first_large_update_does_not_turn_a_low_learning_rate_into_a_strong_penalty(kl_coef: float):
    """Then the updates come to 15 tokens x 0.0025 x 32 / 7 = 0.2 nats per response, 0.14 of them in the first one."""
    settings = {"kl_coef": kl_coef}
    still = {"objective/kl": curve(0.001), "objective/kl_coef": curve(kl_coef), **FLAT_SCORE}
    found = fired(settings, still | {"policy/approxkl_avg": [0.002, 5e-4, *[1e-7] * 38]})
    assert "kl_penalty_too_strong" not in found
    assert same_change(found["update_too_small"].change, ("learning_rate", 4e-4, 10.0))


@pytest.mark.parametrize(("kl_coef", "rule"), [(0.2, "update_too_small"), (0.21, "kl_penalty_too_strong")])
def test_with_one_step_an_iteration_the_penalty_tells_because_the_updates_are_not_measured(kl_coef: float, rule: str):
    still = {"objective/kl": curve(0.001), "policy/approxkl_avg": curve(0.0), **FLAT_SCORE}
    found = fired({"num_ppo_epochs": 1, "kl_coef": kl_coef}, still)
    assert list(found) == [rule]
    assert "KL is 0.001 nats per response" in found[rule].seen
    assert "updates" not in found[rule].seen


@pytest.mark.parametrize(("kl", "fires"), [(0.035, False), (0.03, True)])
def test_early_in_a_run_the_kl_at_its_planned_end_decides_whether_updates_are_too_small(kl: float, fires: bool):
    """Ten of forty iterations: KL grows with their square, so it ends at 16 times what it is, 0.56 or 0.48 nats."""
    still = {"objective/kl": curve(kl), "policy/approxkl_avg": curve(1e-7), **FLAT_SCORE}
    assert ("update_too_small" in fired({}, still, iterations=10)) is fires


@pytest.mark.parametrize("batch", [96, 128])
def test_a_batch_above_64_responses_is_a_start_of_its_own(batch: int):
    """Without an evaluation the rise of the score is from the first iterations: one of them is enough."""
    unmeasured = {key: [math.nan] * 4 for key in ("eval/reward", "eval/reward_sft")}
    flat = unmeasured | {
        "objective/scores": curve(0.0),
        "objective/kl": curve(0.01),
        "policy/approxkl_avg": curve(1e-7),
    }
    settings = {"per_device_train_batch_size": batch, "total_episodes": batch * ITERATIONS}
    assert "update_too_small" in fired(settings, flat)


def test_a_reward_that_tells_no_two_responses_apart_from_the_first_iteration_on_has_lost_its_spread():
    assert "spread_lost" in fired({}, {"objective/scores_std": curve(0.0)})


def test_iterations_of_the_critics_warm_up_are_not_judged():
    still = {"objective/kl": curve(0.0, 0.0, 0.0, 4.0), "policy/approxkl_avg": curve(0.0, 0.0, 0.0, 0.002)}
    assert fired({"critic_warmup_iterations": 30}, still) == {}
    drifting = {"response/length": curve(50.0, 17.0, 17.0, 17.0)}
    assert list(fired({}, drifting)) == ["length_drifted"]
    assert fired({"critic_warmup_iterations": 10}, drifting) == {}


SOLVED = {  # a task of right and wrong answers, as far as it can be solved: one short answer to each prompt
    "eval/judge_score": [0.85, 0.92, 0.97, 0.99],
    "eval/judge_score_sft": [0.8] * 4,
    "eval/reward": [0.85, 0.92, 0.97, 0.99],
    "eval/reward_sft": [0.8] * 4,
    "eval/verdict": [0.0, 1.0, 1.0, 1.0],
    "objective/entropy": curve(1.5, 0.3),
    "objective/kl": curve(10.0),
    "objective/kl_coef": curve(0.05),
    "objective/scores_std": (0.4, 0.1),
    "eval/distinct_2": [0.2, 0.15, 0.1, 0.05],
    "response/length": curve(17.0, 8.0),
    "policy/clipfrac_avg": curve(0.4),
}
OF_EXPLOITATION = {"kl_off_target", "diversity_lost", "entropy_collapsed", "length_drifted"}
OF_OPTIMISATION = {"much_clipped"}
CERTAIN_FALL = {"eval/since_best_p": [1.0, 1.0, 1.0, 0.01], "eval/since_best_reward": [0.0, 0.0, 0.0, -0.1]}


def test_a_task_whose_judge_rose_from_080_to_099_gets_no_advice_that_contradicts_it():
    assert fired(ADAPTIVE, SOLVED) == {}


@pytest.mark.parametrize("doubt", [{"eval/verdict": [0.0] * 4}, {"eval/verdict": [-1.0] * 4}, CERTAIN_FALL])
def test_without_a_certain_rise_or_after_a_certain_fall_the_same_curves_get_advice(doubt: Spoilt):
    assert set(fired(ADAPTIVE, SOLVED | doubt)) == OF_EXPLOITATION | OF_OPTIMISATION


def test_a_success_by_only_the_reward_does_not_silence_the_signs_of_its_exploitation():
    """Also where `evaluation.judge` names that reward, so that there are scores of a judge."""
    assert set(fired(ADAPTIVE, SOLVED | {"eval/verdict": [0.0, 0.5, 0.5, 0.5]})) == OF_EXPLOITATION


def test_limits_that_a_user_set_speak_after_a_success_too():
    assert list(fired({}, SOLVED | {"objective/kl": curve(25.0)})) == ["kl_alarm"]


def test_the_page_lists_the_rules_that_a_success_refutes():
    section = (DOCS / "tuning.md").read_text().split("## Advice that a success refutes")[1].split("## ")[0]
    lists = section.split("\n\n")[2].split("\n- ")
    for by, text in zip(("judged_success", "succeeded"), lists, strict=True):
        assert set(re.findall(r"`(\w+)`", text)) == {rule.name for rule in RULES if rule.refuted_by == by}


def test_the_pages_have_a_row_and_a_case_for_every_rule():
    decision = (DOCS / "decisions" / "0019-advice-has-to-show-that-it-helps.md").read_text()
    for text in ((DOCS / "tuning.md").read_text().split("\n## The rules\n")[1], decision):
        assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [rule.name for rule in RULES]
    of_their_own = {
        "rollout_mismatch": "test_the_other_engine_mends_a_rollout_mismatch",
        "steps_skipped": "test_gradients_beyond_float16_are_finite_in_bfloat16",
        "critic_explains_nothing": "test_a_critic_explains_more_after_the_advice",
        "reward_is_blind": "test_a_reward_that_sees_what_the_judge_sees_is_not_exploited",
        "spread_lost": "test_stopping_a_run_whose_reward_lost_its_spread_loses_nothing",
    }
    tests = re.findall(r"^def (test_\w+)", (Path(__file__).parent / "test_obeyed.py").read_text(), re.M)
    assert set(of_their_own.values()) <= set(tests)
    obeyed = {name.split("-")[0] for name in OBEYED}
    assert obeyed.isdisjoint(of_their_own)
    assert obeyed | set(of_their_own) == set(CASES) == {rule.name for rule in RULES}
