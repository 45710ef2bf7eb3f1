"""What importing the package does to the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ppo_rlhf


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


def test_bitsandbytes_does_not_warn_of_what_only_weights_in_four_bits_use() -> None:
    code = "import logging, ppo_rlhf; logging.getLogger('bitsandbytes.backends.cpu.ops').warning('no kernels')"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, marks=pytest.mark.slow) for command in ("registry list", "clean --help")),
        "run --env test --params ppo.kl_coeff=1",
    ],
    ids=lambda given: given[:8],
)
def test_commands_that_train_nothing_import_no_library_of_training(command: str) -> None:
    """peft, and with it bitsandbytes, costs two seconds."""
    code = f"""
import sys
from kedro.framework.cli.cli import main
sys.argv = ["kedro", *{command.split()}]
try:
    main()
except SystemExit:
    print("imported:", *(name for name in ("peft", "bitsandbytes", "trl") if name in sys.modules))
"""
    project = Path(__file__).parents[1]
    printed = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines()[-1].strip() == "imported:"


def test_the_version_stands_in_the_package_and_in_what_is_cited() -> None:
    cited = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert cited["version"] == ppo_rlhf.__version__
    with pytest.raises(AttributeError, match="no_such_name"):
        ppo_rlhf.no_such_name  # noqa: B018
