"""Decoding steps as CUDA graphs give the tokens of plain steps, and have no operation that a graph cannot capture."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DiffLlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import captures as captures_module
from ppo_rlhf.models.adapters import LoraSettings, with_adapter
from ppo_rlhf.models.captures import DECODING, UPDATE, Captures
from ppo_rlhf.models.common_sizes import captured_columns, captured_rows
from ppo_rlhf.models.compilation import compile_layers
from ppo_rlhf.models.decoding import decodes
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo import captured_sampling, engines, sampling
from ppo_rlhf.ppo.captured_sampling import CapturedSampler, decode_captured, why_not_captured
from ppo_rlhf.ppo.engines import generate_responses
from ppo_rlhf.ppo.sampling import SamplingSettings, decode_packed, responses_of
from tests.graph_on_cpu import GraphOnCPU, graphs_on_cpu, reads_from_the_device, tensors_of
from tests.ppo_runs import build_model
from tests.tiny_models import draw_weights, tiny_model

__all__ = ["graphs_on_cpu"]  # a fixture
CPU = torch.device("cpu")
PLAIN = Captures(CPU, wanted=False)
SHAPE = {
    "vocab_size": 25,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mixture": (Qwen3MoeConfig, {"head_dim": 8, **EXPERTS}),
    "two a layer": (DiffLlamaConfig, {}),
}
KINDS = ["gpt2", "llama", "lora", *CONFIGS]


def make(kind: str, experts: str = "batched_mm") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        model = tiny_model("gpt2", n_positions=128)
    elif kind == "llama":
        model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    elif kind == "lora":
        base = tiny_model("llama", max_position_embeddings=128)
        model = with_adapter(base, LoraSettings(2, 4, "all-linear"), torch.Generator().manual_seed(0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    else:
        config, options = CONFIGS[kind]
        implementation = {"experts_implementation": experts} if kind == "mixture" else {}
        model = AutoModelForCausalLM.from_config(config(**SHAPE, **options), **implementation)
        model = draw_weights(model, 0.3)
    model = prepare(model.eval())
    assert decodes(model)  # it switches packed attention on
    return model


def settings(**changes: Any) -> SamplingSettings:
    plain = {"response_length": 60, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "stop_token_ids": (2, 5)}
    return SamplingSettings(**{**plain, "pad_token_id": 0, **changes})


def prompts(count: int = 37) -> list[list[int]]:
    drawn = np.random.default_rng(3)
    return [drawn.integers(0, 25, size=drawn.integers(1, 12)).tolist() for _ in range(count)]


def noise(count: int, length: int = 60, seed: int = 11) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((count, length)))


def update(model: Any, seed: int) -> None:
    """Change all weights in place, as an optimiser does."""
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.add_(drawn.to(parameter.device), alpha=0.05)


@pytest.fixture(autouse=True)
def looks_as_on_a_gpu(monkeypatch):
    """Drop ended sequences only every 16 steps, as on a GPU, so that batch sizes change during decoding."""
    monkeypatch.setattr(sampling, "is_check_due", lambda step, device: step % 16 == 15)


OPTIONS = [{}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.8, "min_response_length": 20}, {"stop_token_ids": ()}]


def by_default(each: Any, *cases: Any) -> list[Any]:
    """Return all combinations as test cases; those that are not in `cases` are marked slow."""
    return [case if case in cases else pytest.param(*case, marks=pytest.mark.slow) for case in product(*each)]


REPLAYED = [(kind, OPTIONS[number % 3]) for number, kind in enumerate(KINDS)] + [("gpt2", OPTIONS[3])]


@pytest.mark.parametrize(("kind", "how"), by_default([KINDS, OPTIONS], *REPLAYED), ids=str)
@torch.no_grad()
def test_replayed_steps_draw_the_tokens_of_plain_ones_also_after_updates(graphs_on_cpu, kind, how):
    model, how, captures, sizes = make(kind).double(), settings(**how), Captures(CPU), set()
    assert not why_not_captured(model)
    for iteration in range(3):
        given, uniforms = prompts(37 - iteration), noise(37 - iteration, seed=iteration)
        actual = responses_of(*decode_captured(model, given, uniforms, how, captures), how)
        expected = responses_of(*decode_packed(model, given, uniforms, how), how)
        assert torch.equal(actual.response_ids, expected.response_ids)
        assert torch.equal(actual.lengths, expected.lengths)
        assert_close(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-10)
        sizes.update(actual.lengths.tolist())
        update(model, iteration)
    assert not captures.trouble
    assert graphs_on_cpu.replays > 60
    assert 1 < len(captures) < 20
    assert len(sizes) > 5 or not how.stop_token_ids


class Counting(torch.nn.Module):
    """A layer with a step counter that is a Python number, which a graph would not update."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.steps = layer, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return self.layer(*args, **kwargs) * (1 + 0.01 * self.steps)


@torch.no_grad()
def test_a_model_with_a_python_counter_in_its_steps_is_not_captured(graphs_on_cpu, caplog):
    caplog.set_level(logging.INFO)
    model = make("llama").double()
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    assert why_not_captured(model) == "replayed steps give other states"
    assert [line.split()[0] for line in caplog.messages] == ["LlamaForCausalLM"]
    assert why_not_captured(model)
    assert len(caplog.messages) == 1  # probed once


@torch.no_grad()
def test_a_step_with_a_python_counter_draws_other_tokens(graphs_on_cpu, monkeypatch):
    """A mutant that must fail the tests above: its step index is a Python number."""

    def draw(self, logits, how, *, may_stop):
        self.step_number = getattr(self, "step_number", -1) + 1
        step_index = self.step_index
        self.step_index = torch.full_like(step_index, self.step_number % 60)
        right(self, logits, how, may_stop=may_stop)
        self.step_index = step_index

    right = CapturedSampler._draw
    monkeypatch.setattr(CapturedSampler, "_draw", draw)
    model, how = make("gpt2").double(), settings(stop_token_ids=())
    plain = decode_captured(model, prompts(), noise(37), how, Captures(CPU, wanted=False))
    actual = decode_captured(model, prompts(), noise(37), how, Captures(CPU))
    assert torch.equal(plain[0], decode_packed(model, prompts(), noise(37), how)[0])
    assert not torch.equal(actual[0], plain[0])


@torch.no_grad()
def test_experts_in_a_loop_make_the_processor_wait_and_are_decoded_plainly_with_one_line(graphs_on_cpu, caplog):
    caplog.set_level(logging.INFO)
    model, captures = make("mixture", experts="eager").double(), Captures(CPU)
    actual = generate_responses(model, prompts(), noise(37), settings(), captures=captures)
    again = generate_responses(model, prompts(), noise(37), settings(), captures=captures)
    expected = generate_responses(model, prompts(), noise(37), settings())
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert torch.equal(again.response_ids, expected.response_ids)
    assert captures.serves(DECODING)
    assert len(captures) == 0
    (line,) = [line for line in caplog.messages if "CUDA graphs" in line]
    assert line.startswith("Qwen3MoeForCausalLM is decoded without CUDA graphs: operation not permitted")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
@torch.no_grad()
def test_in_float32_and_under_autocast_tokens_are_the_same_up_to_rounding(graphs_on_cpu, kind):
    model, how = make(kind).float(), settings(response_length=12)
    for bits in (32, 16):
        with torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
            captures = Captures(CPU)
            first = decode_captured(model, prompts(), noise(37, 12), how, captures)
            first = [each.clone() for each in first]
            actual = decode_captured(model, prompts(), noise(37, 12), how, captures)
            expected = decode_packed(model, prompts(), noise(37, 12), how)
        assert torch.equal(first[0], actual[0])
        assert torch.equal(first[1], actual[1])
        same = (actual[0] == expected[0]).cumprod(1).bool()
        assert same.float().mean() > (0.99 if bits == 32 else 0.5)
        limit = 1e-4 if bits == 32 else 0.2
        assert (actual[1] - expected[1])[same & (expected[0] != 0)].abs().max() < limit


@torch.no_grad()
def test_a_later_batch_and_other_settings_take_the_same_buffers_and_other_weights_do_not(graphs_on_cpu):
    model, captures = make("llama").double(), Captures(CPU)
    decode_captured(model, prompts(), noise(37), settings(), captures)
    sampler = captures.held[DECODING]
    given, how = prompts()[::-1][:20], settings(response_length=30, top_k=3, stop_token_ids=(7,))
    for _ in range(2):
        for cache in (*sampler.decoder._keys, *sampler.decoder._values):
            cache.fill_(torch.nan)
        actual = decode_captured(model, given, noise(20, seed=5)[:, :30], how, captures)
        expected = decode_packed(model, given, noise(20, seed=5)[:, :30], how)
        assert torch.equal(responses_of(*actual, how).response_ids, responses_of(*expected, how).response_ids)
    assert captures.held[DECODING] is sampler
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.clone() + 0.5
    for _ in range(2):
        actual = decode_captured(model, given, noise(20), settings(), captures)
        expected = decode_packed(model, given, noise(20), settings())
        assert torch.equal(
            responses_of(*actual, settings()).response_ids, responses_of(*expected, settings()).response_ids
        )
    assert captures.held[DECODING] is not sampler


CHANGES = (*OPTIONS[:2], {"pad_token_id": 7}, {"unused_ids": (range(4), range(15, 25))}, {}, {"temperature": 0.3}, {})


@torch.no_grad()
def test_each_way_to_sample_has_graphs_of_its_own(graphs_on_cpu):
    model, captures = make("gpt2").double(), Captures(CPU)
    for how in (settings(response_length=12, **options) for options in CHANGES):
        actual = decode_captured(model, prompts(), noise(37, 12), how, captures)
        expected = decode_packed(model, prompts(), noise(37, 12), how)
        assert torch.equal(responses_of(*actual, how).response_ids, responses_of(*expected, how).response_ids)


@torch.no_grad()
def test_rows_without_a_prompt_have_ended(monkeypatch):
    """All responses end in the first step, since every token stops but 0, which rows without noise draw."""
    steps, captures = [], Captures(CPU)
    captures_on_a_gpu: Any = SimpleNamespace(
        serves=lambda kind: True, held={}, run=lambda key, step: steps.append(key) or step(), release=captures.release
    )
    how = settings(stop_token_ids=tuple(range(1, 25)))
    decode_captured(make("gpt2"), prompts(3), noise(3), how, captures_on_a_gpu)
    assert len(steps) == 15  # up to the first check of which sequences have ended


@torch.no_grad()
def test_a_batch_that_is_larger_or_longer_or_another_models_gets_new_buffers(graphs_on_cpu):
    models, captures = [make("llama").double(), make("gpt2").double()], Captures(CPU)
    for model, count, length in ((0, 10, 20), (0, 37, 20), (0, 37, 60), (1, 37, 60), (0, 20, 20)):
        how = settings(response_length=length)
        for _ in range(2):
            actual = decode_captured(models[model], prompts(count), noise(count, length), how, captures)
            expected = decode_packed(models[model], prompts(count), noise(count, length), how)
            assert torch.equal(responses_of(*actual, how).response_ids, responses_of(*expected, how).response_ids)
        assert list(captures.held) == [DECODING]
    assert captures.held[DECODING].sizes == (32, 64, 20)


@torch.no_grad()
def test_new_buffers_have_room_for_the_old_batches_too(graphs_on_cpu):
    """Otherwise rollouts and evaluations (fewer prompts, longer responses) would free each other's buffers."""
    model, captures = make("llama").double(), Captures(CPU)
    for count, length, sizes in ((37, 20, (48, 64, 20)), (10, 80, (48, 96, 80)), (37, 20, (48, 96, 80))):
        how = settings(response_length=length)
        actual = decode_captured(model, prompts(count), noise(count, length), how, captures)
        expected = decode_packed(model, prompts(count), noise(count, length), how)
        assert torch.equal(responses_of(*actual, how).response_ids, responses_of(*expected, how).response_ids)
        assert captures.held[DECODING].sizes == sizes


ROW = 2 * 2 * 2 * 4 * 8  # keys and values, layers, heads, their width, bytes: of one column


def card_for(monkeypatch: Any, size: int) -> None:
    """Pretend a GPU memory of `8 * size` bytes, of which graphs keep `size` bytes of keys and values."""
    for place in (captures_module, captured_sampling):
        monkeypatch.setattr(place, "card_bytes", lambda device: 8 * size)


@pytest.mark.parametrize("batch_size", [None, 30])
@torch.no_grad()
def test_a_batch_is_cut_so_that_its_keys_and_values_take_half_of_what_graphs_may_keep(
    graphs_on_cpu, monkeypatch, batch_size
):
    """Buffers for 20 sequences fit, so 16 are decoded at a time; an earlier version gave graphs up."""
    card_for(monkeypatch, 20 * 96 * ROW)
    model, captures = make("llama").double(), Captures(CPU)
    actual = generate_responses(model, prompts(), noise(37), settings(), captures=captures, batch_size=batch_size)
    expected = generate_responses(model, prompts(), noise(37), settings())
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert captures.held[DECODING].sizes == (16, 96, 60)
    assert len(captures) > 1
    assert not captures.trouble


@torch.no_grad()
def test_buffers_have_room_for_old_batches_only_as_far_as_they_may_be_kept(graphs_on_cpu, monkeypatch):
    card_for(monkeypatch, 48 * 64 * ROW)
    model, captures = make("llama").double(), Captures(CPU)
    for count, length, sizes in ((37, 20, (48, 64, 20)), (10, 80, (16, 96, 80)), (37, 20, (48, 64, 20))):
        decode_captured(model, prompts(count), noise(count, length), settings(response_length=length), captures)
        assert captures.held[DECODING].sizes == sizes
        assert not captures.trouble


def is_full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate 2 GiB")


@pytest.mark.parametrize("where", ["buffers", "prompts", "a capture"])
@torch.no_grad()
def test_where_memory_does_not_do_the_batch_is_decoded_plainly_and_nothing_is_lost(
    graphs_on_cpu, monkeypatch, caplog, where
):
    model, captures = make("llama").double(), Captures(CPU)
    assert not why_not_captured(model)

    decode_captured(model, prompts(10), noise(10), settings(), captures)
    name = {"buffers": "__init__", "prompts": "sample", "a capture": None}[where]
    if name is None:
        monkeypatch.setattr(graphs_on_cpu, "__enter__", is_full)
    else:
        monkeypatch.setattr(CapturedSampler, name, is_full)
    actual = generate_responses(model, prompts(), noise(37), settings(), captures=captures, batch_size=20)
    expected = generate_responses(model, prompts(), noise(37), settings(), batch_size=20)
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert_close(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-10)
    assert (captures.serves(DECODING), len(captures), captures.held) == (False, 0, {})
    (line,) = caplog.messages
    assert line.endswith("CUDA out of memory. Tried to allocate 2 GiB")


@torch.no_grad()
def test_bytes_of_the_buffers_count_as_free_for_the_next_batch(graphs_on_cpu, monkeypatch):
    """Otherwise the second rollout would be decoded in smaller batches, and its steps captured again."""
    asked = []

    def at_a_time(_model, count, tokens, **how):
        asked.append((count, tokens, how["used_again"]))
        return count

    monkeypatch.setattr(engines, "sequences_at_a_time", at_a_time)
    model, captures, longest = make("llama").double(), Captures(CPU), max(map(len, prompts()))
    for _ in range(2):
        generate_responses(model, prompts(), noise(37), settings(), captures=captures, batch_size=None)
    columns = captured_columns(longest + 60)
    caches = 2 * 2 * 48 * 2 * columns * 4 * 8  # keys and values, layers, rows, heads, columns, widths, bytes
    others = 48 * (60 * (8 + 8 + 8) + 8 + 8 + 1)
    assert asked == [(37, columns, 0), (37, columns, caches + others)]
    assert captures.bytes == caches + others
    generate_responses(model, prompts(), noise(37), settings(), batch_size=None)
    assert asked[-1] == (37, longest + 60, 0)


@pytest.mark.parametrize("value", [None, False])
def test_a_runs_rollouts_and_updates_are_captured_and_its_numbers_are_those_of_plain_ones(
    make_run, graphs_on_cpu, value
):
    run, plain = make_run(total_episodes=24, cuda_graphs=value), make_run(total_episodes=24)
    plain.state.captures = PLAIN
    for _ in range(2):
        actual, expected = run.iteration(), plain.iteration()
        exact = [name for name in expected if not name.startswith(("time/", "throughput/", "memory/"))]
        assert_close(
            {name: actual[name] for name in exact}, {name: expected[name] for name in exact}, rtol=1e-9, atol=1e-9
        )
    assert set(run.state.captures.held) == ({DECODING, UPDATE} if value is None else set())
    assert (len(run.state.captures) >= 2) == (value is None)


def test_decoding_that_is_given_up_leaves_the_update_captured(make_run, graphs_on_cpu, monkeypatch, caplog):
    run, plain = make_run(total_episodes=24), make_run(total_episodes=24)
    plain.state.captures = PLAIN
    monkeypatch.setattr(CapturedSampler, "sample", is_full)
    for each in (run, plain):
        for _ in range(2):
            each.iteration()
    (line,) = [line for line in caplog.messages if "from here on" in line]
    assert line.startswith("The decoding runs without CUDA graphs from here on, its kernels launched one by one: CUDA")
    assert set(run.state.captures.held) == {UPDATE}
    assert len(run.state.captures) > 0
    for name, weight in run.state.policy.state_dict().items():
        assert_close(weight, plain.state.policy.state_dict()[name], rtol=0.0, atol=1e-9)


def test_the_setting_true_is_refused_where_the_policy_cannot_be_captured(make_run, graphs_on_cpu, monkeypatch):
    assert make_run(cuda_graphs=True, device="auto").state.captures.on
    with pytest.raises(ModelError, match=r"^ppo\.cuda_graphs=true: LlamaForCausalLM .*padding"):
        make_run(cuda_graphs=True, device="auto", model={"sliding_window": 64})
    head = torch.nn.Linear(16, 1, bias=False, dtype=torch.float64)
    reward_model = CausalLMRewardModel.from_parts(build_model(sliding_window=64).base_model, head)
    with pytest.raises(ModelError, match=r"^ppo\.cuda_graphs=true: .*critic.*LlamaModel.*padding"):
        make_run(cuda_graphs=True, device="auto", value_model="reward_init", reward_model=reward_model)
    monkeypatch.setattr(GraphOnCPU, "__torch_dispatch__", lambda *_: is_full())
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .*CUDA out of memory"):
        make_run(cuda_graphs=True, device="auto")
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"\bcpu\b"):
        make_run(cuda_graphs=True, device="auto")


def test_episodes_of_several_turns_are_captured_too(make_run, graphs_on_cpu):
    """Each turn has fewer and longer prompts than the turn before."""
    run, plain = (make_run(**TURNS, cuda_graphs=setting) for setting in (None, False))
    for each in (run, plain):
        each.state.sampling = replace(each.state.sampling, environment=answer, stop_token_ids=(2, 6, 9, 12, 15, 18))
    for _ in range(2):
        actual, expected = run.rollouts().responses, plain.rollouts().responses
        assert torch.equal(actual.response_ids, expected.response_ids)
        assert torch.equal(actual.mask, expected.mask)
        assert (actual.mask.sum(1) < actual.lengths).any()
    assert len(run.state.captures) > 0


TURNS = {"environment": "tests.ppo.test_captured_sampling:answer", "turn_length": 3, "response_length": 20}


def answer(prompts: Any, episodes: list[list[int]], _: Any) -> list[list[int] | None]:
    """Answer each turn with two tokens, until an episode has 8."""
    return [[4, 5] if len(tokens) < 8 else None for tokens in episodes]


class Record(TorchDispatchMode):
    """Records the operations of a block with their shapes, and the addresses of tensors from outside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._made: dict[int, Tensor] = {}  # by storage; the tensors are kept, so that no address is given away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((str(func), self._seen(args), self._seen(sorted(kwargs.items()))))
        assert not reads_from_the_device(func, args), func
        actual = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in tensors_of([args, kwargs])}
        for tensor in tensors_of(actual):
            if tensor.untyped_storage()._cdata not in known:
                self._made[tensor.untyped_storage()._cdata] = tensor
        return actual

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = None if value.untyped_storage()._cdata in self._made else value.data_ptr()
            return tuple(value.shape), value.stride(), value.dtype, address
        if isinstance(value, list | tuple):
            return tuple(self._seen(part) for part in value)
        return value if isinstance(value, int | float | bool | str | None) else str(value)


FILTERED = {"top_p": 0.8, "top_k": 9, "min_response_length": 40}
SAME = ("gpt2", 64, FILTERED), ("llama", 16, {})


@pytest.mark.parametrize(("kind", "bits", "how"), by_default([KINDS, [64, 16], [{}, FILTERED]], *SAME), ids=str)
@torch.no_grad()
def test_steps_of_a_size_are_the_same_operations_on_the_same_addresses(monkeypatch, kind, bits, how):
    """So one captured graph serves all steps. 16 bits means float32 weights under autocast."""
    model = make(kind).to(torch.float64 if bits == 64 else torch.float32)
    recorded: dict[tuple[Any, ...], list[list[Any]]] = {}

    def record(key, function):
        with Record() as seen:
            function()
        recorded.setdefault(key, []).append(seen.calls)

    captures: Any = SimpleNamespace(serves=lambda kind: True, held={}, run=record, release=lambda kind: None)
    with torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
        for seed in (1, 2):  # two iterations with one sampler
            decode_captured(model, prompts(), noise(37, seed=seed), settings(**how), captures)
    assert sum(map(len, recorded.values())) > 40
    for key, steps in recorded.items():
        for calls in steps[1:]:
            assert calls == steps[0], key


def test_sizes_are_two_from_one_power_of_2_to_the_next():
    assert [captured_rows(count) for count in (1, 16, 17, 24, 25, 33, 48, 49, 65, 97, 200)] == [
        *(16, 16, 24, 24, 32, 48, 48, 64, 96, 128, 256)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [64, 16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_on_a_gpu_replayed_steps_draw_the_tokens_of_plain_ones(kind, bits):
    model, how = make(kind).to("cuda", torch.float64 if bits == 64 else torch.float32), settings()
    captures = Captures(model.device)
    for iteration in range(3):
        uniforms = noise(37, seed=iteration).to("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=bits == 16):
            assert not why_not_captured(model)
            given = model, prompts(), uniforms, how
            tokens, logprobs = (actual.clone() for actual in decode_captured(*given, captures))
            again, _ = decode_captured(*given, captures)
            expected, expected_logprobs = decode_packed(*given)
        assert torch.equal(tokens, again)
        same = (tokens == expected).cumprod(1).bool()
        assert same.all() if bits == 64 else same.float().mean() > 0.5
        assert (logprobs - expected_logprobs)[same].abs().max() < (1e-9 if bits == 64 else 0.2)
        update(model, iteration)
    assert not captures.trouble
    assert 2 < len(captures) < 20


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_experts_in_a_loop_are_decoded_plainly():
    model, captures = make("mixture", experts="eager").to("cuda"), Captures(torch.device("cuda", 0))
    actual = generate_responses(model, prompts(), noise(37), settings(), captures=captures)
    assert why_not_captured(model)
    assert len(captures) == 0
    expected = generate_responses(model, prompts(), noise(37), settings())
    assert torch.equal(actual.response_ids, expected.response_ids)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_graphs_hold_compiled_layers():
    model, how, captures = make("llama").to("cuda"), settings(), Captures(torch.device("cuda", 0))
    given = model, prompts(), noise(37).to("cuda"), how
    expected, _ = decode_packed(*given)
    compile_layers(model)
    assert not why_not_captured(model)
    for _ in range(2):
        tokens = decode_captured(*given, captures)[0].clone()
        assert (tokens == expected).cumprod(1).float().mean() > 0.9
    assert not captures.trouble
    assert len(captures) > 2
