"""oneDNN keeps many compiled shapes of 16-bit products for a small model, few for all others."""

import os
import subprocess
import sys

import pytest

from ppo_rlhf.models.compiled_shapes import FEW, MANY, VARIABLE, keep_shapes_of_small_models
from ppo_rlhf.models.loading import PretrainedHandle
from tests.tiny_models import save, tiny_model


@pytest.mark.parametrize(("weights", "before", "after"), [(2**23, FEW, MANY), (2**23 + 1, FEW, FEW), (1, "512", "512")])
def test_many_are_kept_for_a_small_model_unless_another_number_was_asked_for(monkeypatch, weights, before, after):
    monkeypatch.setenv(VARIABLE, before)
    keep_shapes_of_small_models(weights)
    assert os.environ[VARIABLE] == after


def test_loading_a_small_model_is_enough(monkeypatch, tmp_path):
    """The first products of a pipeline are those of an evaluation, before there is a run."""
    source = save(tmp_path / "model", tiny_model())
    monkeypatch.setenv(VARIABLE, FEW)
    PretrainedHandle(source).causal_lm()
    assert os.environ[VARIABLE] == MANY


def test_the_number_set_behind_the_import_counts_up_to_the_first_product():
    """Of 40 shapes, seen twice, none is compiled anew; of the few that are kept by default all are."""
    script = """
import os, sys
import torch
import ppo_rlhf
from ppo_rlhf.models.compiled_shapes import keep_shapes_of_small_models
keep_shapes_of_small_models(int(sys.argv[1]))
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
