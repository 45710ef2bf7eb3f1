"""Conversion of configurations of ms-swift: `swift rlhf --rlhf_type ppo`.

Names, defaults and effects of settings are taken from ms-swift at commit 3602360a (August 2026): `swift/arguments`,
`swift/trainers/arguments.py`, `swift/pipelines/train/rlhf.py`. ms-swift's PPO trainer is TRL's last PPOTrainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.trl import LAST_REMARKS
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.directories import is_local

SAME = {  # settings that have the same name in ms-swift, TRL and PPOConfig
    **{"num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2},
    **{"vf_coef": 0.1, "gamma": 1.0, "lam": 0.95, "num_mini_batches": 1, "local_rollout_forward_batch_size": 64},
    **{"missing_eos_penalty": None, "temperature": 0.9, "per_device_train_batch_size": 1},
    **{"gradient_checkpointing": True, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "max_grad_norm": 1.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8},
}
RENAMED = {
    **{name: (f"ppo.{name}", default) for name, default in SAME.items()},
    "seed": ("seed", 42),
    "tuner_type": ("ppo.use_peft", "lora"),
    "truncation_strategy": ("ppo.overlong_prompts", "delete"),
    "use_cpu": ("ppo.device", False),
}
IF_GIVEN = arguments.IF_GIVEN | {"save_total_limit": "ppo.save_total_limit"}
VALUES = arguments.VALUES | {
    "tuner_type": {"lora": True, "full": False},
    "truncation_strategy": {"delete": "drop", "left": "truncate_left"},
    # In ms-swift torch_dtype sets fp16 and bf16, and float32 also sets fp16
    "torch_dtype": {None: "auto", "float32": "float16"},
}
ALWAYS = {
    # ms-swift starts the critic from the reward model; with LoRA the critic has its own adapter on the reward model
    "value_model": "reward_init",
    "value_learning_rate": None,  # None: policy and critic share one optimiser and its learning rate
    "kl_controller": "fixed",
    "kl_estimator": "k1",
    "kl_in": "reward",
    "whiten_advantages": True,
    "stop_token": "eos",  # ms-swift stops a response at the end token of the chat template
}
LENGTHS = ("response_length", "max_new_tokens", "max_completion_length")
DERIVED: dict[str, Any] = {
    **dict.fromkeys(("learning_rate", "gradient_accumulation_steps", "report_to", "enable_thinking", *LENGTHS[:2])),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "quant_method", "quant_bits", "global_world_size")),
    **dict.fromkeys(("model", "model_revision", "adapters")),
    **dict.fromkeys(("reward_model", "reward_model_revision", "reward_adapters")),
    **{"rlhf_type": "dpo", "num_train_epochs": 3.0, "warmup_steps": 0, "warmup_ratio": 0.0, "use_hf": False},
    **{LENGTHS[2]: 512, "lora_rank": 8, "lora_alpha": 32, "target_modules": "all-linear"},
    **{"NPROC_PER_NODE": 1, "NNODES": 1},
}
OLD = {"train_type": "tuner_type", "sft_type": "tuner_type"}
"""Names of settings in ms-swift 2 and 3, with the current names."""
LEFT = {
    "[A-Z]*": "whoever starts the run sets environment variables",
    "*dataset* columns system": "set prompts_path to your prompts in this project's columns",
    "*template* response_prefix *thinking*": "chats are rendered by the tokenizer's own chat template",
    "max_length max_model_len": "prompts have no limit: ppo.overlong_prompts sets what happens to prompts that "
    "leave no room for a response in the model's context",
    "top_k top_p": "ms-swift's PPO ignores this setting; here set ppo.top_k and ppo.top_p",
    "max_steps max_epochs": "ms-swift's PPO uses num_train_epochs",
    "num_sample_generations": "samples are logged of the first, each fifth and the last iteration",
    "ref_*": "the reference is always the policy that PPO starts from",
    "*model_type task_type model_* num_labels new_special_tokens rope_scaling": "models and tokenizers are loaded "
    "unchanged",
    "bnb_4bit_*": "4-bit weights are always NF4 by bitsandbytes, doubly quantised",
    "external_plugins custom_register_path callbacks": "name your own functions in ppo.callbacks and reward.components",
    "stop_words": "ppo.stop_token and ppo.stop_token_id set what ends a response",
    "use_vllm vllm_* async_generate sleep_level": "ms-swift's PPO does not use vLLM; here ppo.rollout_engine=vllm does",
    **arguments.LEFT,
    # Settings of the other algorithms, which args.json has too
    "*epsilon* beta cosine_* repetition_* reward_* chord_* *_turn* teacher_* *offload* num_generations* rlsd_* sdar_* "
    "fipo_* tau_* *advantage* scale_rewards rollout_* cpo_alpha simpo_gamma rpo_alpha": "the setting is not for PPO",
}


def from_swift(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert arguments of `swift rlhf --rlhf_type ppo` to this project's parameters.

    Args:
        settings: The arguments by name, or the content of args.json.
        num_prompts: Number of rows of the training data: the length of training is given in passes over the rows.

    Raises:
        ConfigError: `rlhf_type` is not ppo, or ENV is no mapping.
    """
    given, environment = dict(settings), settings.get("ENV") or {}
    given.pop("ENV", None)
    if not isinstance(environment, Mapping):
        raise ConfigError(f"ms-swift: ENV={environment!r} must be a mapping of environment variables to values.")
    given |= environment
    for old, new in OLD.items():
        if old in given and new in given:
            raise ConfigError(f"ms-swift: {old} is the old name of {new}, and both are given. Keep one of the two.")
    given = {OLD.get(name, name): value for name, value in given.items()}
    if (kind := given.get("rlhf_type", DERIVED["rlhf_type"])) != "ppo":
        raise ConfigError(
            f"ms-swift: rlhf_type={kind!r} has no counterpart, because this project trains by PPO with a critic. Only "
            "rlhf_type='ppo' can be converted."
        )
    c = Conversion("ms-swift's PPO", given, RENAMED, DERIVED, always=ALWAYS, if_given=IF_GIVEN, values=VALUES)
    c.carry_over("rlhf_type")
    _carry_sizes(c, num_prompts)
    _carry_models(c)
    arguments.carry_lora(c, "lora_rank", "lora_alpha", "target_modules", DERIVED["lora_alpha"])
    if c.parameters["ppo"]["use_peft"]:
        arguments.carry_bits(c, "quant_bits", "quant_method", has_adapter=bool(_list(c["adapters"])))
    length = next((name for name in LENGTHS if c[name]), LENGTHS[2])
    c.carry("ppo.response_length", length, value=c[length], otherwise=DERIVED[LENGTHS[2]])
    c.carry_over(*(name for name in LENGTHS if c[name] == c[length]))  # args.json has the length three times
    default = 1e-5 if c["tuner_type"] == "full" else 1e-4
    c.carry("ppo.learning_rate", "learning_rate", value=c["learning_rate"] or default, otherwise=default)
    dtype = arguments.half_of(c) or ("float32" if c.given.keys() & {"bf16", "fp16"} else c.ours("torch_dtype"))
    c.carry("ppo.dtype", "torch_dtype", "bf16", "fp16", value=dtype, otherwise="auto")
    if c["torch_dtype"] == "float32":
        c.remarks.append("With torch_dtype float32 ms-swift computes in float16; set ppo.dtype=float32 for float32.")
    arguments.carry_report_to(c)
    arguments.carry_thinking(c)
    return c.finish(LEFT, *LAST_REMARKS)


def _carry_sizes(c: Conversion, rows: int | None) -> None:
    """Carry over the batch sizes and the number of responses. TRL's last batch is a full batch."""
    launched = ("global_world_size",) if c["global_world_size"] else ("NPROC_PER_NODE", "NNODES")
    c.processes = math.prod(map(c.count, launched))
    c.carry_over("global_world_size", "NPROC_PER_NODE", "NNODES")
    micro, setting = c.count("per_device_train_batch_size"), "gradient_accumulation_steps"
    # ms-swift takes 16 responses over all processes if the number of passes is not given
    passes = max(1, math.ceil(16 / micro / c.processes)) if c[setting] is None else c.count(setting)
    c.carry(f"ppo.{setting}", setting, value=passes)
    iterations = None
    if rows is not None:
        episodes = max(1, int(arguments.epochs(c) * rows))
        c.carry("ppo.total_episodes", "num_train_epochs", value=episodes)
        iterations = math.ceil(episodes / (micro * passes * c.processes))
    else:
        arguments.leave_epochs(c, "", "num_train_epochs")
    arguments.carry_warmup(c, iterations)


def _carry_models(c: Conversion) -> None:
    for model, adapters, revision, target in (
        ("model", "adapters", "model_revision", "sft_model_path"),
        ("reward_model", "reward_adapters", "reward_model_revision", "reward_model_path"),
    ):
        places = _list(c[model])
        adapter = arguments.carry_model(c, target, model, adapters, revision)
        if not adapter and len(places) == 1 and not is_local(places[0]) and not c.flag("use_hf"):
            c.remarks.append(
                f"{places[0]} is a name on ModelScope's hub; {target} needs a directory or a name on the Hugging "
                "Face hub, where the model may have another name."
            )
    if _list(c["adapters"]):
        c.remarks.append(arguments.ADAPTER.format("ms-swift"))


def _list(value: Any) -> list[str]:
    """Return one or several values as a list of texts."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(each) for each in values if each not in (None, "")]
