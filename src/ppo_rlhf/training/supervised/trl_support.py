"""TRL's trainers as functions: quiet, offline, seeded, and without traces in the process or in the model.

Both trainers take token sequences that were made here, so TRL neither tokenises nor truncates, and what ends in an end
of text is decided in one place. What they change on the way (accelerate's process-wide state, the global random
generators, the model's `forward` and configurations) is put back.

Imported only when something is trained: TRL, accelerate and the Trainer take most of a second.
"""

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.models.quiet import errors_only
from ppo_rlhf.training.supervised.demonstrations import TokenisedDemonstrations
from ppo_rlhf.training.supervised.optimisation import History, OptimisationConfig

_CONFIGURATIONS = ("config", "generation_config")  # trainers align them with the tokenizer; classifiers lack the second

Evaluation = Callable[[PreTrainedModel], dict[str, float]]


def trainer_options(config: OptimisationConfig, output_dir: str) -> dict[str, Any]:
    """Return keyword arguments for TRL's SFTConfig and RewardConfig."""
    return {
        "output_dir": output_dir,
        "num_train_epochs": config.num_train_epochs,
        "max_steps": config.max_steps or -1,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": _schedule(config),
        "warmup_steps": config.warmup_ratio,  # below 1 it is a share of the steps
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "activation_checkpointing": config.gradient_checkpointing,
        "bf16": config.bf16,  # TRL's default is True
        "logging_steps": config.logging_steps,
        "seed": config.seed,
        "use_cpu": config.device == "cpu" or not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "train_sampling_strategy": "group_by_length" if config.group_by_length else "random",
        "length_column_name": "length",
        "remove_unused_columns": False,  # would remove the lengths; the collators pick their columns by name
        "max_length": None,  # cut before, where it is counted
        "logging_nan_inf_filter": False,  # would log the last finite loss instead of NaN
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _schedule(config: OptimisationConfig) -> str:
    """Return transformers' name of a schedule; its `constant` leaves a warm-up out."""
    warms_up = config.lr_scheduler_type == "constant" and config.warmup_ratio > 0.0
    return "constant_with_warmup" if warms_up else config.lr_scheduler_type


class QuietSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer, which tells nobody: a run uses nothing from the network."""

    def _send_telemetry(self) -> None:
        pass


class QuietRewardTrainer(RewardTrainer):
    """TRL's RewardTrainer, which tells nobody either."""

    def _send_telemetry(self) -> None:
        pass


class HistoryCallback(TrainerCallback):
    """Collects the training loss, and an evaluation of our own at the end of each epoch, by optimiser step."""

    def __init__(self, prefix: str, evaluate: Evaluation) -> None:
        """Metrics become `<prefix>/loss` and `<prefix>/<name>` for each name that `evaluate` returns."""
        self.history: History = []
        self._prefix = prefix
        self._evaluate = evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the mean loss since the last log."""
        if logs is not None and "loss" in logs:
            self._record(state.global_step, {"loss": float(logs["loss"])})

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        """Evaluate on the held-out rows."""
        if model is not None:
            model.eval()
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
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(named)
        else:
            self.history.append({"step": step, **named})


def run_sft_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenisedDemonstrations,
    config: OptimisationConfig,
    evaluate: Evaluation,
) -> History:
    """Train a language model in place on token sequences and their labels; return `sft/*` metrics."""
    table = {"input_ids": rows.input_ids, "labels": rows.labels, "length": [len(ids) for ids in rows.input_ids]}
    prepared: dict[str, Any] = {"packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}

    def build(output_dir: str, callback: HistoryCallback) -> Trainer:
        return QuietSFTTrainer(
            model,
            SFTConfig(**trainer_options(config, output_dir), **prepared),
            train_dataset=Dataset.from_dict(table),
            processing_class=copy.deepcopy(tokenizer),
            callbacks=[callback],
        )

    return _train(model, build, HistoryCallback("sft", evaluate))


def run_reward_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chosen_ids: list[list[int]],
    rejected_ids: list[list[int]],
    config: OptimisationConfig,
    evaluate: Evaluation,
) -> History:
    """Train a reward model in place on pairs of token sequences; return `reward_model/*` metrics."""
    lengths = [max(len(a), len(b)) for a, b in zip(chosen_ids, rejected_ids, strict=True)]
    table = {"chosen_ids": chosen_ids, "rejected_ids": rejected_ids, "length": lengths}

    def build(output_dir: str, callback: HistoryCallback) -> Trainer:
        return QuietRewardTrainer(
            model,
            RewardConfig(**trainer_options(config, output_dir)),
            train_dataset=Dataset.from_dict(table),
            processing_class=copy.deepcopy(tokenizer),
            callbacks=[callback],
        )

    return _train(model, build, HistoryCallback("reward_model", evaluate))


def _train(
    model: PreTrainedModel, build: Callable[[str, HistoryCallback], Trainer], callback: HistoryCallback
) -> History:
    """Train `model` in place and leave it as it came, but for its weights and where they lie: where it was trained.

    Args:
        model: What the trainer trains.
        build: Makes the trainer from an output directory and the callback; called once everything is isolated.
        callback: Collects the metrics.
    """
    kept = {name: copy.deepcopy(vars(model)[name]) for name in _CONFIGURATIONS if name in vars(model)}
    with (
        accelerate_state_of_its_own(),
        global_randomness_restored(),
        errors_only("transformers.trainer_utils"),  # it warns of aligning special tokens, which is undone anyway
        tempfile.TemporaryDirectory() as output_dir,
    ):
        trainer = build(output_dir, callback)
        trainer.remove_callback(PrinterCallback)  # prints every log to standard output
        trainer.train()
    # TRL and accelerate put a forward of their own on the object: copies of it would run the original's weights
    vars(model).pop("forward", None)
    if model.is_activation_checkpointing:
        model.activation_checkpointing_disable()
    for name, configuration in kept.items():
        setattr(model, name, configuration)
    model.eval()
    return callback.history


@contextmanager
def accelerate_state_of_its_own() -> Iterator[None]:
    """Let a trainer make its own accelerate state, then put back what was there.

    The state is process-wide and refuses a second precision: without this, a stage in bfloat16 stops the next one.
    """
    states = (AcceleratorState._shared_state, PartialState._shared_state, GradientState._shared_state)
    kept = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(states, kept, strict=True):
            state.clear()
            state.update(values)


@contextmanager
def global_randomness_restored() -> Iterator[None]:
    """Give the global random generators back as they were: trainers seed them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
