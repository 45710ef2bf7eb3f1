"""Processes that hang do not outlive the test that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import launch


@pytest.mark.slow
def test_processes_that_hang_end_with_the_test(tmp_path: Path):
    with pytest.raises(subprocess.TimeoutExpired):
        launch("tests.test_launch", str(tmp_path), processes=2, folder=tmp_path, timeout=25)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


if __name__ == "__main__":
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
