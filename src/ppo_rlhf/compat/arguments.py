"""Conversion code that several libraries share: TrainingArguments, LoRA, adapters, the length of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.directories import is_local

OPTIM = {"adamw_torch": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit"}
IF_GIVEN = {
    "optim": "ppo.optim",
    "report_to": "ppo.report_to",
    "full_determinism": "ppo.deterministic",
    "torch_compile": "ppo.compile",
    "save_steps": "ppo.save_interval",
}
"""Settings that are converted only if they are given. For settings that are not given, the values of conf/base
apply."""
LEFT = {
    "lora_dropout module_dropout": "dropout is always off",
    "use_rslora use_dora loraplus_* lorap_* pissa_* lora_bias lora_dtype lora_ga_* init_weights additional_target "
    "modules_to_save target_regex target_parameters use_swift_lora tuner_backend use_llama_pro": "only plain "
    "LoRA on linear layers is supported",
    "freeze_* trainable_parameters* oft_* fourier_* boft_* vera_* adapter_* adalora_* llamapro_* reft_*": "either "
    "all weights train or LoRA adapters (ppo.use_peft)",
    "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini use_muon optim_* optimizer lisa_* "
    "adafactor": "the optimiser is AdamW; ppo.optim=adamw_8bit stores its moments in 8 bits",
    "lr_scheduler_kwargs": "schedules use transformers' default arguments",
    "save_* *_best_model load_best_model_at_end greater_is_better create_checkpoint_symlink enable_jit_checkpoint "
    "safe_serialization max_shard_size use_flash_ckpt": "complete checkpoints are written every ppo.save_interval "
    "iterations; the newest and the best are kept",
    "resume_* ignore_data_skip restore_*": "checkpoints of another library cannot be resumed; resume=latest is for "
    "runs of this project",
    "do_train do_predict predict_with_generate sortish_sampler generation_*": "`kedro run` both trains and evaluates",
    "*eval_* *eval evaluation_strategy eval_strategy val_size val_dataset* split_dataset_ratio "
    "prediction_loss_only early_stop* include_for_metrics": "held-out prompts are a share of the prompts, or "
    "evaluation_prompts_path; ppo.eval_interval sets how often the policy is evaluated on them",
    "output_dir overwrite_output_dir logging_* log_* run_name project* trackio_* swanlab_* use_swanlab hub_* "
    "push_to_hub* disable_tqdm plot_loss add_version include_* print_param_status *profile*": "outputs, logs and "
    "tracking are set in conf/base: catalog_ppo.yml and mlflow.yml",
    "deepspeed* fsdp* ddp_* local_rank accelerator_config parallelism_config zero_hpz_* device_map max_memory "
    "use_ray ray_* master_* device_groups sequence_parallel_size average_tokens_across_devices "
    "auto_find_batch_size": "the launcher and accelerate's configuration file set how processes share work",
    "dataloader_* data_seed preprocessing_* dataset_num_proc overwrite_cache tokenized_path "
    "data_shared_file_system load_from_cache_file lazy_tokenize download_mode remove_unused_columns "
    "train_dataloader_shuffle group_by_length length_column_name train_sampling_strategy disable_shuffling "
    "dataset_shuffle label_names": "prompts are tokenised once, before training, and shuffled in each pass",
    "streaming buffer_size shuffle_buffer_size packing* neat_packing padding_free padding_side "
    "ignore_pad_token_for_loss cached_dataset": "tables are memory-mapped, and training needs no padding",
    "gradient_checkpointing_kwargs use_reentrant_gc vit_gradient_checkpointing use_unsloth* use_liger_kernel "
    "enable_liger_kernel liger_kernel_config torch_compile_* flash_attn attn_impl experts_impl shift_attn "
    "use_cache use_kv_cache use_v1_kernels tf32 use_logits_to_keep upcast_*": "this project chooses kernels itself: "
    "ppo.compile, ppo.cuda_graphs and ppo.rollout_engine",
    "image_* video_* videos_* audio_* crop_to_patches use_audio_in_video media_dir freeze_vision_tower max_pixels "
    "freeze_multi_modal_projector vit_lr aligner_lr norm_bbox": "only text is supported",
    "num_beams length_penalty repetition_penalty do_sample min_p": "PPO needs responses that are sampled from the "
    "policy; ppo.temperature, ppo.top_k and ppo.top_p set the sampling",
    "*_hub_token hub_token use_hf": "models come from the Hugging Face hub, whose token is in HF_TOKEN",
    "per_device_eval_batch_size": "set evaluation.batch_size",
}
"""Settings that are not converted, each with the reason. `*` matches any text; the first matching pattern counts."""
ADAPTER = (
    "{} continues to train the given adapter, and its reference is the model without the adapter; here the adapter is "
    "merged into the model that both start from, and a new adapter is trained."
)
_BASE_NAMED = "the adapter's configuration names its base model"


def normalised(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with values such as `optim` and `report_to` spelt as in this project."""
    given = dict(settings)
    if isinstance(name := given.get("optim"), str):
        given["optim"] = OPTIM.get(name, name)
    if isinstance(reports := given.get("report_to"), list | tuple):
        given["report_to"] = ",".join(map(str, reports)) or "none"
    return given


def located(place: Any, folders: Sequence[Path]) -> Any:
    """Return the absolute path of a file or directory that exists in one of the folders; other values are unchanged."""
    if not isinstance(place, str) or not place:
        return place
    paths = (folder / place for folder in folders if (folder / place).exists())
    return str(next((path.resolve() for path in paths), place))


def carry_always(c: Conversion, values: Mapping[str, Any], group: str = "ppo") -> None:
    """Write the values of parameters that are constants in the source."""
    for name, value in values.items():
        c.write(f"{group}.{name}", value, "always so in the source")


def carry_given(c: Conversion, targets: Mapping[str, str]) -> None:
    """Carry over the given settings that are not None; None is the default of each carried-over setting."""
    for setting, target in targets.items():
        if c[setting] is not None and setting in c.given:
            c.carry(target, setting)


def carry_model(c: Conversion, target: str, model: str, adapters: str | None, revision: str = "") -> list[str]:
    """Carry over a model, or the adapter that the setting `adapters` names instead; return the adapters' names."""
    added, places = names_of(c[adapters]) if adapters else [], c[model] or []
    places, branch = places if isinstance(places, list) else [places], ",".join(names_of(c[revision]))
    if len(added) > 1 or len(places) > 1:
        why = f"there are several; merge them, and give the merged model as {target}"
        c.leave(why, model, revision, *([adapters] if adapters else []))
    elif added and adapters:
        c.carry(target, adapters, value=added[0])
        c.leave(_BASE_NAMED, model, revision)
    elif places and branch not in ("", "main") and is_local(str(places[0])):
        c.carry(target, model, value=places[0])
        c.leave("a directory has no revision", revision)
    elif places:
        c.carry(target, model, revision, value=places[0] if branch in ("", "main") else f"{places[0]}@{branch}")
    return added


def carry_warmup(c: Conversion, iterations: int | None, target: str = "ppo.warmup_ratio") -> None:
    """Carry over the warm-up as a share of the iterations. `iterations` is None if the number is not known."""
    steps = c.checked("warmup_steps", Annotated[float, Field(ge=0)] | None) or 0.0
    if c["lr_scheduler_type"] == "constant":  # transformers' `constant` learning rate schedule ignores warm-up settings
        return
    if 0 < steps < 1:
        c.carry(target, "warmup_steps", "warmup_ratio", value=steps)
    else:
        carry_warmup_steps(c, iterations, int(steps), ("warmup_steps", "warmup_ratio"), target)


def carry_warmup_steps(
    c: Conversion, iterations: int | None, steps: int, settings: tuple[str, str], target: str = "ppo.warmup_ratio"
) -> None:
    """Carry over a warm-up over `steps` iterations, or without steps the share of the iterations.

    `settings` are the names of the number of steps and of the share.
    """
    number, share = settings
    if steps < 1:
        c.carry(target, share, number, value=c[share] or 0.0, otherwise=0.0)
    elif iterations is None:
        c.leave("the number of steps is not known: give --prompts", number)
    else:
        # Subtract half a step: warmup_ratio x iterations is rounded up to whole iterations
        c.carry(target, number, value=(steps - 0.5) / iterations)


def carry_device(c: Conversion, target: str = "ppo.device") -> None:
    """Carry over whether training uses the CPU."""
    c.carry(target, "use_cpu", value="cpu" if c.flag("use_cpu") else "auto")


def carry_thinking(c: Conversion) -> None:
    """Carry over the chat template's argument enable_thinking, if it is given."""
    if c["enable_thinking"] is not None:
        c.carry("chat_template_kwargs", "enable_thinking", value={"enable_thinking": c.flag("enable_thinking")})


def carry_lora(
    c: Conversion,
    kind: str,
    rank: str,
    alpha: str,
    modules: str,
    *,
    uses: bool | None = None,
    default_alpha: int | None = None,
) -> bool:
    """Carry over LoRA's settings, which have the given names, and return whether LoRA is used.

    `uses` says whether LoRA is used; None: the setting `kind` is `lora` or `full`. `default_alpha` replaces an alpha
    that is not given.
    """
    if uses is None:
        uses = renamed(c[kind], {"lora": True, "full": False})
    c.carry("ppo.use_peft", kind, value=uses, otherwise=True)
    if uses is False:
        return False
    c.carry("ppo.lora_r", rank)
    if c[alpha] in (None, 0) and default_alpha is not None:
        c.carry("ppo.lora_alpha", alpha, rank, value=default_alpha)
    else:
        c.carry("ppo.lora_alpha", alpha, otherwise=default_alpha or c.default(alpha))
    value = c[modules]
    names = ",".join(names_of(value)) if isinstance(value, str | list | tuple | set) else value
    value = "all-linear" if names in (None, "all") else names
    c.carry("ppo.lora_target_modules", modules, value=value, otherwise="all-linear")
    return True


def carry_bits(c: Conversion, bits: str, method: str | None, *, has_adapter: bool) -> None:
    """Carry over the quantisation to 4 bits by bitsandbytes. `method` is the setting that names another library."""
    is_bnb = method is None or c[method] == "bnb"
    settings = (bits,) if method is None or c[bits] is None else (bits, method)
    if c[bits] is not None and (has_adapter or str(c[bits]) != "4" or not is_bnb):
        why = "an adapter is merged into full-precision weights" if has_adapter else "only 4 bits by bnb are supported"
        c.leave(why, *settings)
        c.write("ppo.load_in_4bit", False, bits)
    else:
        c.carry("ppo.load_in_4bit", *settings, value=c[bits] is not None)


def renamed(value: Any, names: Mapping[Any, Any]) -> Any:
    """Return this project's name of a value; a value without one is unchanged."""
    return names.get(value, value) if value is None or isinstance(value, str) else value


def names_of(value: Any) -> list[str]:
    """Return a list of names from a comma-separated text or a list."""
    parts = value.split(",") if isinstance(value, str) else value or []
    parts = parts if isinstance(parts, list | tuple | set) else [parts]
    return [str(part).strip() for part in parts if str(part).strip()]


def trained_rows(c: Conversion, num_prompts: int | None) -> int | None:
    """Return how many prompts PPO trains on: those of the table that are not held out for evaluation, else
    `num_prompts`. None: the number is not known.
    """
    if "prompts_path" not in c.tables:
        return num_prompts
    keys = [json.dumps([row["prompt"], row.get("tools")], default=str) for row in c.tables["prompts_path"]]
    if "evaluation_prompts_path" in c.tables or len(set(keys)) < 2:
        return len(keys)
    settings = PromptsConfig()
    seed = c.globals.get("seed", settings.seed)
    trained, _ = hold_out(keys, settings.held_out_share, settings.max_held_out, seed, "held_out", name="prompts")
    c.remarks.append(
        f"Of {len(keys)} prompts {len(trained)} train, and epochs count these; the others are held out for evaluation "
        "(prompts.held_out_share)."
    )
    return len(trained)


def leave_epochs(c: Conversion, fix: str, *settings: str) -> str:
    """List the passes over the prompts as not carried over, and return the reason."""
    why = f"{settings[0]} counts passes over the prompts; give the number of prompts (--prompts){fix}"
    c.leave(why, *settings)
    if settings[0] not in c.given:
        c.remarks.append(f"The default of {settings[0]} is not carried over: {why}.")
    return why


def epochs(c: Conversion, setting: str = "num_train_epochs") -> float:
    """Return the number of passes over the data."""
    return float(c.checked(setting, Annotated[float, Field(gt=0)]))


def batches(rows: int, size: int, passes: float, *, keeps_rest: bool) -> int:
    """Return the number of batches in `passes` passes over `rows` rows.

    The incomplete last batch of a pass counts only with `keeps_rest`.
    """
    per_pass = math.ceil(rows / size) if keeps_rest else rows // size
    return math.ceil(passes * per_pass)
