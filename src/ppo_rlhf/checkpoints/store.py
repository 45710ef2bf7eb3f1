"""Checkpoints: the complete state of a run in one directory of safetensors and JSON files.

    <run directory>/iteration_000010/
        manifest.json                   the run, the iteration, and size and SHA-256 of every other file
        state.json                      counters, controllers, moments, hyperparameters, optimiser groups
        policy/, critic.safetensors, …  the models, see `model_files`
        policy_optimizer.safetensors    moments, named <parameter index>.<moment>
        critic_optimizer.safetensors    missing if policy and value head have one optimiser

The metrics of the iterations so far are in the run's metrics.jsonl, whose length state.json stores. A checkpoint has no
state of random generators: random numbers are a function of seed, iteration and episode. A kill while a checkpoint is
written leaves no part of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ppo_rlhf.checkpoints.files import Checkpoint, checkpoint_name, write_directory
from ppo_rlhf.checkpoints.model_files import POLICY, optimizers, read_models, save_tensors, write_models
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.models.origins import write_origins
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.optimisers import load_moments, saved_moments
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.manifests import MANIFEST, read_json
from ppo_rlhf.runtime.metrics_file import ITERATION, METRICS, Mark, metrics_of, read_lines_until

_OF_PROGRESS = ("iteration", "episode")
_OF_LEARNER = ("optimiser_steps", "skipped_steps", "skipped_in_a_row")
_COUNTERS = (*_OF_PROGRESS, *_OF_LEARNER)
STATE = "state.json"


def write_checkpoint(run_directory: Path, state: TrainingState) -> Path:
    """Write the training state to `<run_directory>/iteration_NNNNNN` and return the path of the checkpoint's directory.

    `run_directory` holds the checkpoints of one run and has the run's name. A missing directory is created.

    Raises:
        CheckpointError: The checkpoint cannot be written, or the state has the models of an earlier iteration
            (`load_best`). Earlier checkpoints are unchanged.
        TrainingError: An update of the state was interrupted.
    """
    progress = state.progress
    progress.check_whole()
    metrics = metrics_of(run_directory)
    if progress.loaded_iteration is not None:
        raise CheckpointError(
            f"{run_directory}: iteration {progress.iteration} is not saved, because policy and critic are those of "
            f"iteration {progress.loaded_iteration}, the best evaluation. Copy the run's own checkpoint"
        )
    target = run_directory / checkpoint_name(progress.iteration)
    try:
        metrics.catch_up(progress.history)
        mark = metrics.mark()
        write_directory(target, progress.iteration, lambda directory: _write_state(directory, state, mark))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        # Keep the first line of safetensors' error, because its list of overlapping weights fills many lines
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{target}: cannot write the checkpoint: {reason}") from error
    return target


def read_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Load a checkpoint into a new state with the same models and configuration.

    `restore.restore` checks the configuration first. The weights are copied into the state's parameters, so the files
    may be deleted afterwards.

    Raises:
        CheckpointError: The checkpoint was made for other models, a weight or a moment of an optimiser is missing, NaN,
            infinite or of another shape, or the counters do not agree.
    """
    learner, progress, directory = state.learner, state.progress, checkpoint.directory
    values = checkpoint.json(STATE)
    _check_numbers(checkpoint, values)
    history = _history(checkpoint, _mark(directory, values))
    progress.updating = True
    with _naming(directory):
        read_models(checkpoint, learner)
        for name, optimizer in optimizers(learner).items():
            load_moments(optimizer, load_file(directory / f"{name}.safetensors"), values[name])
        state.load_extra_state(values["extra"])
        for part, names in ((progress, _OF_PROGRESS), (learner, _OF_LEARNER)):
            for name in names:
                setattr(part, name, values[name])
        progress.requests.end, progress.requests.restore_best = values["ended"], values["restore_best"]
        progress.best_evaluation, learner.micro_batch_tokens = (
            values["best_evaluation"],
            values["micro_batch_tokens"],
        )
        for name, halving in state.halvings.items():
            # A changed setting says anew how many responses fit
            field = halving.setting.removeprefix("ppo.")
            halving.count = values[name] if values["config"][field] == getattr(state.config, field) else 0
    progress.loaded_iteration = None
    progress.restore_history(history)
    progress.updating = False


def mark_of(checkpoint: Path | None, folder: Path) -> Mark:
    """Return the length of `folder`'s metrics.jsonl up to a checkpoint; 0 for a checkpoint of another folder, or None.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    if checkpoint is None or checkpoint.parent.resolve() != folder.resolve():
        return Mark()
    return _mark(checkpoint, read_json(checkpoint / STATE))


def _mark(directory: Path, values: Any) -> Mark:
    """Return the length of metrics.jsonl that a checkpoint stores; `values` is the content of state.json."""
    try:
        return Mark(int(values["metrics"]["bytes"]), str(values["metrics"]["sha256"]))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{directory}: {STATE}: its metrics are no length of {METRICS} ({error!r})") from None


def _history(checkpoint: Checkpoint, mark: Mark) -> list[dict[str, float]]:
    """Return the metrics of each iteration up to a checkpoint, from metrics.jsonl beside it.

    Raises:
        CheckpointError: metrics.jsonl is missing, damaged or of another run, or has another number of iterations.
    """
    path = checkpoint.directory.parent / METRICS
    history = [line.metrics for line in read_lines_until(path, mark) if line.kind == ITERATION]
    if len(history) != checkpoint.iteration:
        raise CheckpointError(
            f"{path}: has {len(history)} iterations up to the checkpoint of iteration {checkpoint.iteration}. Resume "
            "from another checkpoint"
        )
    return history


def check_kept_best(progress: Progress) -> None:
    """Refuse to resume with `evaluation.on_exploitation=stop` a run that began without it.

    Raises:
        ConfigError: The run began without `stop`.
    """
    if progress.best_evaluation is None:
        raise ConfigError(
            "on_exploitation=stop: the run began without it, so its best evaluation may have no checkpoint. Resume "
            "with the value that it began with, or start a new run"
        )


def check_best(run_directory: Path, progress: Progress) -> None:
    """Refuse to resume with `evaluation.on_exploitation=stop` a run whose best evaluation has no checkpoint.

    An iteration is saved before its evaluation, so call `check_best` once the resumed run has repeated the evaluation
    of its checkpoint, which may be the best.

    Raises:
        ConfigError: The checkpoint of the best evaluation is not in `run_directory`.
    """
    if progress.best_evaluation is None:
        return
    if not (best := run_directory / checkpoint_name(progress.best_evaluation)).is_dir():
        raise ConfigError(
            f"on_exploitation=stop: {best}, the checkpoint of the best evaluation, is missing. Resume in the folder "
            "that has it, or start a new run"
        )


def load_best(run_directory: Path, learner: Learner, progress: Progress) -> None:
    """Load policy and critic of the best evaluation, if training ended because the policy exploits its reward.

    Optimisers, counters and history stay those of the last iteration, so the state cannot be trained or saved any more.

    Raises:
        CheckpointError: The checkpoint of the best evaluation is missing or damaged.
    """
    if not progress.requests.restore_best or progress.best_evaluation is None:
        return
    best = Checkpoint(run_directory / checkpoint_name(progress.best_evaluation))
    progress.updating = True  # until both models are read, the state is no checkpoint's
    with _naming(best.directory):
        read_models(best, learner)
    progress.updating = False
    progress.loaded_iteration = progress.best_evaluation


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Turn errors of a block that reads a checkpoint into `CheckpointError`s that name its directory."""
    try:
        yield
    except CheckpointError as error:
        where = "" if str(directory) in str(error) else f"{directory}: "
        raise CheckpointError(f"{where}{error}") from error
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{directory}: made for other models: {reason}") from error


def _check_numbers(checkpoint: Checkpoint, values: Any) -> None:
    """Raise `CheckpointError` if counters, controllers or reward moments are no numbers, or the counters do not agree.

    `values` is the content of state.json.
    """
    directory = checkpoint.directory
    if not isinstance(values, dict) or not isinstance(values.get("metrics"), dict):
        raise CheckpointError(f"{directory / STATE}: has another form than a checkpoint's")
    for name in _COUNTERS:
        if type(count := values.get(name)) is not int or count < 0:
            raise CheckpointError(f"{directory / STATE}: {name}={count!r:.60} is no number of a run")
    iteration = values["iteration"]
    if iteration != checkpoint.iteration:
        raise CheckpointError(
            f"{directory / STATE}: iteration={iteration}, but {MANIFEST} is of iteration {checkpoint.iteration}. "
            "Resume from another checkpoint"
        )
    for name in ("extra", "policy_optimizer", "critic_optimizer"):
        if odd := re.search(r'"(\w+)": \[?(NaN|-?Infinity)', json.dumps(values.get(name))):
            raise CheckpointError(f"{directory / STATE}: {odd[1]} is {odd[2]}. Resume from another checkpoint")


def _write_state(directory: Path, state: TrainingState, metrics: Mark) -> None:
    learner, progress = state.learner, state.progress
    write_models(directory, learner, state.sampler)
    write_origins(directory / POLICY, state.made_from)
    groups = {}
    for name, optimizer in optimizers(learner).items():
        moments, groups[name] = saved_moments(optimizer)
        save_tensors(moments, directory / f"{name}.safetensors")
    values = {
        **{name: getattr(progress, name) for name in _OF_PROGRESS},
        **{name: getattr(learner, name) for name in _OF_LEARNER},
        "extra": state.extra_state(),
        "config": dataclasses.asdict(state.config),
        "batch_size": state.config.batch_size,
        "metrics": dataclasses.asdict(metrics),
        "origin": state.origin,
        "ended": progress.requests.end,
        "restore_best": progress.requests.restore_best,
        "best_evaluation": progress.best_evaluation,
        "micro_batch_tokens": learner.micro_batch_tokens,
        **{name: halving.count for name, halving in state.halvings.items()},
        **groups,
    }
    (directory / STATE).write_text(json.dumps(values, indent=1), encoding="utf-8")
