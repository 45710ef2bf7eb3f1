"""DeepSpeed-Chat's step 3: the options of its main.py, and the constants of its trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_rlhf.compat.command_line import read_options
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import Ledger, Left, Rule, convert, left
from ppo_rlhf.core.errors import ConfigError

SOURCE = "DeepSpeed-Chat's step 3"
# Of main.py; only those that are read below.
DEFAULTS: dict[str, Any] = {
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 16,
    "generation_batches": 1,
    "ppo_epochs": 1,
    "max_answer_seq_len": 256,
    "actor_learning_rate": 9.65e-6,
    "critic_learning_rate": 5e-6,
    "actor_weight_decay": 0.0,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 1,
    "num_warmup_steps": 100,
    "dtype": "fp16",
    "actor_lora_dim": 0,
    "critic_lora_dim": 0,
    "actor_lora_learning_rate": 5e-4,
    "critic_lora_learning_rate": 5e-4,
}
ALWAYS: dict[str, tuple[Any, str]] = {  # of ppo_trainer.py, ds_utils.py and rlhf_engine.py
    "ppo.kl_coef": (0.1, "the trainer's kl_ctl"),
    "ppo.reward_clip": (5.0, "the trainer's clip_reward_value"),
    "ppo.cliprange": (0.2, "the trainer's cliprange"),
    "ppo.cliprange_value": (0.2, "the trainer's cliprange_value"),
    "ppo.gamma": (1.0, "the trainer's gamma"),
    "ppo.lam": (0.95, "the trainer's lam"),
    "ppo.kl_controller": ("fixed", "always so in the trainer"),
    "ppo.kl_estimator": ("k1", "always so in the trainer"),
    "ppo.kl_in": ("reward", "always so in the trainer"),
    "ppo.whiten_rewards": (False, "always so in the trainer"),
    "ppo.whiten_advantages": (False, "always so in the trainer"),
    "ppo.missing_eos_penalty": (None, "the trainer has none"),
    "ppo.vf_coef": (1.0, "the critic has a loss of its own"),
    "ppo.max_grad_norm": (1.0, "gradient_clipping of its DeepSpeed configuration"),
    "ppo.adam_beta1": (0.9, "betas of its engine"),
    "ppo.adam_beta2": (0.95, "betas of its engine"),
    "ppo.value_model": ("reward_init", "critic and reward model are loaded from one place"),
    "ppo.stop_token": ("eos", "as generate does"),
    "ppo.temperature": (1.0, "log-probabilities are not tempered"),
    "ppo.overlong_prompts": ("drop", "it leaves overlong prompts out"),
}
REMARKS = (
    "DeepSpeed-Chat generates as the model's generation configuration says, for most models greedily; here responses "
    "are sampled, at temperature 1.",
    "DeepSpeed-Chat's reward models are checkpoints of its own (v_head in pytorch_model.bin); reward_model_path takes "
    "a sequence-classification model with one label, in safetensors.",
)
EMA_DECAY = 0.992
SIZES = ("per_device_training_batch_size", "per_device_generation_batch_size", "generation_batches")
OLDER_NAMES = {
    "per_device_train_batch_size": "per_device_generation_batch_size",
    "per_device_mini_train_batch_size": "per_device_training_batch_size",
    "generation_batch_numbers": "generation_batches",
}
SWITCHES = ("enable_ema", "actor_gradient_checkpointing")


def _sizes(ledger: Ledger) -> tuple[int, int, int, int]:
    """Return responses on one device: generated before an update, of a backward pass, of a step, of our iteration.

    The trainer generates `generation_batches` times and cuts each generated batch into training batches. DeepSpeed
    steps after every `gradient_accumulation_steps` of them, across iterations if they do not divide one.
    """
    generation = ledger.count("per_device_generation_batch_size")
    micro = min(ledger.count("per_device_training_batch_size"), generation)
    generated = generation * ledger.count("generation_batches")
    step = micro * ledger.count("gradient_accumulation_steps")
    return generated, micro, step, math.lcm(generated, step)


def batches(ledger: Ledger) -> None:
    """Carry the batch sizes over."""
    generated, micro, step, rollout = _sizes(ledger)
    generation = ledger.count("per_device_generation_batch_size")
    read = SIZES[: 2 if micro < ledger.count(SIZES[0]) else 1]
    ledger.derive("ppo.per_device_train_batch_size", micro, *read)
    ledger.derive("ppo.gradient_accumulation_steps", rollout // micro, *SIZES, "gradient_accumulation_steps")
    ledger.derive("ppo.num_mini_batches", rollout // step, *SIZES, "gradient_accumulation_steps")
    ledger.derive("ppo.local_rollout_forward_batch_size", generation, SIZES[1])
    if rollout != generated:
        same_step = rollout == step and ledger.count("ppo_epochs") == 1 and generation % micro == 0
        ledger.remarks.append(
            f"DeepSpeed accumulates gradients over batches of {generated} responses until it has {step} for a step; "
            f"here an iteration generates {rollout} responses "
            + ("before its one step, which is the same." if same_step else "and its steps end with it.")
        )


def length(ledger: Ledger) -> None:
    """Carry over the length of training and the warm-up, a number of optimiser steps, if the prompts are counted."""
    constant = ledger.value("lr_scheduler_type") == "constant"
    if constant:
        ledger.leave("transformers' constant schedule has no warm-up", "num_warmup_steps")
    if ledger.num_prompts is None:
        rule = "the number of prompts is not known: give it (--prompts), or set ppo.total_episodes and ppo.warmup_ratio"
        ledger.leave(rule, "num_train_epochs", "num_warmup_steps")
        ledger.remarks.append(f"{rule[:1].upper()}{rule[1:]}. DeepSpeed-Chat counts epochs over the prompts.")
        return
    episodes = ledger.count("num_train_epochs") * ledger.num_prompts
    ledger.derive("ppo.total_episodes", episodes, "num_train_epochs")
    if not constant:
        _, _, step, rollout = _sizes(ledger)
        updates = math.ceil(episodes / rollout) * (rollout // step) * ledger.count("ppo_epochs")
        ledger.derive("ppo.warmup_ratio", ledger.count("num_warmup_steps", 0) / updates, "num_warmup_steps")


def learning_rates(ledger: Ledger) -> None:
    """Carry the learning rates over. LoRA is on both models here or on none, and its rates count if it is there."""
    adapters = ledger.count("actor_lora_dim", 0) > 0
    for model, target in (("actor", "ppo.learning_rate"), ("critic", "ppo.value_learning_rate")):
        plain, adapter = f"{model}_learning_rate", f"{model}_lora_learning_rate"
        ledger.carry(target, adapter if adapters else plain)
        ledger.leave("with actor_lora_dim above 0 only adapters train here, at their own rate", plain)
        ledger.leave("actor_lora_dim=0: there are no adapters", adapter)


def lora(ledger: Ledger) -> None:
    """Carry over the actor's LoRA, which both models have here. Its scale is 1 / rank."""
    rank, critic_rank = ledger.count("actor_lora_dim", 0), ledger.count("critic_lora_dim", 0)
    ledger.derive("ppo.use_peft", rank > 0, "actor_lora_dim")
    if rank > 0:
        ledger.derive("ppo.lora_r", rank, "actor_lora_dim")
        ledger.fix("ppo.lora_alpha", 1, "its LoRA is scaled by 1 / dim")
    ledger.leave("LoRA is on both models, with the actor's rank", "critic_lora_dim")
    if rank != critic_rank:
        ledger.remarks.append(f"The critic has LoRA of rank {critic_rank} in the source; here it has the actor's.")
    if rank > 0 and not ledger.flag("only_optimize_lora"):
        ledger.remarks.append(
            "Without --only_optimize_lora the source also trains biases, norms and embeddings; here LoRA alone trains."
        )


def averaging(ledger: Ledger) -> None:
    """Derive the decay of the average: DeepSpeed-Chat averages after every training batch, here every step does."""
    if ledger.flag("enable_ema"):
        decay = round(EMA_DECAY ** ledger.count("gradient_accumulation_steps"), 6)
        ledger.derive("ppo.ema_decay", decay, "enable_ema", "gradient_accumulation_steps")
    ledger.leave("false: there is no average", "enable_ema")


SETTINGS: dict[str, Rule] = {
    "ppo_epochs": "ppo.num_ppo_epochs",
    "max_answer_seq_len": "ppo.response_length",
    "actor_weight_decay": "ppo.weight_decay",
    "lr_scheduler_type": "ppo.lr_scheduler_type",
    "seed": "seed",
    "actor_model_name_or_path": "sft_model_path",
    "critic_model_name_or_path": "reward_model_path",
    "data_path": "prompts_path",
    "dtype": ("ppo.dtype", {"fp16": "float16", "bf16": "bfloat16"}),
    "actor_gradient_checkpointing": "ppo.gradient_checkpointing",
    **dict.fromkeys((*SIZES, "gradient_accumulation_steps"), batches),
    **dict.fromkeys(("num_train_epochs", "num_warmup_steps"), length),
    **dict.fromkeys(("actor_learning_rate", "critic_learning_rate"), learning_rates),
    **dict.fromkeys(("actor_lora_learning_rate", "critic_lora_learning_rate"), learning_rates),
    **dict.fromkeys(("actor_lora_dim", "critic_lora_dim"), lora),
    "enable_ema": averaging,
    **left("one weight decay is for both models: the actor's", "critic_weight_decay"),
    **left("gradient checkpointing is for both models: as the actor's", "critic_gradient_checkpointing"),
    **left("LoRA alone trains, if there is any", "only_optimize_lora"),
    **left("LoRA is put on the layers of ppo.lora_target_modules", "*_lora_module_name"),
    **left("always so: if the gradient of one model overflows, both skip the step", "align_overflow"),
    **left("prompts come from one file, prompts_path", "data_split data_output_path preprocessing_num_workers"),
    **left("prompts that leave no room for the response in the model's context are dropped", "max_prompt_seq_len"),
    **left("no unsupervised data is mixed in", "unsup*"),
    **left("positions come from lengths, and no model needs it", "num_padding_at_beginning"),
    **left("outputs are catalog entries, conf/base/catalog_ppo.yml", "output_dir"),
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
    **left("losses are always float32 or wider", "compute_fp32_loss"),
    **left("tracking is configured in conf/base/mlflow.yml", "enable_tensorboard tensorboard_path"),
    **left("the vocabulary of a model is never changed", "add_eot_token"),
    **left("samples are logged every ppo.sample_interval iterations", "print_answers*"),
    **left("the length of training is ppo.total_episodes", "enable_test_mode test_stop_step"),
}


def from_deepspeed_chat(
    given: str | Sequence[str] | Mapping[str, Any], *, num_prompts: int | None = None
) -> Conversion:
    """Convert the options of DeepSpeed-Chat's step 3 (training/step3_rlhf_finetuning/main.py).

    Args:
        given: The arguments as a list, the command as a text, or a mapping of option names to values. In a list and in
            a text, `deepspeed … main.py` may come before the options. A text may go on after a backslash at the end
            of a line, but has no shell variables and no second command.
        num_prompts: Prompts of one epoch (of the share that `--data_split` gives step 3). With it `--num_train_epochs`
            and `--num_warmup_steps` can be worked out.

    Raises:
        ConfigError: The text is not one command, or an option lacks its value or has one of the wrong kind.
    """
    if isinstance(given, Mapping):
        settings = {str(name): value for name, value in given.items()}
    else:
        read = [name for name, rule in SETTINGS.items() if not isinstance(rule, Left)]
        settings = read_options(given, [*read, *OLDER_NAMES], switches=SWITCHES, lists=["data_path"])
    for older, current in OLDER_NAMES.items():
        if older in settings and current in settings:
            raise ConfigError(f"--{older} is an older name of --{current}: give one of them.")
        if older in settings:
            settings[current] = settings.pop(older)
    return convert(
        SOURCE, settings, SETTINGS, defaults=DEFAULTS, always=ALWAYS, remarks=REMARKS, num_prompts=num_prompts
    )
