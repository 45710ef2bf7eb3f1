"""Advice on legal settings: outside the typical range, or without the expected effect. Defaults get none."""

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.advice import head_rate


def test_changed_values_outside_the_typical_range_give_advice_and_defaults_never_do():
    assert PPOConfig().advice() == []
    assert PPOConfig(learning_rate=1e-5, kl_coef=0.1, num_ppo_epochs=2, cliprange=0.3).advice() == []
    config = PPOConfig(learning_rate=4e-4, value_learning_rate=5e-4, cliprange=0.5, top_k=10_000, seed=10**6)
    assert [line.split(" is ")[0] for line in config.advice(parameters=10**9)] == [
        "ppo.cliprange=0.5",
        "ppo.learning_rate=0.0004",
        "ppo.value_learning_rate=0.0005",
    ]
    assert "0.1 to 0.3 (arXiv:1707.06347, table 3)" in config.advice()[0]


@pytest.mark.parametrize(
    ("settings", "parameters", "objections"),
    [
        ({"learning_rate": 1e-4, "value_learning_rate": 5e-4}, 10**9, ["1e-06 to 5e-05", "1e-06 to 0.0001"]),
        ({"learning_rate": 1e-4, "value_learning_rate": 5e-4}, 260_000, []),  # small models train at larger rates
        ({"learning_rate": 1e-4, "value_learning_rate": 5e-4}, None, []),
        ({"learning_rate": 1e-4, "value_learning_rate": 5e-4, "use_peft": True}, 10**9, []),
        ({"learning_rate": 5e-6, "use_peft": True}, 10**9, ["with LoRA 1e-05 to 0.0005"]),
        ({"learning_rate": 5e-6, "use_peft": True}, 260_000, []),
    ],
)
def test_learning_rates_are_held_against_the_range_of_a_policy_of_their_size_and_kind(settings, parameters, objections):
    found = PPOConfig(**settings).advice(parameters=parameters)
    assert len(found) == len(objections)
    assert all(objection in line for objection, line in zip(objections, found, strict=True))


ADAPTIVE = {"kl_controller": "adaptive"}


def test_the_head_of_a_shared_critic_has_a_range_of_its_own():
    for rate, objections in ((3e-5, 1), (3e-4, 0), (2e-3, 1)):
        for settings in ({}, {"use_peft": True}):
            config = PPOConfig(value_model="shared", value_learning_rate=rate, **settings)
            found = [line for line in config.advice(parameters=135_000_000) if "value_learning_rate" in line]
            assert len(found) == objections, rate
    assert "0.0001 to 0.001 (for the head of a shared critic" in found[0]


def test_the_rate_that_is_suggested_for_a_head_is_usual_and_never_below_the_policys():
    rates = {1.5e-5: 3e-4, 1e-5: 2e-4, 1e-6: 1e-4, 1e-4: 1e-3, 4e-3: 4e-3}
    assert {policy: head_rate(policy) for policy in rates} == rates


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({"kl_estimator": "k3"}, {"kl_estimator": "k1"}),
        ({"kl_estimator": "full"}, {"kl_estimator": "full", "kl_in": "loss"}),
        ({"kl_estimator": "k3", "kl_in": "loss"}, {"kl_estimator": "k2", "kl_in": "loss"}),
        ({"kl_horizon": 2001, **ADAPTIVE}, {"kl_horizon": 2000, **ADAPTIVE}),
        ({"vf_coef": 0.5}, {"vf_coef": 0.5, "value_model": "shared"}),
        ({"importance_cap": 2.0, "top_k": 10}, {"importance_cap": 2.0}),
        (
            {"importance_low": 0.7, "importance_high": 6.0, "top_k": 10},
            {"importance_low": 0.7, "importance_high": 6.0},
        ),
        ({"deterministic": True}, {"deterministic": True, "local_rollout_forward_batch_size": 64}),
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_a_setting_without_the_expected_effect_gets_one_line_that_names_it(settings, without):
    (line,) = PPOConfig(**settings).advice()
    assert f"ppo.{next(iter(settings))}" in line
    assert PPOConfig(**without).advice() == []
