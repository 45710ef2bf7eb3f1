"""Conversion code that several libraries share: TrainingArguments, LoRA, adapters, the length of a run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.models.directories import is_local

IF_GIVEN = {
    "optim": "ppo.optim",
    "full_determinism": "ppo.deterministic",
    "torch_compile": "ppo.compile",
    "save_steps": "ppo.save_interval",
}
"""Settings that are converted only if they are given. For settings that are not given, the values of conf/base
apply."""
VALUES: dict[str, dict[Any, Any]] = {
    "optim": {"adamw_torch": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit"},
    "use_cpu": {True: "cpu", False: "auto"},
}
"""Values of settings, each with this project's name."""
LEFT = {
    "*dropout": "dropout is always off",
    "galore_* use_galore *apollo* *badam* lisa_* optim_* optimizer": "the optimiser is AdamW; ppo.optim=adamw_8bit "
    "stores its moments in 8 bits",
    "use_*ora lora_* *lora_* *lora*ratio init_weights target_* modules_to_save additional_target freeze_* adapter_* "
    "trainable_parameters* pissa_* oft_* boft_* vera_* fourier_* reft_* llamapro_* tuner_backend": "either plain LoRA "
    "adapters on linear layers train (ppo.use_peft), or all weights",
    "lr_scheduler_kwargs": "schedules use transformers' default arguments",
    "save_* *best_model* safe_serialization max_shard_size": "complete checkpoints are written every "
    "ppo.save_interval iterations; the newest and the best are kept",
    "resume_* ignore_data_skip restore_*": "checkpoints of another library cannot be resumed; resume=latest is for "
    "runs of this project",
    "per_device_eval_batch_size": "set evaluation.batch_size",
    "do_* predict_* *eval_* *eval evaluation_strategy eval_strategy val_size val_dataset* split_*": "a share of the "
    "prompts is held out, or evaluation_prompts_path names others; ppo.eval_interval sets how often the policy is "
    "evaluated on them",
    "output_dir overwrite_output_dir logging_* log_* run_name project* trackio_* swanlab_* hub_* push_to_hub* "
    "plot_loss add_version": "outputs, logs and tracking are set in conf/base: catalog_ppo.yml and mlflow.yml",
    "deepspeed* fsdp* ddp_* *_rank *_world_size accelerator_* ray_* sequence_parallel_size": "the launcher and "
    "accelerate's configuration file set how processes share work",
    "dataloader_* data_seed preprocessing_* dataset_* overwrite_cache streaming *packing* padding_* remove_unused_* "
    "group_by_length *shuffl* lazy_tokenize": "prompts are tokenised once, before training, and shuffled in each pass",
    "gradient_checkpointing_* *liger* torch_compile_* flash_attn attn_impl* tf32 use_unsloth* use_cache": "this "
    "project chooses kernels itself: ppo.compile and ppo.rollout_engine",
    "image_* video_* audio_*": "only text is supported",
    "num_beams length_penalty repetition_penalty do_sample min_p": "PPO needs responses that are sampled from the "
    "policy; ppo.temperature, ppo.top_k and ppo.top_p set the sampling",
    "*_token use_hf": "models come from the Hugging Face hub, whose token is in HF_TOKEN",
}
"""Settings that are not converted, each with the reason. `*` matches any text; the first matching pattern counts."""
ADAPTER = (
    "{} continues to train the given adapter, and its reference is the model without the adapter; here the adapter is "
    "merged into the model that both start from, and a new adapter is trained."
)
_BASE_NAMED = "the adapter's configuration names its base model"


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


def carry_warmup(
    c: Conversion,
    iterations: int | None,
    target: str = "ppo.warmup_ratio",
    *,
    number: str = "warmup_steps",
    share: str = "warmup_ratio",
) -> None:
    """Carry over the warm-up as a share of the iterations, whose number is None if it is not known.

    `number` and `share` are the settings with the number of steps, which may also be a share, and with the share.
    """
    steps = c.checked(number, float | None) or 0.0
    if c["lr_scheduler_type"] == "constant":  # transformers' `constant` learning rate schedule ignores warm-up settings
        return
    if 0 < steps < 1:
        c.carry(target, number, share, value=steps)
    elif steps < 1:
        c.carry(target, share, number, value=c[share] or 0.0, otherwise=0.0)
    elif iterations is None:
        c.leave(f"the number of steps is not known (for PPO: --prompts); set {target}", number)
    else:
        # Subtract half a step: warmup_ratio x iterations is rounded up to whole iterations
        c.carry(target, number, value=(int(steps) - 0.5) / iterations)


def carry_report_to(c: Conversion) -> None:
    """Carry over the names of integrations, a text or a list, if they are given."""
    if names_of(c["report_to"]):
        c.carry("ppo.report_to", "report_to", value=",".join(names_of(c["report_to"])))


def half_of(c: Conversion) -> str | None:
    """Return the precision of 16 bits that bf16, pure_bf16 or fp16 sets; None: none of them does."""
    if c.flag("bf16") or c.flag("pure_bf16"):
        return "bfloat16"
    return "float16" if c.flag("fp16") else None


def carry_thinking(c: Conversion) -> None:
    """Carry over the chat template's argument enable_thinking, if it is given."""
    if c["enable_thinking"] is not None:
        c.carry("chat_template_kwargs", "enable_thinking", value={"enable_thinking": c.flag("enable_thinking")})


def carry_lora(c: Conversion, rank: str, alpha: str, modules: str, default_alpha: int) -> None:
    """Carry over LoRA's settings, which have the given names, if ppo.use_peft is on. An alpha of 0 is not given."""
    if not c.parameters["ppo"]["use_peft"]:
        return
    c.carry("ppo.lora_r", rank)
    c.carry("ppo.lora_alpha", alpha, value=c[alpha] or default_alpha, otherwise=default_alpha)
    value = c[modules]
    names = ",".join(names_of(value)) if isinstance(value, str | list | tuple | set) else value
    value = "all-linear" if names in (None, "", "all") else names
    c.carry("ppo.lora_target_modules", modules, value=value, otherwise="all-linear")


def carry_bits(c: Conversion, bits: str, method: str, *, has_adapter: bool) -> None:
    """Carry over the quantisation to 4 bits by bitsandbytes. `method` is the setting that names another library."""
    c.carry("ppo.load_in_4bit", bits, method, value=c[bits] is not None)
    if c[bits] is not None and (has_adapter or str(c[bits]) != "4" or c[method] not in (None, "bnb", "bitsandbytes")):
        why = "an adapter is merged into full-precision weights" if has_adapter else "only 4 bits by bnb are supported"
        c.leave(why, bits, method)
        c.write("ppo.load_in_4bit", False, bits)


def names_of(value: Any) -> list[str]:
    """Return a list of names from a comma-separated text or a list."""
    parts = value.split(",") if isinstance(value, str) else value or []
    parts = parts if isinstance(parts, list | tuple | set) else [parts]
    return [str(part).strip() for part in parts if str(part).strip()]


def leave_epochs(c: Conversion, fix: str, *settings: str) -> None:
    """List the passes over the prompts as not carried over."""
    why = f"{settings[0]} counts passes over the prompts; give the number of prompts (--prompts){fix}"
    c.leave(why, *settings)
    if settings[0] not in c.given:
        c.remarks.append(f"The default of {settings[0]} is not carried over: {why}.")


def epochs(c: Conversion) -> float:
    """Return the number of passes over the data."""
    return float(c.checked("num_train_epochs", Annotated[float, Field(gt=0)]))
