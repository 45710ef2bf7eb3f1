"""DeepSpeed-Chat's step 3: the options of its main.py, and the constants of its trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import Carried, NotOfferedError, Parameters, Source, Table, by, convert, left, to
from ppo_rlhf.compat.trl_last import TRACKING
from ppo_rlhf.core.errors import ConfigError

PROGRAM = "main.py"
SOURCE = "DeepSpeed-Chat's step 3"
ALWAYS: dict[str, Any] = {  # of ppo_trainer.py, ds_utils.py and rlhf_engine.py
    "ppo.kl_coef": 0.1,
    "ppo.reward_clip": 5.0,
    "ppo.cliprange": 0.2,
    "ppo.cliprange_value": 0.2,
    "ppo.gamma": 1.0,
    "ppo.lam": 0.95,
    "ppo.kl_controller": "fixed",
    "ppo.kl_estimator": "k1",
    "ppo.kl_in": "reward",
    "ppo.whiten_rewards": False,
    "ppo.whiten_advantages": False,
    "ppo.missing_eos_penalty": None,
    "ppo.vf_coef": 1.0,  # the critic has a loss of its own
    "ppo.max_grad_norm": 1.0,
    "ppo.adam_beta1": 0.9,
    "ppo.adam_beta2": 0.95,
    "ppo.value_model": "reward_init",  # critic and reward model are loaded from one place
    "ppo.stop_token": "eos",  # as generate does
    "ppo.temperature": 1.0,  # log-probabilities are not tempered
    "ppo.overlong_prompts": "drop",
}
REMARKS = (
    "DeepSpeed-Chat generates as the model's generation configuration says, for most models greedily; here responses "
    "are sampled, at temperature 1.",
    "DeepSpeed-Chat's reward models are checkpoints of its own (v_head in pytorch_model.bin); reward_model_path takes "
    "a sequence-classification model with one label, in safetensors.",
)
EMA_DECAY = 0.992
SWITCHES = ("enable_ema", "actor_gradient_checkpointing")


def _sizes(s: Source) -> tuple[int, int, int, int]:
    """Return responses on one device: generated before an update, of a backward pass, of a step, of our iteration.

    The trainer generates `generation_batches` times and cuts each generated batch into training batches. DeepSpeed
    steps after every `gradient_accumulation_steps` of them, across iterations if they do not divide one.
    """
    generation = s.count("per_device_generation_batch_size")
    micro = min(s.count("per_device_training_batch_size"), generation)
    generated = generation * s.count("generation_batches")
    step = micro * s.count("gradient_accumulation_steps")
    return generated, micro, step, math.lcm(generated, step)


def batches(s: Source) -> Parameters:
    """Carry the batch sizes over."""
    generated, micro, step, rollout = _sizes(s)
    if rollout != generated:
        s.remarks.append(
            f"DeepSpeed accumulates gradients over batches of {generated} responses until it has {step} for a step; "
            f"here an iteration generates {rollout} responses, and its steps end with it."
        )
    return {
        "ppo.per_device_train_batch_size": micro,
        "ppo.gradient_accumulation_steps": rollout // micro,
        "ppo.num_mini_batches": rollout // step,
        "ppo.local_rollout_forward_batch_size": s.count("per_device_generation_batch_size"),
    }


def length(s: Source) -> Parameters:
    """Derive the number of responses from epochs over the prompts."""
    return {"ppo.total_episodes": _episodes(s)}


def _episodes(s: Source) -> int:
    epochs = s.count("num_train_epochs")
    if s.num_prompts is None:
        raise NotOfferedError(
            "it counts passes over the prompts: give their number (--prompts), or set ppo.total_episodes and "
            "ppo.warmup_ratio"
        )
    return epochs * s.num_prompts


def warm_up(s: Source) -> Parameters:
    """Derive the share of the updates from a number of optimiser steps."""
    if s["lr_scheduler_type"] == "constant":  # it has no warm-up in transformers
        return {}
    warm_up_steps = s.count("num_warmup_steps", 0)
    _, _, step, rollout = _sizes(s)
    updates = math.ceil(_episodes(s) / rollout) * (rollout // step) * s.count("ppo_epochs")
    return {"ppo.warmup_ratio": warm_up_steps / updates}


def _learning_rate(s: Source, model: str) -> Any:
    """Return a model's rate. LoRA is on both models here or on none, and its rates count if it is there."""
    return s[f"{model}_lora_learning_rate" if s.count("actor_lora_dim", 0) else f"{model}_learning_rate"]


def actor_rate(s: Source) -> Parameters:
    """Carry the policy's learning rate over."""
    return {"ppo.learning_rate": _learning_rate(s, "actor")}


def critic_rate(s: Source) -> Parameters:
    """Carry the critic's learning rate over."""
    return {"ppo.value_learning_rate": _learning_rate(s, "critic")}


def lora(s: Source) -> Parameters:
    """Carry over the actor's LoRA, which both models have here. Its scale is 1 / rank."""
    rank = s.count("actor_lora_dim", 0)
    if rank == 0:
        return {"ppo.use_peft": False}
    s.remarks.append(
        "LoRA is on both models here, with the actor's rank, and alone trains: DeepSpeed-Chat without "
        "--only_optimize_lora also trains biases, norms and embeddings."
    )
    return {"ppo.use_peft": True, "ppo.lora_r": rank, "ppo.lora_alpha": 1}


def averaging(s: Source) -> Parameters:
    """Derive the decay of the average: DeepSpeed-Chat averages after every training batch, here every step does."""
    if not s.flag("enable_ema"):
        return {}
    return {"ppo.ema_decay": round(EMA_DECAY ** s.count("gradient_accumulation_steps"), 6)}


SETTINGS: Table = {  # with the defaults of main.py
    "ppo_epochs": to("ppo.num_ppo_epochs", 1),
    "max_answer_seq_len": to("ppo.response_length", 256),
    "actor_weight_decay": to("ppo.weight_decay", 0.0),
    "lr_scheduler_type": to("ppo.lr_scheduler_type", "cosine"),
    "seed": to("seed"),
    "actor_model_name_or_path": to("sft_model_path"),
    "critic_model_name_or_path": to("reward_model_path"),
    "data_path": to("prompts_path"),
    "dtype": to("ppo.dtype", "fp16", {"fp16": "float16", "bf16": "bfloat16"}),
    "actor_gradient_checkpointing": to("ppo.gradient_checkpointing"),
    **by(
        batches,
        per_device_training_batch_size=16,
        per_device_generation_batch_size=16,
        generation_batches=1,
        gradient_accumulation_steps=1,
    ),
    **by(length, num_train_epochs=1),
    **by(warm_up, num_warmup_steps=100),
    **by(actor_rate, actor_learning_rate=9.65e-6, actor_lora_learning_rate=5e-4),
    **by(critic_rate, critic_learning_rate=5e-6, critic_lora_learning_rate=5e-4),
    **by(lora, actor_lora_dim=0),
    **by(averaging, enable_ema=False),
    **left("both models have the actor's setting", "critic_weight_decay critic_gradient_checkpointing critic_lora_dim"),
    **left("it is an older name of per_device_generation_batch_size", "per_device_train_batch_size"),
    **left("it is an older name of per_device_training_batch_size", "per_device_mini_train_batch_size"),
    **left("it is an older name of generation_batches", "generation_batch_numbers"),
    **left("LoRA alone trains, if there is any", "only_optimize_lora"),
    **left("LoRA is put on the layers of ppo.lora_target_modules", "*_lora_module_name"),
    **left("always so here: losses in float32, and a step skipped for both models", "compute_fp32_loss align_overflow"),
    **left("prompts come from one file, prompts_path", "data_split data_output_path preprocessing_num_workers"),
    **left("prompts that leave no room for the response in the model's context are dropped", "max_prompt_seq_len"),
    **left("no unsupervised data is mixed in", "unsup*"),
    **left("positions come from lengths, and no model needs it", "num_padding_at_beginning"),
    **left(TRACKING, "output_dir enable_tensorboard tensorboard_path print_answers*"),
    **left("on a GPU set ppo.offload_reference_policy or ppo.offload_reward_model", "offload_*"),
    **left(
        "the launcher and accelerate's configuration say how devices share the work",
        "local_rank offload *_zero_stage deepspeed* deepscale* enable_mixed_precision_lora launcher.*",
    ),
    **left(
        "there is no hybrid engine: ppo.rollout_engine generates",
        "enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size tp_gather_*",
    ),
    **left("dropout is always off", "*_dropout"),
    **left("the vocabulary of a model is never changed", "add_eot_token"),
    **left("the length of training is ppo.total_episodes", "enable_test_mode test_stop_step"),
}


def from_deepspeed_chat(given: Sequence[str] | Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert the options of DeepSpeed-Chat's step 3 (training/step3_rlhf_finetuning/main.py).

    Args:
        given: The command's words (`deepspeed … main.py` may come before the options), or a mapping of option names to
            values.
        num_prompts: Prompts of one epoch (of the share that `--data_split` gives step 3). With it `--num_train_epochs`
            and `--num_warmup_steps` can be worked out.

    Raises:
        ConfigError: An option lacks its value or has one of the wrong kind.
    """
    settings = given if isinstance(given, Mapping) else options_of(given)
    for name, value in settings.items():
        if value is True and isinstance(SETTINGS.get(name), Carried) and name not in SWITCHES:
            raise ConfigError(f"--{name} needs a value.")
    return convert(Source(SOURCE, settings, SETTINGS, num_prompts), ALWAYS, REMARKS)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line: True without a value, a list with several.

    Those of a launcher, which stand before main.py, have the prefix `launcher.`.
    """
    program = next((place for place, word in enumerate(words) if word.rpartition("/")[2] == PROGRAM), -1)
    options: dict[str, Any] = {}
    for word in words[: max(program, 0)]:
        if word.startswith("-"):
            options[f"launcher.{word.lstrip('-').partition('=')[0]}"] = True
    name = None
    for word in words[program + 1 :]:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            options[name] = value if has_value else True
        elif name is None:
            raise ConfigError(f"{word!r} is neither a file nor an option of {PROGRAM}.")
        else:
            before = options[name]
            options[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return options
