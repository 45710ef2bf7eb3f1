"""Rules between settings: each names all of them and the way out, and what lies just inside the rule is accepted."""

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

BROKEN_AND_KEPT = [
    (
        {"responses_per_prompt": 3},
        {"responses_per_prompt": 4},
        "ppo.batch_size=8 (per_device_train_batch_size 8 x gradient_accumulation_steps 1) is not a multiple of "
        "ppo.responses_per_prompt=3; nearest sizes that are: 6, 9",
    ),
    (
        {"reward_normalisation": "batch", "per_device_train_batch_size": 1, "num_mini_batches": 1},
        {"reward_normalisation": "running", "per_device_train_batch_size": 1, "num_mini_batches": 1},
        "ppo.reward_normalisation=batch and ppo.batch_size=1 exclude each other: a single score is normalised to 0; "
        "raise ppo.per_device_train_batch_size, or set ppo.reward_normalisation=running",
    ),
    (
        {"min_response_length": 54},
        {"min_response_length": 53},
        "ppo.min_response_length=54 is above ppo.response_length=53: lower the first or raise the second",
    ),
    (
        {"min_response_length": 2, "stop_token": "none"},
        {"min_response_length": 2, "stop_token": "period"},
        "ppo.stop_token=none and ppo.min_response_length=2 exclude each other: without a stop token every response has "
        "ppo.response_length tokens; leave one out",
    ),
    (
        {"missing_eos_penalty": 1.0, "stop_token": "none"},
        {"missing_eos_penalty": 1.0, "stop_token": "period"},
        "ppo.stop_token=none and ppo.missing_eos_penalty=1.0 exclude each other: without a stop token every response "
        "would pay the penalty; leave one out",
    ),
    (
        {"truncated_responses": "penalise"},
        {"truncated_responses": "penalise", "missing_eos_penalty": 0.0},
        "ppo.truncated_responses=penalise needs ppo.missing_eos_penalty: set it, in score units",
    ),
    (
        {"truncated_responses": "replace"},
        {"truncated_responses": "replace", "missing_eos_penalty": 1.0},
        "ppo.truncated_responses=replace needs ppo.missing_eos_penalty: set it, in score units",
    ),
    (
        {"truncated_responses": "mask", "missing_eos_penalty": 1.0},
        {"truncated_responses": "mask"},
        "ppo.truncated_responses=mask and ppo.missing_eos_penalty=1.0 exclude each other: a response that is left out "
        "of the loss pays nothing; leave one out",
    ),
    (
        {"truncated_responses": "bootstrap", "missing_eos_penalty": 1.0},
        {"truncated_responses": "bootstrap"},
        "ppo.truncated_responses=bootstrap and ppo.missing_eos_penalty=1.0 exclude each other: a response that is "
        "valued as if it went on pays nothing for not ending; leave one out",
    ),
    (
        {"truncated_responses": "mask", "stop_token": "none"},
        {"truncated_responses": "mask", "stop_token": "period"},
        "ppo.truncated_responses=mask and ppo.stop_token=none exclude each other: without a stop token every response "
        "counts as cut off, and nothing would be learnt; leave one out",
    ),
    (
        {"truncated_responses": "bootstrap", "stop_token": "none"},
        {"truncated_responses": "bootstrap", "stop_token": "period"},
        "ppo.truncated_responses=bootstrap and ppo.stop_token=none exclude each other: without a stop token every "
        "response counts as cut off, and no score would ever count; leave one out",
    ),
    (
        {"truncated_responses": "bootstrap", "overlong_buffer": 8},
        {"truncated_responses": "keep", "overlong_buffer": 8},
        "ppo.truncated_responses=bootstrap and ppo.overlong_buffer=8 exclude each other: a response that is cut off "
        "would pay nothing, one that ends just before nearly all; leave one out",
    ),
    (
        {"kl_controller": "adaptive", "kl_hold_iterations": 9, "critic_warmup_iterations": 1, "total_episodes": 80},
        {"kl_controller": "adaptive", "kl_hold_iterations": 8, "critic_warmup_iterations": 1, "total_episodes": 80},
        "ppo.kl_hold_iterations=9 leaves the controller no iteration: ppo.total_episodes=80 makes 10, of which the "
        "critic's warm-up takes 1; lower it, or set ppo.kl_controller=fixed",
    ),
    (
        {"overlong_buffer": 54},
        {"overlong_buffer": 53},
        "ppo.overlong_buffer=54 is above ppo.response_length=53: lower the first or raise the second",
    ),
    (
        {"overlong_buffer": 8, "stop_token": "none"},
        {"overlong_buffer": 8, "stop_token": "period"},
        "ppo.stop_token=none and ppo.overlong_buffer=8 exclude each other: without a stop token every response would "
        "pay the whole penalty; leave one out",
    ),
    (
        {"kl_in": "loss"},
        {"kl_in": "loss", "kl_estimator": "k2"},
        "ppo.kl_in=loss and ppo.kl_estimator=k1 exclude each other: the gradient of k1 is 0 on average and holds "
        "nothing back; set ppo.kl_estimator=k2, or ppo.kl_in=reward",
    ),
    (
        {"kl_warning": 21.0},
        {"kl_warning": 20.0},
        "ppo.kl_warning=21 is above ppo.kl_alarm=20 and would never be reached first: lower it, or raise the other",
    ),
    (
        {"kl_controller": "adaptive", "kl_coef": 0},
        {"kl_controller": "fixed", "kl_coef": 0},
        "ppo.kl_controller=adaptive and ppo.kl_coef=0 exclude each other: the controller multiplies, so 0 would stay "
        "0; give a first coefficient such as 0.05, or set ppo.kl_controller=fixed",
    ),
    (
        {"kl_target": 3.0},
        {"kl_target": 3.0, "kl_controller": "adaptive"},
        "ppo.kl_target=3 and ppo.kl_controller=fixed exclude each other: it belongs to the adaptive controller; set "
        "ppo.kl_controller=adaptive, or leave it out",
    ),
    (
        {"kl_horizon": 200.0},
        {"kl_horizon": 200.0, "kl_controller": "adaptive"},
        "ppo.kl_horizon=200 and ppo.kl_controller=fixed exclude each other: it belongs to the adaptive controller; set "
        "ppo.kl_controller=adaptive, or leave it out",
    ),
    (
        {"kl_hold_iterations": 1},
        {"kl_hold_iterations": 1, "kl_controller": "adaptive"},
        "ppo.kl_hold_iterations=1 and ppo.kl_controller=fixed exclude each other: it belongs to the adaptive "
        "controller; set ppo.kl_controller=adaptive, or leave it out",
    ),
    (
        {"critic_warmup_iterations": 1250},
        {"critic_warmup_iterations": 1249},
        "ppo.critic_warmup_iterations=1250 leaves the policy no iteration: ppo.total_episodes=10000 makes 1250; lower "
        "the first or raise the second",
    ),
    (
        {"lr_scheduler_type": "polynomial", "learning_rate": 1e-7},
        {"lr_scheduler_type": "polynomial", "learning_rate": 2e-7},
        "ppo.lr_scheduler_type=polynomial ends at 1e-07, and ppo.learning_rate=1e-07 is not above that: raise it, or "
        "choose another schedule",
    ),
    (
        {"lr_scheduler_type": "polynomial", "value_learning_rate": 1e-8},
        {"lr_scheduler_type": "linear", "value_learning_rate": 1e-8},
        "ppo.lr_scheduler_type=polynomial ends at 1e-07, and ppo.value_learning_rate=1e-08 is not above that: raise "
        "it, or choose another schedule",
    ),
]


@pytest.mark.parametrize(
    ("broken", "kept", "expected"),
    BROKEN_AND_KEPT,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_together_are_refused_in_one_line_that_names_them(broken, kept, expected):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**broken)
    assert str(caught.value) == expected
    PPOConfig(**kept)


def test_all_broken_rules_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        PPOConfig(kl_in="loss", overlong_buffer=60, responses_per_prompt=3, critic_warmup_iterations=2000)
    assert len(str(caught.value).splitlines()) == 4


def test_an_alarm_below_the_usual_warning_needs_no_second_setting():
    assert PPOConfig(kl_alarm=10.0).kl_warning == 15.0
