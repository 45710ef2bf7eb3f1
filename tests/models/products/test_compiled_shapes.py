"""Products have few shapes where oneDNN compiles each, and it keeps many of a small model's, few of all others'."""

import os
import subprocess
import sys

import pytest
import torch

from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.products import compiled_shapes
from ppo_rlhf.models.products.compiled_shapes import (
    FEW,
    MANY,
    ROUND,
    VARIABLE,
    fills_rows,
    keep_shapes_of_small_models,
    rounded_up,
)
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
from ppo_rlhf.models.products.compiled_shapes import keep_shapes_of_small_models
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


def test_numbers_of_tokens_are_rounded_up_to_few_different_ones():
    expected = {1: 16, 16: 16, 17: 32, 383: 384, 384: 384, 385: 416, 416: 416, 768: 768, 769: 832}
    assert {n: rounded_up(n) for n in expected} == expected
    assert all(rounded_up(n) - n < max(ROUND, n / 12) for n in range(1, 5000))
    assert len({rounded_up(n) for n in range(200, 6400)}) < 70


@pytest.mark.parametrize("lacks", [False, True])
def test_rows_of_a_pass_are_filled_up_where_the_processor_has_sixteen_bits(monkeypatch, lacks):
    monkeypatch.setattr(compiled_shapes, "lacks_fast_instructions", lambda _: lacks)
    model = tiny_model()
    assert not fills_rows(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert fills_rows(model) is not lacks
    assert fills_rows(model.bfloat16()) is not lacks
    assert not fills_rows(tiny_model().to("meta"))
