"""The trainings of a sweep, the keys that are refused, and the spread over seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.pipelines.sweep.grid import Setting, SweepConfig, compare_settings, plan_sweep
from ppo_rlhf.rewards.config import RewardConfig

PPO = PPOConfig(gamma=0.9, seed=7)
REWARD = RewardConfig(
    components=[{"type": "function", "function": "mine:good"}, {"type": "function", "function": "mine:short"}]
)


def swept(grid: dict[str, list[Any]], *seeds: int) -> list[Setting]:
    return plan_sweep(PPO, REWARD, SweepConfig(grid=grid, seeds=list(seeds)))


def test_each_combination_is_trained_with_each_seed_and_named_by_what_differs() -> None:
    found = swept({"ppo.kl_coef": [0.1, 0.2], "reward.components.1.weight": [0.5]}, 1, 2)
    assert [each.name for each in found] == [
        f"kl_coef={beta}, reward.components.1.weight=0.5, seed={seed}" for beta in (0.1, 0.2) for seed in (1, 2)
    ]
    assert [(each.ppo.kl_coef, each.ppo.seed) for each in found] == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    assert {each.setting for each in found} == {f"kl_coef={b}, reward.components.1.weight=0.5" for b in (0.1, 0.2)}
    assert {tuple(c.weight for c in each.reward.components) for each in found} == {(1.0, 0.5)}
    assert {each.ppo.gamma for each in found} == {0.9}
    assert found[0].params["ppo.seed"] == "1"
    assert [c.weight for c in REWARD.components] == [1.0, 1.0]


def test_a_seed_that_does_not_differ_is_not_in_the_name() -> None:
    assert [each.name for each in swept({"ppo.lam": [0.9, 1.0]}, 3)] == ["lam=0.9", "lam=1.0"]
    assert [(each.name, each.setting) for each in swept({}, 3, 4)] == [
        ("seed=3", "as configured"),
        ("seed=4", "as configured"),
    ]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"evaluation.seed": [1]}, "sweep.grid: evaluation.seed is not a setting of `ppo` or `reward`"),
        (
            {"ppo.kl_coeff": [1]},
            r"^sweep.grid: ppo.kl_coeff is not a parameter of .* Did you mean `kl_coef`\?",
        ),
        ({"reward.components.2.weight": [1]}, "sweep.grid: reward.components.2.weight is not a setting"),
        ({"reward.components.0.wait": [1]}, "^sweep.grid: reward.components.*wait"),
        ({"ppo": [1]}, "sweep.grid: ppo is not a setting"),
        ({"ppo.kl_coef": [-1.0]}, "^sweep.grid: ppo.kl_coef=-1.0"),
        ({"ppo.kl_coef": [0.1, 0.1]}, "sweep.grid or sweep.seeds"),
        ({"ppo.kl_coef": []}, "sweep.grid.ppo.kl_coef"),
        ({"ppo.seed": [1]}, "sweep.seeds"),
        ({"ppo.response_length": [8]}, "ppo.response_length may not vary"),
        ({"ppo.sft_model_path": ["other"]}, "ppo.sft_model_path may not vary"),
        (
            {"reward.normalise": ["component"]},
            r"^sweep.grid: reward.normalise=component and ppo.reward_normalisation=none",
        ),
        ({"reward.components": [[{"type": "model"}]]}, "reward.components .*`reward`"),
    ],
    ids=str,
)
def test_a_key_that_is_no_setting_or_changes_what_is_loaded_is_refused_in_one_line(
    grid: dict[str, list[Any]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        swept(grid, 1)
    assert "\n" not in str(refused.value)


def test_the_table_has_means_and_standard_deviations_over_the_seeds_that_ended_and_marks_the_others() -> None:
    rows: list[dict[str, Any]] = [{"setting": "first", "error": "", "kl": float(kl), "reward": 2.0} for kl in range(3)]
    rows += [{"setting": "Second", "error": "", "kl": float(kl), "reward": 2.0} for kl in (3, 4)]
    rows += [{"setting": "Second", "error": "it diverged"}, {"setting": "third", "error": "it stopped"}]
    table = compare_settings(rows).set_index("setting")
    assert table.index.tolist() == ["first", "Second", "third"]
    assert table.columns.tolist() == ["trainings", "failed", "reward", "kl", "reward_sd", "kl_sd"]  # no judge
    assert table.loc["first"].tolist() == [3, "", 2.0, 1.0, 0.0, 1.0]
    assert table.loc["Second"].tolist() == [2, "it diverged", 2.0, 3.5, 0.0, pytest.approx(math.sqrt(0.5))]
    assert table.loc["third"].tolist()[:2] == [0, "it stopped"]
    assert table.loc["third"].isna().sum() == 4
