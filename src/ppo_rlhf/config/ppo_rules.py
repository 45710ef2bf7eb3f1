"""Table of the rules between fields of PPOConfig. A broken rule gives one line with the fields and their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from ppo_rlhf.config.rules import Rule
from ppo_rlhf.config.setting_roles import names_in_group

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

POLYNOMIAL_END = 1e-7
"""Learning rate at which transformers' polynomial schedule ends, whatever the peak learning rate is."""
FILTERED = "vLLM would return log-probabilities of the filtered distribution; leave out {0}"
NO_STOP = "without a stop token every response has ppo.response_length tokens and counts as cut off; unset one of them"

_CHANGED = object()


def _rule(names: Sequence[str], broken: Callable[[PPOConfig], bool], why: str) -> Rule[PPOConfig]:
    """Return the rule that settings do not go together if `broken` returns True.

    `why` gives the reason and the fix; in `why`, {0} stands for the name of the first setting and {1} for the name of
    the second setting.
    """
    reads = tuple(f"ppo.{name}" for name in names)

    def seen(c: PPOConfig) -> str:
        return " and ".join(f"ppo.{name}={_word(getattr(c, name))}" for name in names)

    return Rule(reads, broken, seen, why.format(*reads))


def _are(values: Mapping[str, object]) -> Callable[[PPOConfig], bool]:
    """Return a function that tests whether all settings have the given values.

    A value that is a set lists several accepted values. `_CHANGED` accepts any value except the default.
    """

    def is_as(c: PPOConfig, name: str, wanted: object) -> bool:
        if wanted is _CHANGED:
            return name in c.not_default()
        return getattr(c, name) in wanted if isinstance(wanted, set) else bool(getattr(c, name) == wanted)

    return lambda c: all(is_as(c, name, wanted) for name, wanted in values.items())


def _clash(values: Mapping[str, object], why: str) -> Rule[PPOConfig]:
    """Return the rule that the settings must not all have the values in `values`."""
    return _rule(tuple(values), _are(values), why)


def _too_long(name: str, limit: str) -> Rule[PPOConfig]:
    why = "{0} is above {1}; lower {0} or raise {1}"
    return _rule((name, limit), lambda c: (getattr(c, name) or 0) > (getattr(c, limit) or math.inf), why)


def _too_slow(name: str) -> Rule[PPOConfig]:
    why = f"the schedule ends at {POLYNOMIAL_END:g}, so {{1}} must be higher; raise {{1}}, or change {{0}}"
    return _rule(
        ("lr_scheduler_type", name),
        lambda c: c.lr_scheduler_type == "polynomial" and (getattr(c, name) or 1.0) <= POLYNOMIAL_END,
        why,
    )


def _modules(c: PPOConfig) -> list[str]:
    return [name.strip() for name in c.lora_target_modules.split(",")]


_RULES: tuple[Rule[PPOConfig], ...] = (
    # Rules about batch sizes.
    _clash(
        {"reward_normalisation": "batch", "batch_size": 1},
        "a single score is normalised to 0; raise ppo.per_device_train_batch_size, or set {0} to running",
    ),
    _clash(
        {"drop_uniform_prompts": _CHANGED, "responses_per_prompt": 1},
        "one response per prompt always looks uniform; raise {1}, or set {0} to 0",
    ),
    # Rules about how responses end.
    _clash({"stop_token": _CHANGED, "stop_token_id": _CHANGED}, "both set what ends a response; unset one of them"),
    *(_too_long(name, "response_length") for name in ("min_response_length", "overlong_buffer", "turn_length")),
    _too_long("min_response_length", "turn_length"),
    *(
        _clash({"stop_token": "none", name: _CHANGED}, NO_STOP)
        for name in ("min_response_length", "missing_eos_penalty", "overlong_buffer")
    ),
    _clash({"stop_token": "none", "truncated_responses": {"mask", "bootstrap"}}, NO_STOP),
    _clash(
        {"truncated_responses": {"penalise", "replace"}, "missing_eos_penalty": None},
        "{0} needs {1}, in score units; set {1}",
    ),
    _clash(
        {"truncated_responses": {"mask", "bootstrap"}, "missing_eos_penalty": _CHANGED},
        "a masked or bootstrapped response cannot pay a penalty; unset one of them",
    ),
    _clash(
        {"truncated_responses": "bootstrap", "overlong_buffer": _CHANGED},
        "truncated responses would escape the penalty that responses just below the limit pay; unset one of them",
    ),
    # Rules about conversations of several turns.
    _clash(
        {"environment": _CHANGED, "turn_length": None},
        "an environment needs a limit of tokens per turn; set {1}",
    ),
    _clash(
        {"turn_length": _CHANGED, "environment": None},
        "without an environment there are no turns; set {1}, or leave out {0}",
    ),
    _clash(
        {"environment": _CHANGED, "truncated_responses": "bootstrap"},
        "the critic learns no values of states where the environment's reply did not fit; set {1} to another value",
    ),
    _clash(
        {"environment": _CHANGED, "overlong_buffer": _CHANGED},
        "the penalty would count the environment's tokens; unset one of them",
    ),
    _clash(
        {"environment": _CHANGED, "stop_token": "none"},
        "a turn ends with a stop token; set {1} to eos, or leave out {0}",
    ),
    # Rules about vLLM.
    *(
        _clash({name: _CHANGED, "rollout_engine": "vllm"}, why)
        for name, why in {
            "environment": "vLLM does not support multi-turn environments; unset one of them",
            "deterministic": "vLLM's sampling and kernels are not deterministic; unset one of them",
            **dict.fromkeys(("top_k", "top_p", "min_response_length"), FILTERED),
        }.items()
    ),
    _clash(
        {"rollout_engine": "vllm", "dtype": "float64"},
        "vLLM does not support float64; set {1} to bfloat16 or float32",
    ),
    _clash(
        {"vllm_mode": "server", "rollout_engine": "vllm", "vllm_server_base_url": None},
        "set ppo.vllm_server_base_url to the server's address, such as http://localhost:8000",
    ),
    _rule(
        ("vllm_tensor_parallel_size", "world_size"),
        lambda c: c.world_size % c.vllm_tensor_parallel_size != 0,
        "{0} processes share one vLLM, so {1} must be a multiple of {0}",
    ),
    # Rules about the KL penalty.
    _clash(
        {"kl_in": "loss", "kl_estimator": "k1"},
        "the gradient of k1 is 0 on average, so k1 would not limit KL; set {1} to k2, or {0} to reward",
    ),
    _clash(
        {"kl_in": "reward", "kl_estimator": "k3+"},
        "k3+ differs from k3 only in its gradient, and a reward has no gradient; set {1} to k1 or k3, or {0} to loss",
    ),
    _clash(
        {"offload_reference_policy": True, "kl_in": "loss", "kl_estimator": "full"},
        "the reference policy runs in every optimiser step, so it must stay on the GPU; leave out {0}",
    ),
    _rule(
        ("kl_warning", "kl_alarm"),
        lambda c: c.kl_warning > c.kl_alarm and "kl_warning" in c.not_default(),
        "the alarm would come before the warning; lower {0} or raise {1}",
    ),
    _clash(
        {"kl_controller": "adaptive", "kl_coef": 0},
        "the controller multiplies {1}, so 0 would stay 0; set {1} to a positive value such as 0.05, or {0} to fixed",
    ),
    _clash(
        {"lam": _CHANGED, "lam_alpha": _CHANGED, "lam_critic": _CHANGED},
        "{1} sets the policy's lambda and {2} the critic's, so {0} has no effect; unset one of them",
    ),
    _rule(
        ("positive_coef", "positive_threshold"),
        lambda c: (c.positive_coef > 0) != (c.positive_threshold is not None),
        "{0} is the loss weight of responses that score at least {1}; set both, for example {0} to 0.1, or neither",
    ),
    _rule(
        ("importance_low", "importance_high"),
        lambda c: (c.importance_low is None) != (c.importance_high is None),
        "both are the ends of one band; set both, for example to 0.7 and 6, or neither",
    ),
    # Rules about the optimiser.
    _rule(
        ("critic_warmup_iterations", "total_episodes", "num_total_batches"),
        lambda c: c.critic_warmup_iterations >= c.num_total_batches,
        "{0} must be less than {2}; lower {0} or raise {1}",
    ),
    *map(_too_slow, ("learning_rate", "value_learning_rate")),
    # Rules about the models.
    _rule(
        ("num_critic_epochs", "num_ppo_epochs", "value_model"),
        lambda c: (c.num_critic_epochs or math.inf) < (math.inf if c.value_model == "shared" else c.num_ppo_epochs),
        "{0} must be at least {1}, and needs a critic that is not shared; raise {0}, or leave out {0}",
    ),
    _clash(
        {"value_freeze": "attention", "value_model": "shared"},
        "the critic's attention is the policy's, which trains; set {1} to separate, or leave out {0}",
    ),
    _clash(
        {"value_freeze": "attention", "use_peft": True},
        "adapters train on weights that are frozen anyway; leave out {0}, and choose their layers by "
        "ppo.lora_target_modules",
    ),
    _rule(
        ("export_value_head", "value_model"),
        lambda c: c.export_value_head and c.value_model != "shared",
        "only the head of a shared trunk reads the policy's hidden states; set {1} to shared, or leave out {0}",
    ),
    _clash({"export": _CHANGED, "use_peft": False}, "{0} needs an adapter; set {1} to true, or leave out {0}"),
    _clash(
        {"export": "adapter", "export_value_head": True},
        "the value head is saved with the weights of a whole model; set {0} to merged, or leave out {1}",
    ),
    _clash(
        {"export": "adapter", "load_in_4bit": True},
        "the adapter is trained on 4-bit weights, but users would load it onto full-precision ones; unset one of them",
    ),
    _clash(
        {"load_in_4bit": True, "use_peft": False},
        "4-bit weights are frozen, so only adapters can train; set {1} to true, or leave out {0}",
    ),
    *(
        _clash(
            {name: value, "dtype": "float64"},
            "bitsandbytes does not support float64; leave out {0}, or set {1} to float32 or bfloat16",
        )
        for name, value in {"load_in_4bit": True, "optim": "adamw_8bit"}.items()
    ),
    _rule(
        ("lora_target_modules",),
        lambda c: not all(_modules(c)) or (len(_modules(c)) > 1 and any("all-linear" in name for name in _modules(c))),
        "{0} must be all-linear, all-linear+head, or comma-separated names of linear layers",
    ),
    _clash(
        {"offload_reference_policy": True, "use_peft": True},
        "the reference policy is the policy without its adapter and needs no extra memory; leave out {0}",
    ),
    _clash(
        {"offload_reward_model": True, "use_peft": True, "value_model": "reward_init"},
        "the critic is an adapter on the reward model's weights, so the weights must stay on the GPU; leave out {0}",
    ),
)

_GROUP_RULES: tuple[tuple[str, Mapping[str, object], str], ...] = (
    ("vllm", {"rollout_engine": {"static", "hf"}}, "only vLLM uses {0}; leave out {0}"),
    (
        "vllm.served",
        {"vllm_mode": "colocate", "rollout_engine": "vllm"},
        "a colocated vLLM has no server; set {1} to server, or leave out {0}",
    ),
    (
        "vllm.colocated",
        {"vllm_mode": "server", "rollout_engine": "vllm"},
        "a server gets this setting from its own command line; leave out {0}",
    ),
    (
        "adaptive_kl",
        {"kl_controller": "fixed"},
        "{0} belongs to the adaptive controller; set {1} to adaptive, or leave out {0}",
    ),
    (
        "clipping",
        {"importance_low": _CHANGED},
        "the loss that {1} asks for masks tokens, weighs them by their ratio and clips nothing; leave out {0}",
    ),
    ("lora", {"use_peft": False}, "{0} needs an adapter; set {1} to true, or leave out {0}"),
)
"""Rules about each changed setting of a group (`Use.group`) together with settings that have the given values."""


@cache
def _rules(config_class: type) -> tuple[Rule[PPOConfig], ...]:
    """Return all rules, with one for each setting of a group."""
    of_groups = (
        _clash({name: _CHANGED, **values}, why)
        for group, values, why in _GROUP_RULES
        for name in names_in_group(config_class, group)
    )
    return (*_RULES, *of_groups)


def problems(config: PPOConfig) -> list[str]:
    """Return one line for each broken rule; an empty list means that the settings fit together."""
    config_class: type = type(config)
    broken = [f"{rule.seen(config)}: {rule.meaning}" for rule in _rules(config_class) if rule.holds(config)]
    on_device = device_problems(config, config.device) if config.device in ("cpu", "cuda") else []
    return [*_indivisible(config), *broken, *on_device]


def device_problems(c: PPOConfig, device_type: str) -> Iterator[str]:
    """Yield one line for each setting that does not work on this type of device (`cpu` or `cuda`)."""
    if device_type != "cpu":
        return
    for name in names_in_group(type(c), "offloading"):
        if getattr(c, name):
            yield (
                f"ppo.{name}=true has no effect on the CPU (ppo.device={c.device}): all models are in host memory "
                "already; leave it out, or run on a GPU"
            )
    if c.dtype == "float16":
        yield (
            f"ppo.dtype=float16 needs a GPU (ppo.device={c.device}): accelerate has no loss scaling on a CPU; set "
            "float32, or bfloat16 if the processor supports it"
        )


def sharding_problems(c: PPOConfig) -> Iterator[str]:
    """Yield one line for each setting that does not work with FSDP2."""
    for values, reason in (
        ({"offload_reference_policy": True}, "each process holds only a shard of the model anyway"),
        ({"offload_reward_model": True}, "each process holds only a shard of the model anyway"),
        ({"compile": True}, "compiled layers would not gather their sharded weights"),
        ({"load_in_4bit": True}, "bitsandbytes' weights cannot be sharded"),
        ({"optim": "adamw_8bit"}, "bitsandbytes' optimiser moments cannot be sharded; set adamw_torch_fused"),
        ({"dtype": "float16"}, "loss scaling is not implemented for FSDP2; set bfloat16"),
        ({"rollout_engine": "vllm"}, "sending sharded weights to vLLM is not implemented; set static"),
        ({"kl_estimator": "full", "kl_in": "loss"}, "only a rollout gathers the reference policy; set k2"),
    ):
        if _are(values)(c):
            settings = " with ".join(f"ppo.{name}={_word(value)}" for name, value in values.items())
            yield f"{settings}: {reason}. Leave it out, or launch without FSDP2"


def _indivisible(c: PPOConfig) -> Iterator[str]:
    """Yield one line for each setting that does not divide the batch size, with the nearest batch sizes that it
    divides.
    """
    divisors = {"num_mini_batches": c.local_batch_size, "responses_per_prompt": c.batch_size}
    for divisor, size in divisors.items():
        n = getattr(c, divisor)
        if size % n:
            near = ", ".join(str(value) for value in (size - size % n, size - size % n + n) if value > 0)
            processes = f" x {c.world_size} processes" if size != c.local_batch_size else ""
            yield (
                f"ppo.{divisor}={n} does not divide the batch of {size} (ppo.per_device_train_batch_size "
                f"{c.per_device_train_batch_size} x ppo.gradient_accumulation_steps {c.gradient_accumulation_steps}"
                f"{processes}); nearest sizes that it divides: {near}"
            )


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
