"""Memory that runs out in process 1 while the processes exchange gradients; started by torchrun in `test_processes`.

torchrun --nproc_per_node 2 -m tests.ppo.short_memory_case PHASE ANSWER

ANSWER is the file for the error's text.
"""

import os
import sys
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.runtime.processes import own_rank
from tests.ppo.process_cases import build
from tests.ppo.short_memory import ShortMemory

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        if own_rank() == 1:
            ShortMemory(patch, sys.argv[1], most=4)
        try:
            build({"num_mini_batches": 1}).iteration()
        except TrainingError as error:
            Path(sys.argv[2]).write_text(str(error))
            os._exit(3)  # the other process waits in a collective
