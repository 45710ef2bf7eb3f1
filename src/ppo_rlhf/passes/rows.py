"""Computes rows by a model in passes of several rows, of fewer when memory runs out, and by all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.passes.free_memory import sequences_at_a_time
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.prefixes import in_passes_alike
from ppo_rlhf.passes.transfers import on_device, to_cpu
from ppo_rlhf.runtime.processes import dealt_rows, gather_dealt, own_rank
from ppo_rlhf.runtime.progress_display import Lines

Result = TypeVar("Result")


def in_passes(
    rows: Sequence[int],
    most: int,
    compute: Callable[[list[list[int]]], Iterable[Result]],
    halving: Halving | None = None,
) -> list[tuple[list[int], Result]]:
    """Compute rows in passes of at most `most` rows, in the order of `rows`; return the rows and result of each pass.

    A line every `SILENCE_S` seconds says how many rows are done.

    Args:
        rows: The numbers of the rows.
        most: The most rows of a pass.
        compute: Takes the rows of each pass that is left, and yields the passes' results one by one. When memory runs
            out, it is called again with smaller passes for the rows without a result.
        halving: Halves the rows of a pass when memory runs out; None: this call's own.
    """
    halving, done, left = halving or Halving("a pass"), [], list(rows)
    lines = Lines(0, len(rows), step=f"{halving.passes[0].upper()}{halving.passes[1:]}, row")
    while left:
        size = halving.of(min(most, len(rows)))
        passes = [left[start : start + size] for start in range(0, len(left), size)]
        with halving.catching(size):
            for group, result in zip(passes, compute(passes), strict=True):
                done.append((group, result))
                left = left[len(group) :]
                lines.show(len(rows) - len(left), {})
    return done


def table_by_rows(
    model: PreTrainedModel,
    lengths: Sequence[int],
    width: int,
    dtype: torch.dtype,
    compute: Callable[[list[list[int]]], Iterable[Tensor]],
    *,
    shared: Callable[[], Sequence[Sequence[int]] | None],
    device: torch.device,
    batch_size: int | None,
    halving: Halving | None = None,
) -> Tensor:
    """Return a table `[N, width]` on the CPU of what a model computes for each of N rows, without gradients.

    Each process computes its shard of the rows, and returns all rows. Rows that begin alike share a pass if the model
    computes a common beginning once, else rows of similar length.

    Args:
        model: The model; an offloaded or sharded model is whole on the device only during the call.
        lengths: Tokens of each row.
        width: Columns of the table.
        dtype: Dtype of the table.
        compute: Yields the results `[b, t]` of passes of b rows, as in `in_passes`; the columns after t are 0.
        shared: Returns what each row may share with others (`prefixes`); None: the model computes whole rows. Called
            while the model is on the device.
        device: The device to compute on.
        batch_size: The most rows of a pass; None: as many as fit into memory.
        halving: Halves the rows of a pass when memory runs out; None: this call's own.
    """
    shards = dealt_rows(lengths)
    own_rows = shards[own_rank()]
    by_length = sorted(own_rows, key=lambda row: lengths[row])
    with torch.no_grad(), on_device(model, device):
        most = batch_size or sequences_at_a_time(model, len(by_length), max(lengths, default=0))
        beginnings = shared()
        in_order = by_length if beginnings is None else in_passes_alike(by_length, beginnings, most)
        done = in_passes(in_order, most, compute, halving)
    table = filled_rows(len(lengths), width, [rows for rows, _ in done], [result for _, result in done], dtype)
    return gather_dealt(table[own_rows], shards)


def filled_rows(rows: int, width: int, groups: list[list[int]], results: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a table `[rows, width]` on the CPU, filled with the results of groups of rows, 0 elsewhere.

    Each group of rows has a result `[b, t]`, which fills the first t columns of the group's rows. All results are
    copied from the device in one transfer.
    """
    filled = torch.zeros(rows, width, dtype=dtype)
    for group, values in zip(groups, to_cpu(results), strict=True):
        filled[group, : values.shape[1]] = values.to(dtype)
    return filled
