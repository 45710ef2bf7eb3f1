"""The update's operations against numbers counted by hand, and against what torch counts while it computes."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ppo_rlhf.training.optimisation.metrics import iteration_metrics
from ppo_rlhf.training.optimisation.operations import Matrices, UpdateOperations
from ppo_rlhf.training.optimisation.update import optimise
from ppo_rlhf.training.optimisation.utilisation import PEAKS, device_name, peak_flops, update_utilisation

BLOCKS = 2 * (16 * 48 + 16 * 16 + 16 * 64 + 64 * 16)  # two layers, 16 wide: c_attn, c_proj, c_fc, c_proj
HEAD = 23 * 16
ATTENTION = 2 * 16
BEHIND = 16 * 16 + 16 * 64 + 64 * 16  # what follows the last attention: c_proj, c_fc, c_proj
LENGTHS, RESPONSES = [3, 5], [1, 4]
TOKENS, PAIRS, NOT_READ = 8, 6 + 15, 1  # of a prompt of two tokens the first
BY_TOKENS = BLOCKS * TOKENS - BEHIND * NOT_READ


def flops_of_linear(rows, weight, *_, **__):
    return 2 * math.prod(rows) * weight[0]


LIBRARIES = {torch.ops.mkldnn._linear_pointwise: flops_of_linear} if torch.backends.mkldnn.is_available() else {}
"""What torch does not count itself: the products of `models.products.linear`."""


def operations(run) -> UpdateOperations:
    found = UpdateOperations.of(run.state.policy, run.state.critic)
    assert found is not None
    return found


def test_a_tiny_gpt2_counted_by_hand(make_run):
    trunk = 6 * BY_TOKENS + 12 * ATTENTION * PAIRS
    found = operations(make_run("gpt2"))
    assert found.count(LENGTHS, RESPONSES) == 2 * trunk + 6 * HEAD * 5
    forward = 2 * BY_TOKENS + 4 * ATTENTION * PAIRS + 2 * HEAD * 5
    assert found.count(LENGTHS, RESPONSES, policy_learns=False) == forward + trunk


def test_a_shared_trunk_is_passed_once(make_run):
    found = operations(make_run("gpt2", value_model="shared"))
    assert found.count(LENGTHS, RESPONSES) == 6 * BY_TOKENS + 12 * ATTENTION * PAIRS + 6 * HEAD * 5


def test_frozen_matrices_have_no_gradients_of_their_own(make_run):
    behind = 3 * ((16 + 16) + (16 + 64) + (64 + 16))  # rank 3
    adapters = 2 * (3 * (16 + 48) + behind)  # in each of the two layers
    found = operations(make_run("gpt2", use_peft=True, lora_r=3))
    assert found.policy.matrices == Matrices(trained=adapters - behind, frozen=BLOCKS - BEHIND)
    assert found.policy.behind == Matrices(trained=behind, frozen=BEHIND)
    trunk = 4 * BY_TOKENS + 6 * (adapters * TOKENS - behind * NOT_READ) + 12 * ATTENTION * PAIRS
    assert found.count(LENGTHS, RESPONSES) == 2 * trunk + 4 * HEAD * 5


def test_heads_that_share_keys_have_narrower_matrices_and_attend_as_widely(make_run):
    found = operations(make_run("llama"))  # 2 heads of 8 with one key, 24 wide inside
    assert found.policy.matrices.trained == 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) - 16 * 16 - 3 * 16 * 24
    assert found.policy.behind.trained == 16 * 16 + 3 * 16 * 24
    assert found.policy.attention == ATTENTION


def test_matrices_of_other_kinds_are_not_guessed_at():
    assert Matrices.of(nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2), nn.LayerNorm(3))) == Matrices(6, 0)
    assert Matrices.of(nn.Sequential(nn.Linear(2, 3), nn.Conv1d(3, 3, 2))) is None


@pytest.mark.parametrize("options", [{}, {"value_model": "shared"}, {"use_peft": True}], ids=str)
def test_it_is_what_torch_counts_but_for_what_the_page_leaves_out(make_run, make_prompts, options):
    """Torch counts attention's scores to the right and, backward, a second time; the value head; of an adapter not the
    gradient of the first layer's input. 128 wide, with 16 tokens a sequence, that is below 4 %."""
    run = make_run(
        "gpt2",
        model={"n_embd": 128, "n_layer": 6},
        prompts=make_prompts((8,) * 12),
        side_by_side=False,  # torch counts in one thread
        **{"dtype": "float32", "num_ppo_epochs": 1, "stop_token": "none", "missing_eos_penalty": None, **options},
    )
    *_, experience = run.before_update()
    with FlopCounterMode(display=False, custom_mapping=LIBRARIES) as counter:
        optimise(run.state, experience, run.config)
    assert operations(run).count([16] * 12, [8] * 12) == pytest.approx(counter.get_total_flops(), rel=0.04)


def test_the_share_is_of_the_peak_in_the_precision_of_the_run(make_run):
    run = make_run("gpt2", dtype="float32", num_ppo_epochs=3)
    *_, experience = run.before_update()
    responses = experience.rollouts.lengths.tolist()
    lengths = [len(ids) + n for ids, n in zip(experience.rollouts.prompts.prompt_ids, responses, strict=True)]
    whole = operations(run).count(lengths, responses)
    found = update_utilisation(run.state, experience, 6, 0.5, "NVIDIA H200")
    assert found == pytest.approx(3 * whole / (0.5 * 67e12))
    first = update_utilisation(run.state, experience, 1, 0.5, "NVIDIA H200")
    second = update_utilisation(run.state, experience, 2, 0.5, "NVIDIA H200")
    assert first is not None
    assert 0.0 < first < second == pytest.approx(found / 3)


def test_peaks_are_those_of_the_precision():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == peak_flops("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float64") is None
    for unknown in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", None):
        assert peak_flops(unknown, "bfloat16") is None
    assert all(peak.half >= peak.tf32 >= peak.float32 for peak in PEAKS.values())


def test_there_is_no_share_on_the_cpu_nor_where_padding_is_computed(make_run, monkeypatch):
    run = make_run("gpt2", dtype="float32")
    *_, experience = run.before_update()
    assert device_name(run.state.device) is None
    assert "throughput/mfu" not in optimise(run.state, experience, run.config)
    monkeypatch.setattr("ppo_rlhf.training.state.packs", lambda _: False)
    *_, padded = run.before_update()
    assert update_utilisation(run.state, padded, 4, 1.0, "NVIDIA H200") is None


def test_a_gpu_that_is_known_has_it_among_the_metrics_of_an_iteration(make_run, monkeypatch):
    run = make_run("gpt2", dtype="bfloat16")
    *_, experience = run.before_update()
    steps = []
    monkeypatch.setattr(
        "ppo_rlhf.training.optimisation.update.iteration_metrics",
        lambda *arguments: steps.append(arguments) or iteration_metrics(*arguments),
    )
    monkeypatch.setattr("ppo_rlhf.training.optimisation.metrics.device_name", lambda _: "NVIDIA H200")
    metrics = optimise(run.state, experience, run.config)
    seconds = metrics["time/optimise_s"]
    assert len(steps[0][1]) == 4
    assert metrics["throughput/mfu"] == update_utilisation(run.state, experience, 4, seconds, "NVIDIA H200")
