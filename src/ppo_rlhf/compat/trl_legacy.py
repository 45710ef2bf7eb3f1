"""TRL's legacy PPOConfig (0.4 to 0.11: `PPOTrainer.step` with scores from the script, a value head on the policy)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.table import NotOfferedError, Parameters, Source, Table, by, convert, left, to
from ppo_rlhf.compat.trl_last import SCRIPT_SETTINGS, TRACKING
from ppo_rlhf.core.errors import ConfigError

SOURCE = "TRL's legacy PPOConfig"
REMARKS = (
    "The arguments that the script gives to generate are not in the configuration: set ppo.response_length, and "
    "ppo.temperature, ppo.top_k and ppo.top_p if need be. Log-probabilities, KL and entropy are those of the tempered "
    "policy here; TRL's legacy trainer trains at temperature 1.",
)
ALWAYS: dict[str, Any] = {
    "ppo.value_model": "shared",  # the value head is on the policy's trunk
    "ppo.value_learning_rate": None,  # one optimiser for policy and value head
    "ppo.lr_scheduler_type": "constant",  # unless the script makes a schedule
    "ppo.whiten_advantages": True,
    "ppo.kl_in": "reward",
    "ppo.missing_eos_penalty": None,
    "ppo.stop_token": "eos",  # as generate does
    "ppo.temperature": 1.0,  # log-probabilities are not tempered
}


def batches(s: Source) -> Parameters:
    """Carry the sizes over: an iteration has batch_size responses, an optimiser step mini_batch_size x accumulation."""
    mini_setting = "mini_batch_size" if s["forward_batch_size"] is None else "forward_batch_size"
    sizes = ("batch_size", mini_setting, "gradient_accumulation_steps")
    batch, mini, accumulated = map(s.count, sizes)
    if batch % (mini * accumulated):
        raise ConfigError(
            f"{SOURCE}: batch_size={batch} is not a multiple of {mini_setting}={mini} x "
            f"gradient_accumulation_steps={accumulated}, which TRL refuses too; change one of them"
        )
    return {
        "ppo.per_device_train_batch_size": mini,
        "ppo.gradient_accumulation_steps": batch // mini,
        "ppo.num_mini_batches": batch // (mini * accumulated),
    }


def kl_controller(s: Source) -> Parameters:
    """Carry the controller over; with a coefficient of 0 TRL's adaptive one, which multiplies it, stays at 0."""
    if s.checked("init_kl_coef", float) == 0 or not s.flag("adap_kl_ctrl"):
        return {"ppo.kl_controller": "fixed"}
    return {"ppo.kl_controller": "adaptive", "ppo.kl_target": s["target"], "ppo.kl_horizon": s["horizon"]}


def early_stop(s: Source) -> Parameters:
    """Carry the early stop over, which `early_stopping` switches on."""
    if not s.flag("early_stopping"):
        return {"ppo.target_kl": None}
    s.remarks.append(
        "TRL's legacy trainer ends an update after a step, when the mean of old minus new log-probabilities passes "
        "1.5 x target_kl; here it ends before the step, when half the mean of their squared difference does."
    )
    return {"ppo.target_kl": s["target_kl"]}


def score_normalisation(s: Source) -> Parameters:
    """Carry the normalisation of scores over if TRL both shifts and scales them."""
    if not s.flag("use_score_scaling"):
        return {"ppo.reward_normalisation": "none"}
    if not s.flag("use_score_norm"):
        raise NotOfferedError(
            "use_score_scaling without use_score_norm divides and keeps the mean, which is not offered: "
            "ppo.reward_normalisation=running also centres, ppo.reward_scale divides"
        )
    return {"ppo.reward_normalisation": "running"}


SETTINGS: Table = {  # with the defaults of TRL 0.11.4
    "learning_rate": to("ppo.learning_rate", 1.41e-5),
    "steps": to("ppo.total_episodes", 20_000),
    "ppo_epochs": to("ppo.num_ppo_epochs", 4),
    "cliprange": to("ppo.cliprange", 0.2),
    "cliprange_value": to("ppo.cliprange_value", 0.2),
    "vf_coef": to("ppo.vf_coef", 0.1),
    "gamma": to("ppo.gamma", 1.0),
    "lam": to("ppo.lam", 0.95),
    "init_kl_coef": to("ppo.kl_coef", 0.2),
    "kl_penalty": to("ppo.kl_estimator", "kl", {"kl": "k1", "mse": "k2"}),
    "score_clip": to("ppo.reward_clip", None),
    "whiten_rewards": to("ppo.whiten_rewards", False),
    "gradient_checkpointing": to("ppo.gradient_checkpointing", False),
    "max_grad_norm": to("ppo.max_grad_norm", None),
    "seed": to("seed", 0),
    "model_name": to("sft_model_path"),
    "query_dataset": to("prompts_path"),
    **by(batches, batch_size=128, mini_batch_size=128, forward_batch_size=None, gradient_accumulation_steps=1),
    **by(kl_controller, adap_kl_ctrl=True, target=6.0, horizon=10_000),
    **by(early_stop, early_stopping=False, target_kl=1.0),
    **by(score_normalisation, use_score_scaling=False, use_score_norm=False),
    **SCRIPT_SETTINGS,
    **left("TRL only tracks its name: set reward_model_path, or a function in reward.components", "reward_model"),
    **left(TRACKING, "task_name project_kwargs push_to_hub_if_best_kwargs compare_steps"),
    **left("log-ratios are clamped, and a step with a non-finite gradient is skipped", "ratio_threshold"),
    **left("worked out while training", "world_size is_peft_model *backward_batch_size global_batch_size"),
    **left("nothing here needs it", "is_encoder_decoder optimize_cuda_cache optimize_device_cache dataset_num_proc"),
    **left("the precision is ppo.dtype, and the launcher starts the processes", "accelerator_kwargs"),
}


def from_trl_legacy(settings: Mapping[str, Any]) -> Conversion:
    """Convert a configuration of TRL 0.4 to 0.11; absent settings have the defaults of 0.11.4."""
    return convert(Source(SOURCE, settings, SETTINGS), ALWAYS, REMARKS)
