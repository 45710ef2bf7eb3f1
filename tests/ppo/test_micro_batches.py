"""How a minibatch is split, and token budgets that fit an accelerator: this CPU with a pretended memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core import logprobs as core_logprobs
from ppo_rlhf.core.logprobs import UNKNOWN_CARD, card_bytes
from ppo_rlhf.passes import free_memory, response_logprobs
from ppo_rlhf.passes.sharding import local_shard
from ppo_rlhf.ppo import token_budget as budgets
from ppo_rlhf.ppo.micro_batches import micro_batches
from ppo_rlhf.ppo.token_budget import UpdateBytes, copied_bytes
from tests.ppo_runs import MEASURED, Run, weights_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDTHS = 2 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 2 * (16 + 24) + (24 + 16))
"""Inputs and outputs of the linear layers of ppo_runs' Llama: two layers, two heads of 8, one of them for keys."""
LONGEST = 7 + 8
"""Tokens of the longest prompt with its response."""


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend as much free memory on this CPU as micro-batches of the given number of tokens take in float64."""
    monkeypatch.setattr(budgets, "UNLIMITED_ON", ())
    for module in (budgets, response_logprobs):
        monkeypatch.setattr(module, "logits_held", lambda _: 3 * 23)

    def set_free(tokens: int, moments: int = 2) -> None:
        parameters = 8 * (2 * 23 * 16 + 2 * (16 * (16 + 8 + 8 + 16) + 3 * 16 * 24 + 2 * 16) + 16)  # the policy's
        critic = parameters - 8 * 23 * 16 + 8 * (16 + 1)
        epoch, logits = 12 * (LONGEST * 64 + 8 * 61), 3 * 23 * 2 * 8
        fixed = (1 + moments) * (parameters + critic) + epoch + logits
        free = fixed + math.ceil((tokens + 0.5) * int(1.5 * WIDTHS) * 8 / 0.8)
        monkeypatch.setattr(budgets, "free_bytes", lambda device: free)

    return set_free


def trained(run: Run, iterations: int = 2) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train, and return the metrics and the weights."""
    rows = [run.iteration() for _ in range(iterations)]
    numbers = [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]
    return numbers, weights_of(run.state.learner.policy)


def sizes(run: Run) -> list[int]:
    """Return the tokens of each micro-batch of the next iteration's first epoch."""
    rollouts = run.rollouts()
    tokens = [len(ids) for ids in rollouts.prompts.prompt_ids]
    tokens = [own + length for own, length in zip(tokens, rollouts.responses.lengths.tolist(), strict=True)]
    return [sum(tokens[row] for row in rows) for rows in rollouts.cut.first_micro_batches]


def test_the_tokens_that_fit_are_those_worked_out_by_hand():
    update = UpdateBytes(gradients=60, fixed=40, token=10, logit=2, held=20)
    assert update.needed(3, 7) == 100 + 30 + 14
    assert update.needed(3, 70) == 100 + 30 + 40
    assert [update.tokens_in(free) for free in (1140, 1139, 140, 0)] == [80, 79, 2, 2]


@pytest.mark.parametrize("tokens", [40, 33, 20])
def test_micro_batches_have_as_many_tokens_as_fit(make_run, fitting, tokens: int):
    fitting(tokens)
    run = make_run()
    actual = sizes(run)
    assert run.state.learner.micro_batch_tokens == tokens
    assert max(actual) <= tokens < sum(actual)


def test_a_run_is_to_the_bit_the_one_whose_setting_names_the_number(make_run, fitting, same_tensors):
    fitting(40)
    settled = trained(make_run())
    named = make_run(max_tokens_per_micro_batch=40)
    actual = trained(named)
    assert actual[0] == settled[0]
    assert same_tensors(actual[1], settled[1])
    assert named.state.learner.micro_batch_tokens is None  # no token budget was computed


def test_a_larger_batch_takes_no_larger_micro_batches_and_a_small_one_stays_whole(make_run, fitting):
    fitting(40)
    larger = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    assert max(sizes(make_run(**larger))) <= 40
    assert len(sizes(make_run(**larger))) > 2
    fitting(10**6)
    run = make_run(per_device_train_batch_size=3, gradient_accumulation_steps=4, num_mini_batches=2)
    [[first, *_], *_] = run.rollouts().cut.epochs
    assert [len(rows) for rows in first.micro_batches] == [3, 3]  # responses limit it


def test_the_number_is_settled_and_logged_once(make_run, fitting, caplog):
    caplog.set_level("INFO")
    fitting(40)
    run = make_run()
    run.iteration()
    fitting(20)
    run.iteration()
    assert run.state.learner.micro_batch_tokens == 40
    [line] = [record.getMessage() for record in caplog.records if "max_tokens_per_micro_batch" in record.getMessage()]
    assert " 6 responses " in line
    assert " 40 tokens" in line


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"max_tokens_per_micro_batch": 30}], ids=str)
def test_a_cpu_a_deterministic_run_and_a_set_number_do_not_ask_the_memory(
    make_run, monkeypatch, settings: dict[str, Any]
):
    monkeypatch.setattr(budgets, "free_bytes", lambda device: pytest.fail("the memory was asked"))
    if settings:  # on an accelerator
        monkeypatch.setattr(budgets, "UNLIMITED_ON", ())
    run = make_run(**settings)
    run.iteration()
    assert run.state.learner.micro_batch_tokens is None


def test_a_resumed_run_cuts_as_before_whatever_is_free_then(make_run, fitting, tmp_path: Path, same_tensors):
    fitting(40)
    whole, run = make_run(), make_run()
    expected = trained(whole, 3)
    run.iteration()
    written = write_checkpoint(tmp_path / "run", run.state)
    fitting(20)
    resumed = make_run()
    restore(resumed.state, written)
    assert resumed.state.learner.micro_batch_tokens == 40
    actual = trained(resumed, 2)
    assert actual[0] == expected[0][1:]
    assert same_tensors(actual[1], expected[1])


def test_a_checkpoint_of_a_cpu_has_no_number_and_an_accelerator_settles_one_for_it(
    make_run, monkeypatch, tmp_path: Path, fitting
):
    monkeypatch.setattr(budgets, "UNLIMITED_ON", ("cpu",))
    run = make_run()
    run.iteration()
    written = write_checkpoint(tmp_path / "run", run.state)
    assert json.loads((written / "state.json").read_text())["micro_batch_tokens"] is None
    monkeypatch.setattr(budgets, "UNLIMITED_ON", ())
    fitting(33, moments=0)  # they are there already
    resumed = make_run()
    restore(resumed.state, written)
    resumed.iteration()
    assert resumed.state.learner.micro_batch_tokens == 33


def test_autocast_copies_all_weights_and_none_under_lora(make_run):
    def copied(**settings: Any) -> int:
        run = make_run(**{"dtype": "float32", **settings})
        return copied_bytes(run.config, run.state.learner.policy)

    weights = sum(local_shard(parameter).numel() for parameter in make_run().state.learner.policy.parameters())
    assert copied() == 0
    assert copied(dtype="bfloat16") == 2 * weights
    assert copied(dtype="bfloat16", use_peft=True, lora_r=2) == 0


def test_the_whole_memory_says_how_many_logits_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch):
    assert response_logprobs.logits_held(CPU) == free_memory.host_bytes() // 256
    assert card_bytes(CUDA) == UNKNOWN_CARD  # a device that is only pretended
    for module in (free_memory, core_logprobs):
        monkeypatch.setattr(module, "card_bytes", lambda device: 24 * 2**30)
    assert response_logprobs.logits_held(CUDA) == 24 * 2**22
    logits = torch.empty(4, 2**13, 1024, device="meta")  # 2^25 logits; a block has 24 * 2^20
    assert [block[0] for block in core_logprobs._blocks(logits)] == [slice(0, 3), slice(3, 6)]
    assert len(list(core_logprobs._blocks(torch.empty(1, 2**12, 1024)))) == 4


def test_the_memory_of_a_gpu_is_torchs_whole_number(monkeypatch: pytest.MonkeyPatch):
    class Properties:
        total_memory = 123

    card_bytes.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert card_bytes(CUDA) == 123
    card_bytes.cache_clear()


def test_micro_batches_keep_the_order_and_the_last_one_may_be_shorter():
    assert micro_batches([5, 3, 1, 2, 4], 2) == [[5, 3], [1, 2], [4]]
    assert micro_batches([5, 3], 8) == [[5, 3]]


def test_a_token_budget_ends_a_micro_batch_before_the_row_that_would_exceed_it():
    """Row -> prompt + response: 0: 2 + 3, 1: 1 + 1, 2: 4 + 1, 3: 1 + 8; the longest first, equals as they come.

    With padding a micro-batch has (rows x longest row) tokens.
    """
    prompts, responses = [[0] * length for length in (2, 1, 4, 1)], [3, 1, 1, 8]

    def cut(minibatch: list[int], rows: int, budget: int, padded: bool = True) -> list[list[int]]:
        return micro_batches(minibatch, rows, prompts, responses, budget, padded=padded)

    assert cut([0, 1, 2, 3], 4, 9) == [[3], [0], [2], [1]]  # 3 and 0: 2 x 9; 0 and 2, or 2 and 1: 2 x 5
    assert cut([0, 1, 2, 3], 4, 14) == [[3], [0, 2], [1]]  # a third row: 3 x 5
    assert cut([2, 1, 0, 3], 4, 24) == [[3, 2], [0, 1]]  # a third row: 3 x 9; 0 and 1: 2 x 5
    assert cut([0, 1, 2, 3], 4, 48) == [[3, 0, 2, 1]]
    assert cut([0, 1, 2, 3], 3, 48) == [[3, 0, 2], [1]]  # the number of rows is a limit too
    assert cut([0, 1, 2, 3], 4, 2) == [
        [3],
        [0],
        [2],
        [1],
    ]  # a longer row is a micro-batch by itself
    assert cut([0, 1, 2, 3], 4, 13, padded=False) == [[3], [0, 2, 1]]  # 9 + 5; 5 + 5 + 2
    assert cut([0, 1, 2, 3], 4, 14, padded=False) == [[3, 0], [2, 1]]
    assert cut([0, 1, 2, 3], 4, 21, padded=False) == [[3, 0, 2, 1]]
    assert cut([], 4, 10) == []


def test_rows_that_begin_alike_share_a_micro_batch_whose_budget_counts_their_beginning_once():
    """Rows 0, 2 and 3 begin with 16 tokens and go on by 1; row 1 of 17 tokens begins otherwise; responses of 3.

    A micro-batch of two of them has 20 + 4 tokens, and repeats 16 keys, which count as 2; of three 20 + 2 x 4 + 4.
    """
    prompts, responses = [[*range(16), last] for last in (20, 21, 22, 23)], [3] * 4
    prompts[1][0] = 9

    def cut(rows: int, budget: int | None, padded: bool = False) -> list[list[int]]:
        return micro_batches([3, 1, 0, 2], rows, prompts, responses, budget, padded=padded)

    assert cut(2, None) == [[0, 2], [3, 1]]
    assert cut(4, None) == [[3, 1, 0, 2]]  # one micro-batch
    assert cut(2, None, padded=True) == [[3, 1], [0, 2]]
    assert cut(4, 32) == [[0, 2, 3], [1]]
    assert cut(4, 31) == [[0, 2], [3], [1]]
    assert cut(4, 25) == [[0], [2], [3], [1]]


def test_ddp_keeps_each_gradient_twice_and_fsdp_and_a_single_process_once(make_run, monkeypatch):
    """DDP's communication buckets are as large as the gradients."""
    state = make_run().state
    trained = [*state.learner.policy.parameters(), *state.learner.critic.parameters()]
    for processes, shards, copies in ((1, False, 1), (2, False, 2), (2, True, 1)):
        monkeypatch.setattr(budgets, "process_count", lambda count=processes: count)
        monkeypatch.setattr(budgets, "shards_models", lambda is_so=shards: is_so)
        expected = copies * sum(8 * parameter.numel() for parameter in trained)  # float64
        assert budgets._update_bytes(state.learner, 64).gradients == expected
