"""Conversion code that LLaMA-Factory and ms-swift share: transformers' TrainingArguments and the length of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion

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
PROCESSES = (
    "Batch sizes are per process: if you use fewer processes than the source did, raise "
    "ppo.gradient_accumulation_steps by the same factor."
)


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


def carry_warmup(c: Conversion, iterations: int | None, target: str = "ppo.warmup_ratio") -> None:
    """Carry over the warm-up as a share of the iterations. `iterations` is None if the number is not known."""
    steps = c.checked("warmup_steps", Annotated[float, Field(ge=0)] | None) or 0.0
    if c["lr_scheduler_type"] == "constant":  # transformers' `constant` learning rate schedule ignores warm-up settings
        return
    if steps < 1:
        first = ("warmup_steps", "warmup_ratio") if steps else ("warmup_ratio", "warmup_steps")
        c.carry(target, *first, value=c[first[0]] or 0.0, otherwise=0.0)
    elif iterations is None:
        c.leave("the number of steps is not known: give --prompts", "warmup_steps")
    else:
        # Subtract half a step: warmup_ratio x iterations is rounded up to whole iterations
        c.carry(target, "warmup_steps", value=(int(steps) - 0.5) / iterations)


def epochs(c: Conversion) -> float:
    """Return the number of passes over the data."""
    return float(c.checked("num_train_epochs", Annotated[float, Field(gt=0)]))


def batches(rows: int, size: int, passes: float, *, keeps_rest: bool) -> int:
    """Return the number of batches in `passes` passes over `rows` rows.

    The incomplete last batch of a pass counts only with `keeps_rest`.
    """
    per_pass = math.ceil(rows / size) if keeps_rest else rows // size
    return math.ceil(passes * per_pass)
