"""TRL's last PPOConfig (`trl.experimental.ppo`, and trl 0.12 and later): TrainingArguments and PPO's own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import Ledger, Rule, convert, left
from ppo_rlhf.config import PPOConfig

_SAME = (  # PPOConfig has TRL's names and defaults for these
    "num_ppo_epochs cliprange cliprange_value vf_coef gamma lam whiten_rewards kl_coef kl_estimator learning_rate "
    "lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm per_device_train_batch_size "
    "gradient_accumulation_steps num_mini_batches local_rollout_forward_batch_size response_length temperature"
)
DEFAULTS: dict[str, Any] = {  # of TRL 1.12; only those that are read below
    **{field.name: field.default for field in fields(PPOConfig) if field.name in _SAME.split()},
    "gradient_checkpointing": True,
    "missing_eos_penalty": None,
    "stop_token": None,
    "stop_token_id": None,
    "bf16": None,
    "fp16": False,
    "sft_model_path": "EleutherAI/pythia-160m",
    "reward_model_path": "EleutherAI/pythia-160m",
    "seed": 42,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
}
ALWAYS: dict[str, tuple[Any, str]] = {
    "ppo.value_model": ("reward_init", "TRL's scripts load the critic from reward_model_path"),
    "ppo.value_learning_rate": (None, "one optimiser for policy and critic"),
    "ppo.kl_controller": ("fixed", "always so in TRL"),
    "ppo.kl_in": ("reward", "always so in TRL"),
    "ppo.whiten_advantages": (True, "always so in TRL"),
}
REMARKS = ("TRL's PPO does not clip gradients, whatever max_grad_norm says; here they are clipped to it.",)


def length(ledger: Ledger) -> None:
    """Derive the number of responses, from epochs over the prompts if it is not given; remark on TRL's steps."""
    if ledger.value("total_episodes") is not None:
        ledger.derive("ppo.total_episodes", ledger.count("total_episodes"), "total_episodes")
        ledger.leave("total_episodes is set: TRL does not read it", "num_train_epochs")
    elif ledger.num_prompts is not None:
        epochs = ledger.checked("num_train_epochs", Annotated[float, Field(gt=0)])
        ledger.derive("ppo.total_episodes", max(1, int(epochs * ledger.num_prompts)), "num_train_epochs")
    else:
        rule = "ppo.total_episodes is num_train_epochs times the number of prompts: give that (--prompts), or set it"
        ledger.leave(rule, "num_train_epochs")
        ledger.remarks.append(f"num_train_epochs={ledger.value('num_train_epochs')}: {rule}.")
    ledger.leave("None: TRL works it out from num_train_epochs", "total_episodes")
    if ledger.count("gradient_accumulation_steps") > 1 and ledger.count("num_mini_batches") > 1:
        ledger.remarks.append(
            "With gradient_accumulation_steps above 1 TRL takes one optimiser step every gradient_accumulation_steps "
            "micro-batches, wherever minibatches end; here each of the num_mini_batches minibatches ends with a step."
        )


def warm_up(ledger: Ledger) -> None:
    """Derive the warm-up as a share of the iterations, after `length`; `warmup_steps` counts them, or is a share."""
    if ledger.value("lr_scheduler_type") == "constant":
        ledger.leave("transformers' constant schedule has no warm-up", "warmup_ratio", "warmup_steps")
        return
    steps = ledger.checked("warmup_steps", Annotated[float, Field(ge=0)] | None) or 0.0
    episodes = ledger.values.get("ppo.total_episodes")
    if steps == 0 and ledger.value("warmup_ratio") is not None:
        ledger.carry("ppo.warmup_ratio", "warmup_ratio")
        ledger.leave("0: warmup_ratio counts", "warmup_steps")
    elif steps < 1:
        ledger.derive("ppo.warmup_ratio", steps, "warmup_steps")
    elif episodes is None:
        ledger.leave("the number of iterations is not known: ppo.warmup_ratio is a share of them", "warmup_steps")
    else:
        batch_size = ledger.count("per_device_train_batch_size") * ledger.count("gradient_accumulation_steps")
        ledger.derive("ppo.warmup_ratio", share_of(int(steps), math.ceil(episodes / batch_size)), "warmup_steps")
    ledger.leave("warmup_steps counts", "warmup_ratio")


def share_of(steps: int, total: int) -> float:
    """Return a ratio of `total` that is `steps` again when it is rounded up: steps / total, or just below it."""
    ratio = steps / total
    return ratio if math.ceil(ratio * total) == steps else (steps - 0.5) / total


def stop(ledger: Ledger) -> None:
    """Derive the token that ends a response. The penalty for a response without it needs one."""
    if ledger.value("stop_token_id") is not None:
        ledger.leave("stop_token_id replaces it", "stop_token")
    else:
        ledger.derive("ppo.stop_token", ledger.value("stop_token") or "none", "stop_token")
    if ledger.values.get("ppo.stop_token") != "none":
        ledger.carry("ppo.missing_eos_penalty", "missing_eos_penalty")
        return
    ledger.leave("without stop_token no response stops, and all would pay it", "missing_eos_penalty")
    ledger.remarks.append(
        "Without stop_token TRL's responses never stop (ppo.stop_token=none): each has response_length tokens. "
        "ppo.stop_token=eos lets them end."
    )


def precision(ledger: Ledger) -> None:
    """Derive the precision: bfloat16 unless `bf16` or `fp16` says otherwise."""
    fp16 = ledger.flag("fp16")
    bf16 = not fp16 if ledger.value("bf16") is None else ledger.flag("bf16")
    ledger.derive("ppo.dtype", "bfloat16" if bf16 else "float16" if fp16 else "float32", "bf16", "fp16")
    if bf16 or fp16:
        ledger.remarks.append(
            "TRL's PPO computes in float32 whatever bf16 and fp16 say, unless ACCELERATE_MIXED_PRECISION is set; here "
            "ppo.dtype counts. ppo.dtype=float32 does what TRL's run did."
        )


def device(ledger: Ledger) -> None:
    """Derive the device: TRL has a switch that keeps a run on the CPU."""
    if ledger.given("use_cpu"):
        ledger.derive("ppo.device", "cpu" if ledger.flag("use_cpu") else "auto", "use_cpu")


def lora(ledger: Ledger) -> None:
    """Carry LoRA over if the run uses it. TRL's rank and alpha have the same defaults."""
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    ledger.leave("dropout is always off", "lora_dropout")
    if not ledger.flag("use_peft"):
        ledger.leave("use_peft is not set: TRL does not read it", *names)
        return
    for name in names[:2]:
        if ledger.given(name):
            ledger.carry(f"ppo.{name}", name)
    modules = ledger.value("lora_target_modules")
    if modules is not None:
        text = modules if isinstance(modules, str) else ",".join(map(str, modules))
        ledger.derive("ppo.lora_target_modules", text, "lora_target_modules")
        return
    ledger.leave("None: peft chooses by the model's type, and here all-linear applies", "lora_target_modules")
    ledger.remarks.append("Without lora_target_modules peft chooses (in Llama q_proj,v_proj); here it is all-linear.")


SCRIPT_SETTINGS: dict[str, Rule] = {  # of TRL's ModelConfig and ScriptArguments, beside either PPOConfig
    "use_peft": "ppo.use_peft",
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"), lora),
    "dataset_name": "prompts_path",
    **left("LoRA is put on linear layers, without variants", "lora_* use_rslora use_dora"),
    **left("the tokenizer is the SFT policy's own, and the policy is sft_model_path", "model_name_or_path"),
    **left(
        "trainable weights are float32 or wider; ppo.dtype is the precision of the computation", "dtype torch_dtype"
    ),
    **left("set trust_remote_code in conf/local/globals.yml to run a model's own code", "trust_remote_code"),
    **left("models are not quantised", "load_in_8bit load_in_4bit bnb_4bit_* use_bnb_nested_quant"),
    **left("prompts come from a file: write the split that you want to one, and set prompts_path", "dataset_*"),
    **left("all columns of the prompts are kept: reward functions are called with them", "remove_unused_columns"),
    **left("tracking is configured in conf/base/mlflow.yml", "report_to run_name exp_name project log_with tracker_*"),
}
SETTINGS: dict[str, Rule] = {
    **{name: f"ppo.{name}" for name in _SAME.split()},
    "gradient_checkpointing": "ppo.gradient_checkpointing",
    "stop_token_id": "ppo.stop_token_id",
    "use_cpu": device,
    "seed": "seed",
    "sft_model_path": "sft_model_path",
    "reward_model_path": "reward_model_path",
    "optim": "ppo.optim",
    "save_steps": "ppo.save_interval",
    "save_total_limit": "ppo.save_total_limit",
    "full_determinism": "ppo.deterministic",
    "torch_compile": "ppo.compile",
    **dict.fromkeys(("total_episodes", "num_train_epochs"), length),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), warm_up),
    **dict.fromkeys(("stop_token", "missing_eos_penalty"), stop),
    **dict.fromkeys(("bf16", "fp16"), precision),
    **SCRIPT_SETTINGS,
    **left("outputs are catalog entries, conf/base/catalog_ppo.yml", "output_dir overwrite_output_dir"),
    **left("tracking is configured in conf/base/mlflow.yml", "logging_dir trackio_*"),
    **left("every iteration is logged", "logging_* log_level* disable_tqdm include_num_input_tokens_seen"),
    **left("samples are logged every ppo.sample_interval iterations", "num_sample_generations"),
    **left(
        "TRL works it out itself, and overwrites the given value",
        "world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size "
        "mini_batch_size max_steps",
    ),
    **left("TRL's PPO does not evaluate while it trains; here ppo.eval_interval says how often", "*eval_* *eval"),
    **left("checkpoints are whole, in safetensors, every ppo.save_interval iterations", "save_*"),
    **left("the newest checkpoints and the best one are kept", "load_best_model_at_end *_best_model greater_is_better"),
    **left("nothing is pushed to the hub; the exported policy is a plain directory", "push_to_hub* hub_*"),
    **left("the optimiser is AdamW", "optim_* adafactor"),
    **left("prompts are tokenised once, before training", "dataset_num_proc dataloader_*"),
    **left("the precision is ppo.dtype, by autocast", "tf32 half_precision_backend"),
    **left(
        "the launcher and accelerate's configuration say how processes share the work",
        "local_rank ddp_* fsdp* deepspeed ds3_gather_for_generation accelerator_config parallelism_config",
    ),
}


def from_trl_last(settings: Mapping[str, Any], num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of `trl.experimental.ppo`; absent settings have the defaults of TRL 1.12."""
    name = "TRL's PPOConfig"
    return convert(name, settings, SETTINGS, defaults=DEFAULTS, always=ALWAYS, remarks=REMARKS, num_prompts=num_prompts)
