"""Conversion of LLaMA-Factory's stages ppo, sft and rm.

Names, defaults and effects of settings are taken from LlamaFactory at commit ff6d4d12 (August 2026): `hparams`,
`train/ppo`. LLaMA-Factory's PPO uses trl 0.8.6 to 0.9.6, and settings that LLaMA-Factory does not set have the defaults
of trl's PPOConfig.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.supervised.optimisation import OptimisationConfig

STAGES = {"ppo": "prompts_path", "sft": "demonstrations_path", "rm": "preferences_path"}
"""The supported stages, each with the global that names its data."""
SHARED = {  # settings of all stages, with TRL's names, and their defaults
    **{"per_device_train_batch_size": 8, "learning_rate": 5e-5, "lr_scheduler_type": "linear"},
    **{"weight_decay": 0.0, "max_grad_norm": 1.0},
}
SAME = SHARED | {
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "temperature": 0.95, "top_p": 0.7, "top_k": 50},
}
RENAMED = {
    **{name: (f"ppo.{name}", default) for name, default in SAME.items()},
    "ppo_epochs": ("ppo.num_ppo_epochs", 4),
    "ppo_whiten_rewards": ("ppo.whiten_rewards", False),
    "ppo_score_norm": ("ppo.reward_normalisation", False),
    "ppo_target": ("ppo.kl_target", 6.0),
    "ppo_buffer_size": ("ppo.num_mini_batches", 1),
    "max_new_tokens": ("ppo.response_length", 1024),
    "finetuning_type": ("ppo.use_peft", "lora"),
    "disable_gradient_checkpointing": ("ppo.gradient_checkpointing", False),
    "use_cpu": ("ppo.device", False),
    "seed": ("seed", 42),
}
SUPERVISED = {  # settings of the stages sft and rm, with the group's names and their defaults
    **{name: (name, default) for name, default in SHARED.items()},
    "num_train_epochs": ("num_train_epochs", 3.0),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "cutoff_len": ("max_length", 2048),
    "logging_steps": ("logging_steps", 500),
    "disable_gradient_checkpointing": ("gradient_checkpointing", False),
    "use_cpu": ("device", False),
}
VALUES = arguments.VALUES | {
    "ppo_score_norm": {True: "running", False: "none"},
    "finetuning_type": {"lora": True, "full": False},
    "disable_gradient_checkpointing": {True: False, False: True},
}
ALWAYS = {  # defaults of TRL's PPOConfig that LLaMA-Factory leaves unchanged
    **{"kl_coef": 0.2, "kl_controller": "adaptive", "kl_horizon": 10_000, "kl_estimator": "k1", "kl_in": "reward"},
    **{"cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95, "target_kl": None},
    **{"reward_clip": None, "whiten_advantages": True, "missing_eos_penalty": None, "stop_token": "eos"},
    "value_model": "shared",  # LLaMA-Factory puts a value head on the policy, also with LoRA
    "value_learning_rate": None,  # None: policy and value head share one optimiser and its learning rate
}
COMMON = {  # defaults of the settings that the code below converts
    **{"stage": "sft", "num_train_epochs": 3.0, "max_steps": -1, "warmup_steps": 0, "warmup_ratio": None},
    **dict.fromkeys(("bf16", "fp16", "pure_bf16", "create_new_adapter"), False),
    **dict.fromkeys(("model_name_or_path", "adapter_name_or_path")),
    "model_revision": "main",
}
DERIVED = COMMON | {
    **dict.fromkeys(("report_to", "enable_thinking", "lora_alpha", "quantization_bit", "quantization_method")),
    **dict.fromkeys(("reward_model", "reward_model_adapters")),
    **{"gradient_accumulation_steps": 1, "lora_rank": 8, "lora_target": "all", "reward_model_type": "lora"},
}
_TRAINED = {"sft": "sft_model_path", "rm": "reward_model_path"}
_POLICY = ("model_name_or_path", "adapter_name_or_path", "model_revision", "create_new_adapter")
_REWARD = ("reward_model", "reward_model_type", "reward_model_adapters")
LEFT = {
    "template": "chats are rendered by the tokenizer's own chat template; LLaMA-Factory writes its template into the "
    "tokenizers that it saves, so compare with that of the model you started from",
    "save_total_limit": "LLaMA-Factory's PPO keeps every checkpoint; here ppo.save_total_limit sets how many are kept",
    "tool_format preserve_thinking": "the tokenizer's chat template decides; see chat_template_kwargs in globals.yml",
    "cutoff_len": "prompts are not cut; ppo.overlong_prompts sets what happens to prompts that leave no room for a "
    "response in the model's context",
    "max_length": "it includes the prompt; max_new_tokens is the length of a response",
    "train_on_prompt mask_history": "supervised_finetuning.assistant_only_loss sets which tokens are trained on",
    "ref_model*": "the reference is always the policy that PPO starts from",
    "reward_model_quantization_bit": "the reward model is not quantised and has ppo.dtype",
    "quantization_* double_quantization": "4-bit weights are always NF4 by bitsandbytes, doubly quantised",
    "gradient_checkpointing": "LLaMA-Factory's PPO ignores this setting and uses disable_gradient_checkpointing",
    "cache_dir use_fast_tokenizer resize_vocab add_tokens add_special_tokens rope_scaling": "models and tokenizers are "
    "loaded unchanged; change them before the conversion",
    **arguments.LEFT,
}
SUPERVISED_LEFT = {
    "ppo_* reward_model* temperature top_p top_k max_length max_new_tokens": "the setting is for stage ppo",
    "adam_*": "AdamW uses transformers' defaults",
    "optim report_to full_determinism torch_compile save_steps": "SFT and reward training here do not have this "
    "setting",
    "seed": "all stages use the seed of globals.yml",
    **LEFT,
}
PPO_REMARK = (
    "LLaMA-Factory samples at temperature, but computes log-probabilities, KL and entropy at temperature 1; here they "
    "are computed at temperature, too."
)


def from_llamafactory(
    settings: Mapping[str, Any], *, num_prompts: int | None = None, beside: Collection[str] = ()
) -> Conversion:
    """Convert the settings of one stage of LLaMA-Factory to this project's parameters.

    Args:
        settings: The content of a file that `llamafactory-cli train` takes, of `stage: ppo`, `sft` or `rm`.
        num_prompts: Number of rows of the training data: the length of training is given in passes over the rows.
        beside: Stages that are converted together with the given stage. PPO starts from the models that the stages in
            `beside` train.

    Raises:
        ConfigError: The stage is not supported.
    """
    stage = settings.get("stage", COMMON["stage"])
    if stage not in STAGES:
        raise ConfigError(
            f"LLaMA-Factory: stage={stage!r} has no counterpart, because this project trains by PPO with a critic. The "
            f"stages {', '.join(STAGES)} can be converted."
        )
    return _ppo(settings, num_prompts, beside) if stage == "ppo" else _supervised(settings, stage)


def _ppo(settings: Mapping[str, Any], num_prompts: int | None, beside: Collection[str]) -> Conversion:
    trained = {_TRAINED[each] for each in beside if each in _TRAINED}
    c = Conversion(
        "LLaMA-Factory's stage ppo",
        settings,
        RENAMED,
        DERIVED,
        always=ALWAYS,
        if_given={**arguments.IF_GIVEN, "trust_remote_code": "trust_remote_code"},
        values=VALUES,
        to_fill_in=[name for name in (*_TRAINED.values(), "prompts_path") if name not in trained],
    )
    c.carry_over("stage")
    if "sft" in beside:
        c.leave("PPO starts from the model that stage sft trains", *_POLICY)
    else:
        _carry_policy(c)
    if "rm" in beside:
        c.leave("the reward is the model that stage rm trains", *_REWARD)
    else:
        _carry_reward(c)
    arguments.carry_lora(c, "lora_rank", "lora_alpha", "lora_target", 2 * c.count("lora_rank"))
    if c.parameters["ppo"]["use_peft"]:
        has_adapter = "sft" not in beside and bool(arguments.names_of(c["adapter_name_or_path"]))
        arguments.carry_bits(c, "quantization_bit", "quantization_method", has_adapter=has_adapter)
    _leave_tables(c, "ppo")
    _carry_sizes(c, num_prompts)
    c.carry("ppo.dtype", "bf16", "fp16", "pure_bf16", value=arguments.half_of(c) or "float32")
    arguments.carry_report_to(c)
    arguments.carry_thinking(c)
    return c.finish(LEFT, PPO_REMARK)


def _carry_sizes(c: Conversion, rows: int | None) -> None:
    """Carry over the batch sizes, the number of responses and the warm-up.

    In LLaMA-Factory an iteration has per_device_train_batch_size x gradient_accumulation_steps x ppo_buffer_size
    responses, and an optimiser step has per_device_train_batch_size x gradient_accumulation_steps. A pass over the
    prompts leaves out the prompts that do not fill an iteration.
    """
    size = c.count("per_device_train_batch_size") * c.count("gradient_accumulation_steps") * c.count("ppo_buffer_size")
    accumulated = c.count("gradient_accumulation_steps") * c.count("ppo_buffer_size")
    c.carry("ppo.gradient_accumulation_steps", "gradient_accumulation_steps", "ppo_buffer_size", value=accumulated)
    iterations = None
    if (steps := c.checked("max_steps", int)) > 0:
        iterations = steps
    elif rows is not None:
        iterations = math.ceil(arguments.epochs(c) * (rows // size))
        if not iterations:
            raise ConfigError(
                f"{c.source}: {rows} prompts do not fill one iteration of {size} responses, so LLaMA-Factory would "
                "take no step; lower per_device_train_batch_size, gradient_accumulation_steps or ppo_buffer_size."
            )
    if iterations is not None:
        settings = ("max_steps",) if steps > 0 else ("num_train_epochs", "max_steps")
        c.carry("ppo.total_episodes", *settings, value=iterations * size)
    else:
        arguments.leave_epochs(c, ", or max_steps", "num_train_epochs", "max_steps")
    arguments.carry_warmup(c, iterations)


def _carry_policy(c: Conversion) -> None:
    """Carry over the model that PPO starts from."""
    adapters = arguments.carry_model(c, "sft_model_path", *_POLICY[:3])
    c.leave("a given adapter is always merged, and a new adapter is trained", "create_new_adapter")
    if adapters and not c.flag("create_new_adapter"):
        c.remarks.append(arguments.ADAPTER.format("LLaMA-Factory"))


def _carry_reward(c: Conversion) -> None:
    """Carry over the reward model: a model or an adapter with LLaMA-Factory's value head, or a server."""
    kind, place = c["reward_model_type"], c["reward_model"]
    merged = arguments.names_of(c["adapter_name_or_path"])[: None if c.flag("create_new_adapter") else -1]
    if kind not in ("lora", "full", "api"):
        c.leave("reward_model_type must be lora, full or api", "reward_model_type", "reward_model")
    elif place is None:
        return
    elif kind == "lora" and merged:
        why = f"LLaMA-Factory puts this adapter on the model with {', '.join(merged)} merged in, which it does not name"
        c.leave(f"{why}; merge it (llamafactory-cli export with stage: rm) and set reward_model_path", *_REWARD)
    elif kind == "api":
        value = [{"type": "function", "function": "reward_server:score"}]
        c.carry("reward_components", "reward_model_type", "reward_model", value=value)
        c.remarks.append(
            f"A function in reward_server.py asks the server {place} for rewards; copy this function from "
            "docs/converting.md, section LLaMA-Factory."
        )
    else:
        adapters = "reward_model_adapters" if kind == "full" else None
        if arguments.carry_model(c, "reward_model_path", "reward_model", adapters):
            c.carry_over("reward_model_type")
        else:
            alike = "lora and full are loaded alike, with value_head.safetensors beside the weights"
            c.leave(alike, "reward_model_type")


def _supervised(settings: Mapping[str, Any], stage: str) -> Conversion:
    group = {"sft": "supervised_finetuning", "rm": "reward_modelling"}[stage]
    renamed = {name: (f"{group}.{ours}", default) for name, (ours, default) in SUPERVISED.items()}
    c = Conversion(
        f"LLaMA-Factory's stage {stage}",
        settings,
        renamed,
        COMMON | {"finetuning_type": "lora"},
        always={},
        if_given={"trust_remote_code": "trust_remote_code"} if stage == "sft" else {},
        values=VALUES,
        to_fill_in=[STAGES[stage]],
    )
    c.write(f"{group}.group_by_length", False, "always so in the source")
    c.carry_over("stage")
    _leave_tables(c, stage)
    if (steps := c.checked("max_steps", int)) > 0:
        c.carry(f"{group}.max_steps", "max_steps")
    arguments.carry_warmup(c, steps if steps > 0 else None, f"{group}.warmup_ratio")
    c.carry(f"{group}.bf16", "bf16", "pure_bf16", value=c.flag("bf16") or c.flag("pure_bf16"))
    kind = c["finetuning_type"]
    if kind != "full":
        why = f"a rate for {kind} is too high for all weights, which train here; set {group}.learning_rate"
        c.leave(why, "learning_rate")
        c.write(f"{group}.learning_rate", OptimisationConfig.learning_rate, "for all weights; TRL's default")
    if stage == "sft":
        arguments.carry_model(c, "base_model_path", "model_name_or_path", None, "model_revision")
        c.leave("it starts from base_model_path of globals.yml", "adapter_name_or_path")
    else:
        why = "the reward model starts from the SFT policy here"
        c.leave(f"{why}, there from {c['model_name_or_path']}", "model_name_or_path", "model_revision")
        c.leave(why, "adapter_name_or_path")
        c.leave("the global of this name is the policy's, too; set it in globals.yml", "trust_remote_code")
        c.remarks.append(
            "LLaMA-Factory cuts pairs at cutoff_len; here longer pairs are left out, and the run counts them."
        )
    c.carry_over("finetuning_type")
    why = "this stage trains all weights here; if they do not fit, give PPO a model that LLaMA-Factory trained"
    c.leave(why, "lora_rank", "lora_alpha", "lora_target", "quantization_bit")
    if kind != "full":
        c.leave(why, "finetuning_type")
    return c.finish(SUPERVISED_LEFT)


def _leave_tables(c: Conversion, stage: str) -> None:
    why = f"tables of dataset_info.json are not read: set {STAGES[stage]} to your data in this project's columns"
    c.leave(why, "dataset", "dataset_dir", "max_samples", "default_system", "mix_strategy", "interleave_probs")
