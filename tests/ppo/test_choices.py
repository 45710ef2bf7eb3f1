"""A value that a setting declares, but for which no code has a branch, is refused where it is first needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core import aggregation
from ppo_rlhf.ppo import experience, optimisers, run_setup
from ppo_rlhf.rewards import shaping

ONES, TRUE = torch.ones(2), torch.ones(2, dtype=torch.bool)
GIVEN: Any = SimpleNamespace(mask=TRUE[:, None])

CALLS: dict[str, list[Callable[[PPOConfig], object]]] = {
    "truncated_responses": [
        lambda config: shaping.penalised(ONES, TRUE, ONES, config),
        lambda config: shaping.final_token_rewards(ONES[:, None], TRUE, config),
        lambda config: experience.learning_mask(GIVEN, config),
    ],
    "reward_normalisation": [lambda config: shaping.normalised(ONES, GIVEN, config)],
    "kl_in": [lambda config: experience.kl_price(config, 0.1)],
    "kl_controller": [run_setup.kl_controller_of],
    "value_model": [lambda config: run_setup.build_critic(config, GIVEN, None)],
    "value_freeze": [lambda config: run_setup.freeze_critic(GIVEN, config)],
    "rollout_engine": [lambda config: run_setup.engine_of(config, GIVEN)],
    "optim": [lambda config: optimisers.build_optimizer(torch.nn.Linear(1, 1), 0.1, config)],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_setting_without_a_branch_is_refused_and_is_not_taken_for_another_value(name):
    config = PPOConfig()
    object.__setattr__(config, name, "mine")
    for call in CALLS[name]:
        with pytest.raises(AssertionError, match="'mine'"):
            call(config)


def test_a_loss_aggregation_without_a_branch_is_refused(monkeypatch):
    monkeypatch.setattr(aggregation, "LOSS_AGGREGATIONS", ("mine",))
    for call in (
        lambda how: aggregation.aggregate_loss(ONES[None], TRUE[None], how),
        lambda how: aggregation.aggregation_count(TRUE[None], how),
    ):
        with pytest.raises(AssertionError, match="'mine'"):
            call("mine")
