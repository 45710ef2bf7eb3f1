"""Checkpoints on real disks that are full, too small or read-only: small file systems mounted for the test alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRIVATE_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        return subprocess.run([*PRIVATE_MOUNTS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not can_mount(), reason="needs util-linux's unshare and a kernel that lets users mount (man 7 user_namespaces)"
)


def what_is_left(kind: str, folder: Path) -> list[str]:
    command = [*PRIVATE_MOUNTS, sys.executable, "-m", "tests.checkpoints.on_a_bad_disk", kind, str(folder)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.parametrize(("kind", "why"), [("full", "No space left on device"), ("read_only", "Read-only file system")])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_whole_and_nothing_else(
    tmp_path: Path, kind: str, why: str
) -> None:
    first, second = tmp_path / "run" / "iteration_000001", tmp_path / "run" / "iteration_000002"
    refusal, names, newest = what_is_left(kind, tmp_path)
    assert refusal.startswith(f"{second}: cannot write the checkpoint: ")
    assert why in refusal
    assert names == "['iteration_000001']"
    assert newest == str(first)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path: Path) -> None:
    refusal, names = what_is_left("small", tmp_path)
    assert refusal == (
        f"{tmp_path / 'run'}: about 17 MB do not fit, 4.19 MB are free. Free space, lower ppo.save_total_limit, or set "
        "data_root to a place on a larger disk"
    )
    assert names == "[]"
