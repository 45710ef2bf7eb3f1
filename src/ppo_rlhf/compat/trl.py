"""Conversion of TRL's legacy and last PPOConfig, which are recognised by the names of their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.trl_names import LIVES_ELSEWHERE, RENAMED
from ppo_rlhf.core.errors import ConfigError

GLOBALS = ("seed", "sft_model_path", "reward_model_path")
PROMPT_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MODEL_CONFIG: dict[str, Any] = {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": None}
"""Defaults of TRL's ModelConfig, which scripts use together with either PPOConfig."""
LEFT = {
    **LIVES_ELSEWHERE,
    "dtype torch_dtype": "trainable weights are float32 or wider; ppo.dtype sets the precision of the computation",
    "trust_remote_code": "set trust_remote_code in conf/local/globals.yml to run a model's own code",
    "bnb_4bit_* use_bnb_nested_quant": "4-bit weights are always NF4, doubly quantised",
    "remove_unused_columns": "all columns of the prompts are kept, because reward functions get all columns",
    "local_dataloader_batch_size *backward_batch_size global_batch_size world_size": "TRL computes this setting, and "
    "overwrites the given value",
    "dataset_name dataset_config dataset_*_split query_dataset": "set prompts_path to a file, or to a name on the hub "
    "with its split",
    "exp_name tracker_* task_name": "outputs, logs and tracking are set in conf/base: catalog_ppo.yml and mlflow.yml",
    **arguments.LEFT,
}
"""Settings that are not converted, each with the reason. `*` matches any text; the first matching pattern counts."""


def place_of(setting: str) -> str:
    """Return the dotted name of the parameter that corresponds to a setting of TRL; a global has no group."""
    same = setting if setting in GLOBALS else f"ppo.{setting}"
    return RENAMED.get(setting, same)


def _with_places(defaults: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return {setting: (place_of(setting), default) for setting, default in defaults.items()}


_ADAPTERS = {"use_peft": ("ppo.use_peft", False)}
# TRL's legacy PPOConfig (TRL 0.4 to 0.11), for scripts that call `step` with scores. Defaults are those of 0.11.4.
LEGACY = _ADAPTERS | _with_places(
    {
        **{"learning_rate": 1.41e-5, "steps": 20_000, "ppo_epochs": 4, "cliprange": 0.2, "cliprange_value": 0.2},
        **{"vf_coef": 0.1, "gamma": 1.0, "lam": 0.95, "init_kl_coef": 0.2, "score_clip": None},
        **{"whiten_rewards": False, "gradient_checkpointing": False, "seed": 0, "kl_penalty": "kl"},
    }
)
LEGACY_DERIVED = {
    **{"batch_size": 128, "mini_batch_size": 128, "forward_batch_size": None, "gradient_accumulation_steps": 1},
    **{"adap_kl_ctrl": True, "target": 6.0, "horizon": 10_000, "early_stopping": False, "target_kl": 1.0},
    **{"use_score_scaling": False, "use_score_norm": False, "load_in_4bit": False},
}
LEGACY_IF_GIVEN = {name: place_of(name) for name in ("max_grad_norm", "model_name")}
"""Settings that are converted only if they are given, because the source has no default that applies here."""
LEGACY_VALUES: dict[str, dict[Any, Any]] = {
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "adap_kl_ctrl": {True: "adaptive", False: "fixed"},
}
LEGACY_ALWAYS = {
    "value_model": "shared",  # legacy TRL puts the value head on the policy's trunk
    "value_learning_rate": None,  # None: policy and value head share one optimiser and its learning rate
    "lr_scheduler_type": "constant",  # legacy TRL keeps the learning rate constant unless the script passes a scheduler
    "whiten_advantages": True,
    "kl_in": "reward",
    "stop_token": "eos",  # like transformers' generate, stop at the end-of-text token
    "missing_eos_penalty": None,
    "temperature": 1.0,  # legacy TRL computes log-probabilities at temperature 1
}
LEGACY_REMARK = (
    "The configuration lacks the arguments that the script passes to generate: set ppo.response_length, and if needed "
    "ppo.temperature, ppo.top_k and ppo.top_p. Log-probabilities, KL and entropy are computed at ppo.temperature here; "
    "TRL's legacy trainer computes them at temperature 1."
)

# TRL's last PPOConfig: TRL 0.12 and later, now in `trl.experimental.ppo`. Defaults are those of TRL 1.12.
SAME = (  # settings that have the same name and default in TRL and PPOConfig
    *("num_ppo_epochs", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam", "whiten_rewards", "kl_coef"),
    *("kl_estimator", "learning_rate", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_mini_batches", "response_length", "temperature"),
)
LAST = _ADAPTERS | _with_places(
    {
        **{name: getattr(PPOConfig, name) for name in SAME},
        **{"gradient_checkpointing": True, "local_rollout_forward_batch_size": 64, "stop_token_id": None, "seed": 42},
    }
)
LAST |= {"use_cpu": ("ppo.device", False)}
LAST_IF_GIVEN = {name: place_of(name) for name in ("sft_model_path", "reward_model_path", "save_total_limit")}
LAST_DERIVED = {
    **{"total_episodes": None, "num_train_epochs": 3.0, "warmup_steps": 0, "warmup_ratio": None, "report_to": None},
    **{"stop_token": None, "missing_eos_penalty": None, "bf16": None, "fp16": False, "load_in_4bit": False},
}
LAST_ALWAYS = {
    "value_model": "reward_init",  # TRL's example scripts load the critic from reward_model_path
    "value_learning_rate": None,  # None: policy and critic share one optimiser and its learning rate
    "kl_controller": "fixed",
    "kl_in": "reward",
    "whiten_advantages": True,
}
LAST_REMARKS = (  # ms-swift's PPO, too, is TRL's last PPOTrainer
    "TRL's PPO ignores max_grad_norm and does not clip gradients; here gradients are clipped to max_grad_norm.",
    "With gradient_accumulation_steps above 1, TRL takes an optimiser step every gradient_accumulation_steps "
    "micro-batches, regardless of minibatches; here each of the num_mini_batches minibatches is one step.",
)

_LEGACY_NAMES = {*LEGACY, *LEGACY_IF_GIVEN, *LEGACY_DERIVED, "query_dataset"}
_LAST_NAMES = {*LAST, *LAST_IF_GIVEN, *LAST_DERIVED, *arguments.IF_GIVEN, "batch_size", "mini_batch_size"}


def from_trl(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of TRL's PPO to this project's parameters.

    Settings that the configuration lacks get TRL's defaults, and the parameters file lists the defaults.

    Args:
        settings: Fields of a PPOConfig: the legacy one (trl 0.11 and before: `ppo_epochs`, `init_kl_coef`, …) or the
            last one (`trl.experimental.ppo`: `num_ppo_epochs`, `kl_coef`, …).
        num_prompts: Number of rows of the training data; the last PPOConfig gives the length of training in passes over
            the rows.

    Raises:
        ConfigError: Settings of both PPOConfigs are given, or batch sizes that TRL also refuses.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"a configuration of TRL must be a mapping of names to values, not {type(settings).__name__}."
        )
    legacy = [name for name in settings if name in _LEGACY_NAMES - _LAST_NAMES]
    last = [name for name in settings if name in _LAST_NAMES - _LEGACY_NAMES]
    if legacy and last:
        raise ConfigError(
            f"{legacy[0]} is a setting of TRL's legacy PPOConfig, but {last[0]} is one of its last; give the "
            "settings of one of them."
        )
    # TRL's last PPOConfig also has the fields batch_size and mini_batch_size, but computes their values
    if legacy or (not last and {"batch_size", "mini_batch_size"} & settings.keys()):
        return _from_legacy(settings)
    return _from_last(settings, num_prompts)


def _from_legacy(settings: Mapping[str, Any]) -> Conversion:
    c = Conversion(
        "TRL's legacy PPOConfig",
        settings,
        LEGACY,
        LEGACY_DERIVED | MODEL_CONFIG,
        always=LEGACY_ALWAYS,
        if_given=LEGACY_IF_GIVEN,
        values=LEGACY_VALUES,
    )
    _carry_models(c, prompts="query_dataset")
    small = "mini_batch_size" if c["forward_batch_size"] is None else "forward_batch_size"
    sizes = ("batch_size", small, "gradient_accumulation_steps")
    batch, mini, accumulated = map(c.count, sizes)
    if batch % (mini * accumulated):
        raise ConfigError(
            f"{c.source}: batch_size={batch} is not a multiple of {small}={mini} x "
            f"gradient_accumulation_steps={accumulated}, which TRL refuses too; change one of them"
        )
    c.carry("ppo.per_device_train_batch_size", small, "forward_batch_size", value=mini)
    c.carry("ppo.gradient_accumulation_steps", *sizes[:2], value=batch // mini)
    c.carry("ppo.num_mini_batches", *sizes, value=batch // (mini * accumulated))

    # TRL's adaptive controller multiplies the KL coefficient by a factor, so a coefficient of 0 stays 0
    if c.checked("init_kl_coef", float) == 0:
        c.carry("ppo.kl_controller", "init_kl_coef", value="fixed")
    else:
        c.carry("ppo.kl_controller", "adap_kl_ctrl")
        if c.flag("adap_kl_ctrl"):
            c.carry("ppo.kl_target", "target")
            c.carry("ppo.kl_horizon", "horizon")

    c.carry("ppo.target_kl", "early_stopping", value=None)
    if c.flag("early_stopping"):
        c.carry("ppo.target_kl", "target_kl")
        c.remarks.append(
            "TRL's legacy trainer ends an update after a step if the mean of old minus new log-probabilities is above "
            "1.5 x target_kl; here the update ends before a step if half the mean squared difference is above it."
        )
    c.carry("ppo.reward_normalisation", "use_score_scaling", value="none")
    if c.flag("use_score_scaling") and c.flag("use_score_norm"):
        c.carry("ppo.reward_normalisation", "use_score_scaling", "use_score_norm", value="running")
    elif c.flag("use_score_scaling"):
        c.leave(
            "use_score_scaling without use_score_norm divides scores and keeps their mean, which is not supported: "
            "ppo.reward_normalisation=running also subtracts the mean, and ppo.reward_scale multiplies by a constant",
            *("use_score_scaling", "use_score_norm"),
        )
    if c["max_grad_norm"] is None:
        c.remarks.append("Without max_grad_norm TRL's legacy trainer clips no gradients; here they are always clipped.")
    return c.finish(LEFT, LEGACY_REMARK)


def _from_last(settings: Mapping[str, Any], num_prompts: int | None) -> Conversion:
    c = Conversion(
        "TRL's PPOConfig",
        settings,
        LAST,
        LAST_DERIVED | MODEL_CONFIG,
        always=LAST_ALWAYS,
        if_given=LAST_IF_GIVEN | arguments.IF_GIVEN,
        values=arguments.VALUES,
    )
    _carry_models(c, prompts="dataset_name")
    _carry_lengths(c, num_prompts)
    arguments.carry_report_to(c)
    if c["stop_token_id"] is None:
        c.carry("ppo.stop_token", "stop_token", value=c["stop_token"] or "none", otherwise="none")
    if c["stop_token_id"] is not None or c["stop_token"] is not None:
        c.carry("ppo.missing_eos_penalty", "missing_eos_penalty")
    else:
        c.write("ppo.missing_eos_penalty", None, "responses never stop")
        c.remarks.append(
            "Without stop_token TRL's responses never stop (ppo.stop_token=none): each response has response_length "
            "tokens. missing_eos_penalty, which every response would pay, is not carried over. With ppo.stop_token=eos "
            "responses can stop."
        )
    dtype = arguments.half_of(c) or ("bfloat16" if c["bf16"] is None else "float32")
    c.carry("ppo.dtype", "bf16", "fp16", value=dtype)
    if dtype != "float32":
        c.remarks.append(
            "TRL's PPO ignores bf16 and fp16 and computes in float32, unless ACCELERATE_MIXED_PRECISION is set; here "
            "ppo.dtype sets the precision. ppo.dtype=float32 repeats TRL's run."
        )
    return c.finish(LEFT, *LAST_REMARKS)


def _carry_lengths(c: Conversion, num_prompts: int | None) -> None:
    """Carry over the number of responses, and the warm-up as a share of the iterations."""
    episodes, setting = None, "num_train_epochs" if c["total_episodes"] is None else "total_episodes"
    if setting == "total_episodes":
        episodes = c.count("total_episodes")
    elif num_prompts is not None:
        episodes = max(1, int(arguments.epochs(c) * num_prompts))
    if episodes is not None:
        c.carry("ppo.total_episodes", setting, "total_episodes", value=episodes)
    else:
        arguments.leave_epochs(c, ", or total_episodes", "num_train_epochs", "total_episodes")
    batch_size = c.count("per_device_train_batch_size") * c.count("gradient_accumulation_steps")
    iterations = None if episodes is None else math.ceil(episodes / batch_size)

    arguments.carry_warmup(c, iterations)


def _carry_models(c: Conversion, prompts: str) -> None:
    """Carry over LoRA, and the prompts if they are a file."""
    if str(c[prompts]).endswith(PROMPT_FILES):
        c.carry("prompts_path", prompts)
    modules = "lora_target_modules"
    arguments.carry_lora(c, "lora_r", "lora_alpha", modules, MODEL_CONFIG["lora_alpha"])
    if not c.parameters["ppo"]["use_peft"]:
        return
    c.carry("ppo.load_in_4bit", "load_in_4bit", value=c.flag("load_in_4bit"))
    if c.flag("load_in_4bit"):
        c.remarks.append("TRL also quantises critic and reward model to 4 bits; here the reward model keeps ppo.dtype.")
    if c[modules] is None:
        c.remarks.append("Without lora_target_modules peft chooses (in Llama q_proj,v_proj); here all-linear is used.")
