"""TRL's last PPOConfig (`trl.experimental.ppo`, and trl 0.12 and later): TrainingArguments and PPO's own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import NotOfferedError, Parameters, Source, Table, by, convert, left, to
from ppo_rlhf.config import PPOConfig

_SAME = (  # PPOConfig has TRL's names and defaults for these
    "num_ppo_epochs cliprange cliprange_value vf_coef gamma lam whiten_rewards kl_coef kl_estimator learning_rate "
    "lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm per_device_train_batch_size "
    "gradient_accumulation_steps num_mini_batches local_rollout_forward_batch_size response_length temperature"
)
ALWAYS: dict[str, Any] = {
    "ppo.value_model": "reward_init",  # TRL's scripts load the critic from reward_model_path
    "ppo.value_learning_rate": None,  # one optimiser for policy and critic
    "ppo.kl_controller": "fixed",
    "ppo.kl_in": "reward",
    "ppo.whiten_advantages": True,
}
REMARKS = (
    "TRL's PPO does not clip gradients, whatever max_grad_norm says; here they are clipped to it.",
    "With gradient_accumulation_steps above 1 TRL takes one optimiser step every gradient_accumulation_steps "
    "micro-batches, wherever minibatches end; here each of the num_mini_batches minibatches ends with a step.",
)


def length(s: Source) -> Parameters:
    """Derive the number of responses, from epochs over the prompts if it is not given."""
    return {"ppo.total_episodes": _episodes(s)}


def _episodes(s: Source) -> int:
    if s["total_episodes"] is not None:
        return s.count("total_episodes")
    epochs = s.checked("num_train_epochs", Annotated[float, Field(gt=0)])
    if s.num_prompts is None:
        raise NotOfferedError("it counts passes over the prompts: give their number (--prompts), or total_episodes")
    return max(1, int(epochs * s.num_prompts))


def warm_up(s: Source) -> Parameters:
    """Derive the warm-up as a share of the iterations; `warmup_steps` counts them, or is a share."""
    if s["lr_scheduler_type"] == "constant":  # it has no warm-up in transformers
        return {}
    steps = s.checked("warmup_steps", Annotated[float, Field(ge=0)] | None) or 0.0
    if steps == 0 and s["warmup_ratio"] is not None:
        return {"ppo.warmup_ratio": s["warmup_ratio"]}
    if steps >= 1:
        batch_size = s.count("per_device_train_batch_size") * s.count("gradient_accumulation_steps")
        steps = share_of(int(steps), math.ceil(_episodes(s) / batch_size))
    return {"ppo.warmup_ratio": steps}


def share_of(steps: int, total: int) -> float:
    """Return a ratio of `total` that is `steps` again when it is rounded up: steps / total, or just below it."""
    ratio = steps / total
    return ratio if math.ceil(ratio * total) == steps else (steps - 0.5) / total


def stop(s: Source) -> Parameters:
    """Derive the token that ends a response; stop_token_id replaces it."""
    if s["stop_token_id"] is not None:
        return {}
    if s["stop_token"] is None:
        s.remarks.append(
            "Without stop_token TRL's responses never stop (ppo.stop_token=none): each has response_length tokens. "
            "ppo.stop_token=eos lets them end."
        )
    return {"ppo.stop_token": s["stop_token"] or "none"}


def penalty(s: Source) -> Parameters:
    """Derive the penalty of a response that does not stop. If none stops, all would pay it."""
    stops = s["stop_token_id"] is not None or s["stop_token"] is not None
    return {"ppo.missing_eos_penalty": s["missing_eos_penalty"] if stops else None}


def precision(s: Source) -> Parameters:
    """Derive the precision: bfloat16 unless `bf16` or `fp16` says otherwise."""
    fp16 = s.flag("fp16")
    bf16 = not fp16 if s["bf16"] is None else s.flag("bf16")
    if bf16 or fp16:
        s.remarks.append(
            "TRL's PPO computes in float32 whatever bf16 and fp16 say, unless ACCELERATE_MIXED_PRECISION is set; here "
            "ppo.dtype counts. ppo.dtype=float32 does what TRL's run did."
        )
    return {"ppo.dtype": "bfloat16" if bf16 else "float16" if fp16 else "float32"}


def device(s: Source) -> Parameters:
    """Derive the device: TRL has a switch that keeps a run on the CPU."""
    return {"ppo.device": "cpu" if s.flag("use_cpu") else "auto"}


def lora(s: Source) -> Parameters:
    """Carry LoRA over if the run uses it. TRL's rank and alpha have the same defaults."""
    if not s.flag("use_peft"):
        return {"ppo.use_peft": False}
    values = {f"ppo.{name}": s[name] for name in ("lora_r", "lora_alpha") if name in s}
    values["ppo.load_in_4bit"] = s.flag("load_in_4bit")
    if values["ppo.load_in_4bit"]:
        s.remarks.append("TRL puts critic and reward model in 4 bits, too; here the reward model keeps ppo.dtype.")
    modules = s["lora_target_modules"]
    if modules is None:
        s.remarks.append("Without lora_target_modules peft chooses (in Llama q_proj,v_proj); here it is all-linear.")
    elif not isinstance(modules, str):
        modules = ",".join(map(str, modules))
    return {"ppo.use_peft": True, **values, "ppo.lora_target_modules": modules or "all-linear"}


TRACKING = "outputs, logs and tracking are configured in conf/base: catalog_ppo.yml and mlflow.yml"
SCRIPT_SETTINGS: Table = {  # of TRL's ModelConfig and ScriptArguments, beside either PPOConfig
    **by(lora, use_peft=False, lora_r=16, lora_alpha=32, lora_target_modules=None, load_in_4bit=False),
    "dataset_name": to("prompts_path"),
    **left("dropout is always off", "lora_dropout"),
    **left("LoRA is put on linear layers, without variants", "lora_* use_rslora use_dora"),
    **left("the tokenizer is the SFT policy's own, and the policy is sft_model_path", "model_name_or_path"),
    **left(
        "trainable weights are float32 or wider; ppo.dtype is the precision of the computation", "dtype torch_dtype"
    ),
    **left("set trust_remote_code in conf/local/globals.yml to run a model's own code", "trust_remote_code"),
    **left("quantised weights have 4 bits (load_in_4bit)", "load_in_8bit"),
    **left("4-bit weights are always NF4, doubly quantised", "bnb_4bit_* use_bnb_nested_quant"),
    **left("prompts come from a file: write the split that you want to one, and set prompts_path", "dataset_*"),
    **left("all columns of the prompts are kept: reward functions are called with them", "remove_unused_columns"),
    **left(TRACKING, "report_to run_name exp_name project log_with tracker_*"),
}
SETTINGS: Table = {  # with the defaults of TRL 1.12
    **{name: to(f"ppo.{name}", getattr(PPOConfig, name)) for name in _SAME.split()},
    "gradient_checkpointing": to("ppo.gradient_checkpointing", True),
    "stop_token_id": to("ppo.stop_token_id", None),
    "seed": to("seed", 42),
    "sft_model_path": to("sft_model_path"),
    "reward_model_path": to("reward_model_path"),
    "optim": to("ppo.optim", ours={"adamw_bnb_8bit": "adamw_8bit", "adamw_torch": "adamw_torch_fused"}),
    "save_steps": to("ppo.save_interval"),
    "save_total_limit": to("ppo.save_total_limit"),
    "full_determinism": to("ppo.deterministic"),
    "torch_compile": to("ppo.compile"),
    **by(length, total_episodes=None, num_train_epochs=3.0),
    **by(warm_up, warmup_steps=0, warmup_ratio=None),
    **by(stop, stop_token=None),
    **by(penalty, missing_eos_penalty=None),
    **by(precision, bf16=None, fp16=False),
    **by(device, use_cpu=False),
    **SCRIPT_SETTINGS,
    **left(TRACKING, "output_dir overwrite_output_dir logging_* log_level* disable_tqdm trackio_* push_to_hub* hub_*"),
    **left(TRACKING, "include_num_input_tokens_seen num_sample_generations"),
    **left(
        "TRL works it out itself, and overwrites the given value",
        "world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size "
        "mini_batch_size max_steps",
    ),
    **left("TRL's PPO does not evaluate while it trains; here ppo.eval_interval says how often", "*eval_* *eval"),
    **left(
        "checkpoints are whole, every ppo.save_interval iterations; the newest and the best are kept",
        "save_* load_best_model_at_end *_best_model greater_is_better",
    ),
    **left("the optimiser is AdamW, and the precision is ppo.dtype", "optim_* adafactor tf32 half_precision_backend"),
    **left("prompts are tokenised once, before training", "dataset_num_proc dataloader_*"),
    **left(
        "the launcher and accelerate's configuration say how processes share the work",
        "local_rank ddp_* fsdp* deepspeed ds3_gather_for_generation accelerator_config parallelism_config",
    ),
}


def from_trl_last(settings: Mapping[str, Any], num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of `trl.experimental.ppo`; absent settings have the defaults of TRL 1.12."""
    return convert(Source("TRL's PPOConfig", settings, SETTINGS, num_prompts), ALWAYS, REMARKS)
