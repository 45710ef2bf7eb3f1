"""Conversion of configurations of ms-swift: `swift rlhf --rlhf_type ppo`.

Names, defaults and effects of settings are taken from ms-swift at commit 3602360a (August 2026): `swift/arguments`,
`swift/trainers/arguments.py`, `swift/pipelines/train/rlhf.py`. ms-swift's PPO trainer is TRL's last PPOTrainer.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.compat import arguments
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.rows import AFTER_FIRST, ALPACA, Table
from ppo_rlhf.compat.trl import LAST_REMARKS
from ppo_rlhf.core.errors import ConfigError, in_one_line
from ppo_rlhf.data.chats import ASSISTANT, SYSTEM, TOOLS, read_chat, with_system
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.models.directories import is_local

SAME = {  # settings that have the same name in ms-swift, TRL and PPOConfig
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "missing_eos_penalty": None,
    "temperature": 0.9,
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
}
PPO = {**{name: (f"ppo.{name}", default) for name, default in SAME.items()}, "seed": ("seed", 42)}
ALWAYS = {
    # ms-swift starts the critic from the reward model; with LoRA the critic has its own adapter on the reward model
    "value_model": "reward_init",
    "value_learning_rate": None,  # None: policy and critic share one optimiser and its learning rate
    "kl_controller": "fixed",
    "kl_estimator": "k1",
    "kl_in": "reward",
    "whiten_advantages": True,
    "stop_token": "eos",  # ms-swift stops a response at the end token of the chat template
}
DERIVED = {
    **dict.fromkeys(arguments.IF_GIVEN),
    "rlhf_type": "dpo",
    "learning_rate": None,
    "gradient_accumulation_steps": None,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "save_total_limit": None,
    "use_cpu": False,
    "torch_dtype": None,
    "bf16": None,
    "fp16": None,
    "response_length": None,
    "max_new_tokens": None,
    "max_completion_length": 512,
    "truncation_strategy": None,
    "tuner_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32,
    "target_modules": "all-linear",
    "quant_method": None,
    "quant_bits": None,
    "model": None,
    "model_revision": None,
    "adapters": None,
    "use_hf": False,
    "system": None,
    "reward_model": None,
    "reward_model_revision": None,
    "reward_adapters": None,
    "dataset": None,
    "columns": None,
    "enable_thinking": None,
}
OLD = {"train_type": "tuner_type", "sft_type": "tuner_type"}
"""Names of settings in ms-swift 2 and 3, with the current names."""
LEFT = {
    "template template_backend use_chat_template agent_template response_prefix reward_template preserve_thinking "
    "add_non_thinking_prefix disable_ignore_empty_think": "chats are rendered by the tokenizer's own chat template",
    "max_length max_model_len": "prompts have no limit: ppo.overlong_prompts sets what happens to prompts that "
    "leave no room for a response in the model's context",
    "top_k top_p": "ms-swift's PPO ignores this setting; here set ppo.top_k and ppo.top_p",
    "max_steps max_epochs": "ms-swift's PPO uses num_train_epochs",
    "num_sample_generations": "ppo.sample_interval sets how often responses are shown, in iterations",
    "ref_*": "the reference is always the policy that PPO starts from",
    "model_type reward_model_type task_type num_labels problem_type new_special_tokens rope_scaling local_repo_path "
    "init_strategy model_kwargs router_aux_loss_coef": "models and tokenizers are loaded unchanged",
    "bnb_4bit_* hqq_axis": "4-bit weights are always NF4 by bitsandbytes, doubly quantised",
    "interleave_prob stopping_strategy": "tables are concatenated, and prompts are drawn at random",
    "custom_dataset_info disable_auto_column_mapping strict model_name model_author cached_val_dataset": "tables are "
    "files here: prompts_path names them",
    "external_plugins custom_register_path callbacks": "name your own functions in ppo.callbacks and reward.components",
    "stop_words": "ppo.stop_token and ppo.stop_token_id set what ends a response",
    "use_vllm vllm_* async_generate sleep_level": "ms-swift's PPO does not use vLLM; here ppo.rollout_engine=vllm does",
    **arguments.LEFT,
    "loss_scale loss_type loss_weights is_binary_loss_scale label_smoothing* neftune_noise_alpha enable_dft_loss "
    "enable_channel_loss mrl_dims acc_strategy debug skip_memory_metrics torch_empty_cache_steps check_model stream "
    "logprobs top_logprobs structured_outputs_regex enable_npu_model_patch load_args load_data_args "
    "ignore_args_error ds3_gather_for_generation bf16_* fp16_*": "the setting has no counterpart here",
    # patterns of ms-swift's settings that PPO does not read: those of GRPO, GKD, DPO and other algorithms
    "epsilon* delta cosine_* repetition_* reward_model_plugin reward_funcs reward_weights chord_* sync_ref_model "
    "multi_turn_scheduler max_turns completion_length_limit_scope *gym_env dynamic_sample max_resample_times "
    "overlong_filter soft_* scale_rewards top_entropy_quantile importance_sampling_level tau_* real_tau fipo_* "
    "advantage_* kl_in_reward rlsd_* sdar_* rollout_* off_policy_* num_generations* num_iterations teacher_* "
    "offload_* move_model_batches steps_per_generation wandb_log_unique_prompts enable_flattened_weight_sync beta "
    "rpo_alpha ld_alpha discopop_tau cpo_alpha simpo_gamma desirable_weight undesirable_weight "
    "center_rewards_coefficient sft_alpha lmbda seq_kd gkd_*": "the setting is not for PPO",
}
NAMES = (("swift", "rlhf"), ("rlhf.py",), ("swift.cli.rlhf",))
"""The command, as scripts call it."""
_FLAGS = {"bf16", "fp16", "enable_thinking", "full_determinism", "torch_compile"}
NEED_VALUE = {*OLD, *(name for name, default in {**SAME, **DERIVED}.items() if not isinstance(default, bool))} - _FLAGS
"""Settings that a command may not name without a value."""
_QUERIES = ("query", "prompt", "input", "instruction", "question", "problem")
_ANSWERS = ("response", "answer", "output", "solution")
_CHATS = ("conversation", "conversations", "messages")


def from_swift(
    settings: Mapping[str, Any], *, num_prompts: int | None = None, processes: int = 1, folders: Sequence[Path] = ()
) -> Conversion:
    """Convert arguments of `swift rlhf --rlhf_type ppo` to this project's parameters.

    Args:
        settings: The arguments by name. Values may be text, as on a command line.
        num_prompts: Number of rows of the training data, needed if the tables are not read: the length of training is
            given in passes over the rows.
        processes: Number of processes of the source's run (NPROC_PER_NODE x NNODES). The default of
            gradient_accumulation_steps depends on `processes`.
        folders: Folders in which relative paths are searched, in the order of the sequence. Without folders the tables
            are not read.

    Raises:
        ConfigError: `rlhf_type` is not ppo, or ms-swift reads none of a table's columns.
        DataError: A table cannot be loaded.
    """
    if twice := next((name for name in OLD if name in settings and OLD[name] in settings), None):
        raise ConfigError(
            f"ms-swift: {twice} is the old name of {OLD[twice]}, and both are given. Keep one of the two."
        )
    given = arguments.normalised({OLD.get(name, name): value for name, value in settings.items()})
    kind = given.get("rlhf_type", DERIVED["rlhf_type"])
    if kind != "ppo":
        raise ConfigError(
            f"ms-swift: rlhf_type={kind!r} has no counterpart, because this project trains by PPO with a critic. Only "
            "rlhf_type='ppo' can be converted."
        )
    for name in ("model", "reward_model", "adapters", "reward_adapters"):
        if given.get(name):
            given[name] = [arguments.located(each, folders) for each in _list(given[name])]
    c = Conversion("ms-swift's PPO", given, PPO, DERIVED)
    c.processes = processes
    c.carry_over("rlhf_type")
    arguments.carry_always(c, ALWAYS)
    arguments.carry_given(c, {**arguments.IF_GIVEN, "save_total_limit": "ppo.save_total_limit"})
    _carry_tables(c, folders)
    _carry_sizes(c, arguments.trained_rows(c, num_prompts), processes)
    _carry_models(c)
    if arguments.carry_lora(c, "tuner_type", "lora_rank", "lora_alpha", "target_modules"):
        arguments.carry_bits(c, "quant_bits", "quant_method", has_adapter=bool(_list(c["adapters"])))
    length = next((n for n in ("response_length", "max_new_tokens", "max_completion_length") if c[n]), "")
    c.carry("ppo.response_length", length or "max_completion_length", value=c[length] if length else 512, otherwise=512)
    cut = {None: "drop", "delete": "drop", "left": "truncate_left"}.get(c["truncation_strategy"])
    c.carry("ppo.overlong_prompts", "truncation_strategy", value=cut or c["truncation_strategy"], otherwise="drop")
    if c["learning_rate"] is None:
        rate = 1e-5 if c["tuner_type"] == "full" else 1e-4
        c.carry("ppo.learning_rate", "learning_rate", "tuner_type", value=rate)
    else:
        c.carry("ppo.learning_rate", "learning_rate", otherwise=1e-4)
    _carry_dtype(c)
    arguments.carry_device(c)
    arguments.carry_thinking(c)
    return c.finish(LEFT, *LAST_REMARKS)


def _carry_sizes(c: Conversion, rows: int | None, processes: int) -> None:
    """Carry over the batch sizes and the number of responses. TRL's last batch is a full batch."""
    micro = c.count("per_device_train_batch_size")
    if c["gradient_accumulation_steps"] is None:
        accumulated = max(1, math.ceil(16 / micro / processes))
        names = ("gradient_accumulation_steps", "per_device_train_batch_size")
        c.carry("ppo.gradient_accumulation_steps", *names, value=accumulated)
    else:
        accumulated = c.count("gradient_accumulation_steps")
        c.carry("ppo.gradient_accumulation_steps", "gradient_accumulation_steps")
    iterations = None
    if rows is not None:
        episodes = max(1, int(arguments.epochs(c) * rows))
        c.carry("ppo.total_episodes", "num_train_epochs", value=episodes)
        iterations = math.ceil(episodes / (micro * accumulated * processes))
    else:
        arguments.leave_epochs(c, "", "num_train_epochs")
    arguments.carry_warmup(c, iterations)


def _carry_models(c: Conversion) -> None:
    for model, adapters, revision, target in (
        ("model", "adapters", "model_revision", "sft_model_path"),
        ("reward_model", "reward_adapters", "reward_model_revision", "reward_model_path"),
    ):
        places = _list(c[model])
        if arguments.carry_model(c, target, model, adapters, revision) or len(places) != 1:
            continue
        if is_local(places[0]):
            if not Path(places[0]).expanduser().exists():
                c.remarks.append(f"{places[0]} is not there, seen from the current directory; correct {target}.")
        elif not c.flag("use_hf"):
            c.remarks.append(
                f"{places[0]} is a name on ModelScope's hub; {target} needs a directory or a name on the Hugging "
                "Face hub, where the model may have another name."
            )
    if _list(c["adapters"]):
        c.remarks.append(arguments.ADAPTER.format("ms-swift"))


def _carry_dtype(c: Conversion) -> None:
    """Carry over the precision. In ms-swift torch_dtype sets fp16 and bf16, and float32 also sets fp16."""
    named = {None: "auto", "bfloat16": "bfloat16", "float16": "float16", "float32": "float16"}
    dtype = arguments.renamed(c["torch_dtype"], named)
    if c["bf16"] is not None or c["fp16"] is not None:
        dtype = "bfloat16" if c.flag("bf16") else "float16" if c.flag("fp16") else "float32"
    c.carry("ppo.dtype", "torch_dtype", "bf16", "fp16", value=dtype, otherwise="auto")
    if c["torch_dtype"] == "float32":
        c.remarks.append("With torch_dtype float32 ms-swift computes in float16; set ppo.dtype=float32 for float32.")


def _carry_tables(c: Conversion, folders: Sequence[Path]) -> None:
    """Read all tables as ms-swift's AutoPreprocessor does, unless a table is not a file."""
    names, settings = _list(c["dataset"]), ("dataset", "columns", "system")
    if not names or not folders:
        return c.leave("set prompts_path", *settings)
    try:
        renamed = json.loads(c["columns"]) if isinstance(c["columns"], str) else c["columns"] or {}
    except ValueError as error:
        raise ConfigError(f"{c.source}: columns={c['columns']!r} is not JSON: {in_one_line(error)}.") from None
    files = []
    for name in names:
        place, _, count = name.rpartition("#") if name.rpartition("#")[2].isdecimal() else (name, "", "")
        file = Path(arguments.located(place, folders))
        if not file.is_absolute() or not file.exists():  # a place that was found is absolute
            return c.leave(f"{place} is not a file here or above the source; set prompts_path", *settings)
        files.append((name, file, int(count) if count else None))
    for name, file, maximum in files:
        _read(c, name, file, renamed, maximum)
    return c.carry_over(*settings)


def _read(c: Conversion, name: str, file: Path, renamed: Mapping[str, str], maximum: int | None) -> None:
    """Add a file's rows as prompts. The file has chats, Alpaca's columns, or a column with queries."""
    table = load_table(str(file))
    called = {renamed.get(column, column).lower(): column for column in table.column_names}
    beside = {key: called[key] for key in (SYSTEM, TOOLS, "history") if key in called}
    if chats := next((called[key] for key in _CHATS if key in called), None):
        limit = min(len(table), maximum or len(table))
        rows = [_prompt(row, chats, beside, c["system"], str(file)) for row in table.select(range(limit))]
        left = Counter({AFTER_FIRST: len(table) - limit})
        return c.add_table("prompts_path", name, rows, len(table), +left)
    if {"instruction", "input"} <= called.keys():
        columns = {key: called[column] for key, column in ALPACA.items() if column in called}
    elif query := next((called[key] for key in _QUERIES if key in called), None):
        columns = {"prompt": query}
    else:
        names = ", ".join(table.column_names)
        raise ConfigError(f"{file}: ms-swift reads none of the columns {names}. Set `columns`.")
    answer = next(({"response": called[key]} for key in _ANSWERS if key in called), {})
    described = Table(name, str(file), {"columns": columns | answer | beside})
    return described.add_to(c, "ppo", maximum=maximum, system=c["system"])


def _prompt(
    row: Mapping[str, Any], column: str, beside: Mapping[str, str], system: str | None, where: str
) -> dict[str, Any]:
    chat = with_system(read_chat(row[column], f"{where}, column `{column}`"), _cell(row, beside, SYSTEM), where)
    if system and chat[0]["role"] != SYSTEM:
        chat = [{"role": SYSTEM, "content": system}, *chat]
    ends = chat[-1]["role"] == ASSISTANT
    tools = {TOOLS: cell} if (cell := _cell(row, beside, TOOLS)) else {}
    return {"prompt": chat[:-1] if ends else chat, **({"response": chat[-1]["content"]} if ends else {}), **tools}


def _cell(row: Mapping[str, Any], columns: Mapping[str, str], name: str) -> Any:
    return row[columns[name]] if name in columns else None


def _list(value: Any) -> list[str]:
    """Return one or several values as a list of texts."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(each) for each in values if each not in (None, "")]
