"""A checkpoint on a real disk that is full: a small file system that is mounted for the test alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PRIVATE_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        return subprocess.run([*PRIVATE_MOUNTS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    not can_mount(), reason="needs util-linux's unshare and a kernel that lets users mount (man 7 user_namespaces)"
)
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_whole_and_no_part_of_its_own(tmp_path: Path) -> None:
    command = [*PRIVATE_MOUNTS, sys.executable, "-m", "tests.checkpoints.on_a_full_disk", str(tmp_path)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    refusal, names, newest = finished.stdout.splitlines()
    assert refusal.startswith(f"{tmp_path / 'run' / 'iteration_000002'}: ")
    assert "No space left on device" in refusal
    assert names == "['iteration_000001', 'metrics.jsonl']"
    assert newest == str(tmp_path / "run" / "iteration_000001")
