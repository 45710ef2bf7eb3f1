"""Going on from a checkpoint: what may differ from the run that wrote it, and putting its state in place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_rlhf.checkpoints.store import read_checkpoint, saved_batch_size, saved_config
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.state import TrainingState

log = logging.getLogger(__name__)

MAY_CHANGE = frozenset(
    {
        "total_episodes",
        "eval_interval",
        "save_interval",
        "save_total_limit",
        "sample_interval",
        "shutdown_grace_s",
        "max_skipped_steps",
        "kl_warning",
        "kl_alarm",
        "kl_stop",
        "device",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "offload_reference_policy",
        "offload_reward_model",
    }
)
"""Settings that a resumed run may have changed: how long it trains, what it records, when it stops, and where it is.

Of these only `total_episodes` changes the result, by the learning-rate schedule. Another device or number of processes
rounds differently. The two batch settings may change so that another number of processes has the same batch.
"""
MODEL_PATHS = frozenset({"sft_model_path", "reward_model_path"})
"""Settings of PPOTrainer that may also be given otherwise: as an argument, in the pipeline as globals. Where one is
None, it says nothing of the models, and does not differ from anything."""
CHANGES_NUMBERS = frozenset({"total_episodes", "device", "per_device_train_batch_size", "gradient_accumulation_steps"})
"""Of these, the ones after which the run is no longer bit for bit what it would have been."""


def config_changes(saved: Mapping[str, Any], config: PPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return `name: (saved, now)` for every setting that differs; one that was not saved had its default.

    A setting that this version does not have any more is reported with None as its value now.
    """
    now = dataclasses.asdict(config)
    before = {field.name: field.default for field in dataclasses.fields(config)} | dict(saved)
    return {name: (value, now.get(name)) for name, value in before.items() if name not in now or value != now[name]}


def restore(state: TrainingState, directory: Path) -> None:
    """Put a checkpoint's state in the place of a freshly made one.

    Raises:
        ConfigError: A setting differs that must not; every such setting has its line.
        CheckpointError: The checkpoint is damaged, or was made for other models.
    """
    changes = config_changes(saved_config(directory), state.config)
    refused = [
        f"ppo.{name}: {before} in {directory}, {now} now; a resumed run goes on with the settings that it began with"
        for name, (before, now) in changes.items()
        if name not in MAY_CHANGE and not (name in MODEL_PATHS and None in (before, now))
    ]
    batch_size, processes = saved_batch_size(directory), state.config.world_size
    if batch_size != state.config.batch_size:
        refused.append(
            f"ppo.batch_size: {batch_size} in {directory}, {state.config.batch_size} now, on {processes} processes; "
            "set ppo.per_device_train_batch_size and ppo.gradient_accumulation_steps so that their product times the "
            "number of processes is the same"
        )
    if refused:
        raise ConfigError("\n".join(refused))
    read_checkpoint(directory, state)
    log.info("Resumed after iteration %d of %d from %s.", state.iteration, state.total_iterations, directory)
