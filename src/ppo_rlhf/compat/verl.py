"""Conversion of configurations of verl's PPO with a critic: `python -m verl.trainer.main_ppo`.

Names, defaults and effects of settings are taken from verl at commit 1dda039b (August 2026): `verl/trainer/config`,
`verl/trainer/ppo`, `verl/workers`. Names of 2025's releases are read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.core.errors import ConfigError

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
C, REWARD = "critic.", "reward."
RENAMED = {
    f"{A}ppo_epochs": ("ppo.num_ppo_epochs", 1),
    f"{A}clip_ratio_c": ("ppo.dual_clip", 3.0),
    f"{A}entropy_coeff": ("ppo.entropy_coef", 0.0),
    f"{A}loss_agg_mode": ("ppo.loss_aggregation", "token-mean"),
    f"{A}optim.lr": ("ppo.learning_rate", 1e-6),
    f"{C}optim.lr": ("ppo.value_learning_rate", 1e-5),
    f"{A}optim.weight_decay": ("ppo.weight_decay", 0.01),
    f"{A}optim.optimizer": ("ppo.optim", "AdamW"),
    f"{A}fsdp_config.dtype": ("ppo.dtype", "bfloat16"),
    f"{C}cliprange_value": ("ppo.cliprange_value", 0.5),
    f"{M}enable_gradient_checkpointing": ("ppo.gradient_checkpointing", True),
    f"{R}temperature": ("ppo.temperature", 1.0),
    f"{R}top_p": ("ppo.top_p", 1.0),
    f"{R}n": ("ppo.responses_per_prompt", 1),
    f"{R}ignore_eos": ("ppo.stop_token", False),
    "data.max_response_length": ("ppo.response_length", 512),
    "data.truncation": ("ppo.overlong_prompts", "error"),
    "algorithm.gamma": ("ppo.gamma", 1.0),
    "algorithm.lam": ("ppo.lam", 1.0),
    "trainer.device": ("ppo.device", "cuda"),
}
IF_GIVEN = {
    f"{M}trust_remote_code": "trust_remote_code",
    "data.seed": "seed",
    "trainer.max_actor_ckpt_to_keep": "ppo.save_total_limit",
}
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VALUES: dict[str, dict[Any, Any]] = {
    f"{A}loss_agg_mode": {
        "token-mean": "token_mean",
        "seq-mean-token-sum": "seq_mean_token_sum",
        "seq-mean-token-mean": "seq_mean_token_mean",
        "seq-mean-token-sum-norm": "token_sum_fixed_length",
    },
    f"{A}optim.optimizer": {"AdamW": "adamw_torch_fused", "AdamW8bit": "adamw_8bit"},
    f"{A}fsdp_config.dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    f"{A}kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    f"{R}ignore_eos": {True: "none", False: "eos"},
    "data.truncation": {"left": "truncate_left"},
    "trainer.device": {"cuda": "auto", "npu": "auto"},
}
ALWAYS = {
    "vf_coef": 1.0,  # the critic has its own optimiser, and its loss no weight
    "kl_in": "reward",
    "kl_controller": "fixed",
    "whiten_advantages": True,
    "whiten_rewards": False,
    "reward_clip": None,
    "reward_normalisation": "none",
    "missing_eos_penalty": None,
    "truncated_responses": "keep",
    "adam_epsilon": 1e-8,
}
DERIVED: dict[str, Any] = {
    f"{A}ppo_mini_batch_size": 256,
    f"{A}ppo_micro_batch_size": None,
    f"{A}ppo_micro_batch_size_per_gpu": None,
    f"{A}use_dynamic_bsz": False,
    f"{A}ppo_max_token_len_per_gpu": 16384,
    **dict.fromkeys((f"{A}clip_ratio", f"{A}clip_ratio_low", f"{A}clip_ratio_high"), 0.2),
    f"{A}use_kl_loss": False,
    f"{A}kl_loss_coef": 0.001,
    f"{A}kl_loss_type": "low_var_kl",
    f"{A}grad_clip": 1.0,
    f"{A}optim.clip_grad": 1.0,
    f"{A}optim.betas": [0.9, 0.999],
    f"{A}optim.lr_scheduler_type": "constant",
    f"{A}optim.lr_warmup_steps": -1,
    f"{A}optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.ref.fsdp_config.param_offload": False,
    f"{R}top_k": -1,
    **dict.fromkeys((f"{M}path", f"{M}lora_adapter_path", f"{C}model.path", f"{C}ppo_epochs")),
    **{f"{M}lora_rank": 0, f"{M}lora_alpha": 16, f"{M}target_modules": "all-linear"},
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    **dict.fromkeys(("data.train_files", "data.val_files")),
    **{"data.train_batch_size": 1024, "data.train_max_samples": -1, "data.prompt_key": "prompt"},
    "data.filter_overlong_prompts": False,
    **{f"{REWARD}reward_model.enable": False, f"{REWARD}reward_model.model_path": None},
    **{f"{REWARD}custom_reward_function.path": None, f"{REWARD}custom_reward_function.name": "compute_score"},
    **{"trainer.n_gpus_per_node": 8, "trainer.nnodes": 1, "trainer.total_epochs": 30},
    **{"trainer.total_training_steps": None, "trainer.critic_warmup": 0},
    **dict.fromkeys(("trainer.save_freq", "trainer.test_freq"), -1),
}
_FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")
OLD = {
    **{name: f"{REWARD}{name}" for name in (*_FUNCTION, "reward_manager.name", "sandbox_fusion.url")},
    "reward_model.enable": f"{REWARD}reward_model.enable",
    "reward_model.model.path": f"{REWARD}reward_model.model_path",
    "reward_model.reward_manager": f"{REWARD}reward_manager.name",
    "reward_model.sandbox_fusion.url": f"{REWARD}sandbox_fusion.url",
    f"{A}optim.warmup_style": f"{A}optim.lr_scheduler_type",
    f"{C}optim.warmup_style": f"{C}optim.lr_scheduler_type",
}
"""Names of settings in 2025, with the current names."""
SWITCHES = {
    **{f"{A}policy_loss.loss_mode": "vanilla", f"{A}optim.min_lr_ratio": 0.0, f"{A}optim.num_cycles": 0.5},
    **{f"{R}do_sample": True, f"{R}multi_turn.enable": False, "algorithm.use_pf_ppo": False, "data.shuffle": True},
    **{"algorithm.filter_groups.enable": False, "algorithm.rollout_correction.bypass_mode": False},
    **{f"{REWARD}reward_manager.name": "naive", "distillation.enabled": False, "trainer.val_only": False},
    **dict.fromkeys((f"{A}loss_scale_factor", f"{M}custom_chat_template", "data.custom_cls.path")),
    **dict.fromkeys(f"algorithm.rollout_correction.rollout_{kind}" for kind in ("is", "rs")),
}
"""Settings that change the algorithm, each with the value that means what this project does."""
LEFT = {
    f"{A}policy_loss.*": "the policy loss is PPO's clipped loss",
    f"{R}multi_turn.*": "ppo.environment sets what answers a turn",
    "algorithm.filter_groups.*": "ppo.drop_uniform_prompts leaves out groups whose rewards are equal",
    "algorithm.rollout_correction.*": "ppo.importance_cap limits the weights of tokens",
    f"{A}optim.min_lr_ratio {A}optim.num_cycles": "the cosine schedule is half a wave that ends at 0",
    f"{M}custom_chat_template": "the tokenizer's own chat template is used",
    f"{REWARD}reward_manager.name": "only the manager naive is known: the function's score of each response",
    f"{C}*": "policy and critic share the policy's settings, apart from ppo.value_learning_rate, ppo.num_critic_epochs "
    "and ppo.cliprange_value",
    f"{R}val_kwargs.* data.val_* trainer.val_* trainer.log_val*": "the group evaluation sets how the policy is "
    "evaluated",
    f"{R}* *reward_model.rollout.*": "responses come from this project's own sampler; ppo.rollout_engine=vllm takes "
    "vLLM",
    f"{A}fsdp_config.* actor_rollout_ref.ref.* *.megatron.* *.veomni* *strategy *ulysses_* *nccl_timeout ray_* "
    "trainer.ray_* trainer.use_* trainer.balance_batch": "the launcher and accelerate's configuration file set how "
    "processes share work (docs/scaling.md); weights that train are float32",
    "data.max_prompt_length": "prompts have no limit: ppo.overlong_prompts sets what happens to prompts that leave no "
    "room for a response in the model's context",
    "data.*": "the columns of the file reach reward functions unchanged; prompts are tokenised once, before training",
    f"{M}* {A}optim.*": "models and tokenizers are loaded unchanged, and AdamW has no further options",
    "trainer.logger": "metrics go to MLflow; ppo.report_to names further integrations",
    "trainer.default_* trainer.project_* trainer.experiment_* trainer.resume_* *.checkpoint.* *profiler*": "outputs, "
    "logs, checkpoints and tracking are set in conf/base: catalog_ppo.yml, mlflow.yml, ppo.save_interval",
    f"{REWARD}* reward_model.*": "rewards are set by reward_components; give arguments of a function in verl_reward.py",
}
REMARKS = (
    "verl decays all weights; here weight_decay applies to matrices only. verl's critic starts with a random value "
    "head; here the head starts at 0.",
)


def from_verl(settings: Mapping[str, Any], *, num_prompts: int | None = None) -> Conversion:
    """Convert a configuration of verl's PPO to this project's parameters.

    Args:
        settings: A composed configuration, nested or with dotted names (`actor_rollout_ref.actor.optim.lr`).
        num_prompts: Number of rows of the training data: the length of training is given in passes over the rows.

    Raises:
        ConfigError: The configuration is not composed, `algorithm.adv_estimator` is not gae, or batch sizes that verl
            also refuses.
    """
    given = _flat(settings)
    c = Conversion("verl's PPO", given, RENAMED, DERIVED, always=ALWAYS, if_given=IF_GIVEN, values=VALUES)
    if c["algorithm.adv_estimator"] != "gae":
        raise ConfigError(
            f"verl: algorithm.adv_estimator={c['algorithm.adv_estimator']!r} has no counterpart, because this project "
            "trains by PPO with a critic. Only gae can be converted."
        )
    c.carry_over("algorithm.adv_estimator")
    for name, off in SWITCHES.items():
        if c[name] in (off, None):
            c.carry_over(name)
        else:
            c.remarks.append(f"{name}={c[name]} is not carried over; a run here does what {off} does in verl.")
    _carry_models(c)
    _carry_reward(c)
    _carry_losses(c)
    _carry_files(c)
    _carry_sizes(c, num_prompts)
    _carry_rest(c)
    for name in c.given:  # settings of the critic that are the policy's
        policy = name.replace(f"{C}model.", M) if name.startswith(f"{C}model.") else name.replace(C, A, 1)
        if name.startswith(C) and c.given[name] == c[policy]:
            c.carry_over(name)
    return c.finish(LEFT, *REMARKS)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by dotted and current names, with references to other settings (`${data.seed}`) resolved."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                add(f"{prefix}{key}.", value)
            elif key != "_target_":
                flat[f"{prefix}{key}"] = value

    if "defaults" in settings:
        raise ConfigError("verl: this file has `defaults`, so it is not composed; convert what `--cfg job` prints.")
    add("", {key: value for key, value in settings.items() if key != "hydra"})
    resolved = {name: _resolved(name, value, flat) for name, value in flat.items()}
    new = {name: value for name, value in resolved.items() if name not in OLD}
    return new | {OLD[name]: value for name, value in resolved.items() if name in OLD and value is not None}


def _resolved(name: str, value: Any, flat: Mapping[str, Any], depth: int = 0) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value
    reference = re.fullmatch(r"\$\{(?:oc\.select:)?\s*(\.?[\w.]+)\s*(?:,\s*([\w.+-]*|\[\]))?\}", value)
    if reference and depth < 5:
        named = reference[1]
        target = f"{name.rpartition('.')[0]}{named}" if named.startswith(".") else named
        if target in flat:
            return _resolved(target, flat[target], flat, depth + 1)
        if reference[2] is not None:
            return yaml.safe_load(reference[2])
    if name in RENAMED or name in DERIVED:
        raise ConfigError(f"verl: {name}={value} is not resolved; convert what `--cfg job --resolve` prints.")
    return value


def _carry_models(c: Conversion) -> None:
    if arguments.carry_model(c, "sft_model_path", f"{M}path", f"{M}lora_adapter_path"):
        c.remarks.append(arguments.ADAPTER.format("verl"))
    path, critic, reward = (c[name] for name in (f"{M}path", f"{C}model.path", f"{REWARD}reward_model.model_path"))
    uses_model = c.flag(f"{REWARD}reward_model.enable") and c[f"{REWARD}custom_reward_function.path"] is None
    value_model = "reward_init" if uses_model and critic is not None and critic == reward else "separate"
    c.carry("ppo.value_model", f"{C}model.path", value=value_model)
    if value_model == "separate" and critic != path and critic is not None:
        why = "the critic starts from the policy's weights (ppo.value_model=separate), the reward model's (reward_init)"
        c.leave(f"{why} or a stored critic's (pretrained)", f"{C}model.path")
    rank = int(c.checked(f"{M}lora_rank", Annotated[int, Field(ge=0)]))
    c.carry("ppo.use_peft", f"{M}lora_rank", value=rank > 0)
    arguments.carry_lora(c, f"{M}lora_rank", f"{M}lora_alpha", f"{M}target_modules", DERIVED[f"{M}lora_alpha"])
    offload = "actor_rollout_ref.ref.fsdp_config.param_offload"
    if not rank and c.flag(offload):
        c.carry("ppo.offload_reference_policy", offload)
    else:
        c.carry_over(offload)


def _carry_reward(c: Conversion) -> None:
    model, function = f"{REWARD}reward_model.", f"{REWARD}custom_reward_function."
    if c[f"{function}path"] is None and c.flag(f"{model}enable"):
        if c[f"{model}model_path"] is not None:
            c.carry("reward_model_path", f"{model}model_path", value=c[f"{model}model_path"])
        c.carry_over(f"{model}enable")
        return
    value = [{"type": "function", "function": "verl_reward:score"}]
    c.carry("reward_components", f"{function}path", f"{function}name", value=value)
    c.leave("the reward is a function", f"{model}model_path")
    c.carry_over(f"{model}enable")
    if c[f"{function}path"] is None:
        what = "default_compute_score, verl's rules by data_source"
    else:
        what = f"{c[f'{function}name']} of {c[f'{function}path']}"
    c.remarks.append(
        f"The reward is {what}: copy verl_reward.py from docs/converting.md, section verl, into the project's "
        "directory; it calls the function for each response."
    )
    if c.flag(f"{model}enable"):
        c.leave("verl's function may ask the reward model's server; here it gets no address", f"{model}enable")


def _carry_losses(c: Conversion) -> None:
    """Carry over clipping, the KL penalty, and how token losses become one number."""
    both = c[f"{A}clip_ratio"]
    low, high = (both if c[name] is None else c[name] for name in (f"{A}clip_ratio_low", f"{A}clip_ratio_high"))
    is_read = None in (c[f"{A}clip_ratio_low"], c[f"{A}clip_ratio_high"])
    ratio = (f"{A}clip_ratio",) if is_read else ()
    c.carry("ppo.cliprange", f"{A}clip_ratio_low", *ratio, value=low, otherwise=0.2)
    c.carry("ppo.cliprange_high", f"{A}clip_ratio_high", *ratio, value=high, otherwise=0.2)
    if not is_read:
        c.leave("verl reads clip_ratio_low and clip_ratio_high, which are 0.2 by default", f"{A}clip_ratio")
    in_loss, in_reward = c.flag(f"{A}use_kl_loss"), c.flag("algorithm.use_kl_in_reward")
    if not in_loss and not in_reward:
        c.carry("ppo.kl_coef", "algorithm.use_kl_in_reward", f"{A}use_kl_loss", value=0.0)
        return
    c.carry_over("algorithm.use_kl_in_reward", f"{A}use_kl_loss")
    if in_loss:
        c.carry("ppo.kl_coef", f"{A}kl_loss_coef")
        c.carry("ppo.kl_estimator", kind := f"{A}kl_loss_type")
        if c.ours(kind) == "k1":
            c.leave("k1 in the loss has no gradient of the KL; k2 has", kind)
            c.write("ppo.kl_estimator", "k2", kind)
        c.write("ppo.kl_in", "loss", f"{A}use_kl_loss")
        if in_reward:
            why = "the KL is either in the reward or in the loss; here it is in the loss"
            c.leave(why, "algorithm.use_kl_in_reward")
        return
    control = "algorithm.kl_ctrl."
    c.carry("ppo.kl_coef", f"{control}kl_coef")
    c.carry("ppo.kl_estimator", "algorithm.kl_penalty")
    c.carry("ppo.kl_controller", f"{control}type")
    if c[f"{control}type"] == "adaptive":
        c.carry("ppo.kl_horizon", f"{control}horizon")
        why = "verl's target is in nats per token, here ppo.kl_target is in nats per response: set it to their product"
        c.leave(f"{why} with the mean length", f"{control}target_kl")
        c.remarks.append(
            f"{control}target_kl={c[f'{control}target_kl']} is not carried over: {why} with the mean length."
        )


def _carry_files(c: Conversion) -> None:
    """Carry over the prompts if they are one Parquet file, all of whose rows are used."""
    is_plain = c["data.prompt_key"] == "prompt" and int(c.checked("data.train_max_samples", int)) < 1
    c.carry_over("data.prompt_key", "data.train_max_samples")
    for setting, target in {"train_files": "prompts_path", "val_files": "evaluation_prompts_path"}.items():
        files = arguments.names_of(c[f"data.{setting}"])
        if is_plain and len(files) == 1:
            c.carry(target, f"data.{setting}", value=files[0])
        else:
            why = f"set {target} to one file that has the rows, with the prompts in the column prompt"
            c.leave(why, f"data.{setting}", *(() if is_plain else ("data.prompt_key", "data.train_max_samples")))


def _carry_sizes(c: Conversion, rows: int | None) -> None:
    """Carry over the batch sizes, which count prompts of all processes in verl, and the length of training.

    An iteration has train_batch_size x n responses, an optimiser step ppo_mini_batch_size x n. A pass leaves out the
    prompts that do not fill an iteration.
    """
    prompts, mini, n = c.count("data.train_batch_size"), c.count(f"{A}ppo_mini_batch_size"), c.count(f"{R}n")
    c.processes = processes = c.count("trainer.n_gpus_per_node") * c.count("trainer.nnodes")
    c.carry_over("trainer.n_gpus_per_node", "trainer.nnodes")
    if prompts % mini or mini * n % processes:
        raise ConfigError(
            f"{c.source}: data.train_batch_size={prompts} must be a multiple of ppo_mini_batch_size={mini}, and "
            f"ppo_mini_batch_size x n = {mini * n} of the {processes} processes; change one of them."
        )
    local, micro, setting = mini * n // processes, mini * n // processes, f"{A}ppo_mini_batch_size"
    per_gpu, total = f"{A}ppo_micro_batch_size_per_gpu", f"{A}ppo_micro_batch_size"
    if c.flag(f"{A}use_dynamic_bsz"):
        c.carry("ppo.max_tokens_per_micro_batch", f"{A}ppo_max_token_len_per_gpu", f"{A}use_dynamic_bsz")
    elif c[per_gpu] is not None:
        micro, setting = c.count(per_gpu), per_gpu
    elif c[total] is not None:
        micro, setting = max(1, c.count(total) // processes), total
    if local % micro:
        raise ConfigError(
            f"{c.source}: {setting}={micro} does not divide the {local} responses of a process's minibatch, which verl "
            "refuses too; change one of them."
        )
    c.carry("ppo.per_device_train_batch_size", setting, value=micro)
    c.carry("ppo.gradient_accumulation_steps", "data.train_batch_size", value=prompts * n // processes // micro)
    c.carry("ppo.num_mini_batches", f"{A}ppo_mini_batch_size", value=prompts // mini)
    iterations, steps = None, "trainer.total_training_steps"
    if rows is not None:
        iterations = rows // prompts * c.count("trainer.total_epochs")
        if not iterations:
            raise ConfigError(
                f"{c.source}: {rows} prompts do not fill one iteration of {prompts}; lower train_batch_size."
            )
    if c[steps] is not None:
        iterations = c.count(steps) if iterations is None else min(iterations, c.count(steps))
    if iterations is None:
        arguments.leave_epochs(c, f", or {steps}", "trainer.total_epochs", steps)
    else:
        c.carry("ppo.total_episodes", "trainer.total_epochs", steps, value=iterations * prompts * n)
    # verl updates the policy from the step on whose number, counted from 1, is critic_warmup
    warmup = int(c.checked("trainer.critic_warmup", Annotated[int, Field(ge=0)]))
    c.carry("ppo.critic_warmup_iterations", "trainer.critic_warmup", value=max(0, warmup - 1))
    kind, number, share = (
        f"{A}optim.{name}" for name in ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio")
    )
    ratio = float(c.checked(share, Annotated[float, Field(ge=0.0, lt=1.0)]))
    warms = ratio > 0 or int(c.checked(number, int | None) or 0) > 0
    constant = "constant_with_warmup" if warms else "constant"
    schedule = constant if c[kind] == "constant" else c[kind]
    c.carry("ppo.lr_scheduler_type", kind, value=schedule, otherwise=constant)
    arguments.carry_warmup(c, iterations, number=number, share=share)


def _carry_rest(c: Conversion) -> None:
    clips = [c[name] for name in (f"{A}optim.clip_grad", f"{A}grad_clip") if c[name] != 1.0]
    c.carry("ppo.max_grad_norm", f"{A}optim.clip_grad", f"{A}grad_clip", value=(*clips, 1.0)[0], otherwise=1.0)
    beta1, beta2 = c.checked(f"{A}optim.betas", tuple[float, float])
    c.carry("ppo.adam_beta1", f"{A}optim.betas", value=beta1)
    c.carry("ppo.adam_beta2", f"{A}optim.betas", value=beta2)
    c.carry("ppo.top_k", f"{R}top_k", value=max(0, int(c.checked(f"{R}top_k", int))))
    if c.flag("data.filter_overlong_prompts"):
        c.carry("ppo.overlong_prompts", "data.filter_overlong_prompts", value="drop")
    c.carry_over("data.filter_overlong_prompts")
    epochs = c[f"{C}ppo_epochs"]
    if epochs is not None and c.count(f"{C}ppo_epochs") < c.count(f"{A}ppo_epochs"):
        c.leave("the critic trains for at least as many epochs as the policy", f"{C}ppo_epochs")
    elif epochs is not None:
        c.carry("ppo.num_critic_epochs", f"{C}ppo_epochs")
    for setting, target in {"save_freq": "save_interval", "test_freq": "eval_interval"}.items():
        if int(c.checked(f"trainer.{setting}", int)) > 0:
            c.carry(f"ppo.{target}", f"trainer.{setting}")
        else:
            c.leave(f"it is never done there; ppo.{target} sets how often it is done here", f"trainer.{setting}")
    prefix = "data.apply_chat_template_kwargs."
    if kwargs := {name.removeprefix(prefix): value for name, value in c.given.items() if name.startswith(prefix)}:
        c.carry("chat_template_kwargs", *(prefix + name for name in kwargs), value=kwargs)
