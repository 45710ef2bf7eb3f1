"""What a run will need, from configurations alone: counted exactly where a count is possible, else met within 15 %."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ppo_rlhf.models.products import packed_weights, processors
from torch import Tensor
from transformers import BloomConfig, GPT2Config, LlamaConfig, MistralConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.adapters import trained_parameters
from ppo_rlhf.models.reward_model import CausalLMRewardConfig, CausalLMRewardModel
from ppo_rlhf.training.memory import RunShape, machine, plan_memory, remedies
from ppo_rlhf.training.memory.live_bytes import MAPPED_FROM, counting
from ppo_rlhf.training.memory.plan import micro_batch_rows

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "memory.py"
GPT2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=23, n_positions=64, bos_token_id=0, eos_token_id=0)
LLAMA = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=2,
)
WINDOWED = MistralConfig(**LLAMA.to_diff_dict() | {"model_type": "mistral", "sliding_window": 4})
SETTINGS = {"per_device_train_batch_size": 8, "response_length": 8}
TOLERANCE = 0.15


def plan(policy=LLAMA, *, reward_model=None, on_cpu=True, prompt_length=6, **settings):
    return plan_memory(PPOConfig(**{**SETTINGS, **settings}), RunShape(policy, prompt_length, reward_model, on_cpu))


def weights(planned) -> dict[str, int]:
    suffix = ": weights"
    return {name.removesuffix(suffix): size for name, size in planned.held.items() if name.endswith(suffix)}


def phase(planned, name: str):
    return next(found for found in planned.phases if found.name == name)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_storages_count_once_while_something_holds_them():
    with counting() as live:
        first = torch.zeros(10, 4)
        assert live.now.total == 160
        view = first.t()[1:]
        assert live.now.total == 160
        del first
        assert live.now.total == 160
        del view
        assert live.now.total == 0
        assert live.peak_of(lambda: torch.ones(4).add(torch.ones(4))).total == 48
        assert live.peak_of(lambda: None).total == 0


def test_large_blocks_do_not_count_as_the_heaps():
    with counting() as live:
        small, large = torch.empty(MAPPED_FROM - 1, dtype=torch.uint8), torch.empty(MAPPED_FROM, dtype=torch.uint8)
        assert (live.now.total, live.now.in_heap) == (2 * MAPPED_FROM - 1, MAPPED_FROM - 1)
        del small, large


def test_what_the_graph_saves_is_counted_until_the_backward_pass():
    """y = (x W)^2 of x [8, 4], W [4, 6]: the graph saves x, W and x W; the peak adds the gradients as they come."""
    with counting() as live:
        x, w = torch.zeros(8, 4), torch.zeros(4, 6, requires_grad=True)
        before = live.now.total
        y = (x @ w).pow(2).sum()
        assert live.now.total - before == 4 * (8 * 6 + 1)  # x W is saved by pow, its square is gone
        y.backward()
        del y
        assert live.now.total - before == w.grad.untyped_storage().nbytes() == 4 * 24


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"value_model": "shared"},
        {"value_model": "reward_init"},
        {"use_peft": True},
        {"use_peft": True, "dtype": "bfloat16", "value_model": "reward_init"},
        {"use_peft": True, "value_model": "shared", "lora_r": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("kind", "shape"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_weights_and_moments_are_those_of_the_run_to_the_byte(make_run, make_model, kind, shape, settings):
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(settings.get("dtype", ""), torch.float32)
    reward_model = CausalLMRewardModel.from_causal_lm(make_model(kind, dtype=dtype)).requires_grad_(False)
    run = make_run(kind, **{"dtype": "float32", **settings}, reward_model=reward_model)
    models = (run.state.policy, run.reference, reward_model, run.state.critic)
    planned = plan(shape, reward_model=CausalLMRewardConfig(text_config=shape), **settings)
    # buffers: those of a run have the type of their model here, in a plan as loading leaves them
    real = unique_bytes(p for model in models for p in model.parameters())
    buffers = sum(weights(planned).values()) - real
    assert 0 <= buffers < 200 * len(models)
    trained = unique_bytes(p for m in (run.state.policy, run.state.critic) for p in trained_parameters(m).values())
    assert planned.held["optimisers: two moments of each weight that trains"] == 2 * trained
    run.iteration()
    moments = [m for o in {run.state.policy_optimizer, run.state.critic_optimizer} for m in o.state.values()]
    assert planned.held["optimisers: two moments of each weight that trains"] == sum(
        each[name].nbytes for each in moments for name in ("exp_avg", "exp_avg_sq")
    )


def test_with_adapters_reference_and_critic_hold_no_copy_of_the_base():
    found = weights(plan(use_peft=True))
    adapter = plan(use_peft=True).held["optimisers: two moments of each weight that trains"] // 2
    assert found["reference policy"] == 0
    assert found["policy"] + found["critic"] == weights(plan())["reference policy"] + adapter


def test_the_rollout_holds_its_cache():
    """Keys and values [8, S] of 2 layers with one head 8 wide, float32, S = 6 + 8 - 1 in the last step but one."""
    cache = 2 * 2 * 8 * (6 + 8 - 1) * 8 * 4
    found = phase(plan(), "rollout").passing
    assert cache < found < 4 * cache
    assert phase(plan(local_rollout_forward_batch_size=4), "rollout").passing < 0.6 * found


def test_the_rollout_holds_packed_copies_of_what_trains_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """GPT-2's: 12 h² weights a block and the output layer's, which share the embedding's."""
    found = {}
    monkeypatch.setattr(packed_weights, "FEWEST_WEIGHTS", 0)
    for packs in (False, True):
        monkeypatch.setattr(packed_weights, "is_faster_packed", lambda packs=packs: packs)
        found[packs] = {
            name: phase(plan(GPT2, **options), "rollout").passing
            for name, options in {
                "cpu": {},
                "gpu": {"on_cpu": False},
                "bfloat16": {"dtype": "bfloat16"},
                "plain": {"rollout_engine": "plain"},
                "lora": {"use_peft": True, "lora_target_modules": "c_attn"},
            }.items()
        }
    more = {name: found[True][name] - found[False][name] for name in found[True]}
    copies, adapters = 4 * (2 * 12 * 16**2 + 23 * 16), 2 * 4 * 16 * (16 + 48)
    assert more == {"cpu": copies, "gpu": 0, "bfloat16": 0, "plain": 0, "lora": adapters}


def test_logits_are_the_least_that_scoring_takes():
    wide = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 5000})
    logits = 8 * 8 * 5000 * 4
    for name in ("scoring by the reference policy", "scoring by the policy"):
        assert logits <= phase(plan(wide), name).passing < 4 * logits


def test_the_update_takes_less_with_recomputation_and_with_smaller_micro_batches():
    deep = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 4})
    plain = phase(plan(deep), "update").passing
    assert phase(plan(deep, gradient_checkpointing=True), "update").passing < 0.7 * plain
    pieces = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert phase(plan(deep, **pieces), "update").passing < 0.7 * plain
    assert phase(plan(deep, max_tokens_per_micro_batch=28), "update").passing < 0.7 * plain


@pytest.mark.parametrize(("tokens", "rows"), [(None, 8), (1000, 8), (28, 2), (27, 1), (5, 1)])
def test_rows_of_a_micro_batch_follow_the_token_budget(tokens, rows):
    assert micro_batch_rows(PPOConfig(**SETTINGS, max_tokens_per_micro_batch=tokens), 6) == rows


def test_models_that_wait_count_on_the_host_and_while_they_score():
    reward = CausalLMRewardConfig(text_config=LLAMA)
    near, far = (
        plan(reward_model=reward, on_cpu=False, offload_reference_policy=waits, offload_reward_model=waits)
        for waits in (False, True)
    )
    gone = weights(near)["reference policy"] + weights(near)["reward model"]
    assert sum(near.held.values()) - sum(far.held.values()) == far.on_host == gone
    for name in ("reference policy", "reward model"):
        same = phase(near, f"scoring by the {name}").passing + weights(near)[name]
        assert phase(far, f"scoring by the {name}").passing == same
    assert far.needed < near.needed


def test_a_moving_average_and_evaluations_count():
    assert plan(ema_decay=0.9).held["policy: moving average"] == weights(plan())["policy"] - buffers_of(LLAMA)
    config = PPOConfig(**SETTINGS)
    with_evaluation = plan_memory(config, RunShape(LLAMA, 6, evaluation_rows=64))
    assert phase(with_evaluation, "evaluation").passing > 4 * phase(with_evaluation, "rollout").passing


def buffers_of(shape: LlamaConfig) -> int:
    return 2 * (shape.hidden_size // shape.num_attention_heads // 2) * 4  # rotary frequencies, kept twice


def test_the_peak_is_the_phase_with_the_most_and_on_a_gpu_what_is_needed():
    planned = plan(on_cpu=False)
    assert planned.peak is max(planned.phases, key=lambda each: each.total)
    assert planned.needed == planned.peak.total
    assert plan().needed > planned.needed


def test_a_critic_from_a_reward_model_needs_one():
    with pytest.raises(ConfigError, match="value_model=reward_init"):
        plan(value_model="reward_init")


def test_an_architecture_that_cannot_be_simulated_is_named(monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError("data-dependent\nand more")

    monkeypatch.setattr("transformers.LlamaModel.forward", fail)
    with pytest.raises(ModelError) as caught:
        plan()
    assert str(caught.value) == "plan-memory cannot simulate LlamaForCausalLM: RuntimeError: data-dependent"


@pytest.mark.parametrize(
    ("policy", "settings", "more"),
    [
        (LLAMA, {}, []),
        (LLAMA, {"cuda_graphs": True}, ["16-bit weights, which ppo.cuda_graphs holds all the time"]),
        (LLAMA, {"rollout_engine": "hf"}, ["ppo.rollout_engine=hf decodes"]),
        (WINDOWED, {}, ["MistralForCausalLM cannot do without"]),
        (BloomConfig(vocab_size=23, hidden_size=16, n_layer=2, n_head=2), {}, ["BloomForCausalLM cannot do without"]),
    ],
    ids=["packed", "graphs", "engine", "window", "ALiBi"],
)
def test_what_a_run_takes_on_top_of_a_plan_is_said(policy, settings, more):
    planned = plan(policy, **settings)
    assert len(planned.not_counted) == len(more)
    assert all(end in said for said, end in zip(planned.not_counted, more, strict=True))


# What to change first.


def test_nothing_is_to_be_changed_where_it_fits():
    config, shape = PPOConfig(**SETTINGS), RunShape(LLAMA, 6)
    planned = plan_memory(config, shape)
    assert remedies(config, shape, planned, planned.needed) == []


def test_the_cheapest_change_that_helps_comes_first_and_they_end_where_it_fits():
    deep = LlamaConfig(**{**LLAMA.to_dict(), "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
    config, shape = PPOConfig(**{**SETTINGS, "per_device_train_batch_size": 16}), RunShape(deep, 6, on_cpu=False)
    planned = plan_memory(config, shape)
    everything = remedies(config, shape, planned, 0)
    needed = [planned.needed, *(remedy.needed for remedy in everything)]
    assert needed == sorted(needed, reverse=True)
    settings = [remedy.changes.partition("=")[0].removeprefix("ppo.") for remedy in everything]
    at = settings.index
    assert at("per_device_train_batch_size") == 0 < at("value_model") < at("use_peft")
    assert "dtype" in settings
    assert {"local_rollout_forward_batch_size", "offload_reference_policy"} <= set(settings)
    assert everything[0].changes == "ppo.per_device_train_batch_size=8, ppo.gradient_accumulation_steps=2"
    assert remedies(config, shape, planned, everything[0].needed) == everything[:1]


def test_a_change_says_what_it_leads_to():
    deep = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 2})
    config, shape = PPOConfig(**{**SETTINGS, "per_device_train_batch_size": 63}), RunShape(deep, 6, on_cpu=False)
    recomputing = plan_memory(replace(config, gradient_checkpointing=True), shape).needed
    [first] = remedies(config, shape, plan_memory(config, shape), recomputing)
    assert (first.changes, first.needed) == ("ppo.gradient_checkpointing=true", recomputing)


def test_on_the_cpu_nothing_is_offloaded_and_what_is_excluded_is_not_proposed():
    config, shape = PPOConfig(**SETTINGS, align_overflow=True), RunShape(LLAMA, 6)
    changes = " ".join(remedy.changes for remedy in remedies(config, shape, plan_memory(config, shape), 0))
    assert "offload" not in changes
    assert "value_model" not in changes


def without_instructions(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    monkeypatch.setattr(processors, "has_instructions", lambda _: not lacks)
    monkeypatch.setattr(processors, "_has_slow_ones", lambda _: False)


@pytest.mark.parametrize("lacks", [False, True])
def test_sixteen_bits_are_proposed_where_they_help_more_than_the_room_to_round_in_takes(monkeypatch, lacks):
    without_instructions(monkeypatch, lacks)
    wide = LlamaConfig(**{**LLAMA.to_dict(), "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1})
    done = {"per_device_train_batch_size": 7, "gradient_checkpointing": True, "value_model": "shared"}
    for on_cpu in (False, True):
        here = {"side_by_side": False} if on_cpu else {"offload_reference_policy": True}
        config, shape = PPOConfig(**{**SETTINGS, **done, **here}), RunShape(wide, 6, on_cpu=on_cpu)
        planned = plan_memory(config, shape)
        found = [remedy.changes for remedy in remedies(config, shape, planned, planned.needed - 1)]
        assert found == (["ppo.use_peft=true"] if lacks and on_cpu else ["ppo.dtype=bfloat16"])


def test_what_a_gpu_needs_does_not_depend_on_the_processor_that_plans(monkeypatch):
    config, shape = PPOConfig(**SETTINGS, dtype="bfloat16"), RunShape(LLAMA, 6, on_cpu=False)
    found = []
    for lacks in (False, True):
        without_instructions(monkeypatch, lacks)
        found.append(plan_memory(config, shape))
    assert found[0] == found[1]


def test_without_instructions_for_sixteen_bits_the_packed_copies_are_float32(monkeypatch):
    monkeypatch.setattr(packed_weights, "FEWEST_WEIGHTS", 0)
    found = {}
    for lacks in (False, True):
        without_instructions(monkeypatch, lacks)
        found[lacks] = plan(dtype="bfloat16")
    assert phase(found[True], "rollout").passing > phase(found[False], "rollout").passing


# What there is.


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000),
        ({"memory.max": "max\n", "memory.current": "700\n"}, 1000),
        ({"memory.max": "900\n", "memory.current": "700\n"}, 200),
        ({"memory.max": "9000\n", "memory.current": "700\n"}, 1000),
        ({"memory.max": "500\n", "memory.current": "700\n"}, 0),
    ],
    ids=str,
)
def test_a_containers_limit_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine._free_on_host(tmp_path) == expected


# Against measured peaks; tests/benchmarks/memory.py says how they are measured.


def planned_over_measured(name: str, folder: Path) -> float:
    found = folder / "found.json"
    command = [sys.executable, str(BENCHMARK), "--only", name, "--json", str(found)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}  # on one thread policy and critic never go side by side
    subprocess.run(command, check=True, capture_output=True, timeout=500, env=environment)
    (row,) = json.loads(found.read_text())
    return float(row["planned"] / row["measured"]["peak"])


def test_the_plan_meets_the_measured_peak(tmp_path):
    assert planned_over_measured("tiny", tmp_path) == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "tiny, longer",
        "tiny, one minibatch",
        "small",
        "small, bfloat16",
        "small, in pieces",
        "small, LoRA",
        "small, checkpointed",
        "small, shared",
        "small, reward model",
        "wide vocabulary",
        "Llama",
        "Llama, LoRA, bfloat16",
    ],
)
def test_the_plan_meets_the_measured_peak_of_larger_runs(name, tmp_path):
    assert planned_over_measured(name, tmp_path) == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize(("most_tokens", "rows"), [(0.0, None), (14.0, 1), (60.0, 4), (111.0, 7), (112.0, 8)])
def test_where_the_tokens_of_a_step_decide_on_two_lanes_the_plan_is_of_the_update_that_needs_more(
    monkeypatch, most_tokens, rows
):
    """A step has at most 8 x 14 tokens: with fewer than `most_tokens` policy and critic compute side by side."""
    one = plan(side_by_side=False)
    candidates = [] if rows == 8 else [one]
    if rows is not None:
        candidates.append(plan(side_by_side=True, per_device_train_batch_size=rows))
    expected = max(candidates, key=lambda each: each.needed)
    monkeypatch.setattr("ppo_rlhf.training.memory.plan.most_tokens_side_by_side", lambda *_, **__: most_tokens)
    found = plan()
    assert phase(found, "update") == phase(expected, "update")
    assert found.critic_after_policy == expected.critic_after_policy
    assert found.needed >= one.needed or rows == 8


def test_gradients_in_16_bits_take_half(monkeypatch):
    """One row of one token: activations are small beside weights of a wide model, and copies are there in both."""
    without_instructions(monkeypatch, False)
    wide = GPT2Config(**{**GPT2.to_diff_dict(), "n_embd": 256, "n_head": 4})
    monkeypatch.setattr("ppo_rlhf.ppo.sixteen_bit_gradients.FEW", 0)
    settings = {"dtype": "bfloat16", "per_device_train_batch_size": 1, "response_length": 2, "side_by_side": False}
    narrow = phase(plan(wide, prompt_length=1, **settings), "update").passing
    monkeypatch.setattr("ppo_rlhf.training.memory.simulation.kept_in_sixteen_bits", lambda *_: False)
    widened = phase(plan(wide, prompt_length=1, **settings), "update").passing
    matrices = 2 * 12 * 256**2  # weights of two blocks
    assert 0.9 * 2 * matrices < widened - narrow < 1.1 * 2 * matrices
