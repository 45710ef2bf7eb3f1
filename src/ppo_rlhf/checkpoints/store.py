"""Checkpoints: all of a run's state in one directory of safetensors and JSON, whole or not there at all.

    <run directory>/iteration_000010/
        manifest.json                   run, iteration, size and SHA-256 of every other file, sealed by its own hash
        state.json                      counters, controllers, moments, hyperparameters, optimiser groups
        history.json                    every metric of every iteration so far
        policy/, critic.safetensors, …  the models, see `model_files`
        policy_optimizer.safetensors    moments, named <parameter index>.<moment>
        critic_optimizer.safetensors    not with a shared trunk, which has one optimiser

Randomness needs no state: it is a function of seed, iteration and episode.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ppo_rlhf.checkpoints.files import checkpoint_name, verify_checkpoint, write_directory
from ppo_rlhf.checkpoints.model_files import optimizers, read_models, write_models
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.models.adapters import has_adapter
from ppo_rlhf.ppo.state import TrainingState

_COUNTERS = ("iteration", "episode", "optimiser_steps", "skipped_steps", "skipped_in_a_row")
HISTORY = "history.json"
_MOMENTS_OF_ADAM = 2
_SMALL_FILES = 16 * 2**20
"""Bytes, generously, of tokenizer, configurations and history."""


@dataclasses.dataclass(frozen=True)
class CheckpointRequest:
    """A state that may have to be saved. Whether it is due is a function of the state alone."""

    state: TrainingState

    @property
    def due(self) -> bool:
        """True every save_interval iterations, at the last one, and when the run was asked to stop."""
        state = self.state
        return state.finished or state.stopping or state.iteration % state.config.save_interval == 0


def write_checkpoint(run_directory: Path, state: TrainingState) -> Path:
    """Write the state to a temporary directory beside its final place, then rename it there.

    Args:
        run_directory: Holds the checkpoints of one run and has its name; made if it is not there.
        state: What is saved.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: It cannot be written; earlier checkpoints are untouched.
    """
    target = run_directory / checkpoint_name(state.iteration)
    check_free_space(run_directory, state, copies=1)
    try:
        write_directory(target, state.iteration, lambda directory: _write_state(directory, state))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]  # of weights that overlap safetensors writes a page
        raise CheckpointError(f"{target}: cannot write the checkpoint: {reason}") from error
    return target


def read_checkpoint(directory: Path, state: TrainingState) -> None:
    """Load a checkpoint into a freshly created state of the same models and configuration.

    The weights are copied into the state's own parameters; nothing of it lives on in the checkpoint's files.

    Raises:
        CheckpointError: The checkpoint is damaged, or was made for other models.
    """
    verify_checkpoint(directory)
    values = _state_values(directory)
    try:
        read_models(directory, state)
        for name, optimizer in optimizers(state).items():
            _load_optimizer(optimizer, directory / f"{name}.safetensors", values[name])
    except CheckpointError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{directory}: made for other models: {error}") from error
    state.load_extra_state(values["extra"])
    state.history = saved_history(directory)
    for name in _COUNTERS:
        setattr(state, name, values[name])


def saved_config(directory: Path) -> dict[str, Any]:
    """Return the hyperparameters that a checkpoint was made with."""
    return dict(_state_values(directory)["config"])


def saved_batch_size(directory: Path) -> int:
    """Return the responses of one iteration, over all processes, of the run that a checkpoint is of."""
    return int(_state_values(directory)["batch_size"])


def saved_history(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of every iteration up to a checkpoint."""
    history: list[dict[str, float]] = json.loads((directory / HISTORY).read_text())
    return history


def checkpoint_bytes(state: TrainingState) -> int:
    """Return about how many bytes a checkpoint of this state takes: weights, Adam's two moments, small files.

    With LoRA the frozen weights are not in it.
    """
    total = _SMALL_FILES
    for model in (state.policy, state.critic):
        saved = [p for p in model.parameters() if p.requires_grad or not has_adapter(model)]
        for parameter in saved:
            copies = 1 + _MOMENTS_OF_ADAM * parameter.requires_grad
            total += copies * parameter.numel() * parameter.element_size()
    if state.policy_average is not None:
        total += sum(tensor.numel() * tensor.element_size() for tensor in state.policy_average.weights.values())
    return total


def check_free_space(run_directory: Path, state: TrainingState, copies: int) -> None:
    """Check that a number of checkpoints fits on the disk that holds the run's directory.

    Raises:
        CheckpointError: It does not.
    """
    place = next(path for path in (run_directory, *run_directory.absolute().parents) if path.exists())
    size, free = checkpoint_bytes(state), shutil.disk_usage(place).free
    if copies * size > free:
        needed = f"{copies} checkpoints of about {_readable(size)} each" if copies > 1 else f"about {_readable(size)}"
        raise CheckpointError(
            f"{run_directory}: {needed} do not fit, {_readable(free)} are free. Free space, lower "
            "ppo.save_total_limit, or set data_root to a place on a larger disk"
        )


def best_iteration(evaluations: list[dict[str, float]], kl_alarm: float) -> int | None:
    """Return the iteration with the highest judge score (else reward) among evaluations with eval/kl ≤ kl_alarm.

    Args:
        evaluations: Rows with `iteration`, `eval/kl`, `eval/reward` and, with a judge, `eval/judge_score`.
        kl_alarm: Nats per response.
    """
    candidates = [row for row in evaluations if row["eval/kl"] <= kl_alarm]
    if not candidates:
        return None
    best = max(candidates, key=lambda row: (row.get("eval/judge_score", row["eval/reward"]), row["iteration"]))
    return int(best["iteration"])


def _write_state(directory: Path, state: TrainingState) -> None:
    write_models(directory, state)
    groups = {}
    for name, optimizer in optimizers(state).items():
        saved = optimizer.state_dict()
        moments = {f"{index}.{key}": value for index, row in saved["state"].items() for key, value in row.items()}
        save_file(_contiguous(moments), directory / f"{name}.safetensors")
        groups[name] = saved["param_groups"]
    (directory / HISTORY).write_text(json.dumps(state.history))
    values = {
        **{name: getattr(state, name) for name in _COUNTERS},
        "extra": state.extra_state(),
        "config": dataclasses.asdict(state.config),
        "batch_size": state.config.batch_size,
        **groups,
    }
    (directory / "state.json").write_text(json.dumps(values, indent=1))


def _state_values(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "state.json").read_text())
    return values


def _load_optimizer(optimizer: torch.optim.Optimizer, path: Path, groups: list[dict[str, Any]]) -> None:
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        index, key = name.split(".", 1)
        rows.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": rows, "param_groups": groups})


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _readable(size: int) -> str:
    value, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
