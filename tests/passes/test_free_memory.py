"""How many sequences are processed at a time without a setting that limits them. Oracle: worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MambaConfig

from ppo_rlhf.passes import free_memory
from ppo_rlhf.passes.free_memory import available_memory, decoding_bytes, in_equal_parts, sequences_at_a_time
from tests.tiny_models import tiny_model

LAYERS = (16 + 16) + 2 * (16 + 8) + (16 + 16) + 2 * (16 + 24) + (24 + 16)
"""Inputs and outputs of the linear layers of one of tiny_model's two layers: 2 heads of 8, one of them for keys."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000),
        ({"memory.max": "max\n", "memory.current": "700\n"}, 1000),
        ({"memory.max": "900\n", "memory.current": "700\n"}, 200),
        ({"memory.max": "900\n", "memory.current": "700\n", "memory.stat": "anon 50\ninactive_file 600\n"}, 800),
    ],
    ids=str,
)
def test_a_containers_limit_counts(files: dict[str, str], expected: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_memory(torch.device("cpu"), tmp_path) == (expected, expected)


@pytest.mark.parametrize(
    ("count", "fitting", "rows"),
    [(8, 8, 8), (8, 100, 8), (8, 7, 4), (8, 3, 3), (9, 4, 3), (8, 0, 1), (0, 5, 1), (1, 0, 1)],
)
def test_rows_go_in_as_few_equal_parts_as_fit(count: int, fitting: int, rows: int):
    free = round(fitting * 100 / free_memory.USED)
    assert in_equal_parts(count, 100, free, max(1, count)) == rows
    assert in_equal_parts(count, 100, free, 2) == min(2, rows)


@pytest.mark.parametrize("shape", [(40, 6, 46), (40, 1, 46)], ids=["a long prompt", "a short prompt"])
def test_a_response_takes_its_keys_and_values_and_its_prompt_or_the_logits_of_a_step(shape: tuple[int, int, int]):
    vocabulary, prompt, tokens = shape
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    cache, logits = tokens * 2 * (2 * 1 * 8) * 4, vocabulary * (4 + 12)
    assert decoding_bytes(config, prompt, tokens, 500, 4) == cache + max(logits, prompt * 500)


def test_a_model_without_heads_counts_with_twice_its_width():
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3)
    assert decoding_bytes(config, 1, 10, 0, 2) == 10 * 3 * 2 * 16 * 2 + 40 * (2 + 12)


@pytest.mark.parametrize(("autocast", "number"), [(False, 4), (True, 2)])
def test_as_many_sequences_go_together_as_the_free_memory_holds(monkeypatch, autocast: bool, number: int):
    model, one_layer = tiny_model(), int(1.5 * 2 * LAYERS) * number // 2
    decoded = 14 * 2 * 16 * number + max(model.config.vocab_size * (number + 12), 6 * one_layer)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for fitting, rows in ((8, 8), (5, 4), (2, 2), (0, 1)):
            for decoded_from, row_bytes in ((6, decoded), (None, 14 * one_layer)):
                free = round(row_bytes * (fitting + 0.5) / free_memory.USED)
                monkeypatch.setattr(free_memory, "available_memory", lambda _, free=free: (free, free))
                assert sequences_at_a_time(model, 8, 14, decoded_from=decoded_from) == rows


def test_a_whole_pass_on_a_cpu_takes_few_sequences_however_much_memory_is_free(monkeypatch):
    monkeypatch.setattr(free_memory, "available_memory", lambda _: (2**40, 2**40))
    assert sequences_at_a_time(tiny_model(), 200, 14) == 50
    assert sequences_at_a_time(tiny_model(), 200, 14, decoded_from=6) == 200


def test_processes_share_the_hosts_memory(monkeypatch):
    model = tiny_model()
    row = 14 * (int(1.5 * 2 * LAYERS) * 4 // 2)
    monkeypatch.setattr(free_memory, "available_memory", lambda _: (round(row * 8.5 / free_memory.USED), 0))
    assert sequences_at_a_time(model, 8, 14) == 8
    monkeypatch.setattr(free_memory, "process_count", lambda: 4)
    assert sequences_at_a_time(model, 8, 14) == 2


def test_blocks_that_torch_keeps_free_on_a_gpu_count(monkeypatch):
    monkeypatch.setattr(free_memory, "available_memory", lambda _: (100, 7))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert free_memory.free_bytes(torch.device("cuda")) == 130
    assert free_memory.free_bytes(torch.device("cpu")) == 100
