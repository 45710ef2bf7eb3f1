"""verl's PPO: composed configurations and scripts are read, batches worked by hand, nothing dropped in silence."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from ppo_rlhf.compat import from_verl, verl
from ppo_rlhf.compat.files import convert_files
from ppo_rlhf.core.errors import ConfigError
from tests.compat.test_converting_tables import PAGE

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ONE_GPU = {
    "trainer.n_gpus_per_node": 1,
    "data.train_batch_size": 64,
    f"{ACTOR}ppo_mini_batch_size": 16,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": 4,
    f"{ROLLOUT}n": 2,
}
SCRIPT = r"""
set -x
train_files="['$HOME/gsm8k/train.parquet', '$HOME/math/train.parquet']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$train_files" \
    data.train_batch_size=1024 \
    data.max_response_length=256 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=org/base \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=vllm \
    critic.optim.lr=1e-5 \
    critic.model.path=org/base \
    reward_model.enable=True \
    reward_model.model.path=org/reward \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.01 \
    +trainer.own=1 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.critic_warmup=11 \
    trainer.total_training_steps=100 $@
"""


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
        ({f"{ACTOR}optim.lr": "${oc.env:LR}"}, "needs Hydra"),
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
        ("algorithm.use_pf_ppo", True, "no such step"),
        (f"{ACTOR}policy_loss.loss_mode", "gspo", "clipped loss"),
        (f"{ROLLOUT}multi_turn.enable", True, "ppo.environment"),
        ("reward_model.reward_manager", "dapo", "naive"),
        ("critic.optim.weight_decay", 0.1, "share"),
        ("data.max_prompt_length", 512, "ppo.overlong_prompts"),
        (f"{ACTOR}ppo_epoch", 3, "closest setting"),
        ("own.setting", 3, "no such setting"),
        (f"{ACTOR}loss_agg_mode", ["token-mean"], "does not accept"),
        ("data.truncation", ["left"], "does not accept"),
        (f"{ACTOR}optim.lr", True, "true or false"),
    ],
)
def test_what_has_no_counterpart_is_named(name: str, value: Any, shown: str):
    assert shown in left(**{name: value})[verl.OLD.get(name, name)]


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


def test_a_script_is_converted_as_worked_by_hand(tmp_path: Path):
    (tmp_path / "ppo.sh").write_text(SCRIPT)
    [conversion] = convert_files("verl", [tmp_path / "ppo.sh"], num_prompts=15_000)
    expected = {
        "learning_rate": 2e-6,
        "value_learning_rate": 1e-5,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 8,  # 1024 / 8 processes / 16
        "num_mini_batches": 4,
        "response_length": 256,
        "kl_coef": 0.01,
        "warmup_ratio": 0.1,
        "lr_scheduler_type": "constant_with_warmup",
        "critic_warmup_iterations": 10,
        "total_episodes": 100 * 1024,  # 15,000 prompts fill 14 iterations, so 30 passes would be 420
        "overlong_prompts": "drop",
        "value_model": "separate",
    }
    values = conversion.parameters["ppo"]
    assert {name: values[name] for name in expected} == expected
    assert conversion.globals == {"sft_model_path": "org/base", "reward_model_path": "org/reward"}
    reasons = dict(conversion.not_carried)
    assert {"trainer.own", "trainer.logger", f"{ROLLOUT}name", "data.train_files"} <= reasons.keys()
    assert any("critic.optim.lr_warmup_steps_ratio is 0.0 in verl" in remark for remark in conversion.remarks)
    assert any("$@" in remark for remark in conversion.remarks)
    assert conversion.ppo_config().local_mini_batch_size == 32  # 256 / 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config-name=ppo_megatron_trainer", "no override of verl's ppo_trainer"),
        ("data.seed=1 data.seed=2", "data.seed is given twice"),
        ("~data.seed", "no override"),
        ("data=own", "Add `--cfg job`"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(tmp_path: Path, words: str, message: str):
    (tmp_path / "ppo.sh").write_text(f"python -m verl.trainer.main_ppo {words}\n")
    with pytest.raises(ConfigError, match=message):
        convert_files("verl", [tmp_path / "ppo.sh"])


def test_a_composed_file_is_read_with_its_references(tmp_path: Path):
    nested: dict[str, Any] = {
        "hydra": {"job": {"name": "main"}},
        "actor_rollout_ref": {
            "actor": {
                "_target_": "x",
                "ppo_mini_batch_size": 16,
                "ppo_micro_batch_size_per_gpu": 4,
                "ppo_epochs": 2,
                "optim": {"lr": 1e-6, "betas": [0.9, 0.95], "lr_scheduler_type": "constant", "warmup_style": None},
            },
            "rollout": {"n": 1, "top_k": -1},
            "model": {"path": "org/base"},
        },
        "critic": {
            "ppo_mini_batch_size": "${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}",
            "ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}",
            "optim": {"betas": [0.9, 0.95]},
            "model": {"path": "${actor_rollout_ref.model.path}"},
        },
        "data": {"train_batch_size": 64, "apply_chat_template_kwargs": {"enable_thinking": False}},
        "trainer": {"n_gpus_per_node": 1, "total_training_steps": 3},
        "reward_model": {"enable": None, "model": {"path": None}},
        "reward": {"reward_model": {"enable": True, "model_path": "org/rm"}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nested))
    [conversion] = convert_files("verl", [tmp_path / "config.yaml"])
    values = conversion.parameters["ppo"]
    assert (values["num_ppo_epochs"], values["num_critic_epochs"], values["adam_beta2"]) == (2, 2, 0.95)
    assert conversion.globals["reward_model_path"] == "org/rm"
    assert conversion.globals["chat_template_kwargs"] == {"enable_thinking": False}
    assert conversion.not_carried == []


def test_parquet_files_become_the_prompts(tmp_path: Path):
    rows = [
        {
            "data_source": "s",
            "prompt": [{"role": "user", "content": f"q{number}"}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number in range(3)
    ]
    for name in ("a", "b"):
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    given = {"data.train_batch_size": 2, f"{ACTOR}ppo_mini_batch_size": 2, "trainer.n_gpus_per_node": 1}
    given |= {f"{ACTOR}ppo_micro_batch_size_per_gpu": 1, "trainer.total_epochs": 2, "data.val_files": "b.parquet"}
    one = from_verl(given | {"data.train_files": "a.parquet"}, folders=[tmp_path])
    assert one.globals["prompts_path"] == str(tmp_path / "a.parquet")
    assert one.globals["evaluation_prompts_path"] == str(tmp_path / "b.parquet")
    assert one.counts[0] == f"{tmp_path / 'a.parquet'}: 3 of 3 rows."
    assert one.parameters["ppo"]["total_episodes"] == 2 * 1 * 2  # 3 prompts fill one iteration of 2
    two = from_verl(given | {"data.train_files": ["a.parquet", "b.parquet"]}, folders=[tmp_path])
    assert len(two.tables["prompts_path"]) == 6
    assert two.tables["prompts_path"][0]["reward_model"]["ground_truth"] == "0"
    assert two.parameters["ppo"]["total_episodes"] == 2 * 3 * 2
    few = from_verl(given | {"data.train_files": "a.parquet", "data.train_max_samples": 2}, folders=[tmp_path])
    assert few.counts[0].startswith(f"{tmp_path / 'a.parquet'}: 2 of 3 rows; left out: 1 after the first ones")
    with pytest.raises(ConfigError, match="no column question"):
        from_verl(given | {"data.train_files": "a.parquet", "data.prompt_key": "question"}, folders=[tmp_path])
    gone = from_verl(given | {"data.train_files": "gone.parquet"}, folders=[tmp_path], num_prompts=4)
    assert "set prompts_path" in dict(gone.not_carried)["data.train_files"]


def test_each_setting_that_is_carried_stands_on_the_page():
    section = PAGE.partition("## verl\n")[2].partition("\n## ")[0]
    cells = [
        cell for row in re.findall(r"^\| (.+?) \|", section, re.MULTILINE) for cell in re.findall(r"`([\w.*]+)`", row)
    ]
    names = [
        re.sub(r"^(actor_rollout_ref|data|trainer)[.]", "", name)
        for name in {*verl.PPO, *verl.DERIVED} - {"algorithm.adv_estimator"}
    ]
    assert [name for name in names if not any(fnmatchcase(name, cell) for cell in cells)] == []
    shown = {name: yaml.safe_dump(value).splitlines()[0] for name, value in verl.ALWAYS.items()}
    assert [name for name, value in shown.items() if f"`ppo.{name}: {value}`" not in section] == []
