"""verl's PPO: batches are as worked by hand, settings mean the same, and nothing is dropped in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.compat import from_verl, verl
from ppo_rlhf.core.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ONE_GPU = {
    "trainer.n_gpus_per_node": 1,
    "data.train_batch_size": 64,
    f"{ACTOR}ppo_mini_batch_size": 16,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": 4,
    f"{ROLLOUT}n": 2,
}


def ppo(**settings: Any) -> dict[str, Any]:
    return from_verl(ONE_GPU | settings).parameters["ppo"]


def left(**settings: Any) -> dict[str, str]:
    return dict(from_verl(ONE_GPU | settings).not_carried)


@pytest.mark.parametrize(
    ("settings", "micro", "accumulation", "minibatches"),
    [
        # an iteration has 64 x 2 responses, a step 16 x 2, a pass 4
        ({}, 4, 32, 4),
        # of each of 2 processes: 64 responses an iteration, 16 a step, 4 a pass
        ({"trainer.n_gpus_per_node": 2}, 4, 16, 4),
        ({"trainer.n_gpus_per_node": 1, "trainer.nnodes": 2}, 4, 16, 4),
        # all responses of a step may share a pass, as far as the tokens fit
        ({f"{ACTOR}use_dynamic_bsz": True}, 32, 4, 4),
        # the deprecated size counts all processes
        (
            {
                "trainer.n_gpus_per_node": 2,
                f"{ACTOR}ppo_micro_batch_size": 8,
                f"{ACTOR}ppo_micro_batch_size_per_gpu": None,
            },
            4,
            16,
            4,
        ),
        ({f"{ACTOR}ppo_mini_batch_size": 64}, 4, 32, 1),
    ],
)
def test_batches_are_as_worked_by_hand(settings: dict[str, Any], micro: int, accumulation: int, minibatches: int):
    conversion = from_verl(ONE_GPU | settings)
    values = conversion.parameters["ppo"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    assert tuple(values[name] for name in names) == (micro, accumulation, minibatches)
    assert values["responses_per_prompt"] == 2
    processes = settings.get("trainer.n_gpus_per_node", 1) * settings.get("trainer.nnodes", 1)
    assert conversion.processes == processes
    assert micro * accumulation * processes == 64 * 2


def test_tokens_limit_a_pass_of_a_dynamic_batch():
    assert ppo(**{f"{ACTOR}use_dynamic_bsz": True})["max_tokens_per_micro_batch"] == 16384


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ACTOR}ppo_mini_batch_size": 24}, "train_batch_size=64 must be a multiple of ppo_mini_batch_size=24"),
        ({"trainer.n_gpus_per_node": 3}, "32 of the 3 processes"),
        ({f"{ACTOR}ppo_micro_batch_size_per_gpu": 5}, "=5 does not divide the 32 responses"),
        ({"algorithm.adv_estimator": "grpo"}, "PPO with a critic"),
        ({"defaults": ["_self_"]}, "not composed"),
        ({f"{ACTOR}optim.lr": "${oc.env:LR}"}, r"is not resolved; convert what `--cfg job --resolve`"),
        ({f"{ROLLOUT}n": True}, "true or false"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        from_verl(ONE_GPU | settings)


@pytest.mark.parametrize(
    ("rows", "settings", "episodes"),
    [
        (200, {"trainer.total_epochs": 5}, 5 * 3 * 128),  # 200 prompts fill 3 iterations of 64
        (200, {"trainer.total_epochs": 5, "trainer.total_training_steps": 4}, 4 * 128),
        (200, {"trainer.total_epochs": 5, "trainer.total_training_steps": 40}, 5 * 3 * 128),  # the passes end first
        (None, {"trainer.total_training_steps": 7}, 7 * 128),
        (None, {}, None),
    ],
)
def test_steps_are_iterations_and_passes_drop_the_rest(rows: int | None, settings: Any, episodes: int | None):
    conversion = from_verl(ONE_GPU | settings, num_prompts=rows)
    assert conversion.parameters["ppo"].get("total_episodes") == episodes
    if episodes is None:
        assert any("--prompts" in remark for remark in conversion.remarks)
    with pytest.raises(ConfigError, match="63 prompts do not fill"):
        from_verl(ONE_GPU, num_prompts=63)


@pytest.mark.parametrize(("warmup", "iterations"), [(0, 0), (1, 0), (2, 1), (20, 19)])
def test_the_policy_trains_from_the_step_of_critic_warmup_on(warmup: int, iterations: int):
    assert ppo(**{"trainer.critic_warmup": warmup})["critic_warmup_iterations"] == iterations


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"kl_coef": 0.0, "kl_in": "reward"}),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"},
            {"kl_coef": 0.001, "kl_estimator": "k3", "kl_in": "reward", "kl_controller": "fixed"},
        ),
        (
            {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": "1e-2"},
            {"kl_coef": 0.01, "kl_estimator": "k3", "kl_in": "loss"},
        ),
        ({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "kl"}, {"kl_estimator": "k2", "kl_in": "loss"}),
        ({f"{ACTOR}clip_ratio": 0.1}, {"cliprange": 0.2, "cliprange_high": 0.2}),  # verl does not read it either
        (
            {f"{ACTOR}clip_ratio": 0.1, f"{ACTOR}clip_ratio_low": None, f"{ACTOR}clip_ratio_high": 0.28},
            {"cliprange": 0.1, "cliprange_high": 0.28},
        ),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-sum"}, {"loss_aggregation": "seq_mean_token_sum"}),
        ({f"{ROLLOUT}top_k": 20, f"{ROLLOUT}top_p": 0.9}, {"top_k": 20, "top_p": 0.9}),
        ({f"{ACTOR}grad_clip": 0.5}, {"max_grad_norm": 0.5}),
        ({"data.truncation": "left"}, {"overlong_prompts": "truncate_left"}),
        ({"actor_rollout_ref.model.lora_rank": 8}, {"use_peft": True, "lora_r": 8, "lora_alpha": 16}),
        ({"critic.ppo_epochs": 3}, {"num_ppo_epochs": 1, "num_critic_epochs": 3}),
        ({f"{ACTOR}optim.warmup_style": "cosine"}, {"lr_scheduler_type": "cosine"}),
        ({"trainer.save_freq": 20, "trainer.test_freq": 5}, {"save_interval": 20, "eval_interval": 5}),
        (
            {f"{ACTOR}optim.lr_warmup_steps": 10, "trainer.total_training_steps": 100},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.095},  # rounded up: 10 of 100 iterations
        ),
    ],
)
def test_settings_mean_what_they_mean_in_verl(settings: dict[str, Any], expected: dict[str, Any]):
    values = ppo(**settings)
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("algorithm.use_pf_ppo", True, "no counterpart"),
        (f"{ACTOR}policy_loss.loss_mode", "gspo", "clipped loss"),
        (f"{ROLLOUT}multi_turn.enable", True, "ppo.environment"),
        ("reward_model.reward_manager", "dapo", "naive"),
        ("critic.optim.weight_decay", 0.1, "share"),
        ("data.max_prompt_length", 512, "ppo.overlong_prompts"),
        ("data.train_files", ["a.parquet", "b.parquet"], "set prompts_path to one file"),
        ("own.setting", 3, "no such setting"),
        (f"{ACTOR}loss_agg_mode", ["token-mean"], "does not accept"),
        ("data.truncation", ["left"], "does not accept"),
        (f"{ACTOR}optim.lr", True, "true or false"),
    ],
)
def test_what_has_no_counterpart_is_named(name: str, value: Any, shown: str):
    assert shown in left(**{name: value})[verl.OLD.get(name, name)]


@pytest.mark.parametrize(("name", "off"), verl.SWITCHES.items())
def test_an_option_that_changes_the_algorithm_is_remarked_on_unless_it_is_off(name: str, off: Any):
    conversion = from_verl(ONE_GPU | {name: off})
    assert conversion.not_carried == []
    assert not any(name in remark for remark in conversion.remarks)
    conversion = from_verl(ONE_GPU | {name: "other"})
    assert name in dict(conversion.not_carried)
    assert any(f"{name}=other is not carried over" in remark for remark in conversion.remarks)


def test_the_prompts_are_one_file_with_verls_columns():
    given = {"data.train_files": "a.parquet", "data.val_files": ["b.parquet"]}
    assert from_verl(ONE_GPU | given).globals["prompts_path"] == "a.parquet"
    assert from_verl(ONE_GPU | given).globals["evaluation_prompts_path"] == "b.parquet"
    for change in ({"data.prompt_key": "question"}, {"data.train_max_samples": 5}):
        conversion = from_verl(ONE_GPU | given | change)
        assert "prompts_path" in conversion.missing
        assert set(change) | set(given) == set(dict(conversion.not_carried))


def test_an_adaptive_target_per_token_is_not_taken_for_one_per_response():
    given = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    conversion = from_verl(ONE_GPU | given)
    assert conversion.parameters["ppo"]["kl_controller"] == "adaptive"
    assert "kl_target" not in conversion.parameters["ppo"]
    assert any("nats per token" in remark for remark in conversion.remarks)


@pytest.mark.parametrize(
    ("settings", "expected", "value_model"),
    [
        (
            {"reward_model.enable": True, "reward_model.model.path": "org/rm"},
            {"reward_model_path": "org/rm"},
            "separate",
        ),
        (
            {
                "reward.reward_model.enable": True,
                "reward.reward_model.model_path": "org/rm",
                "critic.model.path": "org/rm",
            },
            {"reward_model_path": "org/rm"},
            "reward_init",
        ),
        ({}, {"reward_components": [{"type": "function", "function": "verl_reward:score"}]}, "separate"),
        (
            {"custom_reward_function.path": "my.py", "reward_model.model.path": "org/rm"},
            {"reward_components": [{"type": "function", "function": "verl_reward:score"}]},
            "separate",
        ),
    ],
)
def test_the_reward_is_a_model_or_a_function(settings: dict[str, Any], expected: dict[str, Any], value_model: str):
    conversion = from_verl(ONE_GPU | {"actor_rollout_ref.model.path": "org/base"} | settings)
    assert conversion.globals == {"sft_model_path": "org/base"} | expected
    assert conversion.parameters["ppo"]["value_model"] == value_model
    is_function = "reward_components" in expected
    assert any("verl_reward.py" in remark for remark in conversion.remarks) == is_function


def test_the_function_of_the_page_calls_verls_function():
    (script,) = re.findall(r"```python\n(# verl_reward\.py\n.*?)```", PAGE, re.DOTALL)
    script = script.replace("from my_reward import compute_score", "")

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        score = float(solution_str == ground_truth) + extra_info.get("bonus", 0)
        return {"score": score} if data_source == "a" else score

    names: dict[str, Any] = {"compute_score": compute_score}
    exec(script, names)  # as Python imports the module
    columns = {"data_source": ["a", "b"], "reward_model": [{"ground_truth": "1"}] * 2, "ability": ["x", "y"]}
    assert names["score"](["p", "q"], ["1", "2"], **columns) == [1.0, 0.0]
    assert names["score"](["p", "q"], ["1", "2"], **columns, extra_info=[{"bonus": 2}, None]) == [3.0, 0.0]
