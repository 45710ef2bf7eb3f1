"""The trainings of the KL study."""

from __future__ import annotations

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.pipelines.kl_study.grid import KLStudyConfig, plan_study
from ppo_rlhf.rewards.config import RewardConfig


def test_each_penalty_is_trained_once_and_the_target_with_the_studys_horizon() -> None:
    ppo = PPOConfig(kl_coef=0.07, gamma=0.9)
    reward = RewardConfig(components=[{"type": "model"}])
    study = KLStudyConfig(kl_coefs=[0.3, 0.1], kl_target=3.0, kl_horizon=123.0)
    trained = [each.ppo for each in plan_study(ppo, reward, study)]
    assert [(c.kl_controller, c.kl_coef) for c in trained] == [("fixed", 0.1), ("fixed", 0.3), ("adaptive", 0.07)]
    assert (trained[-1].kl_target, trained[-1].kl_horizon) == (3.0, 123.0)
    assert {c.gamma for c in trained} == {0.9}
    assert len(plan_study(ppo, reward, KLStudyConfig(kl_coefs=[0.3, 0.1]))) == 2
