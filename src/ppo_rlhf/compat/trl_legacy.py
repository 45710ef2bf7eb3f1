"""TRL's legacy PPOConfig (up to 0.11: `step` with external rewards, a value head on a shared trunk)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.ledger import Ledger, by_setting, carry_prompts
from ppo_rlhf.compat.trl_models import MODEL_SETTINGS, carry_model_settings, warn_of_processes
from ppo_rlhf.core.errors import ConfigError

SOURCE = "TRL's legacy PPOConfig"

# Of TRL 0.11.4; only what is read below.
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
}

_SAME = {  # carried as they are
    "ppo_epochs": "num_ppo_epochs",
    "cliprange": "cliprange",
    "cliprange_value": "cliprange_value",
    "vf_coef": "vf_coef",
    "gamma": "gamma",
    "lam": "lam",
    "whiten_rewards": "whiten_rewards",
    "init_kl_coef": "kl_coef",
    "score_clip": "reward_clip",
    "learning_rate": "learning_rate",
    "steps": "total_episodes",
    "gradient_checkpointing": "gradient_checkpointing",
}

_REASONS = by_setting(
    {
        "tracking is configured in conf/base/mlflow.yml": (
            "exp_name task_name log_with tracker_kwargs tracker_project_name project_kwargs"
        ),
        "nothing is pushed to the hub; the best checkpoint is kept, and the exported policy is a plain directory": (
            "push_to_hub_if_best_kwargs compare_steps"
        ),
        "there is no guard on the ratio: log-ratios are clamped, and a step with a non-finite gradient is skipped": (
            "ratio_threshold"
        ),
        "worked out while training": (
            "world_size is_peft_model backward_batch_size global_backward_batch_size global_batch_size total_ppo_epochs"
        ),
        "models are causal language models; encoder-decoders are not": "is_encoder_decoder",
        "it changes memory and speed only, and nothing here needs it": (
            "optimize_cuda_cache optimize_device_cache dataset_num_proc"
        ),
        "all columns of the prompts are kept: reward functions are called with them": "remove_unused_columns",
        "precision is ppo.dtype; how processes share the work is not part of these parameters": "accelerator_kwargs",
    }
)

_GENERATION = {  # arguments of `generate`, which a script has beside the PPOConfig
    "max_new_tokens": "response_length",
    "min_new_tokens": "min_response_length",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
_GENERATION_REASONS = by_setting(
    {
        "responses are always sampled": "do_sample",
        "it counts the prompt's tokens too: ppo.min_response_length counts the response's": "min_length",
        "it comes from the tokenizer": "pad_token_id",
        "one response is generated for each episode": "num_return_sequences",
    }
)

SETTINGS = frozenset({*DEFAULTS, *_REASONS, "forward_batch_size", "max_grad_norm", "query_dataset", "reward_model"})
_PREFIX = "generation_kwargs"


def from_trl_legacy(settings: Mapping[str, Any]) -> Conversion:
    """Convert a configuration of TRL 0.4 to 0.11; what is absent has the default of 0.11.4.

    `generation_kwargs`, the arguments that the script gives to `generate`, are read if they are given, as a mapping.
    """
    ledger = Ledger(SOURCE, _flat(settings), DEFAULTS)
    for setting, name in _SAME.items():
        ledger.carry(f"ppo.{name}", setting)
    ledger.carry("seed", "seed")
    ledger.carry("sft_model_path", "model_name")
    _batches(ledger)
    _kl(ledger)
    _early_stop(ledger)
    _score_normalisation(ledger)
    _constants(ledger)
    _generation(ledger)
    carry_model_settings(ledger)
    carry_prompts(ledger, "query_dataset")
    _reward_model(ledger)
    _gradient_norm(ledger)
    warn_of_processes(ledger)
    ledger.leave_all(_REASONS)
    return ledger.close([*SETTINGS, *MODEL_SETTINGS])


def _batches(ledger: Ledger) -> None:
    """One `step` is an iteration of batch_size; an optimiser step takes mini_batch_size x accumulation of it."""
    mini_setting = "mini_batch_size"
    if ledger.value("forward_batch_size") is not None:
        mini_setting = "forward_batch_size"
        ledger.leave("mini_batch_size", "forward_batch_size replaces it")
    else:
        ledger.leave("forward_batch_size", "deprecated in TRL for mini_batch_size, and not set")
    batch, mini, accumulated = map(ledger.count, ("batch_size", mini_setting, "gradient_accumulation_steps"))
    if batch % (mini * accumulated):
        raise ConfigError(
            f"{SOURCE}: batch_size={batch} is not a multiple of {mini_setting}={mini} x "
            f"gradient_accumulation_steps={accumulated}, which TRL refuses too; nearest sizes that are: "
            f"{_nearest_multiples(batch, mini * accumulated)}"
        )
    ledger.derive("ppo.per_device_train_batch_size", mini, mini_setting)
    ledger.derive("ppo.gradient_accumulation_steps", batch // mini, "batch_size", mini_setting)
    steps = batch // (mini * accumulated)
    ledger.derive("ppo.num_mini_batches", steps, "batch_size", mini_setting, "gradient_accumulation_steps")


def _kl(ledger: Ledger) -> None:
    _kl_controller(ledger)
    ledger.fix("ppo.kl_in", "reward", "always so in TRL")
    estimator = {"kl": "k1", "mse": "k2"}.get(ledger.value("kl_penalty"))
    if estimator is not None:
        ledger.derive("ppo.kl_estimator", estimator, "kl_penalty")
        return
    why = {
        "abs": "|log-ratio| is not offered: it does not estimate a KL",
        "full": "the KL over the whole vocabulary is not offered; k1 has the same mean",
    }
    unknown = "TRL knows kl, abs, mse and full"
    ledger.leave(
        "kl_penalty", f"{why.get(ledger.value('kl_penalty'), unknown)}: ppo.kl_estimator=k1 is written instead"
    )
    ledger.fix("ppo.kl_estimator", "k1", "in place of kl_penalty")


def _kl_controller(ledger: Ledger) -> None:
    adaptive = ledger.flag("adap_kl_ctrl")
    if ledger.entered("ppo.kl_coef") == 0:
        ledger.fix("ppo.kl_controller", "fixed", "init_kl_coef=0")
        for setting in ("adap_kl_ctrl", "target", "horizon"):
            ledger.leave(setting, "init_kl_coef=0: the adaptive controller multiplies it, so it stays 0")
        if adaptive:
            ledger.remark(
                "With init_kl_coef=0 TRL's adaptive controller keeps the coefficient at 0, as ppo.kl_controller=fixed "
                "does."
            )
        return
    ledger.derive("ppo.kl_controller", "adaptive" if adaptive else "fixed", "adap_kl_ctrl")
    for setting, name in (("target", "kl_target"), ("horizon", "kl_horizon")):
        if adaptive:
            ledger.carry(f"ppo.{name}", setting)
        else:
            ledger.leave(setting, "adap_kl_ctrl=False: only the adaptive controller reads it")


def _early_stop(ledger: Ledger) -> None:
    if ledger.flag("early_stopping"):
        ledger.derive("ppo.target_kl", ledger.value("target_kl"), "early_stopping", "target_kl")
        ledger.remark(
            "TRL's legacy trainer ends an update after a step, when the mean of old minus new log-probabilities passes "
            "1.5 x target_kl; here it ends before the step, when half the mean of their squared difference does."
        )
        return
    ledger.derive("ppo.target_kl", None, "early_stopping")
    ledger.leave("target_kl", "early_stopping=False: TRL does not read it")


def _score_normalisation(ledger: Ledger) -> None:
    scaled, centred = ledger.flag("use_score_scaling"), ledger.flag("use_score_norm")
    if scaled and centred:
        ledger.derive("ppo.reward_normalisation", "running", "use_score_scaling", "use_score_norm")
    elif scaled:
        reason = "use_score_scaling without use_score_norm divides and keeps the mean: not offered"
        for setting in ("use_score_scaling", "use_score_norm"):
            ledger.leave(setting, f"{reason}; ppo.reward_normalisation=running also centres, ppo.reward_scale divides")
    else:
        ledger.leave("use_score_norm", "use_score_scaling=False: TRL does not read it")
        ledger.derive("ppo.reward_normalisation", "none", "use_score_scaling")


def _constants(ledger: Ledger) -> None:
    ledger.fix("ppo.value_model", "shared", "TRL's value head on the policy's trunk")
    ledger.fix("ppo.value_learning_rate", None, "one optimiser for policy and value head")
    ledger.fix("ppo.lr_scheduler_type", "constant", "no schedule unless the script makes one")
    ledger.fix("ppo.whiten_advantages", True, "always so in TRL")
    ledger.fix("ppo.missing_eos_penalty", None, "TRL's legacy trainer has none")
    ledger.fix("ppo.stop_token", "eos", "as generate does")
    ledger.fix("ppo.temperature", 1.0, "log-probabilities are not tempered in TRL's legacy trainer")


def _generation(ledger: Ledger) -> None:
    for setting, name in _GENERATION.items():
        if ledger.given(f"{_PREFIX}.{setting}"):
            ledger.carry(f"ppo.{name}", f"{_PREFIX}.{setting}")
    end = f"{_PREFIX}.eos_token_id"
    if ledger.given(end):
        never = ledger.value(end) in (None, -1)
        ledger.derive("ppo.stop_token" if never else "ppo.stop_token_id", "none" if never else ledger.value(end), end)
    ledger.leave_all({f"{_PREFIX}.{name}": reason for name, reason in _GENERATION_REASONS.items()})
    if not ledger.given(f"{_PREFIX}.max_new_tokens"):
        ledger.remark(
            "The length of responses is not in TRL's legacy configuration but among the script's arguments of generate "
            "(max_new_tokens): set ppo.response_length."
        )
    if ledger.value(f"{_PREFIX}.temperature") not in (None, 1, 1.0):
        ledger.remark(
            "TRL's legacy trainer samples at the temperature but trains at 1; here log-probabilities, KL and entropy "
            "are those of the tempered policy."
        )


def _reward_model(ledger: Ledger) -> None:
    ledger.leave(
        "reward_model",
        "TRL's legacy trainer only tracks its name, the script does the scoring: set reward_model_path, or a Python "
        "function in reward.components",
    )
    if not ledger.given("reward_model"):
        ledger.remark("Scores come from the script in TRL's legacy loop: set reward_model_path or reward.components.")


def _gradient_norm(ledger: Ledger) -> None:
    if ledger.value("max_grad_norm") is not None:
        ledger.carry("ppo.max_grad_norm", "max_grad_norm")
        return
    ledger.leave("max_grad_norm", "gradients are always clipped here: ppo.max_grad_norm=1.0 applies")
    if not ledger.given("max_grad_norm"):
        ledger.remark("TRL's legacy trainer does not clip gradients by default; here ppo.max_grad_norm=1.0 applies.")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(settings)
    nested = flat.pop(_PREFIX, None)
    if nested is None:
        return flat
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{SOURCE}: {_PREFIX} must be a mapping of generate's arguments, got {nested!r}")
    return flat | {f"{_PREFIX}.{name}": value for name, value in nested.items()}


def _nearest_multiples(size: int, of: int) -> str:
    below = size - size % of
    return ", ".join(str(value) for value in (below, below + of) if value > 0)
