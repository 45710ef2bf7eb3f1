"""However a run is cut, padded, shared by processes and interrupted, it is the plain run of its settings."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.passes import forward, sequences
from ppo_rlhf.runtime import processes
from tests.ppo.process_cases import CASES, ITERATIONS, build
from tests.ppo.test_invariances import padded_more
from tests.ppo.test_processes import differences
from tests.ppo_runs import MEASURED, Run, build_tokenizer, weight_sums

RESPONSES = 16
OWN_CUT = ("token budget", "a shared prefix")
"""Cases whose settings are a cut of the batch themselves."""


@dataclass(frozen=True)
class Cut:
    """What must change no number of a run.

    Attributes:
        processes: Processes that share the batch.
        micro_batch: Responses of a process in one pass of the update.
        rollout_batch: Responses of a process in one pass of the rollouts.
        tokens: The budget of a pass, instead of `micro_batch`; None: no budget.
        padding: Columns before the prompts and after the responses of rows that are computed with padding; None: rows
            are packed.
        pad_token: The tokenizer's.
        side: The tokenizer's side of padding.
        after: Iterations after which the run is saved and goes on from its checkpoint; None: it is not interrupted.
    """

    processes: int = 1
    micro_batch: int = RESPONSES
    rollout_batch: int = RESPONSES
    tokens: int | None = None
    padding: tuple[int, int] | None = None
    pad_token: str = "<pad>"
    side: str = "left"
    after: int | None = None


CUTS = st.builds(
    Cut,
    processes=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 2, 4, 8]),
    rollout_batch=st.sampled_from([1, 3, RESPONSES]),
    tokens=st.sampled_from([None, None, 20, 45]),
    padding=st.sampled_from([None, None, (4, 0), (0, 3), (2, 5)]),
    pad_token=st.sampled_from(["<pad>", "</s>", "<unk>"]),
    side=st.sampled_from(["left", "right"]),
    after=st.sampled_from([None, 0, 1]),
)


@contextmanager
def padded(columns: tuple[int, int] | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if columns is not None:
            patch.setattr(forward, "packs", lambda _: False)
            patch.setattr(sequences, "make_batch", padded_more(*columns))
        yield


def outcome(name: str, cut: Cut, folder: Path) -> dict[str, Any]:
    """Return the metrics and weights of a run that is cut so, after its last iteration."""
    case = {"kind": "gpt2", **CASES[name]}  # in float64 throughout, unlike a Llama's norm
    if name not in OWN_CUT:
        case |= {"max_tokens_per_micro_batch": cut.tokens}

    def make(**other: Any) -> Run:
        tokenizer = build_tokenizer(pad_token=cut.pad_token, padding_side=cut.side)
        sizes = {"local_rollout_forward_batch_size": cut.rollout_batch, "micro_batch": cut.micro_batch}
        return build({**case, **sizes, "tokenizer": tokenizer, **other}, RESPONSES)

    with padded(cut.padding):
        run, metrics = make(), []
        for iteration in range(ITERATIONS):
            if iteration == cut.after:
                if processes.is_main_process():
                    write_checkpoint(folder / "run", run.state)
                processes.wait_for_all()
                # An adapter's frozen weights are the start model's, which no checkpoint holds
                resumed = make(**({} if case.get("use_peft") else {"model": {"seed": 9}}))
                restore(resumed.state, folder / "run" / f"iteration_{iteration:06d}")
                resumed.reference = run.reference  # no checkpoint holds it
                run = resumed
            metrics.append({k: v for k, v in run.iteration().items() if not k.startswith(MEASURED)})
        return {"metrics": metrics, "weights": weight_sums(run)}


def by_forks(count: int, work: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Do the work on forks of this process, which gloo joins; return what all of them must give."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(count))
                torch.set_num_threads(1)
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                (folder / f"{rank}.json").write_text(json.dumps(work()))
                processes.wait_for_all()
                torch.distributed.destroy_process_group()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count
    texts = {(folder / f"{rank}.json").read_text() for rank in range(count)}
    assert len(texts) == 1, "the processes differ"
    found: dict[str, Any] = json.loads(texts.pop())
    return found


@cache
def plain(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        expected: dict[str, Any] = json.loads(json.dumps(outcome(name, Cut(), Path(folder))))
    return expected


def check(name: str, cut: Cut) -> None:
    expected = plain(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if cut.processes == 1:
            actual = outcome(name, cut, folder)
        else:
            cut = replace(cut, micro_batch=min(cut.micro_batch, RESPONSES // cut.processes))
            actual = by_forks(cut.processes, lambda: outcome(name, cut, folder), folder)
    assert not differences(json.loads(json.dumps(actual)), expected, f"{name}, {cut}")


@given(st.sampled_from(sorted(CASES)), CUTS)
@example("critic first", Cut(processes=2, micro_batch=2))  # DDP once summed the policy's first gradients twice
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_a_run_is_the_plain_one_however_it_is_cut_padded_shared_and_interrupted(name: str, cut: Cut) -> None:
    check(name, cut)


@pytest.mark.slow
@given(st.sampled_from(sorted(CASES)), CUTS)
@settings(max_examples=150, deadline=None)
def test_any_run_is_the_plain_one_however_it_is_cut_padded_shared_and_interrupted(name: str, cut: Cut) -> None:
    check(name, cut)
