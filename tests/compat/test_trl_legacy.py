"""TRL's legacy PPOConfig: every setting is accounted for, and a converted run does what TRL's would do."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_rlhf.compat import from_trl
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims
from tests.compat.trl_source import LEGACY_SCRIPT, TRL_LEGACY


def ppo(**settings: Any) -> dict[str, Any]:
    """The ppo parameters of legacy settings; `steps` marks them as legacy."""
    return from_trl({"steps": 1000, **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_trl({"steps": 1000, **settings}).not_carried)


def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    others = {"kl_penalty": "mse", "gamma": 0.9, "lam": 0.9, "batch_size": 512, "mini_batch_size": 64}
    others |= {"forward_batch_size": 16}
    settings = {**TRL_LEGACY, "batch_size": 256, "mini_batch_size": 32, "use_score_norm": True}
    check_claims(from_trl, settings, others)
    switched_on = {"early_stopping": True, "use_score_scaling": True, "use_score_norm": True, "score_clip": 3.0}
    check_claims(from_trl, {**settings, **switched_on, "max_grad_norm": 0.5}, others)


def test_the_script_of_the_legacy_api_is_converted_as_worked_by_hand():
    conversion = from_trl(LEGACY_SCRIPT)
    assert conversion.parameters == {
        "seed": 0,
        "sft_model_path": "gpt2",
        "ppo": {
            "num_ppo_epochs": 4,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "whiten_advantages": True,
            "target_kl": None,
            "kl_coef": 0.2,
            "kl_estimator": "k1",
            "kl_in": "reward",
            "kl_controller": "adaptive",
            "kl_target": 6.0,
            "kl_horizon": 10_000.0,
            "reward_clip": None,
            "reward_normalisation": "none",
            "missing_eos_penalty": None,
            "learning_rate": 1.41e-5,
            "value_learning_rate": None,
            "lr_scheduler_type": "constant",
            "total_episodes": 20_000,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 8,  # 8 x 32 = 256 responses an iteration
            "num_mini_batches": 8,  # 256 / 32
            "temperature": 1.0,
            "stop_token": "eos",
            "value_model": "shared",
            "use_peft": False,
            "gradient_checkpointing": False,
        },
    }
    assert [setting for setting, _ in conversion.not_carried] == ["log_with", "optimize_cuda_cache", "target_kl"]


@pytest.mark.parametrize(("batch", "mini", "accumulation"), [(256, 32, 4), (128, 128, 1), (256, 1, 16), (48, 8, 3)])
def test_batch_sizes_give_the_same_rollout_step_and_micro_batch(batch: int, mini: int, accumulation: int):
    """TRL: a rollout of `batch`, steps on mini x accumulation, backward passes of mini."""
    sizes = {"batch_size": batch, "mini_batch_size": mini, "gradient_accumulation_steps": accumulation}
    config = from_trl(sizes).ppo_config()
    assert (config.batch_size, config.batch_size // config.num_mini_batches) == (batch, mini * accumulation)
    assert config.local_micro_batch_size == mini


def test_forward_batch_size_replaces_the_mini_batch_size_as_in_trl():
    sizes = {"batch_size": 64, "mini_batch_size": 16, "forward_batch_size": 8}
    assert from_trl(sizes).parameters["ppo"]["per_device_train_batch_size"] == 8
    assert set(dict(from_trl(sizes).not_carried)) == {"mini_batch_size"}


@pytest.mark.parametrize("size", [100, "many", 0])
def test_a_batch_size_that_trl_would_refuse_is_refused_by_name(size: Any):
    with pytest.raises(ConfigError, match=f"batch_size={size!r}"):
        from_trl({"batch_size": size, "mini_batch_size": 16, "gradient_accumulation_steps": 2})


def test_a_fixed_controller_takes_neither_target_nor_horizon():
    values = ppo(adap_kl_ctrl=False, target=3.0, horizon=500)
    assert values["kl_controller"] == "fixed"
    assert not {"kl_target", "kl_horizon"} & set(values)
    assert set(reasons(adap_kl_ctrl=False, target=3.0, horizon=500)) == {"target", "horizon"}


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_coefficient_of_0_which_the_controller_leaves_at_0_is_fixed(adaptive: bool):
    conversion = from_trl({"init_kl_coef": "0", "adap_kl_ctrl": adaptive, "target": 3.0, "horizon": 500})
    config = conversion.ppo_config()
    assert (config.kl_coef, config.kl_controller) == (0.0, "fixed")
    assert set(dict(conversion.not_carried)) == {"adap_kl_ctrl", "target", "horizon"}


@pytest.mark.parametrize(("penalty", "estimator"), [("kl", "k1"), ("mse", "k2"), ("abs", "k1"), ("full", "full")])
def test_penalties_become_their_estimators_and_k1_stands_in_for_those_that_are_not_offered(
    penalty: str, estimator: str
):
    assert ppo(kl_penalty=penalty)["kl_estimator"] == estimator
    assert ("kl_penalty" in reasons(kl_penalty=penalty)) == (penalty == "abs")


def test_early_stopping_carries_the_target():
    assert ppo(early_stopping=True, target_kl=0.1)["target_kl"] == 0.1
    assert ppo(early_stopping=True)["target_kl"] == 1.0  # TRL's default
    assert ppo(early_stopping=False, target_kl=0.1)["target_kl"] is None


@pytest.mark.parametrize(
    ("scaling", "norm", "normalisation", "left"),
    [
        (False, True, "none", {"use_score_norm"}),
        (True, True, "running", set()),
        (True, False, "none", {"use_score_scaling", "use_score_norm"}),
    ],
)
def test_scores_are_normalised_only_where_trl_shifts_and_scales_them(
    scaling: bool, norm: bool, normalisation: str, left: set[str]
):
    settings = {"use_score_scaling": scaling, "use_score_norm": norm}
    assert ppo(**settings).get("reward_normalisation") == normalisation
    assert set(reasons(**settings)) == left


def test_a_gradient_norm_is_carried_and_none_is_remarked_on():
    assert ppo(max_grad_norm=0.5)["max_grad_norm"] == 0.5
    assert "max_grad_norm" not in ppo(max_grad_norm=None)
    assert any("max_grad_norm" in remark for remark in from_trl({"steps": 1}).remarks)


def test_a_file_of_prompts_is_carried_and_the_name_of_a_data_set_is_not():
    assert from_trl({"steps": 1, "query_dataset": "my/prompts.jsonl"}).parameters["prompts_path"] == "my/prompts.jsonl"
    assert "prompts_path" not in from_trl({"steps": 1, "query_dataset": "stanfordnlp/imdb"}).parameters
    assert "set prompts_path" in reasons(query_dataset="stanfordnlp/imdb")["query_dataset"]


def test_texts_that_are_numbers_are_read_as_yaml_and_the_command_line_give_them():
    values = ppo(learning_rate="1e-5", adap_kl_ctrl="False", batch_size="64", mini_batch_size="32")
    assert (values["learning_rate"], values["kl_controller"], values["num_mini_batches"]) == (1e-5, "fixed", 2)
