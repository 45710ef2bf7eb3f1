"""DeepSpeed-Chat's step 3: its command line, and the constants of its trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat import deepspeed_options as table
from ppo_rlhf.compat.command_line import CommandLine, read_command_line
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.ledger import Ledger, carry_prompts, names
from ppo_rlhf.core.errors import ConfigError

SOURCE = "DeepSpeed-Chat's step 3"


def from_deepspeed_chat(argv: str | Sequence[str], *, num_prompts: int | None = None) -> Conversion:
    """Convert a command line of DeepSpeed-Chat's step 3 (training/step3_rlhf_finetuning/main.py).

    Args:
        argv: The arguments as a list, or the command or the shell script that holds it as text; `deepspeed … main.py`
            before the arguments is read as the launcher's.
        num_prompts: Prompts of one epoch (of the share that `--data_split` gives step 3). With it `--num_train_epochs`
            and `--num_warmup_steps` can be worked out.

    Raises:
        ConfigError: An option lacks its value, or has one of the wrong kind.
    """
    ledger = _open(read_command_line(argv, table.KINDS))
    for name, (value, why) in table.CONSTANTS.items():
        ledger.fix(f"ppo.{name}", value, why)
    for setting, name in table.SAME.items():
        ledger.carry(f"ppo.{name}", setting)
    _models(ledger)
    carry_prompts(ledger, "data_path")
    rollout, step = _batches(ledger)
    _length(ledger, num_prompts, rollout, step)
    _rates(ledger)
    _weight_decay(ledger)
    _lora(ledger)
    _precision_and_memory(ledger)
    ledger.leave_all(table.REASONS)
    return ledger.close(table.OPTIONS)


def _open(line: CommandLine) -> Ledger:
    settings: dict[str, Any] = {}
    written: dict[str, str] = {}
    unread: dict[str, str] = {}
    for name, value in line.settings.items():
        current = table.OLDER_NAMES.get(name, name)
        if current != name and current in line.settings:
            raise ConfigError(f"--{name} is an older name of --{current}: give one of them.")
        if isinstance(value, str) and "$" in value:
            unread[name] = f"{value} is a shell variable without a value in the text"
            continue
        settings[current] = value[0] if isinstance(value, list) and len(value) == 1 else value
        if current != name:
            written[current] = name
    for word in line.stray:
        unread[word] = f"{'a shell variable without a value in the text' if '$' in word else 'it belongs to no option'}"
    for name in line.launcher:
        unread[f"launcher --{name}" if name in line.settings else name] = table.LAUNCHER
    return Ledger(SOURCE, settings, table.DEFAULTS, written=written, unread=unread)


def _models(ledger: Ledger) -> None:
    for setting, name in (
        ("actor_model_name_or_path", "sft_model_path"),
        ("critic_model_name_or_path", "reward_model_path"),
    ):
        if ledger.given(setting):
            ledger.carry(name, setting)
        else:
            ledger.remark(f"There is no --{setting} with a value: set {name}.")
    ledger.remark(
        "Sizes are those of one device: with fewer processes than DeepSpeed-Chat had devices, raise "
        "ppo.gradient_accumulation_steps by the same factor."
    )
    ledger.remark(
        "DeepSpeed-Chat generates as the model's generation configuration says, for most models greedily; here "
        "responses are sampled, at temperature 1."
    )
    ledger.remark(
        "DeepSpeed-Chat's reward models are checkpoints of its own (v_head in pytorch_model.bin); reward_model_path "
        "takes a sequence-classification model with one label, in safetensors."
    )
    if ledger.given("seed"):
        ledger.carry("seed", "seed")


def _batches(ledger: Ledger) -> tuple[int, int]:
    """Carry the sizes; return the responses of one iteration and those of one optimiser step, on one device.

    The trainer generates `generation_batches` times, cuts each generated batch into training batches, and lets
    DeepSpeed step after every `gradient_accumulation_steps` of them, across iterations if they do not divide one.
    """
    sizes = names("per_device_training_batch_size per_device_generation_batch_size generation_batches")
    training, generation, batches = map(ledger.count, sizes)
    accumulation = ledger.count("gradient_accumulation_steps")
    micro = min(training, generation)
    generated, step = generation * batches, micro * accumulation
    rollout = math.lcm(generated, step)
    ledger.derive("ppo.per_device_train_batch_size", micro, *sizes[:2] if micro < training else sizes[:1])
    ledger.derive("ppo.gradient_accumulation_steps", rollout // micro, *sizes, "gradient_accumulation_steps")
    ledger.derive("ppo.num_mini_batches", rollout // step, *sizes, "gradient_accumulation_steps")
    ledger.derive("ppo.local_rollout_forward_batch_size", generation, sizes[1])
    if rollout != generated:
        same = rollout == step and ledger.count("ppo_epochs") == 1 and generation % micro == 0
        ledger.remark(
            f"DeepSpeed accumulates gradients over batches of {generated} responses until it has {step} for a step; "
            f"here an iteration generates {rollout} responses "
            + ("before its one step, which is the same." if same else "and its steps end with it.")
        )
    return rollout, step


def _length(ledger: Ledger, num_prompts: int | None, rollout: int, step: int) -> None:
    """Carry the length of training and the warm-up, which is counted in optimiser steps there."""
    constant = ledger.value("lr_scheduler_type") == "constant"
    if constant:
        ledger.leave("num_warmup_steps", "transformers' constant schedule has no warm-up")
    if num_prompts is None:
        ledger.leave(
            "num_train_epochs", "the number of prompts is not known: ppo.total_episodes is this times that (--prompts)"
        )
        ledger.leave(
            "num_warmup_steps",
            "the number of updates is not known: ppo.warmup_ratio is this as a share of it (--prompts)",
        )
        epochs, updates = ledger.value("num_train_epochs"), ledger.value("num_warmup_steps")
        ledger.remark(
            f"DeepSpeed-Chat trains for num_train_epochs={epochs} times the number of prompts"
            + ("" if constant else f", and warms up over {updates} updates")
            + ": give that number (--prompts), or set ppo.total_episodes and ppo.warmup_ratio."
        )
        return
    episodes = ledger.count("num_train_epochs") * num_prompts
    ledger.derive("ppo.total_episodes", episodes, "num_train_epochs")
    if not constant:
        updates = math.ceil(episodes / rollout) * (rollout // step) * ledger.count("ppo_epochs")
        warm_up = ledger.checked("num_warmup_steps", Annotated[int, Field(ge=0)])
        ledger.derive("ppo.warmup_ratio", warm_up / updates, "num_warmup_steps")


def _rates(ledger: Ledger) -> None:
    for model, name in (("actor", "learning_rate"), ("critic", "value_learning_rate")):
        plain, adapter = f"{model}_learning_rate", f"{model}_lora_learning_rate"
        if ledger.checked(f"{model}_lora_dim", Annotated[int, Field(ge=0)]) > 0:
            ledger.carry(f"ppo.{name}", adapter)
            ledger.leave(plain, f"with {model}_lora_dim above 0 only the adapter trains, at {adapter}")
        else:
            ledger.carry(f"ppo.{name}", plain)
            ledger.leave(adapter, f"{model}_lora_dim=0: the trainer does not read it")


def _weight_decay(ledger: Ledger) -> None:
    actor, critic = "actor_weight_decay", "critic_weight_decay"
    if ledger.checked(actor, float) == ledger.checked(critic, float):
        ledger.derive("ppo.weight_decay", ledger.value(actor), actor, critic)
        return
    ledger.carry("ppo.weight_decay", actor)
    ledger.leave(critic, f"there is one ppo.weight_decay for both models, and {actor} is another")
    if not ledger.given(critic):
        ledger.remark(f"The critic's weight decay is 0 in the source; here it is the actor's, {ledger.value(actor)}.")


def _lora(ledger: Ledger) -> None:
    actor, critic = "actor_lora_dim", "critic_lora_dim"
    size, critic_size = (ledger.checked(name, Annotated[int, Field(ge=0)]) for name in (actor, critic))
    if size == 0:
        ledger.derive("ppo.use_peft", False, actor)
        ledger.leave("only_optimize_lora", "actor_lora_dim=0: the trainer does not read it")
        if critic_size:
            ledger.leave(critic, "LoRA is on both models or on none, and actor_lora_dim=0")
        else:
            ledger.derive("ppo.use_peft", False, critic)
        return
    ledger.derive("ppo.use_peft", True, actor, "only_optimize_lora")
    ledger.derive("ppo.lora_r", size, actor)
    ledger.fix("ppo.lora_alpha", 1, "its LoRA is scaled by 1 / dim")
    if critic_size == size:
        ledger.derive("ppo.lora_r", size, actor, critic)
    else:
        ledger.leave(critic, "LoRA has one rank, ppo.lora_r, for both models")
        if not ledger.given(critic):
            ledger.remark(
                "The critic trains whole in the source (critic_lora_dim=0); here it has LoRA as the actor has."
            )
    if not ledger.given("only_optimize_lora"):
        ledger.remark(
            "Without --only_optimize_lora the source also trains biases, norms and embeddings; here LoRA alone trains."
        )


def _precision_and_memory(ledger: Ledger) -> None:
    ledger.carry("ppo.dtype", "dtype", lambda dtype: table.PRECISION.get(dtype, dtype))
    checkpointing = ("actor_gradient_checkpointing", "critic_gradient_checkpointing")
    ledger.derive("ppo.gradient_checkpointing", any(map(ledger.given, checkpointing)), *checkpointing)
    if ledger.given("align_overflow"):
        ledger.derive("ppo.align_overflow", True, "align_overflow")
    if ledger.given("enable_ema"):
        # averaged after every training batch there, after every optimiser step here
        decay = round(table.EMA_DECAY ** ledger.count("gradient_accumulation_steps"), 6)
        ledger.derive("ppo.ema_decay", decay, "enable_ema", "gradient_accumulation_steps")
