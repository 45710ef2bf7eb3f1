"""compare.py's own side, row format and arithmetic, on a toy shape and without TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import check_steps, check_tokens, combination_rows, parse_arguments, take_turns
from roofline import Rates, Work, adamw_seconds, matrix_elements, measure
from scaling import fit
from speed.channel import Worker, WorkerError
from speed.inputs import find_noise_seed, make_models, make_prompts
from speed.rows import PHASES, rows_of, table
from speed.workload import PRESETS, Job, Preset, Shape, response_length_of, stop_probability
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ppo_rlhf.models.products.processors import lacks_fast_instructions

GPT2 = Preset(Shape("gpt2", 2, 16, 2, 64), batch=4, minibatch=2, prompt_length=4, response_length=6, epochs=2)
LLAMA = replace(GPT2, shape=Shape("llama", 2, 16, 4, 64, kv_heads=2, feed_forward=24))
TOY = replace(GPT2, shape=Shape("gpt2", 2, 64, 4, 500), response_length=40)
FOREVER = float("inf")


def job_of(preset: Preset, form: str, folder: Path, iterations: int) -> Job:
    models = make_models(preset, form, folder)
    seed = find_noise_seed(preset, models.stop_probability, 1, iterations) if form == "mixed" else 0
    prompts = make_prompts(preset, form, preset.batch * iterations)
    return Job(preset, form, "float32", "cpu", iterations, models.policy, models.reward, prompts, noise_seed=seed)


def rates_of(shape: Shape, products: float, attention: float, bandwidth: float) -> Rates:
    every = {f"{k}x{n}": products for k, n in [*shape.linears, (shape.width, shape.vocabulary)]}
    return Rates(every, every, attention, bandwidth)


def iteration(seconds: float, tokens: int = 10, memory: float = 1.0) -> dict[str, Any]:
    times = dict.fromkeys(PHASES, seconds)
    return {**times, "prompt_tokens": [2], "response_tokens": [tokens], "memory_mib": memory, "steps": 8}


def test_a_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    """By hand: the ratios 4, 5 and 9/8 have median 4, the medians 8 and 9 have 9/8; with defaults 3, 5, 1.5."""
    ours, peer, defaults = ([iteration(s) for s in times] for times in ((1, 10, 8), (4, 50, 9), (3, 50, 12)))
    needed = [tuple(dict.fromkeys(PHASES, s) for s in (least, least / 2)) for least in (0.5, 2.0, 2.0)]
    rows = rows_of({"preset": "p", "form": "full", "precision": "float32"}, ours, peer, defaults, needed)
    assert [row["phase"] for row in rows] == ["rollout", "score", "update", "iteration"]
    for row in rows:
        assert (row["ours_s"], row["peer_s"], row["ratio"]) == (8, 9, 4)
        assert (row["peer_defaults_s"], row["ratio_defaults"]) == (12, 3)
        assert (row["roofline"], row["roofline_s"], row["pairs"]) == (0.25, 2.0, 3)
        assert row["roofline_fastest"] == 0.125


def test_memory_is_the_highest_peak_and_tokens_are_the_mean_of_iterations() -> None:
    ours, peer = [iteration(1, 10, 5.0), iteration(1, 20, 6.0)], [iteration(1, 14, 8.0), iteration(1, 15, 8.0)]
    last = rows_of({}, ours, peer, [], [(dict.fromkeys(PHASES, 1.0),) * 2] * 2)[-1]
    assert (last["memory_ours_mib"], last["memory_peer_mib"], last["memory_share"]) == (6.0, 8.0, 0.75)
    assert (last["ours_tokens"], last["peer_tokens"]) == (15, 14.5)
    assert "ratio_defaults" not in last


def test_sides_take_turns_in_alternating_order_and_the_machine_is_measured_after_each_round() -> None:
    order: list[str] = []

    def side(name: str) -> Any:
        return lambda: order.append(name) or {"iteration": 0.0}

    runs, rates = take_turns({"ours": side("a"), "peer": side("b"), "defaults": side("c")}, side("r"), 3)
    assert "".join(order) == "abcrcbarabcr"
    assert [len(runs["ours"]), len(runs["defaults"]), len(rates)] == [3, 3, 3]


def test_sides_that_did_other_work_are_refused() -> None:
    job = Job(GPT2, "full", "float32", "cpu", 2, "", "", [])
    check_steps(job, {"ours": [{"steps": 4}, {"steps": 8}]})
    with pytest.raises(SystemExit, match="peer: 4 optimiser steps, 8 expected"):
        check_steps(job, {"ours": [{"steps": 8}], "peer": [{"steps": 4}]})
    half = replace(job, form="mixed")  # 4 responses of 6 tokens at most: 12 an iteration
    check_tokens(half, {"preset": "p", "ours_tokens": 12.3, "peer_tokens": 13.0})
    with pytest.raises(SystemExit, match="p mixed, ours: 13 response tokens an iteration, 12 expected"):
        check_tokens(half, {"preset": "p", "ours_tokens": 13.0, "peer_tokens": 12.0})
    with pytest.raises(SystemExit, match="p full, peer: 20 response tokens an iteration, 24 expected"):
        check_tokens(job, {"preset": "p", "ours_tokens": 24.0, "peer_tokens": 20.0})


@pytest.mark.parametrize(("form", "preset"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_counted_operations_of_linear_layers_are_those_of_the_model(form: str, preset: Preset, tmp_path: Path) -> None:
    """torch counts what the model really computes; attention and the head's prompt positions are left out of both."""
    policy = AutoModelForCausalLM.from_pretrained(make_models(preset, "full", tmp_path).policy)
    ids = torch.zeros(2, 10, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        policy(input_ids=ids, logits_to_keep=torch.arange(3, 9)).logits.sum().backward()
    operations = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for name, count in operations.items() if name in ("aten.addmm", "aten.mm"))
    work = Work(replace(preset, epochs=1), "float32", [4, 4], [6, 6])
    rates = rates_of(preset.shape, 1.0, FOREVER, FOREVER)
    head = 3 * 2 * 12 * 16 * 64
    critic = work.score(rates) - 2 * head / 3  # four trunks forward
    assert work.update(rates) == linear + 3 * critic / 4


def test_attention_counts_each_pair_of_positions_once() -> None:
    """By hand: lengths 5 and 3 have 15 + 6 pairs, 2 layers, width 16: 4 x 21 x 16 x 2 operations a forward pass."""
    work = Work(replace(GPT2, epochs=3), "float32", [3, 2], [2, 1])
    rates = rates_of(GPT2.shape, FOREVER, 1.0, FOREVER)
    assert work.score(rates) == 4 * 2688
    assert work.update(rates) == 3 * 2 * 3 * 2688  # epochs, models, a backward pass is two forward passes


def test_a_decoding_step_reads_all_matrices_and_the_cache_of_the_rows_still_going() -> None:
    """By hand: responses of 3 and 1 tokens make 2 steps, both of the first row, which then has 4 and 5 positions."""
    work = Work(LLAMA, "bf16", [3, 2], [3, 1])
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 64
    assert matrix_elements(LLAMA.shape) == matrices
    seconds = work.rollout(rates_of(LLAMA.shape, FOREVER, FOREVER, 1.0))
    assert seconds == 2 * 2 * matrices + (4 + 5) * 2 * 2 * 8 * 2
    # computing, not memory, is what takes the time of a machine with endless bandwidth: 5 + 2 tokens, 2 + 2 heads
    computed = work.rollout(rates_of(LLAMA.shape, 1.0, FOREVER, FOREVER))
    assert computed == 2 * (7 * (matrices - 16 * 64) + 4 * 16 * 64)


def test_all_phases_make_the_iteration_and_adamw_passes_seven_times_over_both_models() -> None:
    work, rates = Work(GPT2, "float32", [4], [6]), rates_of(GPT2.shape, 2.0, 3.0, 5.0)
    seconds = work.seconds(rates)
    assert seconds["iteration"] == seconds["rollout"] + seconds["score"] + seconds["update"]
    assert adamw_seconds(GPT2, rates) == pytest.approx(4 * 2 * 7 * matrix_elements(GPT2.shape) * 4 / 5.0)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_machine_is_measured_on_every_product(precision: str) -> None:
    rates = measure(GPT2, precision, "cpu")
    assert set(rates.forward) == set(rates.backward) == {"16x48", "16x16", "16x64", "64x16"}
    assert all(rate > 0 for rate in [*rates.forward.values(), rates.attention, rates.bandwidth])
    has_onednn = torch.backends.mkldnn.is_available()
    has_another = has_onednn and (precision == "float32" or lacks_fast_instructions(torch.bfloat16))
    another = set(rates.forward) if has_another else set()
    assert set(rates.other_forward) == set(rates.other_backward) == another
    assert (rates.other_attention > 0) is has_another


def test_of_each_product_the_faster_way_counts() -> None:
    rates = Rates({"a": 1.0, "b": 4.0}, {"a": 2.0, "b": 2.0}, 7.0, 8.0, {"a": 3.0, "b": 3.0}, {"a": 1.0}, 9.0)
    fastest = replace(rates, forward={"a": 3.0, "b": 4.0}, backward={"a": 2.0, "b": 2.0}, attention=9.0)
    assert rates.fastest() == fastest


def test_the_stop_probability_halves_the_mean_length() -> None:
    """For R = 4 the mean 1 + q + q² + q³ is 2 at q = 0.543689 (the tribonacci constant's reciprocal)."""
    assert stop_probability(4) == pytest.approx(1 - 0.5436890126920764, abs=1e-9)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [TOY.shape, Shape("llama", 2, 64, 4, 500, kv_heads=2)])
def test_the_stop_token_has_its_probability_after_any_text(
    shape: Shape, precision: torch.dtype, tmp_path: Path
) -> None:
    models = make_models(replace(TOY, shape=shape), "mixed", tmp_path)
    assert models.stop_probability == pytest.approx(stop_probability(40), rel=0.02)  # half a bfloat16 step
    policy = AutoModelForCausalLM.from_pretrained(models.policy)
    ids = torch.randint(1, 500, (16, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        stops = policy(input_ids=ids).logits.float().softmax(-1)[..., 0]
    assert float(stops.mean()) == pytest.approx(models.stop_probability, rel=0.01)
    assert float(stops.min()) > 0.8 * models.stop_probability
    assert float(stops.max()) < 1.2 * models.stop_probability


def test_response_lengths_count_the_stop_token() -> None:
    assert [response_length_of(row, 0) for row in ([5, 0, 7, 0], [0, 1], [5, 6])] == [2, 1, 2]
    assert response_length_of([5, 0, 7], None) == 3


def test_prompts_are_of_one_length_in_full_and_mixed_from_a_quarter_of_it() -> None:
    preset = replace(GPT2, prompt_length=16)
    assert {len(ids) for ids in make_prompts(preset, "full", 50)} == {16}
    lengths = {len(ids) for ids in make_prompts(preset, "mixed", 400)}
    assert lengths == set(range(4, 17))


def test_our_worker_and_the_roofline_make_rows(tmp_path: Path) -> None:
    """Two processes, driven as compare.py drives them; our side stands in for the peer, too."""
    job = replace(job_of(TOY, "mixed", tmp_path, 3), overrides={"vf_coef": 0.2})
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    worker, roof = (Worker(sys.executable, name, tmp_path / "job.json") for name in ("speed.our_side", "roofline"))
    try:
        assert worker.ready()["threads"] == torch.get_num_threads()
        roof.ready()
        runs, rates = take_turns({"ours": worker.run}, roof.run, 3)
    finally:
        worker.close()
        roof.close()
    for run in runs["ours"]:
        assert run["iteration"] == pytest.approx(run["rollout"] + run["score"] + run["update"])
        assert len(run["response_tokens"]) == len(run["prompt_tokens"]) == 4
        assert max(run["response_tokens"]) <= 40
    assert [run["steps"] for run in runs["ours"]] == [4, 8, 12]
    rows = combination_rows(job, "toy", 1, {**runs, "peer": runs["ours"]}, [Rates(**found) for found in rates])
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert (row["preset"], row["form"], row["precision"], row["pairs"]) == ("toy", "mixed", "float32", 2)
        assert row["ratio"] == 1.0
        assert row["roofline"] > 0.0
        assert 0.0 < row["roofline_fastest"] < 1.0
    assert 0.0 < rows[-1]["memory_ours_mib"] < 2000.0
    printed = table([*rows, {"machine": {}}]).splitlines()
    assert len(printed) == 5
    assert printed[-1].startswith("toy     mixed  float32    iteration")


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    worker = Worker(sys.executable, "roofline", tmp_path / "missing.json")
    with pytest.raises(WorkerError, match=r"roofline .* ended with status 1:[\s\S]*missing.json"):
        worker.ready()
    worker.close()


def test_the_peer_inherits_nothing_that_this_project_sets_for_its_own_libraries(tmp_path: Path) -> None:
    """In a process of its own: this one has imported the project already."""
    own = ("CUBLAS_WORKSPACE_CONFIG", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    (tmp_path / "says.py").write_text("import os\nfrom speed.channel import Channel\nChannel().send(**os.environ)")
    command = (
        "import json, os, sys; from compare import Worker; from pathlib import Path;"
        "worker = Worker(sys.executable, 'says', Path('job.json')); found = worker.ready(); worker.close();"
        "print(json.dumps([dict(os.environ), found]))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    given = {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": path}
    said = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, env=given, capture_output=True, check=True)
    parents, workers = json.loads(said.stdout)
    assert set(own) <= set(parents)
    assert not set(own) & set(workers)
    assert workers["GOMP_SPINCOUNT"] == "3000"


def test_the_fixed_command_is_understood() -> None:
    line = "--peer-python P --presets tiny,small --forms full,mixed --precisions float32,bf16 --pairs 5 --json OUT"
    arguments = parse_arguments([*line.split(), "--set", "dtype=float16", "--set", "max_tokens_per_micro_batch=512"])
    assert (arguments.presets, arguments.forms) == (["tiny", "small"], ["full", "mixed"])
    assert (arguments.precisions, arguments.pairs, arguments.json) == (["float32", "bf16"], 5, Path("OUT"))
    assert dict(arguments.set) == {"dtype": "float16", "max_tokens_per_micro_batch": 512}
    assert set(PRESETS) == {"tiny", "small", "gpt2", "llama1b"}
    with pytest.raises(SystemExit):
        parse_arguments([*line.split(), "--presets", "huge"])


def test_a_line_is_fitted() -> None:
    assert fit([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx({"slope": 2.0, "intercept": 3.0, "r2": 1.0})
    assert fit([0.0, 1.0, 2.0], [0.0, 3.0, 0.0])["r2"] == pytest.approx(0.0)
