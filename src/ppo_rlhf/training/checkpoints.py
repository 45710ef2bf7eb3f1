"""Checkpoints: all of a run's state in one directory of safetensors and JSON, whole or not there at all.

    <run directory>/iteration_000010/
        manifest.json                   format, iteration, size and SHA-256 of every other file
        state.json                      counters, KL controller, hyperparameters, history, optimiser groups
        policy/                         a Hugging Face model directory with its tokenizer
        critic.safetensors
        policy_optimizer.safetensors    moments, named <parameter index>.<moment>
        critic_optimizer.safetensors

Randomness needs no state: it is a function of seed, iteration and episode.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.models.quiet import quiet_transformers
from ppo_rlhf.training.state import TrainingState

FORMAT = 1
MANIFEST = "manifest.json"
_COUNTERS = ("iteration", "episode", "optimiser_steps", "skipped_steps", "skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class CheckpointRequest:
    """A state that may have to be saved. Whether it is due is a function of the state alone."""

    state: TrainingState

    @property
    def due(self) -> bool:
        """True every save_interval iterations and at the last one."""
        return self.state.finished or self.state.iteration % self.state.config.save_interval == 0


def checkpoint_name(iteration: int) -> str:
    """Return the directory name of an iteration's checkpoint; names sort in time."""
    return f"iteration_{iteration:06d}"


def write_checkpoint(run_directory: Path, state: TrainingState) -> Path:
    """Write the state to a temporary directory beside its final place, then rename it there.

    Args:
        run_directory: Holds the checkpoints of one run; made if it is not there.
        state: What is saved.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: It cannot be written; earlier checkpoints are untouched.
    """
    target = run_directory / checkpoint_name(state.iteration)
    temporary = run_directory / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write_state(temporary, state)
        _write_manifest(temporary, state.iteration)
        _replace(target, temporary)
        _sync(run_directory)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot write the checkpoint: {error}") from error
    finally:  # whatever ended the writing, a signal too
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def verify_checkpoint(directory: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest.

    Raises:
        CheckpointError: A file is missing, was cut off or changed, or the format is unknown; the file is named.
    """
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's manifest ({error})") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')}, this version reads format {FORMAT}")
    for name, expected in files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though the manifest lists it")
        if expected != {"bytes": file.stat().st_size, "sha256": _sha256(file)}:
            raise CheckpointError(f"{file}: damaged; size or SHA-256 differs from the manifest")
    return manifest


def read_checkpoint(directory: Path, state: TrainingState) -> None:
    """Load a checkpoint into a freshly created state of the same models and configuration.

    Raises:
        CheckpointError: The checkpoint is damaged, or was made for other models.
    """
    verify_checkpoint(directory)
    values = json.loads((directory / "state.json").read_text())
    with quiet_transformers():
        policy = AutoModelForCausalLM.from_pretrained(
            directory / "policy", dtype=state.policy.dtype, use_safetensors=True
        )
    try:
        state.policy.load_state_dict(policy.state_dict())
        state.critic.load_state_dict(load_file(directory / "critic.safetensors", device=str(state.device)))
        for name in ("policy_optimizer", "critic_optimizer"):
            _load_optimizer(getattr(state, name), directory / f"{name}.safetensors", values[name])
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{directory}: made for other models: {error}") from error
    state.kl_controller.load_state_dict(values["kl_controller"])
    state.history[:] = values["history"]
    for name in _COUNTERS:
        setattr(state, name, values[name])


def checkpoint_iterations(run_directory: Path) -> list[int]:
    """Return the iterations that a run has checkpoints of, ascending."""
    return sorted(int(path.name.removeprefix("iteration_")) for path in run_directory.glob("iteration_[0-9]*"))


def prune_checkpoints(run_directory: Path, keep_newest: int, best: int | None) -> list[Path]:
    """Delete all but the newest checkpoints and the best one of a run; return what was deleted.

    Args:
        run_directory: Holds the checkpoints of one run.
        keep_newest: How many of the newest stay.
        best: Iteration of the best checkpoint, or None if none was evaluated.
    """
    found = checkpoint_iterations(run_directory)
    surplus = [run_directory / checkpoint_name(i) for i in found[:-keep_newest] if i != best]
    for path in surplus:
        _delete(path)
    return surplus


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


def _replace(target: Path, new: Path) -> None:
    """Rename `new` to `target`; what stood there is deleted only after that."""
    if not target.exists():
        new.rename(target)
        return
    old = target.rename(target.with_name(f".{target.name}.{os.getpid()}.old"))
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _delete(checkpoint: Path) -> None:
    """Take a checkpoint's name away before its files, so that no half of one is ever found."""
    doomed = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.old"))
    shutil.rmtree(doomed)


def _write_state(directory: Path, state: TrainingState) -> None:
    with quiet_transformers():
        state.policy.save_pretrained(directory / "policy")
    state.tokenizer.save_pretrained(directory / "policy")
    save_file(_contiguous(state.critic.state_dict()), directory / "critic.safetensors")
    groups = {}
    for name in ("policy_optimizer", "critic_optimizer"):
        saved = getattr(state, name).state_dict()
        moments = {f"{index}.{key}": value for index, row in saved["state"].items() for key, value in row.items()}
        save_file(_contiguous(moments), directory / f"{name}.safetensors")
        groups[name] = saved["param_groups"]
    values = {
        **{name: getattr(state, name) for name in _COUNTERS},
        "kl_controller": state.kl_controller.state_dict(),
        "config": dataclasses.asdict(state.config),
        "history": state.history,
        **groups,
    }
    (directory / "state.json").write_text(json.dumps(values, indent=1))


def _load_optimizer(optimizer: torch.optim.Optimizer, path: Path, groups: list[dict[str, Any]]) -> None:
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        index, key = name.split(".", 1)
        rows.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": rows, "param_groups": groups})


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _write_manifest(directory: Path, iteration: int) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    for path in [*files, *(p for p in directory.rglob("*") if p.is_dir())]:
        _sync(path)
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "iteration": iteration, "files": entries}, indent=1))
    _sync(manifest)
    _sync(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
