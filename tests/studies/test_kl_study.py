"""The trainings of the KL study, and what is said of their results."""

from __future__ import annotations

import pandas as pd
import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.studies.kl_study import KLStudyConfig, findings, settings_of


def test_each_penalty_is_trained_once_and_the_target_with_the_studys_horizon() -> None:
    ppo = PPOConfig(kl_coef=0.07, gamma=0.9)
    reward = RewardConfig(components=[{"type": "model"}])
    study = KLStudyConfig(kl_coefs=[0.3, 0.1], kl_target=3.0, kl_horizon=123.0)
    trained = [each.ppo for each in settings_of(study, ppo, reward)]
    assert [(c.kl_controller, c.kl_coef) for c in trained] == [("fixed", 0.1), ("fixed", 0.3), ("adaptive", 0.07)]
    assert (trained[-1].kl_target, trained[-1].kl_horizon) == (3.0, 123.0)
    assert {c.gamma for c in trained} == {0.9}
    assert len(settings_of(KLStudyConfig(kl_coefs=[0.3, 0.1]), ppo, reward)) == 2


@pytest.mark.parametrize(
    ("kl", "said"), [(2.9, "NOT within"), (3.0, "within"), (5.0, "within"), (5.1, "NOT within")], ids=str
)
def test_a_target_is_met_by_a_kl_at_most_a_quarter_of_it_away(kl: float, said: str) -> None:
    rows = [("beta 0.1", "fixed", 0.1, None, 8.0), ("beta 0.3", "fixed", 0.3, None, 2.0)]
    rows += [("adaptive", "adaptive", 0.1, 4.0, kl)]
    results = pd.DataFrame(rows, columns=["setting", "kl_controller", "kl_coef", "kl_target", "kl"])
    results = results.assign(last_kl_coef=0.2, reward=1.0, reward_sft=0.0)
    metrics, lines = findings(results, pd.DataFrame({"n": [1.0, 2.0], "kl": [0.0, 0.2], "reward": [0.0, 0.5]}))
    assert metrics["kl_study/adaptive_kl_over_target"] == kl / 4.0
    (line,) = [line for line in lines if line.startswith("The adaptive controller")]
    assert f" nats, {said} 25% of its target of 4" in line
