"""oneDNN keeps many compiled shapes for a small model in 16 bits, few for all others."""

import os
import subprocess
import sys

import pytest

from ppo_rlhf.training.compiled_shapes import FEW, MANY, VARIABLE, keep_shapes_of_small_models
from ppo_rlhf.training.config import PPOConfig


@pytest.mark.parametrize(
    ("dtype", "weights", "before", "after"),
    [
        ("bfloat16", 2**23, FEW, MANY),
        ("float16", 1, FEW, MANY),
        ("bfloat16", 2**23 + 1, FEW, FEW),
        ("float32", 1, FEW, FEW),
        ("bfloat16", 1, "512", "512"),
    ],
)
def test_many_are_kept_for_a_small_model_in_sixteen_bits_unless_another_number_was_asked_for(
    monkeypatch, dtype, weights, before, after
):
    monkeypatch.setenv(VARIABLE, before)
    keep_shapes_of_small_models(PPOConfig(dtype=dtype), weights)
    assert os.environ[VARIABLE] == after


def test_the_number_set_behind_the_import_counts_up_to_the_first_product():
    """Of 40 shapes, seen twice, none is compiled anew; of the few that are kept by default all are."""
    script = """
import os, sys
import torch
import ppo_rlhf
from ppo_rlhf.training.compiled_shapes import keep_shapes_of_small_models
from ppo_rlhf.training.config import PPOConfig
keep_shapes_of_small_models(PPOConfig(dtype="bfloat16"), int(sys.argv[1]))
right = torch.ones(64, 64, dtype=torch.bfloat16)
for _ in range(2):
    for rows in range(16, 16 * 41, 16):
        torch.ones(rows, 64, dtype=torch.bfloat16) @ right
"""
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "LRU_CACHE_CAPACITY")}
    compiled = []
    for weights in (1, 2**30):
        found = subprocess.run(
            [sys.executable, "-c", script, str(weights)],
            env=environment | {"ONEDNN_VERBOSE": "profile"},
            capture_output=True,
            text=True,
            check=True,
        )
        compiled.append(found.stdout.count("create:cache_miss"))
    if not any(compiled):
        pytest.skip("this processor multiplies 16 bits without oneDNN")
    assert compiled == [40, 80]
