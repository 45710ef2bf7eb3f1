"""Resuming from a checkpoint: which settings may differ, and how the state is restored."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.files import Checkpoint
from ppo_rlhf.checkpoints.store import STATE, read_checkpoint
from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.config.setting_roles import names_of
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import printed_dates
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.processes import is_main_process

log = logging.getLogger(__name__)

MAY_CHANGE = frozenset(names_of(PPOConfig, lambda roles: roles.resume != "same"))
"""Settings that may change on resume. The product of `per_device_train_batch_size`, `gradient_accumulation_steps` and
the number of processes must stay the same."""
CHANGES_NUMBERS = frozenset(names_of(PPOConfig, lambda roles: roles.resume == "rounds"))
"""Settings of MAY_CHANGE whose change makes the resumed run's numbers differ from the uninterrupted run's, at least in
the last bits."""
MENDABLE = "reward_functions"
"""Key in the origin of a script's run that may change on resume: the source code of the reward functions."""

DATE = "printed_date"
"""Key in the origin for the date that the chat template prints, which changes every day."""


def printed_date(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the origin's entry with today's date if the chat template prints the date, else an empty mapping."""
    dates = printed_dates(tokenizer) if prompts.has_chats else []
    return {DATE: ", ".join(dates)} if dates else {}


def config_changes(saved: dict[str, Any], config: PPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return `name: (saved, now)` for every setting whose value differs; None stands for a setting that one lacks."""
    now = dataclasses.asdict(config)
    return {name: (saved.get(name), now.get(name)) for name in saved | now if saved.get(name) != now.get(name)}


def restore(state: TrainingState, directory: Path) -> None:
    """Load a checkpoint into a new state.

    Model paths and parts of the origin that the checkpoint or the state lacks are not compared, because the pipeline
    has model paths as globals and PPOTrainer has model paths as arguments.

    Raises:
        ConfigError: A setting that must not change, the origin or the batch size differs from the checkpoint. The
            message has one line for each difference.
        CheckpointError: The checkpoint is damaged, or was made for other models.
    """
    checkpoint = Checkpoint(directory)
    saved = checkpoint.json(STATE)
    changes = config_changes(saved["config"], state.config)
    refused = [
        f"ppo.{name}: {before} in {directory}, {now} now; a resumed run must keep the settings that it started with"
        for name, (before, now) in changes.items()
        if name not in MAY_CHANGE and not (name in MODEL_PATHS and None in (before, now))
    ]
    if saved["batch_size"] != state.config.batch_size:
        refused.append(
            f"ppo.batch_size: {saved['batch_size']} in {directory}, {state.config.batch_size} now, on "
            f"{state.config.world_size} processes; set ppo.per_device_train_batch_size and "
            "ppo.gradient_accumulation_steps so that their product times the number of processes is the same"
        )
    changed_origin = [name for name, now in state.origin.items() if saved["origin"].get(name, now) != now]
    refused += [
        f"{name}: differs from the run of {directory}; give the same {name}, or start a new run in another folder"
        for name in changed_origin
        if name not in (MENDABLE, DATE)
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    read_checkpoint(checkpoint, state)
    if is_main_process():
        if MENDABLE in changed_origin:
            log.warning("The reward functions changed since %s; the run continues with the new functions.", directory)
        if DATE in changed_origin:
            log.warning(
                "The chat template prints today's date: prompts contain %s from now on, and contained %s before.",
                state.origin[DATE],
                saved["origin"][DATE],
            )
        for halving in state.halvings.values():
            if halving.count:
                log.info("Memory ran out before: %s stays divided by %d.", halving.setting, 2**halving.count)
        log.info(
            "Resumed after iteration %d of %d from %s.",
            state.progress.iteration,
            state.progress.total_iterations,
            directory,
        )
