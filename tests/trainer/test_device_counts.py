"""Iterations on a pretended device, in a separate process: torch registers one only before its first backward pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_device import reason_to_skip

CASE = Path(__file__).with_name("device_counts_case.py")


@pytest.mark.skipif(reason_to_skip is not None, reason=str(reason_to_skip))
@pytest.mark.slow
@pytest.mark.parametrize("which", ["an_iteration or an_evaluation", "every_option"])
def test_an_iteration_on_a_device(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASE), "-k", which]
    actual = subprocess.run([*command, "-o", "addopts="], capture_output=True, text=True, check=False)
    assert actual.returncode == 0, actual.stdout[-6000:]
