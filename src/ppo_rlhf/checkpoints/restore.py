"""Resuming from a checkpoint: the settings that may differ, and the way the state is put in place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.files import read_json, verify_checkpoint
from ppo_rlhf.checkpoints.store import STATE, read_checkpoint
from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.config.ppo_rules import VLLM_FIELDS
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import printed_dates
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.processes import is_main_process

log = logging.getLogger(__name__)

_AT_A_TIME = {"per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size"}
MAY_CHANGE = frozenset(
    {
        "total_episodes",
        "eval_interval",
        "save_interval",
        "save_total_limit",
        "sample_interval",
        "max_time",
        "report_to",
        "callbacks",
        "export",
        "export_critic",
        "shutdown_grace_s",
        "max_skipped_steps",
        "kl_warning",
        "kl_alarm",
        "kl_stop",
        "device",
        "cuda_graphs",
        *_AT_A_TIME,
        "offload_reference_policy",
        "offload_reward_model",
        *VLLM_FIELDS,
    }
)
"""Settings that a resumed run may have changed: its length, records, limits, device, micro-batches, place of vLLM.

`total_episodes` changes the learning-rate schedule; the device, `cuda_graphs` and the three batch settings change the
rounding. The product of `per_device_train_batch_size`, `gradient_accumulation_steps` and the processes must stay the
same.
"""
CHANGES_NUMBERS = _AT_A_TIME | {"total_episodes", "device", "cuda_graphs"}
"""Settings of MAY_CHANGE after which a run is no longer bit for bit what it would have been."""
MENDABLE = "reward_functions"
"""The part of a script's origin that a resumed run may have changed: the source of its reward functions."""

DATE = "printed_date"
"""The part of an origin that is the date which the chat template prints; each day has another one."""


def printed_date(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the part of an origin that says which date the chat template prints today; none if it prints none."""
    dates = printed_dates(tokenizer) if prompts.has_chats else []
    return {DATE: ", ".join(dates)} if dates else {}


def config_changes(saved: Mapping[str, Any], config: PPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return `name: (saved, now)` for every setting that differs.

    A setting that was not saved had its default. A setting that this version lacks has None as its value now.
    """
    now = dataclasses.asdict(config)
    before = {field.name: field.default for field in dataclasses.fields(config)} | dict(saved)
    return {name: (value, now.get(name)) for name, value in before.items() if name not in now or value != now[name]}


def restore(state: TrainingState, directory: Path) -> None:
    """Load a checkpoint into a freshly made state.

    Model paths and the origin may be unknown on one side: the pipeline has them as globals, PPOTrainer as arguments.

    Raises:
        ConfigError: A setting or the origin differs that must not, or the batch has another size. Each has a line.
        CheckpointError: The checkpoint is damaged, or was made for other models.
    """
    verify_checkpoint(directory)
    saved = read_json(directory / STATE)
    changes = config_changes(saved["config"], state.config)
    refused = [
        f"ppo.{name}: {before} in {directory}, {now} now; a resumed run keeps the settings that it began with"
        for name, (before, now) in changes.items()
        if name not in MAY_CHANGE and not (name in MODEL_PATHS and None in (before, now))
    ]
    if saved["batch_size"] != state.config.batch_size:
        refused.append(
            f"ppo.batch_size: {saved['batch_size']} in {directory}, {state.config.batch_size} now, on "
            f"{state.config.world_size} processes; set ppo.per_device_train_batch_size and "
            "ppo.gradient_accumulation_steps so that their product times the number of processes is the same"
        )
    others = [name for name, now in state.origin.items() if saved["origin"].get(name, now) != now]
    refused += [
        f"{name}: not what the run of {directory} began with; give the same, or begin a new run in another folder"
        for name in others
        if name not in (MENDABLE, DATE)
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    read_checkpoint(directory, state)
    if is_main_process():
        if MENDABLE in others:
            log.warning("The reward's functions were changed since %s: the run continues with the new ones.", directory)
        if DATE in others:
            log.warning(
                "The chat template prints the date: prompts have %s from here on, where they had %s.",
                state.origin[DATE],
                saved["origin"][DATE],
            )
        log.info("Resumed after iteration %d of %d from %s.", state.iteration, state.total_iterations, directory)
