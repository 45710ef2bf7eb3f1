"""TRL's trainers as functions: quiet, offline and seeded, with one training for all processes.

TRL's SFTTrainer and RewardTrainer get token sequences from this package, so TRL neither tokenises nor truncates, and
only this package decides which sequences end in an end-of-text token.

Import `trl_support` only in a training, because importing TRL and transformers' Trainer takes most of a second.
"""

import copy
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from ppo_rlhf.core.errors import ConfigError, TrainingError
from ppo_rlhf.passes import gradient_checkpointing
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.log_lines import errors_only
from ppo_rlhf.supervised.demonstrations import TokenisedDemonstrations
from ppo_rlhf.supervised.optimisation import History, OptimisationConfig, Watch

logger = logging.getLogger(__name__)
Evaluation = Callable[[PreTrainedModel], dict[str, float]]
SAME = (
    "num_train_epochs",
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "logging_steps",
    "seed",
)
"""Settings that have the same name in TRL and in this project. `bf16` is always passed, because TRL's default is
True."""


def run_sft_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenisedDemonstrations,
    config: OptimisationConfig,
    evaluate: Evaluation,
    watch: Watch | None = None,
) -> History:
    """Train a language model in place on token sequences and their labels; return the `sft/*` metrics.

    `evaluate` is called with the model while the model has TRL's fused head (`trl.trainer.utils.add_fused_lm_head`).
    """
    table = {"input_ids": rows.input_ids, "labels": rows.labels, "length": [len(ids) for ids in rows.input_ids]}
    _check_processes("supervised_finetuning", config)
    options = {**trainer_options(config), "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    text = model.config.get_text_config()
    # TRL's router loss reads `num_experts` from the configuration, which Granite's lacks
    if not hasattr(text, "num_experts"):
        options["router_aux_loss_coef"] = 0.0
        if getattr(text, "num_local_experts", 0):
            logger.warning("supervised_finetuning: %s is trained without its router loss", type(model).__name__)
    callback = HistoryCallback("sft", evaluate, watch)
    return _train(SFTTrainer, SFTConfig, options, model, tokenizer, table=table, callback=callback)


def run_reward_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chosen_ids: list[list[int]],
    rejected_ids: list[list[int]],
    config: OptimisationConfig,
    evaluate: Evaluation,
    watch: Watch | None = None,
) -> History:
    """Train a reward model in place on pairs of token sequences; return the `reward_model/*` metrics."""
    lengths = [max(len(a), len(b)) for a, b in zip(chosen_ids, rejected_ids, strict=True)]
    table = {"chosen_ids": chosen_ids, "rejected_ids": rejected_ids, "length": lengths}
    _check_processes("reward_modelling", config)
    callback = HistoryCallback("reward_model", evaluate, watch)
    return _train(
        RewardTrainer, RewardConfig, trainer_options(config), model, tokenizer, table=table, callback=callback
    )


def trainer_options(config: OptimisationConfig) -> dict[str, Any]:
    """Return the keyword arguments for TRL's SFTConfig and RewardConfig without `output_dir`."""
    warms_up = config.lr_scheduler_type == "constant" and config.warmup_ratio > 0.0
    return {
        **{name: getattr(config, name) for name in SAME},
        gradient_checkpointing.NAME: config.gradient_checkpointing,
        "max_steps": config.max_steps or -1,
        "lr_scheduler_type": "constant_with_warmup" if warms_up else config.lr_scheduler_type,
        "warmup_steps": config.warmup_ratio,  # transformers reads a value below 1 as a share of the training steps
        # All processes share one batch, instead of each process having a batch of its own
        "accelerator_config": {"split_batches": True},
        "use_cpu": resolve_device(config.device).type == "cpu",
        "ddp_timeout": int(processes.TIMEOUT.total_seconds()),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "train_sampling_strategy": "group_by_length" if config.group_by_length else "random",
        "length_column_name": "length",
        # True would remove the column of lengths, and no column need be removed: the collators select columns by name
        "remove_unused_columns": False,
        "max_length": None,  # the sequences have been truncated before, so TRL must not truncate them
        "logging_nan_inf_filter": False,  # True would log the last finite loss in place of a NaN
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


class HistoryCallback(TrainerCallback):
    """Collects training losses and learning rates by optimiser step, and this package's evaluation of each epoch."""

    def __init__(self, prefix: str, evaluate: Evaluation, watch: Watch | None) -> None:
        """Record metrics as `<prefix>/loss`, `<prefix>/learning_rate` and `<prefix>/<name>` for `evaluate`'s names."""
        self.history: History = []
        self._prefix = prefix
        self._evaluate = evaluate
        self._watch = watch
        self.display = ExitStack()
        self._report: Callable[[int, dict[str, float]], None] = lambda step, metrics: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the progress display, because the number of optimiser steps is known when training begins."""
        if self._watch is not None:
            self._report = self.display.enter_context(self._watch(state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show a step whose loss is not logged: between two logged losses minutes may pass."""
        if not control.should_log:
            self._report(state.global_step, {})

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the mean loss since the last logged loss, and the learning rate."""
        logs = kwargs["logs"]
        if "loss" in logs:
            self._record(state.global_step, {name: float(logs[name]) for name in ("loss", "learning_rate")})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate on the held-out rows."""
        model = kwargs["model"].eval()
        with torch.no_grad():
            self._record(state.global_step, self._evaluate(model))
        model.train()

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if not np.isfinite(value):
                raise TrainingError(
                    f"{self._prefix}: the {name.replace('_', ' ')} is {value} at step {step}. Lower learning_rate."
                )
        named = {f"{self._prefix}/{name}": value for name, value in metrics.items()}
        if not self.history or self.history[-1]["step"] != step:
            self.history.append({"step": step})
        self.history[-1].update(named)
        self._report(step, named)


def _train(
    trainer_class: type[Trainer],
    config_class: type[TrainingArguments],
    options: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    table: dict[str, Any],
    callback: HistoryCallback,
) -> History:
    """Train `model` in place, and restore its configurations; the model stays on the device of the training."""
    # Trainers change both configurations to match the tokenizer; classifiers have no generation_config
    configurations = {
        name: copy.deepcopy(vars(model)[name]) for name in ("config", "generation_config") if name in vars(model)
    }
    with (
        _global_randomness_restored(),
        # Silence the warning that the trainer changed the configurations, which are restored below
        errors_only("transformers.trainer_utils"),
        tempfile.TemporaryDirectory() as output_dir,
        callback.display,
    ):
        # Disable TRL's telemetry, because a run must make no network requests
        silent: Any = type(trainer_class.__name__, (trainer_class,), {"_send_telemetry": lambda self: None})
        trainer = silent(
            model,
            config_class(output_dir=output_dir, **options),
            train_dataset=Dataset.from_dict(table),
            processing_class=copy.deepcopy(tokenizer),
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)  # PrinterCallback would print every log entry to standard output
        trainer.train()
    # Remove TRL's and accelerate's `forward` of this instance: a copy of the model would use the instance's weights
    vars(model).pop("forward", None)
    gradient_checkpointing.disable_gradient_checkpointing(model)
    for name, configuration in configurations.items():
        setattr(model, name, configuration)
    model.eval()
    return callback.history


def _check_processes(group: str, config: OptimisationConfig) -> None:
    """Raise `ConfigError` if the processes of this run cannot train with the given settings."""
    processes.refuse_sharding(group)
    count, rows = processes.process_count(), config.per_device_train_batch_size
    if rows % count:
        raise ConfigError(
            f"{group}.per_device_train_batch_size={rows} is the batch of all processes, and {count} processes cannot "
            f"share {rows} rows evenly. Set per_device_train_batch_size to a multiple of {count}."
        )
    if count == 1 and config.device != "cpu" and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"{group}: this process sees {torch.cuda.device_count()} GPUs, but TRL's trainers use one GPU per process. "
            "Start one process per GPU with torchrun --nproc_per_node, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


@contextmanager
def _global_randomness_restored() -> Iterator[None]:
    """Restore the state of the global random generators after the block: trainers seed these generators."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
