"""TRL's legacy PPOConfig (0.4 to 0.11: `PPOTrainer.step` with scores from the script, a value head on the policy)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import Ledger, Rule, convert, left
from ppo_rlhf.compat.trl_last import SCRIPT_SETTINGS
from ppo_rlhf.core.errors import ConfigError

SOURCE = "TRL's legacy PPOConfig"
GENERATION = "generation_kwargs"
# Of TRL 0.11.4; only those that are read below.
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model_name": "gpt2",
    "steps": 20_000,
    "learning_rate": 1.41e-5,
    "adap_kl_ctrl": True,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "target": 6.0,
    "horizon": 10_000,
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "batch_size": 128,
    "mini_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 4,
    "early_stopping": False,
    "target_kl": 1.0,
    "use_score_scaling": False,
    "use_score_norm": False,
    "score_clip": None,
    "whiten_rewards": False,
    "gradient_checkpointing": False,
    "max_grad_norm": None,
}
ALWAYS: dict[str, tuple[Any, str]] = {
    "ppo.value_model": ("shared", "TRL's value head on the policy's trunk"),
    "ppo.value_learning_rate": (None, "one optimiser for policy and value head"),
    "ppo.lr_scheduler_type": ("constant", "no schedule unless the script makes one"),
    "ppo.whiten_advantages": (True, "always so in TRL"),
    "ppo.kl_in": ("reward", "always so in TRL"),
    "ppo.missing_eos_penalty": (None, "TRL's legacy trainer has none"),
    "ppo.stop_token": ("eos", "as generate does"),
    "ppo.temperature": (1.0, "log-probabilities are not tempered in TRL's legacy trainer"),
}


def batches(ledger: Ledger) -> None:
    """Carry the sizes over: an iteration has batch_size responses, an optimiser step mini_batch_size x accumulation."""
    mini_setting = "mini_batch_size" if ledger.value("forward_batch_size") is None else "forward_batch_size"
    sizes = ("batch_size", mini_setting, "gradient_accumulation_steps")
    batch, mini, accumulated = map(ledger.count, sizes)
    if batch % (mini * accumulated):
        raise ConfigError(
            f"{SOURCE}: batch_size={batch} is not a multiple of {mini_setting}={mini} x "
            f"gradient_accumulation_steps={accumulated}, which TRL refuses too; change one of them"
        )
    ledger.derive("ppo.per_device_train_batch_size", mini, mini_setting)
    ledger.derive("ppo.gradient_accumulation_steps", batch // mini, *sizes[:2])
    ledger.derive("ppo.num_mini_batches", batch // (mini * accumulated), *sizes)
    ledger.leave("forward_batch_size replaces it", "mini_batch_size")
    ledger.leave("None: mini_batch_size counts", "forward_batch_size")


def kl_controller(ledger: Ledger) -> None:
    """Carry the controller over; with a coefficient of 0 TRL's adaptive one, which multiplies it, stays at 0."""
    adaptive = ledger.flag("adap_kl_ctrl")
    if ledger.values.get("ppo.kl_coef") == 0:
        ledger.fix("ppo.kl_controller", "fixed", "init_kl_coef=0")
        ledger.leave("init_kl_coef=0 stays 0 under the adaptive controller", "adap_kl_ctrl", "target", "horizon")
        return
    ledger.derive("ppo.kl_controller", "adaptive" if adaptive else "fixed", "adap_kl_ctrl")
    if adaptive:
        ledger.carry("ppo.kl_target", "target")
        ledger.carry("ppo.kl_horizon", "horizon")
    ledger.leave("adap_kl_ctrl=False: only the adaptive controller reads it", "target", "horizon")


def early_stop(ledger: Ledger) -> None:
    """Carry the early stop over, which `early_stopping` switches on."""
    if not ledger.flag("early_stopping"):
        ledger.derive("ppo.target_kl", None, "early_stopping")
        ledger.leave("early_stopping=False: TRL does not read it", "target_kl")
        return
    ledger.derive("ppo.target_kl", ledger.value("target_kl"), "early_stopping", "target_kl")
    ledger.remarks.append(
        "TRL's legacy trainer ends an update after a step, when the mean of old minus new log-probabilities passes "
        "1.5 x target_kl; here it ends before the step, when half the mean of their squared difference does."
    )


def score_normalisation(ledger: Ledger) -> None:
    """Carry the normalisation of scores over if TRL both shifts and scales them."""
    names = ("use_score_scaling", "use_score_norm")
    scaled, centred = map(ledger.flag, names)
    if scaled and centred:
        ledger.derive("ppo.reward_normalisation", "running", *names)
    elif scaled:
        ledger.leave(
            "use_score_scaling without use_score_norm divides and keeps the mean, which is not offered: "
            "ppo.reward_normalisation=running also centres, ppo.reward_scale divides",
            *names,
        )
    else:
        ledger.derive("ppo.reward_normalisation", "none", names[0])
        ledger.leave("use_score_scaling=False: TRL does not read it", names[1])


def end_of_response(ledger: Ledger) -> None:
    """Carry over `generate`'s end token: -1 never stops."""
    end = f"{GENERATION}.eos_token_id"
    if ledger.given(end) and ledger.value(end) in (None, -1):
        ledger.derive("ppo.stop_token", "none", end)
    elif ledger.given(end):
        ledger.carry("ppo.stop_token_id", end)
    if ledger.value(f"{GENERATION}.temperature") not in (None, 1):
        ledger.remarks.append(
            "TRL's legacy trainer samples at the temperature but trains at 1; here log-probabilities, KL and entropy "
            "are those of the tempered policy."
        )
    if not ledger.given(f"{GENERATION}.max_new_tokens"):
        ledger.remarks.append("The script's max_new_tokens is not in the configuration: set ppo.response_length.")


SETTINGS: dict[str, Rule] = {
    **{name: f"ppo.{name}" for name in ("cliprange", "cliprange_value", "vf_coef", "gamma", "lam", "whiten_rewards")},
    **{name: f"ppo.{name}" for name in ("learning_rate", "gradient_checkpointing", "max_grad_norm")},
    "ppo_epochs": "ppo.num_ppo_epochs",
    "steps": "ppo.total_episodes",
    "init_kl_coef": "ppo.kl_coef",
    "score_clip": "ppo.reward_clip",
    "seed": "seed",
    "model_name": "sft_model_path",
    f"{GENERATION}.max_new_tokens": "ppo.response_length",
    f"{GENERATION}.min_new_tokens": "ppo.min_response_length",
    f"{GENERATION}.temperature": "ppo.temperature",
    f"{GENERATION}.top_k": "ppo.top_k",
    f"{GENERATION}.top_p": "ppo.top_p",
    f"{GENERATION}.eos_token_id": end_of_response,
    **dict.fromkeys(("batch_size", "mini_batch_size", "forward_batch_size", "gradient_accumulation_steps"), batches),
    **dict.fromkeys(("adap_kl_ctrl", "target", "horizon"), kl_controller),
    "kl_penalty": ("ppo.kl_estimator", {"kl": "k1", "mse": "k2"}),
    **dict.fromkeys(("early_stopping", "target_kl"), early_stop),
    **dict.fromkeys(("use_score_scaling", "use_score_norm"), score_normalisation),
    "query_dataset": "prompts_path",
    **SCRIPT_SETTINGS,
    **left("responses are always sampled, one for each episode", f"{GENERATION}.do_sample {GENERATION}.num_return*"),
    **left("it counts the prompt's tokens too; ppo.min_response_length does not", f"{GENERATION}.min_length"),
    **left("it comes from the tokenizer", f"{GENERATION}.pad_token_id"),
    **left("TRL only tracks its name: set reward_model_path, or a function in reward.components", "reward_model"),
    **left("tracking is configured in conf/base/mlflow.yml", "exp_name task_name project_kwargs"),
    **left("nothing is pushed to the hub; the best checkpoint is kept", "push_to_hub_if_best_kwargs compare_steps"),
    **left("log-ratios are clamped, and a step with a non-finite gradient is skipped", "ratio_threshold"),
    **left("worked out while training", "world_size is_peft_model *backward_batch_size global_batch_size"),
    **left("models are causal language models", "is_encoder_decoder"),
    **left("nothing here needs it", "optimize_cuda_cache optimize_device_cache dataset_num_proc"),
    **left("the precision is ppo.dtype, and the launcher starts the processes", "accelerator_kwargs"),
}


def from_trl_legacy(settings: Mapping[str, Any]) -> Conversion:
    """Convert a configuration of TRL 0.4 to 0.11; absent settings have the defaults of 0.11.4.

    `generation_kwargs`, the mapping that the script gives to `generate`, is read if it is there.
    """
    flat = dict(settings)
    generation = flat.pop(GENERATION, None) or {}
    if not isinstance(generation, Mapping):
        raise ConfigError(f"{SOURCE}: {GENERATION} must be a mapping of generate's arguments, got {generation!r}")
    flat |= {f"{GENERATION}.{name}": value for name, value in generation.items()}
    return convert(SOURCE, flat, SETTINGS, defaults=DEFAULTS, always=ALWAYS)
