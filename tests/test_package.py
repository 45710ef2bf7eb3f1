"""What importing the package does to the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", None, ":4096:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":16:8"),
    ],
)
def test_what_libraries_read_as_they_are_loaded_is_set_unless_the_environment_sets_it(
    name: str, given: str | None, expected: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != name}
    if given is not None:
        environment[name] = given
    code = f"import sys, os, ppo_rlhf; print(os.environ['{name}'], 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [expected, "False"]
