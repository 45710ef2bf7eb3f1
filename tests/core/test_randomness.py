"""Randomness is a pure function of (seed, stream, index) and does not depend on the process."""

import json
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from ppo_rlhf.core.randomness import (
    episode_prompts,
    episode_uniforms,
    generator,
    minibatch_partition,
    permutation,
)

DRAW_ALL = """
import json
from ppo_rlhf.core.randomness import *
print(json.dumps([
    permutation(11, 7, "held_out").tolist(),
    episode_uniforms(7, "rollout", 3, 4, 5).tolist(),
    episode_prompts(7, 3, 6, 10),
    minibatch_partition(7, 3, 1, 12, 3),
]))
"""


def test_a_fresh_process_draws_the_same_whatever_this_one_did_before():
    torch.manual_seed(123)
    np.random.seed(5)
    random.seed(6)
    torch.rand(1000)
    here = [
        permutation(11, 7, "held_out").tolist(),
        episode_uniforms(7, "rollout", 3, 4, 5).tolist(),
        episode_prompts(7, 3, 6, 10),
        minibatch_partition(7, 3, 1, 12, 3),
    ]
    fresh = subprocess.run([sys.executable, "-c", DRAW_ALL], capture_output=True, text=True, check=True)
    assert json.loads(fresh.stdout) == here  # JSON keeps every bit of a double


def test_drawing_does_not_change_the_global_generators():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    episode_uniforms(1, "rollout", 1, 8, 8)
    episode_prompts(1, 1, 8, 5)
    minibatch_partition(1, 1, 0, 8, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_argument_changes_what_is_drawn():
    drawn = [
        generator(*arguments).initial_seed()
        for arguments in [
            (42, "rollout", 1),
            (43, "rollout", 1),
            (42, "minibatches", 1),
            (42, "rollout", 2),
            (42, "rollout", 1, 0),
            (42, "rollout", 1, 1),
            (42, "rollout", 11),
            (42, "rollout"),
            (421, "rollout"),
        ]
    ]
    assert len(set(drawn)) == len(drawn)


def test_uniforms_are_float64_in_the_half_open_unit_interval_and_evenly_spread():
    uniforms = episode_uniforms(42, "rollout", 1, 400, 100)
    assert uniforms.dtype == torch.float64
    assert uniforms.shape == (400, 100)
    assert float(uniforms.min()) >= 0.0
    assert float(uniforms.max()) < 1.0
    # chi-square over 100 equal cells: mean 99, standard deviation 14; 99 + 5 x 14 is exceeded once in 1e5 seeds
    counts = torch.histc(uniforms, bins=100, min=0.0, max=1.0)
    assert float(((counts - 400.0).square() / 400.0).sum()) < 170.0


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(7, 5), (5, 7), (6, 6), (1, 4), (10, 3)])
def test_every_prompt_is_used_equally_often_across_passes(num_prompts, batch_size):
    used: Counter[int] = Counter()
    for iteration in range(1, 2 * num_prompts + 1):
        indices = episode_prompts(3, iteration, batch_size, num_prompts)
        assert len(indices) == batch_size
        used.update(indices)
        counts = [used[i] for i in range(num_prompts)]
        assert max(counts) - min(counts) <= 1
    assert set(used.values()) == {2 * batch_size}


def test_each_pass_over_the_prompts_has_an_order_of_its_own():
    passes = [episode_prompts(3, iteration, 20, 20) for iteration in (1, 2, 3)]
    assert [sorted(indices) for indices in passes] == [list(range(20))] * 3
    assert len({tuple(indices) for indices in [*passes, list(range(20))]}) == 4


def test_the_prompt_order_does_not_depend_on_the_batch_size():
    small = [i for iteration in range(1, 13) for i in episode_prompts(3, iteration, 4, 10)]
    large = [i for iteration in range(1, 5) for i in episode_prompts(3, iteration, 12, 10)]
    assert small == large


@pytest.mark.parametrize(("size", "num_mini_batches"), [(12, 1), (12, 3), (12, 12), (5, 5)])
def test_a_partition_holds_each_row_once_in_minibatches_of_equal_size(size, num_mini_batches):
    partition = minibatch_partition(1, 2, 3, size, num_mini_batches)
    assert sorted(row for minibatch in partition for row in minibatch) == list(range(size))
    assert [len(minibatch) for minibatch in partition] == [size // num_mini_batches] * num_mini_batches


def test_epochs_and_iterations_cut_different_minibatches():
    cuts = [minibatch_partition(1, iteration, epoch, 16, 4) for iteration in (1, 2) for epoch in (0, 1)]
    assert len({str(cut) for cut in cuts}) == 4
