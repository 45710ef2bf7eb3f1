"""Runs of one process in a group of its own, through DDP or FSDP2; started by torchrun in `test_sharding`.

torchrun --nproc_per_node 1 -m tests.ppo.sharding_on_a_gpu_case RESULTS DEVICE

NCCL allows one process per GPU. So on one GPU only the hooks and streams of DDP and FSDP2 can be tested.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ppo.sharding_cases import CASES, results

NAMES = ("token budget, GPT-2 with a tied head", "LoRA")


def main(path: Path, device: str) -> None:
    """Run the cases with DDP, then with FSDP2; write the backend and the results."""
    actual: dict[str, Any] = {name: {"DDP": results({**CASES[name], "device": device})} for name in NAMES}
    for name, module in list(sys.modules.items()):  # check_launch refuses FSDP2 with one process
        if name.startswith(("ppo_rlhf.", "tests.", "__main__")) and hasattr(module, "shards_models"):
            vars(module)["shards_models"] = lambda: True
    for name in NAMES:
        actual[name]["FSDP2"] = results({**CASES[name], "device": device})
    actual["backend"] = torch.distributed.get_backend()
    path.write_text(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
