"""Decoding steps whose shapes and addresses stay, so that each is recorded once and then replayed: CUDA graphs.

A step of a small model takes a GPU less time than it takes the host to launch its kernels. A captured graph is one
launch. It reads and writes the memory that it was captured with, so all of that lives as long as the model trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import decoding
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.decoding import HeldColumns
from ppo_rlhf.models.forward import backbone_of, logits_of
from ppo_rlhf.models.packed_attention import PackedLayout, packed_states
from ppo_rlhf.models.probe import asking, some_ids
from ppo_rlhf.models.products.sixteen_bit_weights import SixteenBitWeights

WARM_UPS = 3
"""Runs of a step before it is captured, as torch's documentation has it: libraries set themselves up in the first."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Takes a step, which may run any number of times; returns what runs it again, and the tensor that its result is in."""


class CudaGraphs:
    """Captures steps on a CUDA device; their intermediate results share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Take the device that the model lies on."""
        self._device = device
        self._pool: Any = None
        self._stream: Any = None  # one for all: each that computes products has a workspace of its own, for good

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture a step."""
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream()
            main, side = torch.cuda.current_stream(), self._stream
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
            main.wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                result = step()
        return graph.replay, result


class RecordedSteps:
    """Decoding steps of one model, recorded by the number of rows and of columns that they look at.

    Rows are rounded up to a power of two, but not beyond the largest batch so far, columns to `decoding.BUCKET`. Spare
    rows decode one token over and over, which nobody reads. Every recording reads the same memory for keys and values,
    as much of it as it looks at: nothing is copied when columns grow or rows end.
    """

    def __init__(self, model: PreTrainedModel, record: Record) -> None:
        """Take a model and what records.

        Raises:
            ModelError: The model cannot be decoded so (`check_recordable`).
        """
        check_recordable(model)
        self._model, self._record = model, record
        self._weights: SixteenBitWeights | None = None
        self._keys: list[Tensor] = []  # of each time that a pass attends, [slots, K, capacity, d]
        self._values: list[Tensor] = []
        self._capacity = 0
        self._token_ids = torch.zeros(0, dtype=torch.long, device=model.device)  # [slots]
        self._lengths = self._token_ids.clone()  # [slots]
        self._steps: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        self._recorded_with: tuple[object, ...] = ()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Within the block decoders use the model's weights as they are now; under autocast, copies in 16 bits.

        Steps that were recorded with another autocast, or with weights that lie elsewhere now, are forgotten.
        """
        device = self._model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with ExitStack() as stack:
            if dtype is not None:
                if self._weights is None or self._weights.dtype != dtype:
                    self._weights = SixteenBitWeights(self._model, dtype)
                stack.enter_context(self._weights.in_place())
            tensors = chain(self._model.parameters(), self._model.buffers())
            recorded_with = (dtype, *(tensor.data_ptr() for tensor in tensors))
            if recorded_with != self._recorded_with:
                self._steps.clear()
                self._recorded_with = recorded_with
            yield

    def take_over(
        self, keys: list[Tensor], values: list[Tensor], lengths: Tensor, longest: int
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Go on from what a prefill left, and return what holds it now: keys, values and lengths.

        Args:
            keys: `[B, K, columns, d]` of each time that a pass attends; emptied.
            values: Likewise.
            lengths: Tokens of each sequence, `[B]`.
            longest: How long a sequence can get.
        """
        self._make_room(keys[0], len(lengths), longest)
        for mine, theirs in ((self._keys, keys), (self._values, values)):
            for turn in range(len(theirs)):
                found = theirs.pop(0)
                if turn == len(mine):
                    slots, capacity = len(self._lengths), self._capacity
                    mine.append(found.new_empty(slots, found.shape[1], capacity, found.shape[3]))
                mine[turn].zero_()  # of an earlier batch: 0 x NaN, masked or not, is NaN
                mine[turn][: len(found), :, : found.shape[2]] = found
        self._lengths.zero_()
        self._lengths[: len(lengths)] = lengths
        return self._keys, self._values, self._lengths[: len(lengths)]

    def step(self, token_ids: Tensor, columns: int) -> Tensor:
        """Take one token of each of the first B sequences, `[B]`, and return the logits `[B, V]` that follow it.

        They hold until the next step. `columns` are those of the longest sequence, this token included.
        """
        live = len(token_ids)
        rows = min(1 << (live - 1).bit_length(), len(self._lengths))
        width = min(decoding.in_buckets(columns), self._capacity)
        self._token_ids[:live] = token_ids
        if (rows, width) not in self._steps:
            self._steps[rows, width] = self._record(partial(self._compute, rows, width))
        replay, logits = self._steps[rows, width]
        replay()
        return logits[:live]

    def _compute(self, rows: int, width: int) -> Tensor:
        """Compute a step out of what is held; doing it again changes nothing."""
        lengths, device = self._lengths[:rows], self._lengths.device.type
        attention = HeldColumns.of(self._keys, self._values, lengths, width, is_even=False)
        with torch.autocast(  # the same as outside, but for its cache: what is in there now will have gone
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device), cache_enabled=False
        ):
            states = packed_states(backbone_of(self._model), self._token_ids[None, :rows], lengths[None], attention)
            return logits_of(self._model)(states)

    def _make_room(self, held: Tensor, rows: int, longest: int) -> None:
        """Hold so many rows and columns of this type, or forget all that was recorded and make room anew."""
        mine = next(iter(self._keys), None)
        is_alike = mine is not None and (mine.dtype, mine.device) == (held.dtype, held.device)
        if is_alike and rows <= len(self._lengths) and longest <= self._capacity:
            return
        self._steps.clear()
        self._keys.clear()
        self._values.clear()
        self._capacity = max(self._capacity, decoding.in_buckets(longest))
        self._token_ids = torch.zeros(max(rows, len(self._lengths)), dtype=torch.long, device=held.device)
        self._lengths = torch.zeros_like(self._token_ids)


def check_recordable(model: PreTrainedModel) -> None:
    """Ask a model for a step without padding in which the host reads nothing of the device.

    Raises:
        ModelError: It needs padding, or its forward pass reads.
    """
    backbone = backbone_of(model)
    if not decoding.decodes(model):
        raise ModelError(f"{type(model).__name__} cannot be decoded without padding")
    head, ids = logits_of(model), some_ids(model, 2)[None].to(model.device)
    positions, layout = torch.arange(2, device=model.device)[None], PackedLayout.of([2], model.device)
    with asking(model), _NoReading(type(model).__name__):
        head(packed_states(backbone, ids, positions, layout))


class _NoReading(TorchDispatchMode):
    """Refuses what waits for a device: values that the host reads, shapes that depend on values, new constants.

    Of experts' products, too: but for bfloat16 on some devices torch reads the groups' sizes.
    """

    _READING = frozenset(
        {
            *("_local_scalar_dense", "equal", "lift_fresh", "_grouped_mm"),
            *("nonzero", "masked_select", "_unique2", "unique_consecutive", "repeat_interleave", "bincount"),
        }
    )

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in self._READING or picks:
            raise ModelError(f"the forward pass of {self._who} reads from the device ({name})")
        return func(*args, **(kwargs or {}))
