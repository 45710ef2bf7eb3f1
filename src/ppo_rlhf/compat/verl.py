"""Conversion of configurations of verl's PPO with a critic: `python -m verl.trainer.main_ppo`.

Names, defaults and effects of settings are taken from verl at commit 1dda039b (August 2026): `verl/trainer/config`,
`verl/trainer/ppo`, `verl/workers`. Names of 2025's releases are read too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.rows import AFTER_FIRST
from ppo_rlhf.compat.sources import parsed
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.sources import load_table

NAMES = (("verl.trainer.main_ppo",), ("main_ppo.py",))
"""The command, as scripts call it."""
A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
C, REWARD = "critic.", "reward."
PPO = {
    f"{A}ppo_epochs": ("ppo.num_ppo_epochs", 1),
    f"{A}clip_ratio_c": ("ppo.dual_clip", 3.0),
    f"{A}entropy_coeff": ("ppo.entropy_coef", 0.0),
    f"{A}optim.lr": ("ppo.learning_rate", 1e-6),
    f"{C}optim.lr": ("ppo.value_learning_rate", 1e-5),
    f"{A}optim.weight_decay": ("ppo.weight_decay", 0.01),
    f"{C}cliprange_value": ("ppo.cliprange_value", 0.5),
    f"{M}enable_gradient_checkpointing": ("ppo.gradient_checkpointing", True),
    f"{R}temperature": ("ppo.temperature", 1.0),
    f"{R}top_p": ("ppo.top_p", 1.0),
    f"{R}n": ("ppo.responses_per_prompt", 1),
    "data.max_response_length": ("ppo.response_length", 512),
    "algorithm.gamma": ("ppo.gamma", 1.0),
    "algorithm.lam": ("ppo.lam", 1.0),
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
DERIVED = {
    f"{A}ppo_mini_batch_size": 256,
    f"{A}ppo_micro_batch_size": None,
    f"{A}ppo_micro_batch_size_per_gpu": None,
    f"{A}use_dynamic_bsz": False,
    f"{A}ppo_max_token_len_per_gpu": 16384,
    f"{A}clip_ratio": 0.2,
    f"{A}clip_ratio_low": 0.2,
    f"{A}clip_ratio_high": 0.2,
    f"{A}loss_agg_mode": "token-mean",
    f"{A}use_kl_loss": False,
    f"{A}kl_loss_coef": 0.001,
    f"{A}kl_loss_type": "low_var_kl",
    f"{A}grad_clip": 1.0,
    f"{A}optim.clip_grad": 1.0,
    f"{A}optim.betas": [0.9, 0.999],
    f"{A}optim.optimizer": "AdamW",
    f"{A}optim.lr_scheduler_type": "constant",
    f"{A}optim.lr_warmup_steps": -1,
    f"{A}optim.lr_warmup_steps_ratio": 0.0,
    f"{A}fsdp_config.dtype": "bfloat16",
    "actor_rollout_ref.ref.fsdp_config.param_offload": False,
    f"{R}top_k": -1,
    f"{R}ignore_eos": False,
    f"{M}path": None,
    f"{M}lora_rank": 0,
    f"{M}lora_alpha": 16,
    f"{M}target_modules": "all-linear",
    f"{M}lora_adapter_path": None,
    f"{M}trust_remote_code": False,
    f"{C}model.path": None,
    f"{C}ppo_epochs": None,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "data.train_files": None,
    "data.val_files": None,
    "data.train_batch_size": 1024,
    "data.train_max_samples": -1,
    "data.prompt_key": "prompt",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.seed": None,
    f"{REWARD}reward_model.enable": False,
    f"{REWARD}reward_model.model_path": None,
    f"{REWARD}custom_reward_function.path": None,
    f"{REWARD}custom_reward_function.name": "compute_score",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.critic_warmup": 0,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.device": "cuda",
}
MODELS = (f"{M}path", f"{M}lora_adapter_path", f"{C}model.path", f"{REWARD}reward_model.model_path")
"""Settings that name a model, or an adapter."""
OLD = {
    "custom_reward_function.path": f"{REWARD}custom_reward_function.path",
    "custom_reward_function.name": f"{REWARD}custom_reward_function.name",
    "reward_model.enable": f"{REWARD}reward_model.enable",
    "reward_model.model.path": f"{REWARD}reward_model.model_path",
    "reward_model.reward_manager": f"{REWARD}reward_manager.name",
    "reward_manager.name": f"{REWARD}reward_manager.name",
    "reward_model.sandbox_fusion.url": f"{REWARD}sandbox_fusion.url",
    "sandbox_fusion.url": f"{REWARD}sandbox_fusion.url",
    f"{A}optim.warmup_style": f"{A}optim.lr_scheduler_type",
    f"{C}optim.warmup_style": f"{C}optim.lr_scheduler_type",
}
"""Names of settings in 2025, with the current names."""
_NO_PART = "PPO here has no such step"
SWITCHES = {
    f"{A}policy_loss.loss_mode": ("vanilla", "the policy loss is PPO's clipped loss"),
    f"{A}loss_scale_factor": (None, "token_sum_fixed_length divides by ppo.response_length"),
    f"{A}optim.min_lr_ratio": (0.0, "the cosine schedule ends at 0"),
    f"{A}optim.num_cycles": (0.5, "the cosine schedule is half a wave"),
    f"{R}do_sample": (True, "PPO needs responses that are sampled"),
    f"{R}multi_turn.enable": (False, "ppo.environment sets what answers a turn"),
    f"{M}exclude_modules": (None, "name the layers that get an adapter in ppo.lora_target_modules"),
    f"{M}custom_chat_template": (None, "the tokenizer's own chat template is used"),
    f"{M}external_lib": (None, "models are loaded by transformers"),
    f"{C}enable": (None, "PPO here always has a critic"),
    "algorithm.use_pf_ppo": (False, _NO_PART),
    "algorithm.filter_groups.enable": (False, "ppo.drop_uniform_prompts does so"),
    "algorithm.rollout_correction.rollout_is": (None, "ppo.importance_cap weights tokens so"),
    "algorithm.rollout_correction.rollout_rs": (None, _NO_PART),
    "algorithm.rollout_correction.bypass_mode": (False, _NO_PART),
    "data.custom_cls.path": (None, "write the rows as verl's Parquet files"),
    "data.shuffle": (True, "prompts are shuffled in each pass"),
    "distillation.enabled": (False, _NO_PART),
    f"{REWARD}reward_manager.name": ("naive", "only the manager naive is known: the function's score of each response"),
    f"{REWARD}sandbox_fusion.url": (None, "call the sandbox in your own reward function"),
    "trainer.val_only": (False, "kedro run --pipelines evaluation does so"),
}
"""Settings that change the algorithm, each with the value that means what this project does, and what to do."""
AS_ACTOR = {
    f"{C}ppo_mini_batch_size": (f"{A}ppo_mini_batch_size", None),
    f"{C}loss_agg_mode": (f"{A}loss_agg_mode", None),
    f"{C}optim.weight_decay": (f"{A}optim.weight_decay", 0.01),
    f"{C}optim.betas": (f"{A}optim.betas", [0.9, 0.999]),
    f"{C}optim.lr_scheduler_type": (f"{A}optim.lr_scheduler_type", "constant"),
    f"{C}optim.lr_warmup_steps": (f"{A}optim.lr_warmup_steps", -1),
    f"{C}optim.lr_warmup_steps_ratio": (f"{A}optim.lr_warmup_steps_ratio", 0.0),
    f"{C}model.enable_gradient_checkpointing": (f"{M}enable_gradient_checkpointing", True),
    f"{C}model.lora_rank": (f"{M}lora_rank", 0),
    f"{C}grad_clip": (f"{A}grad_clip", 1.0),
    f"{C}optim.clip_grad": (f"{A}optim.clip_grad", 1.0),
}
"""Settings of the critic, each with the policy's setting, which counts for both here, and with the default; None: the
policy's value."""
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("k1", "k2", "k3", "k3+")}
_LOSSES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "token_sum_fixed_length",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OPTIMISERS = {"AdamW": "adamw_torch_fused", "AdamW8bit": "adamw_8bit"}
LEFT = {
    "*profiler* *.prometheus.* *.trace.*": "profiling and traces are not part of a run here",
    f"{R}val_kwargs.* data.val_* data.validation_* trainer.val_* trainer.log_val* trainer.validation*": "the group "
    "evaluation sets how the policy is evaluated",
    f"{R}log_prob_* actor_rollout_ref.ref.log_prob_* {C}*micro_batch_size* {C}*_max_token_len_per_gpu "
    f"{C}use_dynamic_bsz {A}*_infer_*": "the device takes as many responses as fit into its memory; "
    "ppo.per_device_train_batch_size counts for policy and critic",
    f"{A}shuffle {C}shuffle": "each epoch draws its minibatches anew",
    f"{R}* reward_model.rollout.* {REWARD}reward_model.rollout.*": "responses come from this project's own sampler; "
    "ppo.rollout_engine=vllm takes vLLM",
    f"{A}fsdp_config.* actor_rollout_ref.ref.* {C}model.fsdp_config.* {C}fsdp.* {C}fsdp_config.* *.megatron.* "
    "*.veomni* *strategy *ulysses_* reward_model.model.fsdp_config.* actor_rollout_ref.nccl_timeout "
    "trainer.balance_batch actor_rollout_ref.hybrid_engine ray_* trainer.ray_* trainer.use_* trainer.v1.* "
    "transfer_queue.* skip.*": "the "
    "launcher and accelerate's configuration file set how processes share work (docs/scaling.md); weights that train "
    "are float32",
    "*use_remove_padding *use_liger *use_fused_kernels *fused_kernel* *use_torch_compile *use_shm *tiled_mlp* *mtp* "
    "*entropy_* *pad_to_length* *enable_activation_offload *qat* *zero_indexed_step *use_prefix_grouper": "this "
    "project chooses kernels itself, and needs no padding",
    "data.max_prompt_length": "prompts have no limit: ppo.overlong_prompts sets what happens to prompts that leave no "
    "room for a response in the model's context",
    "data.*": "the columns of the file reach reward functions unchanged; prompts are tokenised once, before training",
    f"{M}* {C}model.* {C}optim.* {A}optim.*": "models and tokenizers are loaded unchanged, and AdamW has no "
    "further options",
    "trainer.logger": "metrics go to MLflow; ppo.report_to names further integrations",
    "trainer.* *.checkpoint.* *checkpoint_engine* global_profiler.*": "outputs, logs, checkpoints and tracking are set "
    "in conf/base: catalog_ppo.yml, mlflow.yml, ppo.save_interval",
    f"{REWARD}* reward_model.* reward_manager.* custom_reward_function.* sandbox_fusion.*": "rewards are set by "
    "reward_components; give arguments of a function in verl_reward.py",
    f"{A}policy_loss.* {A}tau_* algorithm.pf_ppo.* algorithm.rollout_correction.* algorithm.filter_groups.* "
    "algorithm.norm_adv_by_std_in_grpo distillation.* *router_replay.* *.freeze_vision_tower *dro_* *calculate_* "
    "*sum_pi_squared* *rollout_n *data_loader_seed": "it belongs to an option that is off, or is computed",
}
REMARKS = (
    "verl decays all weights; here weight_decay applies to matrices only. verl's critic starts with a random value "
    "head; here the head starts at 0.",
)


def from_verl(
    settings: Mapping[str, Any], *, num_prompts: int | None = None, folders: Sequence[Path] = ()
) -> Conversion:
    """Convert a configuration of verl's PPO to this project's parameters.

    Args:
        settings: A composed configuration, nested or with dotted names (`actor_rollout_ref.actor.optim.lr`).
        num_prompts: Number of rows of the training data, needed if the files are not read: the length of training is
            given in passes over the rows.
        folders: Folders in which relative paths are searched, in the order of the sequence. Without folders no files
            are read.

    Raises:
        ConfigError: `algorithm.adv_estimator` is not gae, or batch sizes that verl also refuses.
        DataError: A file cannot be loaded.
    """
    given = _flat(settings)
    for name in MODELS:
        if name in given:
            given[name] = _place(given[name], folders)
    c = Conversion("verl's PPO", given, PPO, DERIVED | {name: off for name, (off, _) in SWITCHES.items()})
    if c["algorithm.adv_estimator"] != "gae":
        raise ConfigError(
            f"verl: algorithm.adv_estimator={c['algorithm.adv_estimator']!r} has no counterpart, because this project "
            "trains by PPO with a critic. Only gae can be converted."
        )
    c.carry_over("algorithm.adv_estimator")
    arguments.carry_always(c, ALWAYS)
    for name, (off, why) in SWITCHES.items():
        if c[name] == off:
            c.carry_over(name)
        else:
            c.leave(f"{name}={c[name]}: {why}", name)
    _carry_models(c)
    _carry_reward(c)
    _carry_losses(c)
    rows = _carry_files(c, "prompts_path", "data.train_files", folders)
    _carry_files(c, "evaluation_prompts_path", "data.val_files", folders)
    _carry_sizes(c, num_prompts if rows is None else rows)
    _carry_rest(c)
    for critic, (actor, default) in AS_ACTOR.items():
        value = c.given.get(critic, c[actor] if default is None else default)
        if value == c[actor]:
            c.carry_over(critic)
        else:
            why = f"policy and critic share {actor}={c[actor]}"
            c.leave(why, critic)
            if critic not in c.given:
                c.remarks.append(f"{critic} is {value} in verl; here {why}.")
    return c.finish(LEFT, *REMARKS)


def read_overrides(words: Sequence[str], where: str) -> dict[str, Any]:
    """Return the settings of Hydra's overrides (`name=value`, with + or ++ before it).

    Raises:
        ConfigError: A word is no override, a setting is given twice, or the command names another configuration.
    """
    settings: dict[str, Any] = {}
    for word in words:
        name, is_given, text = word.partition("=")
        if name == "--config-path" or (name == "--config-name" and text.removesuffix(".yaml") == "ppo_trainer"):
            continue
        if not is_given or not re.fullmatch(r"\+{0,2}\w+(\.[\w-]+)+", name):
            raise ConfigError(
                f"{where}: `{word[:60]}` is no override of verl's ppo_trainer. Add `--cfg job` to the command, and "
                "convert what it prints."
            )
        name = name.lstrip("+")
        if name in settings:
            raise ConfigError(f"{where}: {name} is given twice. Keep one of the two.")
        settings[name] = parsed(text, f"{where}: {name}") if text[:1] in "[{'\"" else _scalar(text)
    return settings


def _scalar(text: Any) -> Any:
    words = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
    if not isinstance(text, str) or text in words:
        return words[text] if isinstance(text, str) else text
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+\.?([eE][-+]?[0-9]+)?", text) else text


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by dotted and current names, with references to other settings (`${data.seed}`) resolved."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping) and (value or prefix):
                add(f"{prefix}{key}.", value)
            elif key != "_target_":
                flat[f"{prefix}{key}"] = _scalar(value)

    if "defaults" in settings:
        raise ConfigError("verl: this file has `defaults`, so it is not composed; convert what `--cfg job` prints.")
    add("", {key: value for key, value in settings.items() if key != "hydra"})
    known = {*PPO, *DERIVED, *SWITCHES, *AS_ACTOR}
    resolved = {name: _resolved(name, value, flat) for name, value in flat.items()}
    new = {name: value for name, value in resolved.items() if name not in OLD and (value is not None or name in known)}
    return new | {OLD[name]: value for name, value in resolved.items() if name in OLD and value is not None}


def _resolved(name: str, value: Any, flat: Mapping[str, Any], depth: int = 0) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value
    reference = re.fullmatch(r"\$\{(?:oc\.select:)?\s*(\.?[\w.]+)\s*(?:,\s*(.*))?\}", value)
    if reference and depth < 5:
        named = reference[1]
        target = f"{name.rpartition('.')[0]}{named}" if named.startswith(".") else named
        if target in flat:
            return _resolved(target, flat[target], flat, depth + 1)
        if reference[2] is not None and "${" not in reference[2]:
            return _scalar(reference[2].strip("\"'"))
    if name in {*PPO, *DERIVED}:
        raise ConfigError(f"verl: {name}={value} needs Hydra; write its value.")
    return value


def _carry_models(c: Conversion) -> None:
    if arguments.carry_model(c, "sft_model_path", f"{M}path", f"{M}lora_adapter_path"):
        c.remarks.append(arguments.ADAPTER.format("verl"))
    path, critic, reward = (c[name] for name in (f"{M}path", f"{C}model.path", f"{REWARD}reward_model.model_path"))
    uses_model = c.flag(f"{REWARD}reward_model.enable") and c[f"{REWARD}custom_reward_function.path"] is None
    value_model = "reward_init" if uses_model and critic is not None and critic == reward else "separate"
    c.carry("ppo.value_model", f"{C}model.path", value=value_model)
    if value_model == "separate" and critic != path and critic is not None:
        why = (
            "the critic starts from the policy's weights (ppo.value_model=separate), the reward model's (reward_init) "
        )
        c.leave(f"{why}or a stored critic's (pretrained)", f"{C}model.path")
    if c[f"{M}trust_remote_code"] is not None and f"{M}trust_remote_code" in c.given:
        c.carry("trust_remote_code", f"{M}trust_remote_code")
    rank = int(c.checked(f"{M}lora_rank", Annotated[int, Field(ge=0)]))
    names = f"{M}lora_rank", f"{M}lora_rank", f"{M}lora_alpha", f"{M}target_modules"
    arguments.carry_lora(c, *names, uses=rank > 0)
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
    mode = f"{A}loss_agg_mode"
    c.carry("ppo.loss_aggregation", mode, value=arguments.renamed(c[mode], _LOSSES), otherwise="token_mean")
    in_loss, in_reward = c.flag(f"{A}use_kl_loss"), c.flag("algorithm.use_kl_in_reward")
    kinds = {
        True: (f"{A}kl_loss_coef", f"{A}kl_loss_type"),
        False: ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    }
    coefficient, kind = kinds[in_loss]
    if not in_loss and not in_reward:
        c.carry("ppo.kl_coef", "algorithm.use_kl_in_reward", f"{A}use_kl_loss", value=0.0)
        return
    c.carry_over("algorithm.use_kl_in_reward", f"{A}use_kl_loss")
    c.carry("ppo.kl_coef", coefficient)
    estimator = arguments.renamed(c[kind], _KL)
    if in_loss and estimator == "k1":
        c.leave("k1 in the loss has no gradient of the KL; k2 has", kind)
        c.write("ppo.kl_estimator", "k2", kind)
    else:
        c.carry("ppo.kl_estimator", kind, value=estimator, otherwise="k3" if in_loss else "k1")
    if in_loss:
        c.write("ppo.kl_in", "loss", f"{A}use_kl_loss")
        if in_reward:
            c.leave(
                "the KL is either in the reward or in the loss; here it is in the loss", "algorithm.use_kl_in_reward"
            )
        return
    control = "algorithm.kl_ctrl."
    c.carry("ppo.kl_controller", f"{control}type")
    if c[f"{control}type"] == "adaptive":
        c.carry("ppo.kl_horizon", f"{control}horizon")
        why = "verl's target is in nats per token, here ppo.kl_target is in nats per response: set it to their product"
        c.leave(f"{why} with the mean length", f"{control}target_kl")
        c.remarks.append(
            f"{control}target_kl={c[f'{control}target_kl']} is not carried over: {why} with the mean length."
        )


def _carry_files(c: Conversion, target: str, setting: str, folders: Sequence[Path]) -> int | None:
    """Carry over the Parquet files of one setting, and return their number of rows; None: a file is not there.

    The rows of several files are written to one file; a single file is read where it is.
    """
    files = [_place(each, folders) for each in arguments.names_of(c[setting])]
    if not files or not folders:
        c.leave(f"set {target}", setting)
        return None
    if absent := next((file for file in files if not Path(file).is_file()), None):
        c.leave(f"{absent} is not a file here or above the source; set {target}", setting)
        return None
    maximum = int(c.checked("data.train_max_samples", int)) if target == "prompts_path" else -1
    key = str(c["data.prompt_key"])
    is_plain = len(files) == 1 and key == "prompt" and maximum < 1
    number = 0
    for file in files:
        table = load_table(file)
        if key not in table.column_names:
            raise ConfigError(f"{file} has no column {key} (data.prompt_key).")
        limit = len(table) if maximum < 1 else min(len(table), maximum - number)
        if is_plain:
            c.counts.append(f"{file}: {limit} of {limit} rows.")
        else:
            rows = [{"prompt": row.pop(key), **row} for row in map(dict, table.select(range(limit)))]
            c.add_table(target, file, rows, len(table), +Counter({AFTER_FIRST: len(table) - limit}))
        number += limit
    if is_plain:
        c.carry(target, setting, value=files[0])
    c.carry_over(setting, "data.train_max_samples", "data.prompt_key")
    return number


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
    _carry_schedule(c, iterations)


def _carry_schedule(c: Conversion, iterations: int | None) -> None:
    kind, number, share = (
        f"{A}optim.{name}" for name in ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio")
    )
    steps = int(c.checked(number, int | None) or 0)
    ratio = float(c.checked(share, Annotated[float, Field(ge=0.0, lt=1.0)]))
    warms = steps > 0 or ratio > 0
    constant = "constant_with_warmup" if warms else "constant"
    c.carry("ppo.lr_scheduler_type", kind, value=arguments.renamed(c[kind], {"constant": constant}), otherwise=constant)
    arguments.carry_warmup_steps(c, iterations, steps, (number, share))


def _carry_rest(c: Conversion) -> None:
    clips = [c[name] for name in (f"{A}optim.clip_grad", f"{A}grad_clip") if c[name] != 1.0]
    c.carry(
        "ppo.max_grad_norm", f"{A}optim.clip_grad", f"{A}grad_clip", value=clips[0] if clips else 1.0, otherwise=1.0
    )
    beta1, beta2 = c.checked(f"{A}optim.betas", tuple[float, float])
    c.carry("ppo.adam_beta1", f"{A}optim.betas", value=beta1)
    c.carry("ppo.adam_beta2", f"{A}optim.betas", value=beta2)
    optimiser, dtype, k = f"{A}optim.optimizer", f"{A}fsdp_config.dtype", int(c.checked(f"{R}top_k", int))
    c.carry("ppo.optim", optimiser, value=arguments.renamed(c[optimiser], _OPTIMISERS), otherwise="adamw_torch_fused")
    c.carry("ppo.dtype", dtype, value=arguments.renamed(c[dtype], _DTYPES), otherwise="bfloat16")
    c.carry("ppo.top_k", f"{R}top_k", value=max(0, k))
    c.carry("ppo.stop_token", f"{R}ignore_eos", value="none" if c.flag(f"{R}ignore_eos") else "eos")
    cut = (
        "drop"
        if c.flag("data.filter_overlong_prompts")
        else arguments.renamed(c["data.truncation"], {"left": "truncate_left"})
    )
    c.carry("ppo.overlong_prompts", "data.truncation", "data.filter_overlong_prompts", value=cut, otherwise="error")
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
    if c["trainer.max_actor_ckpt_to_keep"] is not None:
        c.carry("ppo.save_total_limit", "trainer.max_actor_ckpt_to_keep")
    if c["data.seed"] is not None:
        c.carry("seed", "data.seed")
    device = "trainer.device"
    c.carry("ppo.device", device, value=arguments.renamed(c[device], {"cuda": "auto", "npu": "auto"}), otherwise="auto")
    kwargs = {n.removeprefix("data.apply_chat_template_kwargs."): n for n in c.given if n.startswith("data.apply_chat")}
    if kwargs := {key: name for key, name in kwargs.items() if "." not in key}:
        c.carry("chat_template_kwargs", *kwargs.values(), value={key: c.given[name] for key, name in kwargs.items()})


def _place(value: Any, folders: Sequence[Path]) -> Any:
    if value is None:
        return None
    text = str(value)
    return arguments.located(str(Path(text).expanduser()) if text.startswith("~") else text, folders)
