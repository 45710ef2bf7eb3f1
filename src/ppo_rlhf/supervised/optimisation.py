"""Settings that supervised fine-tuning and reward-model training share."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ppo_rlhf.config.parameter_groups import Seed

TINY_MODEL, TINY_MODELS_RATE = 1_000_000, 1e-3

History = list[dict[str, float]]
"""Metrics of a supervised training: one dictionary per logged step, with `step` (completed optimiser steps) and the
metrics."""
Watch = Callable[[int], AbstractContextManager[Callable[[int, Mapping[str, float]], None]]]
"""Opens a progress display for the given number of optimiser steps; yields a function that takes (step, metrics); the
metrics of a step whose loss is not logged are empty."""


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """Settings of the optimiser for supervised fine-tuning and reward-model training; the names are TRL's."""

    num_train_epochs: Annotated[float, Field(gt=0.0)] = 3.0
    """Passes over the training data."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimiser steps, in place of num_train_epochs."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Schedule of the learning rate over the optimiser steps."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the training over which the learning rate rises to its peak. It rises from 0."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest 2-norm of a gradient. Larger gradients are clipped."""
    per_device_train_batch_size: Annotated[int, Field(ge=1)] = 8
    """Rows (texts or pairs) in one forward and backward pass of all processes together. The number of processes must
    divide per_device_train_batch_size. With several processes the last batch of an epoch is filled up with rows of the
    first batch."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Forward and backward passes per optimiser step."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest sequence in tokens; None: the model's context."""
    group_by_length: bool = True
    """Put rows of similar length into one batch. It then needs less padding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Training then needs less memory and is about a fifth slower."""
    bf16: bool = False
    """Autocast to bfloat16 (weights stay float32); for GPUs."""
    logging_steps: Annotated[int, Field(ge=1)] = 10
    """Optimiser steps between logged losses. A logged loss is the mean over the steps since the last logged loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if a device is available, else the CPU. A process uses one device."""
    seed: Seed = 42
    """Seed of random initial weights and of the order of the data."""

    def longest_sequence(self, context: int | None) -> int | None:
        """Return the maximum length of a training sequence for a model with the given context; None: no limit."""
        return min((length for length in (self.max_length, context) if length is not None), default=None)

    def in_words(self, rows: str) -> str:
        """Return the length, the batch and the optimiser of the training for a model card; `rows` names the rows."""
        passes = f"{self.num_train_epochs:g} epoch{'' if self.num_train_epochs == 1.0 else 's'}"
        length = passes if self.max_steps is None else f"{self.max_steps:,} steps"
        batch = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return (
            f"{length}, {batch} {rows} per step, AdamW, peak learning rate {self.learning_rate:g} "
            f"({self.lr_scheduler_type}), seed {self.seed}"
        )


def advice(group: str, config: OptimisationConfig, parameters: int) -> list[str]:
    """Return [a warning] if the learning rate suits only tiny models but the model is larger; else an empty list."""
    if parameters <= TINY_MODEL or config.learning_rate < TINY_MODELS_RATE:
        return []
    return [
        f"{group}.learning_rate={config.learning_rate:g} suits models of less than {TINY_MODEL / 1e6:g} M parameters, "
        f"this model has {parameters / 1e6:.3g} M: 1e-5 to 5e-4 is usual"
    ]
