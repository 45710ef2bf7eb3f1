"""TRL's last PPOConfig (`trl.experimental.ppo`, and trl 0.12 to 0.2x before it): TrainingArguments and PPO's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.ledger import Ledger, names
from ppo_rlhf.compat.trl_arguments import NOT_CARRIED
from ppo_rlhf.compat.trl_models import MODEL_SETTINGS, carry_model_settings, warn_of_processes

SOURCE = "TRL's PPOConfig"

# Of TRL 1.12; only what is read below.
DEFAULTS: dict[str, Any] = {
    "num_ppo_epochs": 4,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "learning_rate": 3e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "response_length": 53,
    "temperature": 0.7,
    "missing_eos_penalty": None,
    "stop_token": None,
    "stop_token_id": None,
    "bf16": None,
    "fp16": False,
    "gradient_checkpointing": True,
    "sft_model_path": "EleutherAI/pythia-160m",
    "reward_model_path": "EleutherAI/pythia-160m",
    "seed": 42,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
    "save_strategy": "steps",
}

_SAME_NAME = names(
    "num_ppo_epochs cliprange cliprange_value vf_coef gamma lam whiten_rewards kl_coef kl_estimator learning_rate "
    "lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon per_device_train_batch_size "
    "gradient_accumulation_steps num_mini_batches local_rollout_forward_batch_size response_length temperature"
)
_GLOBALS = ("seed", "sft_model_path", "reward_model_path")
_IF_GIVEN = {"full_determinism": "deterministic", "torch_compile": "compile"}

SETTINGS = frozenset(
    {*DEFAULTS, *_IF_GIVEN, *NOT_CARRIED}
    | set(
        names(
            "total_episodes max_grad_norm warmup_ratio save_steps save_total_limit use_cpu no_cuda "
            "activation_checkpointing optim"
        )
    )
)
# Names by which this configuration is told from the legacy one.
TELLING = frozenset(
    names(
        "num_ppo_epochs kl_coef kl_estimator total_episodes num_mini_batches response_length missing_eos_penalty "
        "local_rollout_forward_batch_size stop_token stop_token_id sft_model_path reward_model_path "
        "per_device_train_batch_size num_sample_generations num_train_epochs output_dir"
    )
)


def from_trl_last(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of `trl.experimental.ppo`; what is absent has the default of TRL 1.12.

    Args:
        settings: Fields of PPOConfig, and of ModelConfig and ScriptArguments, which TRL's scripts read from one file.
        num_prompts: Rows of the training data. With it `num_train_epochs` and `warmup_steps` can be worked out.
    """
    ledger = Ledger(SOURCE, settings, DEFAULTS)
    for name in _SAME_NAME:
        ledger.carry(f"ppo.{name}", name)
    for name in _GLOBALS:
        ledger.carry(name, name)
    for setting, name in _IF_GIVEN.items():
        if ledger.given(setting):
            ledger.derive(f"ppo.{name}", ledger.flag(setting), setting)
    iterations = _length(ledger, num_prompts)
    _warm_up(ledger, iterations)
    _stop(ledger)
    _precision(ledger)
    _device(ledger)
    _checkpointing(ledger)
    _optimiser(ledger)
    _saving(ledger)
    _gradient_norm(ledger)
    _constants(ledger)
    carry_model_settings(ledger)
    warn_of_processes(ledger)
    ledger.leave_all(NOT_CARRIED)
    return ledger.close([*SETTINGS, *MODEL_SETTINGS])


def _length(ledger: Ledger, num_prompts: int | None) -> int | None:
    """Carry the number of episodes; return the iterations that TRL makes of them on one process, if known."""
    if ledger.value("total_episodes") is not None:
        episodes: int | None = ledger.count("total_episodes")
        ledger.derive("ppo.total_episodes", episodes, "total_episodes")
        ledger.leave("num_train_epochs", "total_episodes is set: TRL does not read it")
    elif num_prompts is not None:
        epochs = ledger.checked("num_train_epochs", Annotated[float, Field(gt=0)])
        episodes = max(1, int(epochs * num_prompts))
        ledger.derive("ppo.total_episodes", episodes, "num_train_epochs")
    else:
        episodes = None
        epochs = ledger.value("num_train_epochs")
        ledger.leave(
            "num_train_epochs", "the number of prompts is not known: ppo.total_episodes is this times that (--prompts)"
        )
        ledger.remark(
            f"TRL trains for num_train_epochs={epochs} times the number of prompts, which is not in the configuration: "
            "give it (--prompts), or set ppo.total_episodes."
        )
    ledger.leave("total_episodes", "None: TRL works it out from num_train_epochs")
    sizes = ledger.count("per_device_train_batch_size"), ledger.count("gradient_accumulation_steps")
    _warn_of_single_step(ledger, sizes[1])
    return None if episodes is None else math.ceil(episodes / math.prod(sizes))


def _warn_of_single_step(ledger: Ledger, accumulation: int) -> None:
    if accumulation > 1 and ledger.count("num_mini_batches") > 1:
        ledger.remark(
            "With gradient_accumulation_steps above 1 TRL's trainer takes one optimiser step every "
            "gradient_accumulation_steps micro-batches, wherever minibatches end; here each of the num_mini_batches "
            "minibatches ends with a step, as the setting's name says."
        )


def _warm_up(ledger: Ledger, iterations: int | None) -> None:
    if ledger.value("lr_scheduler_type") == "constant":
        for setting in ("warmup_ratio", "warmup_steps"):
            ledger.leave(setting, "transformers' constant schedule has no warm-up")
        return
    steps = ledger.checked("warmup_steps", Annotated[float, Field(ge=0)] | None) or 0.0
    if ledger.value("warmup_ratio") is None:
        ledger.leave("warmup_ratio", "None: warmup_steps counts")
    elif steps == 0.0:
        ledger.carry("ppo.warmup_ratio", "warmup_ratio")
        ledger.leave("warmup_steps", "0: warmup_ratio counts")
        return
    else:
        ledger.leave("warmup_ratio", "warmup_steps is set: transformers does not read it")
    if steps < 1:
        ledger.derive("ppo.warmup_ratio", steps, "warmup_steps")
    elif iterations is None:
        ledger.leave("warmup_steps", "the number of iterations is not known: ppo.warmup_ratio is a share of them")
    else:
        ledger.derive("ppo.warmup_ratio", share_of(int(steps), iterations), "warmup_steps")


def share_of(steps: int, total: int) -> float:
    """Return a ratio of `total` that is `steps` again when it is rounded up: steps / total, or just below it."""
    ratio = steps / total
    return ratio if math.ceil(ratio * total) == steps else (steps - 0.5) / total


def _stop(ledger: Ledger) -> None:
    if ledger.value("stop_token_id") is not None:
        ledger.carry("ppo.stop_token_id", "stop_token_id")
        ledger.leave("stop_token", "stop_token_id replaces it")
    else:
        ledger.derive("ppo.stop_token", ledger.value("stop_token") or "none", "stop_token")
        ledger.leave("stop_token_id", "None: stop_token counts")
        if ledger.value("stop_token") is None:
            ledger.remark(
                "Without stop_token TRL's responses never stop (ppo.stop_token=none): each has response_length tokens. "
                "ppo.stop_token=eos lets them end."
            )
            if ledger.value("missing_eos_penalty") is not None:
                reason = "without stop_token no response stops, and all would pay it: set ppo.stop_token=eos to have it"
                ledger.leave("missing_eos_penalty", reason)
                ledger.fix("ppo.missing_eos_penalty", None, "no response stops")
                return
    ledger.carry("ppo.missing_eos_penalty", "missing_eos_penalty")


def _precision(ledger: Ledger) -> None:
    fp16 = ledger.flag("fp16")
    bf16 = not fp16 if ledger.value("bf16") is None else ledger.flag("bf16")
    ledger.derive("ppo.dtype", "bfloat16" if bf16 else "float16" if fp16 else "float32", "bf16", "fp16")
    if bf16 or fp16:
        ledger.remark(
            "TRL's PPO computes in float32 whatever bf16 and fp16 say, unless ACCELERATE_MIXED_PRECISION is set; here "
            "ppo.dtype counts. ppo.dtype=float32 does what TRL's run did."
        )


def _device(ledger: Ledger) -> None:
    for setting in ("use_cpu", "no_cuda"):
        if ledger.given(setting):
            cpu = ledger.flag("use_cpu") or ledger.flag("no_cuda")
            ledger.derive("ppo.device", "cpu" if cpu else "auto", setting)


def _checkpointing(ledger: Ledger) -> None:
    newer = ledger.value("activation_checkpointing") is not None  # transformers 5.2x renamed it
    names = ("gradient_checkpointing", "activation_checkpointing")
    ledger.derive("ppo.gradient_checkpointing", ledger.flag(names[newer]), names[newer])
    ledger.leave(names[not newer], f"{names[newer]} counts")


def _optimiser(ledger: Ledger) -> None:
    if ledger.value("optim") in ("adamw_torch", "adamw_torch_fused"):
        ledger.carry("ppo.optim", "optim")
    ledger.leave("optim", "the optimiser is torch's AdamW")


def _saving(ledger: Ledger) -> None:
    if ledger.value("save_strategy") != "steps":
        ledger.leave("save_steps", f"save_strategy={ledger.value('save_strategy')}: TRL does not read it")
    elif ledger.given("save_steps"):
        ledger.derive("ppo.save_interval", ledger.value("save_steps"), "save_steps", "save_strategy")
    ledger.leave("save_strategy", "checkpoints are always written, every ppo.save_interval iterations")
    if ledger.value("save_total_limit") is not None:
        ledger.carry("ppo.save_total_limit", "save_total_limit")
    ledger.leave("save_total_limit", "None keeps all of them: ppo.save_total_limit newest and the best are kept here")


def _gradient_norm(ledger: Ledger) -> None:
    if ledger.given("max_grad_norm"):
        ledger.carry("ppo.max_grad_norm", "max_grad_norm")
    ledger.remark("TRL's PPO does not clip gradients, whatever max_grad_norm says; here they are clipped to it.")


def _constants(ledger: Ledger) -> None:
    ledger.fix("ppo.value_model", "reward_init", "TRL's scripts load the critic from reward_model_path")
    ledger.fix("ppo.value_learning_rate", None, "one optimiser for policy and critic")
    ledger.fix("ppo.kl_controller", "fixed", "always so in TRL")
    ledger.fix("ppo.kl_in", "reward", "always so in TRL")
    ledger.fix("ppo.whiten_advantages", True, "always so in TRL")
