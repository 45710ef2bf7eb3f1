"""PPOConfig: TRL's formulas, and its defaults but for a few; errors in plain words, advice for changed values only."""

import ast
import dataclasses
import inspect
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from ppo_rlhf import training
from ppo_rlhf.compat import trl_last
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config import ppo as config_module
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.training.trainer import PPOTrainer
from tests.compat.trl_source import TRL_LAST, TRL_MODEL

# A contract, written out by hand: TRL's where TRL has the setting, but for the departures in docs/algorithm.md.
DEFAULTS = {
    "num_ppo_epochs": 4,
    "cliprange": 0.2,
    "cliprange_high": None,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "lam_critic": None,
    "whiten_rewards": False,
    "whiten_advantages": True,
    "entropy_coef": 0.0,
    "dual_clip": None,
    "target_kl": None,
    "loss_aggregation": "token_mean",
    "importance_cap": None,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "kl_controller": "fixed",
    "kl_target": 6.0,
    "kl_horizon": 10000,
    "kl_hold_iterations": 0,
    "kl_warning": 15,
    "kl_alarm": 20,
    "kl_stop": None,
    "reward_scale": 1.0,
    "reward_clip": None,
    "reward_normalisation": "none",
    "missing_eos_penalty": None,
    "truncated_responses": "keep",
    "overlong_buffer": None,
    "learning_rate": 3e-6,
    "value_learning_rate": None,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0,
    "critic_warmup_iterations": 0,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "align_overflow": False,
    "ema_decay": None,
    "total_episodes": 10000,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "responses_per_prompt": 1,
    "max_tokens_per_micro_batch": None,
    "response_length": 53,
    "min_response_length": 0,
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 1.0,
    "stop_token": "eos",
    "stop_token_id": None,
    "overlong_prompts": "error",
    "value_model": "separate",
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "gradient_checkpointing": False,
    "compile": False,
    "export_value_head": False,
    "dtype": "float32",
    "offload_reference_policy": False,
    "offload_reward_model": False,
    "rollout_engine": "static",
    "cuda_graphs": False,
    "side_by_side": None,
    "device": "auto",
    "deterministic": False,
    "seed": 42,
    "sft_model_path": None,
    "reward_model_path": None,
    "eval_interval": 10,
    "save_interval": 10,
    "save_total_limit": 2,
    "sample_interval": 5,
    "shutdown_grace_s": 25.0,
    "max_skipped_steps": 5,
}


def message(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**values)
    return str(caught.value)


def test_the_configuration_and_the_state_can_be_imported_from_the_package():
    assert training.PPOConfig is PPOConfig
    assert training.PPOTrainer is PPOTrainer
    assert training.TrainingState is TrainingState


def test_every_field_has_its_contracted_default():
    config = PPOConfig()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS


def test_defaults_are_trls_but_for_exactly_those_that_the_page_on_the_algorithm_lists():
    other_names = {  # ours, and what TRL's configuration calls it
        "dtype": "bf16",  # its own `dtype` is that of the weights
        "save_interval": "save_steps",
        "warmup_ratio": "warmup_steps",
        "compile": "torch_compile",
        "deterministic": "full_determinism",
    }
    trl = {**TRL_MODEL, **TRL_LAST}
    trl |= {ours: trl[theirs] for ours, theirs in other_names.items()}
    shared = trl.keys() & DEFAULTS.keys()
    assert trl_last.DEFAULTS.items() <= trl.items()
    assert len(shared) == 42
    differ = {name: (str(trl[name]), str(DEFAULTS[name])) for name in shared if trl[name] != DEFAULTS[name]}
    assert differ == defaults_that_the_page_lists()


def defaults_that_the_page_lists() -> dict[str, tuple[str, str]]:
    """The setting, TRL's default and ours, from the table of docs/algorithm.md."""
    page = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
    section = page.split("## 10. Departures from TRL's PPO\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| `([^`]+)`[^|]* \| `([^`]+)` \|", section, flags=re.MULTILINE)
    return {name: (theirs, ours) for names, theirs, ours in rows for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize(
    ("sizes", "micro", "batch", "mini", "local_micro", "iterations"),
    [
        # (per device, accumulation, minibatches, episodes), then TRL's formulas worked by hand
        ((8, 1, 1, 10_000), 8, 8, 8, 8, 1250),
        ((8, 4, 1, 100), 8, 32, 32, 8, 4),  # 100 / 32 = 3.125: rounded up to full batches
        ((8, 4, 4, 96), 8, 32, 8, 8, 3),
        ((8, 2, 4, 1), 8, 16, 4, 4, 1),  # minibatches smaller than per_device: the micro-batch shrinks to them
        ((5, 3, 3, 46), 5, 15, 5, 5, 4),
        ((6, 2, 3, 12), 6, 12, 4, 4, 1),
    ],
)
def test_batch_sizes_follow_trl(sizes, micro, batch, mini, local_micro, iterations):
    per_device, accumulation, minibatches, episodes = sizes
    config = PPOConfig(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
        total_episodes=episodes,
    )
    assert config.world_size == 1
    assert config.micro_batch_size == micro
    assert config.local_batch_size == config.batch_size == batch
    assert config.local_mini_batch_size == config.mini_batch_size == mini
    assert config.local_micro_batch_size == local_micro
    assert config.num_total_batches == iterations


@pytest.mark.parametrize(("ratio", "iterations"), [(0.0, 0), (0.01, 1), (0.1, 2), (0.5, 7), (0.99, 13)])
def test_the_warm_up_is_its_share_of_the_iterations_rounded_up(ratio, iterations):
    assert PPOConfig(total_episodes=104, warmup_ratio=ratio).warmup_iterations == iterations


def test_the_rollout_forward_batch_need_not_divide_the_batch():
    assert PPOConfig(local_rollout_forward_batch_size=7).batch_size == 8


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 3},
            "ppo.batch_size=16 (per_device_train_batch_size 8 x gradient_accumulation_steps 2) is not a multiple of "
            "ppo.num_mini_batches=3; nearest sizes that are: 15, 18",
        ),
        (
            {"per_device_train_batch_size": 2, "num_mini_batches": 4},
            "ppo.batch_size=2 (per_device_train_batch_size 2 x gradient_accumulation_steps 1) is not a multiple of "
            "ppo.num_mini_batches=4; nearest sizes that are: 4",
        ),
        (
            {"stop_token": "period", "stop_token_id": 3},
            "ppo.stop_token=period and ppo.stop_token_id=3 exclude each other: leave one out",
        ),
        (
            {"stop_token": "none", "stop_token_id": 0},
            "ppo.stop_token=none and ppo.stop_token_id=0 exclude each other: leave one out",
        ),
        (
            {"stop_token": "none", "stop_token_id": 0, "num_mini_batches": 3},
            "ppo.batch_size=8 (per_device_train_batch_size 8 x gradient_accumulation_steps 1) is not a multiple of "
            "ppo.num_mini_batches=3; nearest sizes that are: 6, 9\n"
            "ppo.stop_token=none and ppo.stop_token_id=0 exclude each other: leave one out",
        ),
        ({"num_ppo_epochs": 0}, "ppo.num_ppo_epochs=0: input should be greater than or equal to 1"),
        ({"cliprange": 0}, "ppo.cliprange=0: input should be greater than 0"),
        ({"cliprange_value": -0.1}, "ppo.cliprange_value=-0.1: input should be greater than 0"),
        ({"vf_coef": 0.0}, "ppo.vf_coef=0.0: input should be greater than 0"),
        ({"gamma": 1.01}, "ppo.gamma=1.01: input should be less than or equal to 1"),
        ({"lam": -0.1}, "ppo.lam=-0.1: input should be greater than or equal to 0"),
        ({"kl_coef": -0.1}, "ppo.kl_coef=-0.1: input should be greater than or equal to 0"),
        ({"kl_coef": math.inf}, "ppo.kl_coef=inf: input should be a finite number"),
        ({"kl_estimator": "k4"}, "ppo.kl_estimator='k4': input should be 'k1', 'k2' or 'k3'"),
        ({"kl_alarm": 0}, "ppo.kl_alarm=0: input should be greater than 0"),
        ({"reward_clip": 0}, "ppo.reward_clip=0: input should be greater than 0"),
        ({"missing_eos_penalty": -1}, "ppo.missing_eos_penalty=-1: input should be greater than or equal to 0"),
        ({"learning_rate": 0}, "ppo.learning_rate=0: input should be greater than 0"),
        ({"learning_rate": math.nan}, "ppo.learning_rate=nan: input should be a finite number"),
        ({"value_learning_rate": 0}, "ppo.value_learning_rate=0: input should be greater than 0"),
        (
            {"lr_scheduler_type": "plateau"},
            "ppo.lr_scheduler_type='plateau': input should be 'linear', 'cosine', 'cosine_with_restarts', "
            "'polynomial', 'constant', 'constant_with_warmup' or 'inverse_sqrt'",
        ),
        ({"cliprange_high": 0}, "ppo.cliprange_high=0: input should be greater than 0"),
        ({"lam_critic": 1.1}, "ppo.lam_critic=1.1: input should be less than or equal to 1"),
        ({"entropy_coef": -0.1}, "ppo.entropy_coef=-0.1: input should be greater than or equal to 0"),
        ({"dual_clip": 1.0}, "ppo.dual_clip=1.0: input should be greater than 1"),
        ({"target_kl": 0}, "ppo.target_kl=0: input should be greater than 0"),
        ({"importance_cap": 0}, "ppo.importance_cap=0: input should be greater than 0"),
        ({"kl_in": "advantage"}, "ppo.kl_in='advantage': input should be 'reward' or 'loss'"),
        ({"kl_controller": "pid"}, "ppo.kl_controller='pid': input should be 'fixed' or 'adaptive'"),
        ({"kl_target": 0}, "ppo.kl_target=0: input should be greater than 0"),
        ({"kl_horizon": 0}, "ppo.kl_horizon=0: input should be greater than 0"),
        ({"reward_scale": 0}, "ppo.reward_scale=0: input should be greater than 0"),
        ({"overlong_buffer": 0}, "ppo.overlong_buffer=0: input should be greater than or equal to 1"),
        ({"adam_beta1": 1}, "ppo.adam_beta1=1: input should be less than 1"),
        ({"adam_epsilon": 0}, "ppo.adam_epsilon=0: input should be greater than 0"),
        ({"weight_decay": -1}, "ppo.weight_decay=-1: input should be greater than or equal to 0"),
        ({"optim": "sgd"}, "ppo.optim='sgd': input should be 'adamw_torch_fused' or 'adamw_torch'"),
        ({"responses_per_prompt": 0}, "ppo.responses_per_prompt=0: input should be greater than or equal to 1"),
        (
            {"loss_aggregation": "mean"},
            "ppo.loss_aggregation='mean': input should be 'token_mean', 'seq_mean_token_sum', 'seq_mean_token_mean' or "
            "'token_sum_fixed_length'",
        ),
        (
            {"truncated_responses": "drop"},
            "ppo.truncated_responses='drop': input should be 'keep', 'penalise', 'replace', 'mask' or 'bootstrap'",
        ),
        (
            {"reward_normalisation": "yes"},
            "ppo.reward_normalisation='yes': input should be 'none', 'running' or 'batch'",
        ),
        ({"warmup_ratio": 1}, "ppo.warmup_ratio=1: input should be less than 1"),
        ({"max_grad_norm": 0}, "ppo.max_grad_norm=0: input should be greater than 0"),
        ({"total_episodes": 0}, "ppo.total_episodes=0: input should be greater than or equal to 1"),
        (
            {"total_episodes": "many"},
            "ppo.total_episodes='many': input should be a valid integer, unable to parse string as an integer",
        ),
        ({"temperature": 0}, "ppo.temperature=0: input should be greater than 0"),
        ({"top_k": -1}, "ppo.top_k=-1: input should be greater than or equal to 0"),
        ({"top_p": 0}, "ppo.top_p=0: input should be greater than 0"),
        ({"top_p": 1.5}, "ppo.top_p=1.5: input should be less than or equal to 1"),
        ({"stop_token": "newline"}, "ppo.stop_token='newline': input should be 'eos', 'period' or 'none'"),
        ({"stop_token_id": -1}, "ppo.stop_token_id=-1: input should be greater than or equal to 0"),
        (
            {"overlong_prompts": "truncate"},
            "ppo.overlong_prompts='truncate': input should be 'error', 'drop' or 'truncate_left'",
        ),
        ({"value_model": "both"}, "ppo.value_model='both': input should be 'separate', 'shared' or 'reward_init'"),
        (
            {"dtype": "half"},
            "ppo.dtype='half': input should be 'float32', 'bfloat16', 'float16' or 'float64'",
        ),
        ({"rollout_engine": "vllm"}, "ppo.rollout_engine='vllm': input should be 'static', 'plain' or 'hf'"),
        ({"seed": None}, "ppo.seed=None: input should be a valid integer"),
        ({"save_total_limit": 0}, "ppo.save_total_limit=0: input should be greater than or equal to 1"),
        ({"kl_coeff": 0.1}, "ppo.kl_coeff is not a parameter of this group. Did you mean `kl_coef`?"),
        (
            {"num_minibatches": 2},
            "ppo.num_minibatches is not a parameter of this group. Did you mean `num_mini_batches`?",
        ),
        ({"learningrate": 1}, "ppo.learningrate is not a parameter of this group. Did you mean `learning_rate`?"),
        ({"qwertyuiop": 1}, "ppo.qwertyuiop is not a parameter of this group."),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_value_is_refused_in_one_line_that_says_the_rule(values, expected):
    assert message(**values) == expected


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model_name", "set it in conf/local/globals.yml or with --params sft_model_path=…"),
        ("model_name_or_path", "set it in conf/local/globals.yml or with --params sft_model_path=…"),
        ("output_dir", "outputs are catalog entries, conf/base/catalog_ppo.yml"),
        ("save_steps", "it is ppo.save_interval, counted in iterations"),
        ("eval_steps", "it is ppo.eval_interval, counted in iterations"),
        ("logging_steps", "every iteration is logged; ppo.sample_interval sets how often samples are"),
        ("report_to", "tracking is configured in conf/base/mlflow.yml"),
        ("run_name", "name the run in conf/base/mlflow.yml (tracking.run.name)"),
        ("bf16", "precision is ppo.dtype"),
        ("fp16", "precision is ppo.dtype"),
        ("num_train_epochs", "the length of training is ppo.total_episodes"),
        ("max_steps", "the length of training is ppo.total_episodes"),
        ("batch_size", "it is per_device_train_batch_size x gradient_accumulation_steps"),
        ("mini_batch_size", "it is batch_size / ppo.num_mini_batches"),
        ("ppo_epochs", "it is ppo.num_ppo_epochs"),
        ("init_kl_coef", "it is ppo.kl_coef"),
        ("adap_kl_ctrl", "it is ppo.kl_controller=adaptive"),
        ("target", "it is ppo.kl_target"),
        ("horizon", "it is ppo.kl_horizon"),
        ("kl_penalty", "it is ppo.kl_estimator"),
        ("kl_ctl", "it is ppo.kl_coef"),
        ("score_clip", "it is ppo.reward_clip"),
        ("clip_reward_value", "it is ppo.reward_clip"),
        ("use_score_norm", "it is ppo.reward_normalisation=running"),
        ("lr_scheduler_kwargs", "ppo.lr_scheduler_type has the schedules that need no arguments"),
        ("full_determinism", "it is ppo.deterministic"),
    ],
)
def test_a_name_of_other_libraries_is_refused_with_where_the_setting_lives(name, where):
    assert message(**{name: 1}) == f"ppo.{name} is not a parameter of this group: {where}"


def test_the_hugging_face_argument_parser_reads_every_field_and_gives_the_same_config():
    changed = {
        "num_ppo_epochs": 2,
        "kl_coef": 0.2,
        "kl_estimator": "k3",
        "whiten_rewards": True,
        "whiten_advantages": False,
        "reward_clip": 5.0,
        "value_learning_rate": 1e-5,
        "stop_token_id": 7,
        "device": "cpu",
        "lr_scheduler_type": "cosine",
    }
    arguments = [part for name, value in changed.items() for part in (f"--{name}", str(value))]
    parser = HfArgumentParser(PPOConfig)
    assert parser.parse_args_into_dataclasses(arguments) == (PPOConfig(**changed),)
    assert parser.parse_args_into_dataclasses([]) == (PPOConfig(),)


def test_the_hugging_face_argument_parser_reads_back_a_whole_config_from_a_dictionary():
    config = PPOConfig(gamma=0.99, missing_eos_penalty=1.0, num_mini_batches=4)
    assert HfArgumentParser(PPOConfig).parse_dict(dataclasses.asdict(config)) == (config,)


def test_every_field_has_a_docstring():
    tree = ast.parse(inspect.getsource(config_module))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PPOConfig"]
    documented = {
        field.target.id
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert documented == set(DEFAULTS)


def test_only_values_that_differ_from_the_default_are_listed_in_order_of_declaration():
    config = PPOConfig(seed=7, kl_coef=0.05, gamma=0.9, top_p=1.0, num_ppo_epochs=1)
    assert list(config.not_default().items()) == [("num_ppo_epochs", 1), ("gamma", 0.9), ("seed", 7)]
    assert PPOConfig().not_default() == {}
