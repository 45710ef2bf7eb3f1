"""Each rule speaks of a curve that calls for it, with the change worked out by hand, and keeps silent just below."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.rewards.shaping import normalised
from ppo_rlhf.training.tuning import RULES, Advice, Change, Stage, advise
from ppo_rlhf.training.tuning.rule import Finding
from tests.training.tuning.support import ADAPTIVE, ITERATIONS, Spoilt, config, curve, history

DOCS = Path(__file__).parents[3] / "docs"
NOISE = [1.0, -1.0] * (ITERATIONS // 2)
SHARED = {"value_model": "shared", "value_learning_rate": None}
FLAT_SCORE = {"eval/reward": [0.0] * 4}


@dataclass
class Case:
    """A run of which the rule must speak, the change it must advise, and one just below of which it must not."""

    speaks: Spoilt
    silent: Spoilt
    change: tuple[str, Any, Any] | None
    settings: dict[str, Any] = field(default_factory=dict)
    settings_silent: dict[str, Any] = field(default_factory=dict)


CASES = {
    "rollout_mismatch": Case(
        {"policy/rollout_logprob_gap": curve(2e-3)},
        {"policy/rollout_logprob_gap": curve(9e-4)},
        ("rollout_engine", "static", "hf"),
    ),
    "rollout_mismatch_half_precision": Case(
        {"policy/rollout_logprob_gap": curve(0.06)},
        {"policy/rollout_logprob_gap": curve(0.04)},
        ("importance_cap", None, 2.0),
        {"dtype": "bfloat16"},
    ),
    "kl_negative": Case(
        {"objective/kl": [-0.2 + 0.05 * n for n in NOISE]},  # standard error 0.017
        {"objective/kl": [-0.2 + 0.5 * n for n in NOISE]},  # 0.17
        ("top_k", 50, 0),
        {"top_k": 50},
    ),
    "kl_alarm": Case({"objective/kl": curve(30)}, {"objective/kl": curve(19.9)}, ("kl_coef", 0.08, 0.24)),
    "kl_warning": Case({"objective/kl": curve(18)}, {"objective/kl": curve(14.9)}, ("kl_coef", 0.08, 0.14)),
    "kl_collapsed": Case({"objective/kl": curve(4, 0.3)}, {"objective/kl": curve(4, 0.5)}, ("kl_coef", 0.08, 0.04)),
    "kl_penalty_too_strong": Case(
        {"objective/kl": curve(0.4), **FLAT_SCORE},
        {"objective/kl": curve(0.4), "eval/reward": [0.0, 0.0, 0.0, 0.3]},
        ("kl_coef", 0.5, 0.1),
        {"kl_coef": 0.5},
    ),
    "kl_horizon_too_long": Case(
        {},
        {},
        ("kl_horizon", 1000.0, 130.0),  # 2,560 episodes / 20, of two digits
        ADAPTIVE | {"kl_horizon": 1000.0},
        ADAPTIVE | {"kl_horizon": 512.0},
    ),
    "kl_coef_saturated": Case(
        {"objective/kl": curve(12), "objective/kl_coef": (0.05, 0.8)},
        {"objective/kl": curve(7.4), "objective/kl_coef": (0.05, 0.8)},
        ("learning_rate", 4e-4, 2e-4),
        ADAPTIVE,
    ),
    "kl_off_target": Case(
        {"objective/kl": curve(8), "objective/kl_coef": curve(0.05)},
        {"objective/kl": curve(7.4), "objective/kl_coef": curve(0.05)},
        ("kl_horizon", 200.0, 100.0),
        ADAPTIVE,
    ),
    "reward_hacked": Case(
        {"eval/judge_score": [0.2, 0.5, 0.3, 0.2]},  # 0.25 of 0.5 lost, at twice the KL of the best
        {"eval/judge_score": [0.2, 0.5, 0.45, 0.35]},  # 0.1 of 0.5 lost
        ("kl_coef", 0.08, 0.16),
    ),
    "diversity_lost": Case(
        {"eval/distinct_2": [0.23, 0.2, 0.15, 0.11]},
        {"eval/distinct_2": [0.23, 0.1, 0.15, 0.12]},
        ("kl_coef", 0.08, 0.12),
    ),
    "entropy_collapsed": Case(
        {"objective/entropy": curve(1.5, 0.49)},
        {"objective/entropy": curve(1.5, 0.51)},
        ("kl_coef", 0.08, 0.12),
    ),
    "steps_skipped": Case(
        {"optimiser/skipped_steps": (0.0, 1.0)}, {"optimiser/skipped_steps": curve(0)}, ("learning_rate", 4e-4, 2e-4)
    ),
    "score_fell": Case(
        {"eval/reward": [0.0, -0.2, -0.4, -0.6]},
        {"eval/reward": [0.0, -0.2, -0.6, -0.4]},
        ("learning_rate", 4e-4, 2e-4),
    ),
    "update_too_large": Case(
        {"policy/approxkl_avg": curve(0.0, 0.32, 0.0, 0.0)},  # a window of it; (0.02 / 0.32) ** 0.5 = 1/4
        {"policy/approxkl_avg": [0.0, 0.9, *[0.0] * 38]},  # one batch
        ("learning_rate", 4e-4, 1e-4),
    ),
    "update_too_small": Case(
        {"policy/approxkl_avg": curve(4e-5), "objective/kl": curve(0.01), **FLAT_SCORE},
        {"policy/approxkl_avg": curve(4e-5), "objective/kl": curve(0.01), "eval/reward": [0.0, 0.1, 0.2, 0.3]},
        ("learning_rate", 4e-4, 2e-3),  # (1e-3 / 4e-5) ** 0.5 = 5
    ),
    "drift_without_gain": Case(
        {"objective/kl": curve(8), "eval/reward": [0.3] * 4},  # a tenth of (2 x 8) ** 0.5 is 0.4
        {"objective/kl": curve(8), "eval/reward": [0.5] * 4},
        ("gradient_accumulation_steps", 1, 2),
    ),
    "value_loss_grows": Case(
        {"loss/value_avg": curve(0.2, 0.7), "val/explained_variance": curve(0.0)},
        {"loss/value_avg": curve(0.2, 0.7), "val/explained_variance": curve(0.3)},
        ("value_learning_rate", 5e-4, 2.5e-4),
    ),
    "value_loss_dominates": Case(
        {"loss/value_avg": curve(200)},  # 0.1 x (2 x 200) ** 0.5 = 2
        {"loss/value_avg": curve(45)},  # 0.95
        ("vf_coef", 0.1, 0.025),
        SHARED,
    ),
    "critic_is_poor": Case(
        {"val/explained_variance": curve(0.04)},
        {"val/explained_variance": curve(0.0, 0.06)},
        ("value_learning_rate", 5e-4, 1e-3),
    ),
    "gradient_mostly_clipped": Case(
        {"policy/grad_norm": [0.3] * 30 + [5.0] * 6 + [0.3] * 4},  # six of the last ten iterations
        {"policy/grad_norm": [0.3] * 30 + [500.0] * 4 + [1.9] * 6},  # four of them, and far
        ("max_grad_norm", 1.0, 5.0),
    ),
    "vf_coef_without_effect": Case({}, {}, ("vf_coef", 0.5, 0.1), {"vf_coef": 0.5}, {"vf_coef": 0.1}),
    "much_clipped": Case(
        {"policy/clipfrac_avg": curve(0.31, 0.1)}, {"policy/clipfrac_avg": curve(0.29)}, ("num_ppo_epochs", 4, 2)
    ),
    "values_much_clipped": Case(
        {"val/clipfrac_avg": curve(0.7, 0.1)}, {"val/clipfrac_avg": curve(0.59)}, ("cliprange_value", 0.2, 0.4)
    ),
    "truncated": Case(
        {"response/truncated_fraction": curve(0.1, 0.6)},
        {"response/truncated_fraction": curve(0.1, 0.49)},
        ("missing_eos_penalty", None, 1.0),
    ),
    "length_drifted": Case(
        {"response/length": curve(10, 21)}, {"response/length": curve(10, 5.1)}, ("kl_coef", 0.08, 0.12)
    ),
    "spread_lost": Case(
        {"objective/scores_std": curve(1.0, 0.09)},  # from iteration 21 on
        {"objective/scores_std": curve(1.0, 0.11)},
        ("total_episodes", 2560, 1344),
    ),
    "reward_clipped": Case(
        {"objective/scores_p05": curve(-3), "objective/scores_p50": curve(-1.1), "objective/scores_p95": curve(0)},
        {"objective/scores_p05": curve(-3), "objective/scores_p50": curve(-0.9), "objective/scores_p95": curve(0)},
        ("reward_clip", 1.0, 4.5),
        {"reward_clip": 1.0},
    ),
}


def spoken(settings: dict[str, Any], spoilt: Spoilt | None = None, iterations: int = ITERATIONS) -> dict[str, Advice]:
    return {item.rule.name: item for item in advise(config(**settings), history(spoilt, iterations))}


def test_of_a_healthy_run_no_rule_speaks_whatever_its_length():
    for iterations in range(ITERATIONS + 1):
        assert spoken({}, iterations=iterations) == {}, iterations


def test_every_rule_has_its_cases():
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_of_a_curve_that_calls_for_it_and_says_what_to_change_to_what(name: str):
    case = CASES[name]
    advice = spoken(case.settings, case.speaks)[name]
    assert advice.change is not None
    assert (advice.change.setting, advice.change.now, advice.change.next) == case.change
    assert re.search(r"\d", advice.seen)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_silent_just_below_its_threshold(name: str):
    case = CASES[name]
    assert name not in spoken(case.settings_silent or case.settings, case.silent)


@pytest.mark.parametrize("name", CASES)
def test_what_a_rule_advises_is_a_valid_configuration_that_differs(name: str):
    settings = config(**CASES[name].settings)
    for item in advise(settings, history(CASES[name].speaks)):
        assert item.change is not None
        changed = replace(settings, **{item.change.setting: item.change.next})
        assert changed != settings
        assert item.change.now == (getattr(settings, item.change.setting))


@pytest.mark.parametrize("name", [rule.name for rule in RULES if rule.iterations])
def test_a_rule_keeps_silent_while_the_run_is_too_short_for_it(name: str):
    needed = next(rule.iterations for rule in RULES if rule.name == name)
    assert name not in spoken(CASES[name].settings, CASES[name].speaks, needed - 1)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_silent_about_metrics_that_were_not_measured(name: str):
    if all(key.startswith("ppo.") for key in next(rule for rule in RULES if rule.name == name).looks_at):
        return  # settings are always there
    rows = [
        {"iteration": float(i)} | dict.fromkeys(history()[0].keys() - {"iteration"}, math.nan) for i in range(1, 41)
    ]
    given = config(**CASES[name].settings)
    assert name not in {item.rule.name for item in advise(given, rows)}
    assert name not in {item.rule.name for item in advise(given, [{"iteration": float(i)} for i in range(1, 41)])}


def test_rules_stand_in_the_order_of_the_guide():
    stages = [rule.stage for rule in RULES]
    assert stages == sorted(stages, key=list(Stage).index)
    assert [stage.value for stage in Stage] == [
        "before tuning",
        "KL",
        "learning rates and batch sizes",
        "epochs and clipping",
        "reward and responses",
    ]


def test_every_rule_looks_at_settings_and_metrics_that_exist_and_names_its_source():
    metrics = set(re.findall(r"^\| `([a-z_]+/[a-z0-9_]+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    settings = {f"ppo.{entry.name}" for entry in fields(PPOConfig)}
    for rule in RULES:
        assert set(rule.looks_at) <= metrics | settings, rule.name
        assert rule.source, rule.name
        assert rule.meaning[-1] != ".", rule.name  # the sentence goes on or is closed by the writer


@pytest.mark.parametrize(
    ("kl", "coefficient", "expected"),
    [
        (curve(25), 0.05, ("kl_coef", 0.05, 0.12)),  # 2.5 times: KL falls as the coefficient rises
        (curve(22), 0.05, ("kl_coef", 0.05, 0.11)),
        (curve(500), 0.05, ("kl_coef", 0.05, 0.2)),  # four times at most
        (curve(25), 0.0, ("kl_coef", 0.0, 0.05)),  # TRL's, for scores of standard deviation 1
    ],
)
def test_a_penalty_is_raised_in_proportion_and_started_at_the_usual_value(
    kl: list[float], coefficient: float, expected: tuple[str, float, float]
):
    change = spoken({"kl_coef": coefficient}, {"objective/kl": kl})["kl_alarm"].change
    assert change == Change(*expected)


def test_a_first_penalty_is_in_units_of_the_score():
    wide = {"objective/kl": curve(25), "objective/scores_std": (10.0, 6.0)}
    change = spoken({"kl_coef": 0.0}, wide)["kl_alarm"].change
    assert change == Change("kl_coef", 0.0, 0.5)
    normalised = {"kl_coef": 0.0, "reward_normalisation": "running", "reward_scale": 2.0}
    assert spoken(normalised, wide)["kl_alarm"].change == Change("kl_coef", 0.0, 0.1)


@pytest.mark.parametrize(
    ("kl", "coefficients", "settings", "expected"),
    [
        # too high, the coefficient still on its way up: begin where it got
        (curve(12), (0.05, 0.1), {}, ("kl_coef", 0.05, 0.094)),
        # too low, on its way down
        (curve(2), (0.05, 0.025), {}, ("kl_coef", 0.05, 0.028)),
        # too high because it wound down while KL was near 0: hold it there
        (curve(12), curve(0.05, 0.02, 0.03, 0.05), {}, ("kl_hold_iterations", 0, 10)),
        # held already: react sooner
        (curve(12), curve(0.05, 0.02, 0.03, 0.05), {"kl_hold_iterations": 10}, ("kl_horizon", 200.0, 100.0)),
        # too high, held, and the coefficient lower than at first: where it went is no better start
        (curve(12), curve(0.05, 0.02), {"kl_hold_iterations": 10}, ("kl_horizon", 200.0, 100.0)),
        # as quick as it gets: the updates
        (curve(12), curve(0.05), {"kl_horizon": 128.0}, ("learning_rate", 4e-4, 2e-4)),
        (curve(2), curve(0.05), {"kl_horizon": 128.0}, ("learning_rate", 4e-4, 8e-4)),
    ],
)
def test_a_controller_off_its_target_gets_a_better_start_or_a_shorter_horizon_or_other_updates(
    kl: list[float], coefficients: Any, settings: dict[str, Any], expected: tuple[str, Any, Any]
):
    curves = {"objective/kl": kl, "objective/kl_coef": coefficients}
    assert spoken(ADAPTIVE | settings, curves)["kl_off_target"].change == Change(*expected)


def test_with_the_controller_kl_above_the_limit_is_blamed_on_a_target_that_is_above_it_too():
    high = {"objective/kl": curve(25), "objective/kl_coef": curve(0.05)}
    assert spoken(ADAPTIVE | {"kl_target": 30.0}, high)["kl_alarm"].change == Change("kl_target", 30.0, 12.0)
    assert spoken(ADAPTIVE, high)["kl_alarm"].change == Change("kl_horizon", 200.0, 100.0)


def test_a_controller_that_cannot_lower_the_coefficient_further_needs_larger_updates():
    low = {"objective/kl": curve(2), "objective/kl_coef": (0.05, 0.0001)}
    assert "kl_coef_saturated" not in spoken(ADAPTIVE, low)  # 0.0058 on average at the end: not yet a tenth
    low["objective/kl_coef"] = curve(0.05, 0.004)
    assert spoken(ADAPTIVE, low)["kl_coef_saturated"].change == Change("learning_rate", 4e-4, 8e-4)


def test_a_controller_that_is_too_slow_is_told_so_once_and_one_at_its_end_nothing_else():
    off = {"objective/kl": curve(9), "objective/kl_coef": (0.05, 0.2)}  # where it got to would be the better start
    slow = spoken(ADAPTIVE | {"kl_horizon": 1000.0}, off)
    assert {name: advice.change for name, advice in slow.items()} == dict.fromkeys(
        ("kl_horizon_too_long", "kl_off_target"), Change("kl_horizon", 1000.0, 130.0)
    )
    assert spoken(ADAPTIVE, off)["kl_off_target"].change == Change("kl_coef", 0.05, 0.18)
    off["objective/kl_coef"] = curve(0.05, 0.6)
    assert set(spoken(ADAPTIVE, off)) == {"kl_coef_saturated"}


def test_a_kl_that_was_never_worth_watching_does_not_collapse():
    assert "kl_collapsed" not in spoken({}, {"objective/kl": curve(0.49, 0.01)})
    assert "kl_collapsed" in spoken({}, {"objective/kl": curve(0.51, 0.01)})


def test_a_kl_that_collapsed_without_a_penalty_is_not_blamed_on_one():
    fell = {"objective/kl": curve(4, 0.3)}
    with_penalty, without = (str(spoken({"kl_coef": kl_coef}, fell)["kl_collapsed"]) for kl_coef in (0.08, 0.0))
    assert with_penalty == (
        "KL fell from 4 to 0.3 nats per response: the penalty outweighs the score and has pulled the policy back to "
        "where it started. Lower ppo.kl_coef from 0.08 to 0.04."
    )
    assert without == (
        "KL fell from 4 to 0.3 nats per response: no penalty holds the policy, so its updates have undone each other. "
        "Lower ppo.learning_rate from 0.0004 to 0.0002."
    )


def test_steps_that_are_mostly_clipped_are_told_by_how_much_and_iterations_that_were_not_finite_are_left_out():
    norms = [0.3] * 30 + [4.0, math.nan, math.inf] + [4.0] * 3 + [0.3] * 2 + [math.nan] * 2
    assert str(spoken({"max_grad_norm": 0.5}, {"policy/grad_norm": norms})["gradient_mostly_clipped"]) == (
        "In at least half of the last 10 iterations policy/grad_norm, the mean over their steps, is 4 or more, 8 times "
        "ppo.max_grad_norm: most steps are cut to one length, not only the outliers. Raise ppo.max_grad_norm from 0.5 "
        "to 4."
    )


def test_with_a_fixed_coefficient_no_rule_on_the_controller_speaks():
    off = {"objective/kl": curve(12), "objective/kl_coef": (0.01, 1.0)}
    assert not {
        name for name in spoken({"total_episodes": 2560}, off) if name.startswith(("kl_off", "kl_coef", "kl_h"))
    }


def test_a_judge_below_sft_by_its_interval_is_an_exploited_reward_even_if_it_never_rose():
    lost = {"eval/judge_score": [-0.1, -0.2, -0.3, -0.4]}
    assert "reward_hacked" not in spoken({}, lost)  # the interval still holds one half
    lost["eval/win_rate_high"] = [0.5, 0.45, 0.4, 0.3]
    assert spoken({}, lost)["reward_hacked"].change == Change("kl_coef", 0.08, 0.32)
    assert "reward_hacked" not in spoken({}, lost | {"eval/reward": [-0.1, -0.2, -0.3, -0.3]})  # the reward fell too


def test_without_a_judge_nothing_is_said_of_exploiting_the_reward():
    silent = {"eval/judge_score": [math.nan] * 4, "eval/win_rate_high": [0.4] * 4}
    assert "reward_hacked" not in spoken({}, silent)


def test_where_the_penalty_has_nothing_to_hold_entropy_is_kept_by_a_bonus():
    curves = {"objective/entropy": curve(1.5, 0.2), "objective/kl": curve(0.1)}
    assert spoken({}, curves)["entropy_collapsed"].change == Change("entropy_coef", 0.0, 0.01)
    assert spoken({"entropy_coef": 0.02}, curves)["entropy_collapsed"].change == Change("entropy_coef", 0.02, 0.04)


def test_a_flat_score_under_a_strong_penalty_and_one_under_tiny_updates_are_told_apart():
    flat = {"objective/kl": curve(0.05), **FLAT_SCORE}
    assert {"kl_penalty_too_strong"} == set(spoken({}, flat))
    assert {"update_too_small"} == set(spoken({}, flat | {"policy/approxkl_avg": curve(1e-7)}))


def test_with_one_step_an_iteration_approxkl_says_nothing_and_the_penalty_decides():
    one = {"num_ppo_epochs": 1}
    flat = {
        "objective/kl": curve(0.05),
        "policy/approxkl_avg": curve(0.0),
        "policy/clipfrac_avg": curve(0),
        **FLAT_SCORE,
    }
    assert spoken(one, flat)["update_too_small"].change == Change("learning_rate", 4e-4, 8e-4)
    assert {"kl_penalty_too_strong"} == set(spoken(one | {"kl_coef": 1.0}, flat))


def test_the_score_is_that_of_the_evaluations_if_there_are_any_else_of_training():
    never = dict.fromkeys(("eval/reward", "eval/reward_sft"), [math.nan] * 4)
    falling = {"objective/scores": curve(0.0, -0.7)}
    assert "score_fell" in spoken({}, falling | never)
    assert "score_fell" not in spoken({}, falling)


def test_skipped_steps_of_float16_count_only_once_its_scale_is_found():
    early = {"optimiser/skipped_steps": [0.0, 4.0, *[8.0] * 38]}
    late = {"optimiser/skipped_steps": (0.0, 8.0)}
    assert "steps_skipped" not in spoken({"dtype": "float16"}, early)
    assert spoken({"dtype": "float16"}, late)["steps_skipped"].change == Change("dtype", "float16", "bfloat16")
    assert "steps_skipped" in spoken({}, early)


def test_a_gap_in_half_precision_is_weighed_away_then_looked_for_in_the_engine_then_reported():
    gap, half = {"policy/rollout_logprob_gap": curve(0.2)}, {"dtype": "bfloat16", "importance_cap": 2.0}
    name = "rollout_mismatch_half_precision"
    assert spoken(half, gap)[name].change == Change("rollout_engine", "static", "hf")
    assert spoken(half | {"rollout_engine": "hf"}, gap)[name].change is None


def test_a_gap_that_grows_is_seen_and_so_is_one_in_the_first_iteration():
    assert "rollout_mismatch" in spoken({}, {"policy/rollout_logprob_gap": curve(1e-7, 1e-2)})
    assert "rollout_mismatch" in spoken({}, {"policy/rollout_logprob_gap": [1e-2, *[1e-7] * 39]}, iterations=1)
    assert "rollout_mismatch" in spoken({}, {"policy/rollout_logprob_gap": [math.nan, *[1e-2] * 39]})


def test_a_gap_with_captured_steps_is_looked_for_there_before_the_engine_that_excludes_them():
    captured = config(cuda_graphs=True)
    [advice] = advise(captured, history({"policy/rollout_logprob_gap": curve(1e-2)}))
    assert advice.change == Change("cuda_graphs", True, False)
    assert replace(captured, cuda_graphs=False).rollout_engine == "static"


@pytest.mark.parametrize(
    ("settings", "start", "expected"),
    [
        ({"missing_eos_penalty": 1.0}, 0.1, ("missing_eos_penalty", 1.0, 2.0)),
        ({"missing_eos_penalty": 0.0}, 0.1, ("missing_eos_penalty", 0.0, 1.0)),
        ({}, 0.9, ("response_length", 36, 54)),  # the SFT policy needs that length itself
        ({"truncated_responses": "mask"}, 0.1, ("response_length", 36, 54)),  # excludes the penalty
        ({"truncated_responses": "bootstrap"}, 0.1, ("response_length", 36, 54)),
    ],
)
def test_cut_off_responses_are_penalised_where_that_can_help_else_given_more_room(
    settings: dict[str, Any], start: float, expected: tuple[str, Any, Any]
):
    cut = {"response/truncated_fraction": curve(start, 0.8)}
    assert spoken(settings, cut)["truncated"].change == Change(*expected)


@pytest.mark.parametrize("shaping", [{"reward_scale": 0.2}, {"reward_normalisation": "batch", "reward_scale": 0.2}])
def test_the_first_penalty_is_one_deviation_of_the_scores_that_it_is_subtracted_from(shaping: dict[str, Any]):
    """Scores of deviation 3; what is paid is 0.2 of them, or of their normalised values of deviation 1."""
    cut = {"response/truncated_fraction": curve(0.1, 0.8), "objective/scores_std": curve(3.0)}
    change = spoken(shaping, cut)["truncated"].change
    assert change is not None
    scores = torch.tensor([-3.0, 0.0, 3.0])
    paid = normalised(scores, RunningMoments(), config(**shaping))
    assert change.next == pytest.approx(float(paid.std()), rel=1e-6)


def test_no_penalty_of_zero_is_advised_where_the_spread_is_unknown():
    cut = {"response/truncated_fraction": curve(0.1, 0.8), "objective/scores_std": curve(0.0)}
    assert spoken({}, cut)["truncated"].change == Change("response_length", 36, 54)


def test_responses_without_a_stop_token_are_not_called_cut_off():
    assert "truncated" not in spoken({"stop_token": "none"}, {"response/truncated_fraction": curve(1.0)})


def test_a_reward_that_never_tells_responses_apart_is_named_and_no_setting_is_blamed():
    same = {"objective/scores_std": curve(0.0)}
    assert spoken({}, same)["spread_lost"].change is None


SPARSE = {"objective/scores_std": [0.0] * 3 + [0.4] * 37, "objective/scores": (0.0, 0.8)}
ONE_RESPONSE = {"total_episodes": 40, "per_device_train_batch_size": 1}


def test_a_sparse_reward_whose_first_batches_are_all_equal_is_not_called_one_score_for_all():
    assert spoken({}, SPARSE) == {}
    never = dict.fromkeys(("eval/reward", "eval/reward_sft"), [math.nan] * 4)
    fell = SPARSE | {"objective/scores": (0.8, 0.0)} | never
    assert "score_fell" in spoken({}, fell)  # in units of the first spread above 0


def test_the_spread_of_a_sparse_reward_is_lost_where_it_does_not_come_back():
    lost = {"objective/scores_std": [0.0] * 3 + [0.4] * 4 + [0.0] + [0.4] * 12 + [0.0] * 20}
    assert spoken({}, lost)["spread_lost"].change == Change("total_episodes", 2560, 1344)


def test_the_score_of_a_batch_of_one_response_is_not_called_the_same_for_all():
    assert "spread_lost" not in spoken(ONE_RESPONSE, {"objective/scores_std": curve(0.0)})


def test_the_critics_warm_up_counts_in_the_episodes_until_the_spread_is_lost():
    lost = {"objective/scores_std": [1.0] * 25 + [0.05] * 15}  # gone at iteration 26
    change = spoken({"critic_warmup_iterations": 20}, lost)["spread_lost"].change
    assert change == Change("total_episodes", 2560, 1664)


@pytest.mark.parametrize(
    ("settings", "deviations", "expected"),
    [
        ({}, SPARSE["objective/scores_std"], 0.02),  # of the first spread above 0
        ({}, curve(0.0), 0.05),
        ({}, curve(math.nan), 0.05),
        (ONE_RESPONSE, curve(0.0), 0.05),
    ],
)
def test_a_first_penalty_is_the_usual_one_where_the_spread_is_unknown(
    settings: dict[str, Any], deviations: list[float], expected: float
):
    curves = {"objective/kl": curve(30), "objective/scores_std": deviations}
    assert spoken({"kl_coef": 0.0} | settings, curves)["kl_alarm"].change == Change("kl_coef", 0.0, expected)


def test_a_change_to_the_present_value_is_dropped_and_what_was_seen_stays():
    rule = replace(RULES[0], check=lambda run, threshold: Finding("seen", run.scaled("entropy_coef", 2.0)))
    [advice] = advise(config(entropy_coef=0.0), history(), [rule])
    assert (advice.seen, advice.change) == ("seen", None)


def test_a_reward_that_is_normalised_before_its_clip_is_not_compared_with_it():
    clipped = {"objective/scores_p50": curve(3.0)}
    assert "reward_clipped" in spoken({"reward_clip": 1.0}, clipped)
    assert "reward_clipped" not in spoken({"reward_clip": 1.0, "reward_scale": 0.2}, clipped)
    assert "reward_clipped" not in spoken({"reward_clip": 1.0, "reward_normalisation": "batch"}, clipped)


@pytest.mark.parametrize("missing", [{"05", "95"}, {"05"}, {"95"}])
def test_a_clip_is_advised_from_what_was_measured_of_the_scores(missing: set[str]):
    """The median is -2, the percentiles around it -3 and 4: one and a half times the widest that is known."""
    levels = {"05": -3.0, "50": -2.0, "95": 4.0}
    curves = {f"objective/scores_p{q}": curve(math.nan if q in missing else level) for q, level in levels.items()}
    known = max(abs(level) for q, level in levels.items() if q not in missing)
    change = spoken({"reward_clip": 1.0}, curves)["reward_clipped"].change
    assert change == Change("reward_clip", 1.0, 1.5 * known)


def test_the_critics_rate_is_the_policys_where_it_has_none_of_its_own_and_a_shared_trunk_has_a_weight():
    poor = {"val/explained_variance": curve(0.0)}
    assert spoken({"value_learning_rate": None}, poor)["critic_is_poor"].change == Change(
        "value_learning_rate", 4e-4, 8e-4
    )
    assert spoken(SHARED, poor)["critic_is_poor"].change == Change("vf_coef", 0.1, 0.2)
    assert "vf_coef_without_effect" not in spoken(SHARED | {"vf_coef": 0.5})


def test_a_critic_whose_loss_grows_is_slowed_down_not_sped_up():
    diverging = {"loss/value_avg": curve(0.2, 0.7), "val/explained_variance": curve(-0.5)}
    assert set(spoken({}, diverging)) == {"value_loss_grows"}


def test_a_whole_number_stays_one():
    change = spoken({"num_ppo_epochs": 3}, {"policy/clipfrac_avg": curve(0.5)})["much_clipped"].change
    assert change == Change("num_ppo_epochs", 3, 2)
    assert isinstance(change.next, int)
    one = spoken({"num_ppo_epochs": 1, "num_mini_batches": 2}, {"policy/clipfrac_avg": curve(0.5)})["much_clipped"]
    assert one.change == Change("learning_rate", 4e-4, 2e-4)


def test_iterations_of_the_critics_warm_up_are_not_judged():
    still = {"objective/kl": curve(0.0, 0.0, 0.0, 4.0), "policy/approxkl_avg": curve(0.0, 0.0, 0.0, 0.002)}
    assert spoken({"critic_warmup_iterations": 30}, still) == {}
    rows = history({"response/length": curve(50.0, 17.0, 17.0, 17.0)})
    assert [item.rule.name for item in advise(config(), rows)] == ["length_drifted"]
    assert advise(config(critic_warmup_iterations=10), rows) == []
