"""Conversion of LLaMA-Factory's stages ppo, sft and rm, and of the tables that dataset_info.json describes.

Names, defaults and effects of settings are taken from LlamaFactory at commit ff6d4d12 (August 2026): `hparams`,
`train/ppo`. LLaMA-Factory's PPO uses trl 0.8.6 to 0.9.6, and settings that LLaMA-Factory does not set have the defaults
of trl's PPOConfig.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import TO_FILL_IN, Conversion
from ppo_rlhf.compat.rows import INFO, STAGES, Table
from ppo_rlhf.compat.sources import mapping_of
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.supervised.optimisation import OptimisationConfig

PPO = {
    "ppo_epochs": ("ppo.num_ppo_epochs", 4),
    "ppo_whiten_rewards": ("ppo.whiten_rewards", False),
    "per_device_train_batch_size": ("ppo.per_device_train_batch_size", 8),
    "learning_rate": ("ppo.learning_rate", 5e-5),
    "lr_scheduler_type": ("ppo.lr_scheduler_type", "linear"),
    "weight_decay": ("ppo.weight_decay", 0.0),
    "adam_beta1": ("ppo.adam_beta1", 0.9),
    "adam_beta2": ("ppo.adam_beta2", 0.999),
    "adam_epsilon": ("ppo.adam_epsilon", 1e-8),
    "max_grad_norm": ("ppo.max_grad_norm", 1.0),
    "ppo_target": ("ppo.kl_target", 6.0),
    "temperature": ("ppo.temperature", 0.95),
    "top_p": ("ppo.top_p", 0.7),
    "top_k": ("ppo.top_k", 50),
    "seed": ("seed", 42),
}
PPO_ALWAYS = {  # defaults of TRL's PPOConfig that LLaMA-Factory leaves unchanged
    "kl_coef": 0.2,
    "kl_controller": "adaptive",
    "kl_horizon": 10_000,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "target_kl": None,
    "reward_clip": None,
    "whiten_advantages": True,
    "missing_eos_penalty": None,
    "value_model": "shared",  # LLaMA-Factory puts a value head on the policy, also with LoRA
    "value_learning_rate": None,  # None: policy and value head share one optimiser and its learning rate
    "stop_token": "eos",
}
SUPERVISED = {  # LLaMA-Factory's settings of the stages sft and rm, with their defaults
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}
COMMON = {  # defaults of LLaMA-Factory's settings that the code below converts
    "stage": "sft",
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "bf16": False,
    "fp16": False,
    "pure_bf16": False,
    "use_cpu": False,
    "disable_gradient_checkpointing": False,
    "model_name_or_path": None,
    "adapter_name_or_path": None,
    "model_revision": "main",
    "create_new_adapter": False,
    "dataset": None,
    "dataset_dir": "data",
    "max_samples": None,
    "default_system": None,
    "enable_thinking": None,
    "trust_remote_code": None,
}
_TRAINED = {"sft": "sft_model_path", "rm": "reward_model_path"}
_POLICY = ("model_name_or_path", "adapter_name_or_path", "model_revision", "create_new_adapter")
_REWARD = ("reward_model", "reward_model_type", "reward_model_adapters")
PPO_DERIVED = {
    **dict.fromkeys(arguments.IF_GIVEN),
    "gradient_accumulation_steps": 1,
    "ppo_buffer_size": 1,
    "ppo_score_norm": False,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_alpha": None,
    "lora_target": "all",
    "quantization_bit": None,
    "max_new_tokens": 1024,
    "max_length": 1024,
    "reward_model": None,
    "reward_model_type": "lora",
    "reward_model_adapters": None,
}
_LEFT = {
    "template": "chats are rendered by the tokenizer's own chat template; LLaMA-Factory writes its template into the "
    "tokenizers that it saves, so compare with that of the model you started from",
    "save_total_limit": "LLaMA-Factory's PPO keeps every checkpoint; here ppo.save_total_limit sets how many are kept",
    "tool_format preserve_thinking": "the tokenizer's chat template decides; see chat_template_kwargs in globals.yml",
    "cutoff_len": "prompts are not cut; ppo.overlong_prompts sets what happens to prompts that leave no room for a "
    "response in the model's context",
    "mix_strategy interleave_probs": "tables are concatenated, and prompts are drawn at random",
    "train_on_prompt mask_history": "supervised_finetuning.assistant_only_loss sets which tokens are trained on",
    "ref_model*": "the reference is always the policy that PPO starts from",
    "reward_model_quantization_bit": "the reward model is not quantised and has ppo.dtype",
    "quantization_* double_quantization": "4-bit weights are always NF4 by bitsandbytes, doubly quantised",
    "gradient_checkpointing": "LLaMA-Factory's PPO ignores this setting and uses disable_gradient_checkpointing",
    "pref_* dpo_* kto_* simpo_* ld_alpha use_dft_loss use_asft_loss asft_* use_eaft_loss eaft_*": "the setting "
    "is for other stages",
    "adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens add_tokens add_special_tokens "
    "new_special_tokens_config init_special_tokens rope_scaling moe_aux_loss_coef mixture_of_depths "
    "train_from_scratch low_cpu_mem_usage offload_folder": "models and tokenizers are loaded unchanged; "
    "change them before the conversion",
    "skip_special_tokens infer_* vllm_* sglang_* export_* kt_* use_kt fp8* bf16_* fp16_* half_precision_backend "
    "use_mca use_megatron_bridge use_hyper_parallel hyper_parallel_*": "the setting has no counterpart here",
    "compute_accuracy neftune_noise_alpha label_smoothing_factor torch_empty_cache_steps batch_eval_metrics "
    "jit_mode_eval skip_memory_metrics debug use_ipex past_index torchdynamo": "the setting has no counterpart here",
}
LEFT = _LEFT | arguments.LEFT
SUPERVISED_LEFT = {
    "ppo_* reward_model* temperature top_p top_k max_length max_new_tokens": "the setting is for stage ppo",
    "adam_*": "AdamW uses transformers' defaults",
    "optim report_to full_determinism torch_compile save_steps quantization_bit": "SFT and reward training here do not "
    "have this setting",
    **LEFT,
}
PPO_REMARK = (
    "LLaMA-Factory samples at temperature, but computes log-probabilities, KL and entropy at temperature 1; here they "
    "are computed at temperature, too."
)


def from_llamafactory(
    settings: Mapping[str, Any],
    *,
    num_prompts: int | None = None,
    folders: Sequence[Path] = (),
    beside: Collection[str] = (),
) -> Conversion:
    """Convert the settings of one stage of LLaMA-Factory to this project's parameters.

    Args:
        settings: The content of a file that `llamafactory-cli train` takes, of `stage: ppo`, `sft` or `rm`.
        num_prompts: Number of rows of the training data, needed if the tables are not read: the length of training is
            given in passes over the rows.
        folders: Folders in which relative paths of models and `dataset_dir` are searched, in the order of the sequence.
            Without folders the tables are not read.
        beside: Stages that are converted together with the given stage. PPO starts from the models that the stages in
            `beside` train.

    Raises:
        ConfigError: The stage is not supported, or an entry of dataset_info.json is invalid or has images.
        DataError: A table cannot be loaded.
    """
    stage = settings.get("stage", "sft")
    if stage not in STAGES:
        raise ConfigError(
            f"LLaMA-Factory: stage={stage!r} has no counterpart, because this project trains by PPO with a critic. The "
            f"stages {', '.join(STAGES)} can be converted."
        )
    given = arguments.normalised(settings)
    for name in ("model_name_or_path", "adapter_name_or_path", "reward_model", "reward_model_adapters"):
        if name in given:
            given[name] = arguments.located(given[name], folders)
    if stage == "ppo":
        return _ppo(given, num_prompts, folders, beside)
    return _supervised(given, stage, folders)


def _ppo(
    settings: Mapping[str, Any], num_prompts: int | None, folders: Sequence[Path], beside: Collection[str]
) -> Conversion:
    trained = {_TRAINED[each] for each in beside if each in _TRAINED}
    to_fill_in = [name for name in TO_FILL_IN if name not in trained]
    c = Conversion("LLaMA-Factory's stage ppo", settings, PPO, COMMON | PPO_DERIVED, to_fill_in)
    c.carry_over("stage")
    if "sft" in beside:
        c.leave("PPO starts from the model that stage sft trains", *_POLICY)
    else:
        _carry_policy(c)
    if "rm" in beside:
        c.leave("the reward is the model that stage rm trains", *_REWARD)
    else:
        _carry_reward(c)
    rank = 2 * c.count("lora_rank")
    if arguments.carry_lora(c, "finetuning_type", "lora_rank", "lora_alpha", "lora_target", default_alpha=rank):
        has_adapter = "sft" not in beside and bool(arguments.names_of(c["adapter_name_or_path"]))
        arguments.carry_bits(c, "quantization_bit", None, has_adapter=has_adapter)
    arguments.carry_always(c, PPO_ALWAYS)
    arguments.carry_given(c, {**arguments.IF_GIVEN, "trust_remote_code": "trust_remote_code"})
    _carry_tables(c, "ppo", folders)
    _carry_sizes(c, arguments.trained_rows(c, num_prompts))
    c.carry("ppo.reward_normalisation", "ppo_score_norm", value="running" if c.flag("ppo_score_norm") else "none")
    if c.checked("max_new_tokens", int) > 0:
        c.carry("ppo.response_length", "max_new_tokens")
    else:
        c.leave("max_length includes the prompt; give max_new_tokens instead", "max_new_tokens", "max_length")
        c.write("ppo.response_length", 1024, "default of max_new_tokens")
    half = [name for name in ("bf16", "pure_bf16", "fp16") if c.flag(name)]
    dtype = "float32" if not half else "float16" if half == ["fp16"] else "bfloat16"
    c.carry("ppo.dtype", "bf16", "fp16", "pure_bf16", value=dtype)
    arguments.carry_device(c)
    c.carry(
        "ppo.gradient_checkpointing",
        "disable_gradient_checkpointing",
        value=not c.flag("disable_gradient_checkpointing"),
    )
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
    c.carry("ppo.num_mini_batches", "ppo_buffer_size")
    iterations = None
    if (steps := c.checked("max_steps", int)) > 0:
        iterations = steps
    elif rows is not None:
        iterations = arguments.batches(rows, size, arguments.epochs(c), keeps_rest=False)
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


def _supervised(settings: Mapping[str, Any], stage: str, folders: Sequence[Path]) -> Conversion:
    group = {"sft": "supervised_finetuning", "rm": "reward_modelling"}[stage]
    renamed = {name: (f"{group}.{name}", default) for name, default in SUPERVISED.items()}
    renamed |= {"cutoff_len": (f"{group}.max_length", 2048), "logging_steps": (f"{group}.logging_steps", 500)}
    c = Conversion(f"LLaMA-Factory's stage {stage}", settings, renamed, COMMON | {"finetuning_type": "lora"}, ())
    c.carry_over("stage")
    _carry_tables(c, stage, folders)
    rows = c.tables.get(STAGES[stage])
    if (steps := c.checked("max_steps", int)) > 0:
        c.carry(f"{group}.max_steps", "max_steps")
    elif rows is not None:
        size = c.count("per_device_train_batch_size") * c.count("gradient_accumulation_steps")
        steps = arguments.batches(len(rows), size, arguments.epochs(c), keeps_rest=True)
    arguments.carry_warmup(c, steps if steps > 0 else None, f"{group}.warmup_ratio")
    c.carry(f"{group}.bf16", "bf16", "pure_bf16", value=c.flag("bf16") or c.flag("pure_bf16"))
    c.carry(
        f"{group}.gradient_checkpointing",
        "disable_gradient_checkpointing",
        value=not c.flag("disable_gradient_checkpointing"),
    )
    arguments.carry_device(c, f"{group}.device")
    c.write(f"{group}.group_by_length", False, "always so in the source")
    if c["finetuning_type"] != "full":
        kind = c["finetuning_type"]
        why = f"a rate for {kind} is too high for all weights, which train here; set {group}.learning_rate"
        c.leave(why, "learning_rate")
        c.write(f"{group}.learning_rate", OptimisationConfig.learning_rate, "for all weights; TRL's default")
    if stage == "sft":
        arguments.carry_given(c, {"trust_remote_code": "trust_remote_code"})
        arguments.carry_model(c, "base_model_path", "model_name_or_path", None, "model_revision")
        c.leave("it starts from base_model_path of globals.yml", "adapter_name_or_path")
    else:
        why = "the reward model starts from the SFT policy here"
        model = "model_name_or_path"
        c.leave(f"{why}, there from {c[model]}", model, "model_revision")
        c.leave(why, "adapter_name_or_path")
        c.leave("the global of this name is the policy's, too; set it in globals.yml", "trust_remote_code")
        c.remarks.append(
            "LLaMA-Factory cuts pairs at cutoff_len; here longer pairs are left out, and the run counts them."
        )
    why = "this stage trains all weights here; if they do not fit, give PPO a model that LLaMA-Factory trained"
    c.carry_over("finetuning_type")
    if c["finetuning_type"] != "full":
        c.leave(why, "finetuning_type")
    c.leave(why, "lora_rank", "lora_alpha", "lora_target", "quantization_bit")
    c.leave("all stages use the seed of globals.yml", "seed")
    return c.finish(SUPERVISED_LEFT)


def _carry_tables(c: Conversion, stage: str, folders: Sequence[Path]) -> None:
    """Read the rows of the tables that a stage names, unless a table cannot be found."""
    names, settings = arguments.names_of(c["dataset"]), ("dataset", "dataset_dir", "max_samples", "default_system")
    if not names:
        return None
    files = [folder / str(c["dataset_dir"]) / INFO for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return c.leave(f"there is no {c['dataset_dir']}/{INFO} here or above the file; set {STAGES[stage]}", *settings)
    info = mapping_of(file)
    maximum = None if c["max_samples"] is None else c.count("max_samples")
    tables = []
    for name in names:
        if not isinstance(info.get(name), dict):
            raise ConfigError(f"{file} has no table {name}. Its tables are {', '.join(sorted(info)[:20])}.")
        if (source := _source_of(info[name], file.parent)) is None:
            why = f"the table {name} is neither a file nor on the Hugging Face hub; set {STAGES[stage]}"
            return c.leave(why, *settings)
        tables.append(Table(name, source, info[name]))
    for table in tables:
        table.add_to(c, stage, maximum=maximum, system=c["default_system"])
    return c.carry_over(*settings)


def _source_of(entry: Mapping[str, Any], folder: Path) -> str | None:
    if "hf_hub_url" in entry:
        subset, split = entry.get("subset"), entry.get("split", "train")
        return f"{entry['hf_hub_url']}{f'#{subset}' if subset else ''}:{split}" if not entry.get("folder") else None
    if "file_name" in entry and not entry.keys() & {"ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}:
        return str(folder / entry["file_name"])
    return None
