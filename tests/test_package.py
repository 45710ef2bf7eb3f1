"""What importing the package does to the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "3000"), ("7", "7")])
def test_waiting_threads_spin_briefly_unless_the_environment_says_otherwise(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    code = "import sys, os, ppo_rlhf; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [expected, "False"]
