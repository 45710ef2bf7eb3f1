"""Advice on legal settings: outside the typical range, or without the effect that one might expect. Defaults: none."""

import pytest

from ppo_rlhf.config import PPOConfig


def test_changed_values_outside_the_typical_range_give_advice_and_defaults_never_do():
    assert PPOConfig().advice() == []
    assert PPOConfig(learning_rate=1e-5, kl_coef=0.1, num_ppo_epochs=2, cliprange=0.3).advice() == []
    config = PPOConfig(learning_rate=4e-4, value_learning_rate=5e-4, cliprange=0.5, top_k=10_000, seed=10**6)
    assert config.advice() == [
        "ppo.cliprange=0.5 is outside its typical range 0.1 to 0.3 (arXiv:1707.06347, table 3)",
        "ppo.learning_rate=0.0004 is outside its typical range 1e-06 to 5e-05 (common practice in RLHF tuning guides)",
        "ppo.value_learning_rate=0.0005 is outside its typical range 1e-06 to 0.0001 "
        "(common practice in RLHF tuning guides)",
    ]


def advice_on(**settings) -> str:
    [line] = PPOConfig(**settings).advice()
    return line


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_estimator_that_pushes_rare_tokens_down_is_accepted_in_the_reward_with_advice(estimator):
    assert advice_on(kl_estimator=estimator) == (
        f"ppo.kl_estimator={estimator} with ppo.kl_in=reward pushes tokens that are rarer than in the reference "
        "further down: training ends away from the optimum of the KL penalty (on a bandit, total variation 0.2 to "
        "0.7). Use k1 in the reward, or ppo.kl_in=loss with k2"
    )


def test_k2_in_the_loss_needs_no_advice_and_k3_has_another_optimum():
    assert PPOConfig(kl_in="loss", kl_estimator="k2").advice() == []
    assert advice_on(kl_in="loss", kl_estimator="k3") == (
        "ppo.kl_estimator=k3 with ppo.kl_in=loss has the gradient of KL(reference || policy), not of "
        "KL(policy || reference): its optimum is another one. k2 has the usual one"
    )


def test_an_adaptive_controller_gets_advice_when_the_run_is_shorter_than_five_horizons():
    line = advice_on(kl_controller="adaptive", kl_horizon=2001)
    assert line == (
        "ppo.total_episodes=10000 is less than 5 x ppo.kl_horizon=2001: the coefficient changes by at most 20 % a "
        "horizon and hardly moves in this run; set ppo.kl_horizon to 2000 or less"
    )
    assert PPOConfig(kl_controller="adaptive", kl_horizon=2000).advice() == []


@pytest.mark.parametrize("value_model", ["separate", "reward_init"])
def test_a_factor_of_the_value_loss_that_cancels_in_adam_is_spoken_of_if_it_is_set(value_model):
    assert PPOConfig(value_model=value_model).advice() == []
    assert advice_on(vf_coef=0.5, value_model=value_model) == (
        f"ppo.vf_coef=0.5 has next to no effect with ppo.value_model={value_model}: the critic has an optimiser of its "
        "own, and Adam's step does not depend on the scale of the loss. Set ppo.value_learning_rate instead"
    )


def test_importance_weights_do_not_undo_a_filter_of_the_sampler():
    assert PPOConfig(importance_cap=2.0).advice() == []
    for filtered in ({"top_k": 10}, {"top_p": 0.9}, {"min_response_length": 4}):
        assert advice_on(importance_cap=2.0, **filtered).startswith("ppo.importance_cap corrects the rounding of the")


def test_advice_is_given_only_on_the_settings_asked_about():
    config = PPOConfig(vf_coef=0.5, kl_estimator="k3", cliprange=0.5)
    assert len(config.advice()) == 3
    assert len(config.advice(["cliprange"])) == 1
    assert len(config.advice(["vf_coef", "kl_estimator"])) == 2
    assert config.advice([]) == []
