"""What follows a trunk's last attention, computed for those tokens alone whose states are read.

In every layer each token gives keys and values to the tokens behind it. But behind the last attention each token is on
its own, and of a prompt's tokens the last alone is read, for a reward model one of a whole sequence. The others' share
of these modules, three quarters of a layer, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ppo_rlhf.models.packed_attention import Attention, place_rows, take_rows


@dataclass(frozen=True)
class ReadTokens:
    """M of the N tokens in a row `[1, N]`: those whose last hidden states are read.

    Attributes:
        places: `[M]` long, none twice.
        size: N.
        more: Rows of zeros that products are given, too, so that they have few different shapes.
    """

    places: Tensor
    size: int
    more: int = 0

    def take(self, states: Tensor) -> Tensor:
        """Return the states of these tokens and what fills them up, `[1, M + more, H]` of `[1, N, H]`."""
        return take_rows(states.flatten(0, -2), self.places, self.more).view(_like(states))

    def place(self, states: Tensor) -> Tensor:
        """Return `[1, N, H]` with 0 for the other tokens: what `take` undoes."""
        return place_rows(states.flatten(0, -2), self.places, self.size).view(_like(states))


class Tail:
    """The modules behind a trunk's last attention, which can compute some tokens alone."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._read: ReadTokens | None = None  # as the last attention said

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, a backward pass that computes again included, passes can be of some tokens (`attention`).

        Not for two passes at the same time.
        """
        self._depth += 1
        if not self._handles:
            for module in self.modules:
                self._handles.append(module.register_forward_pre_hook(self._take))
                self._handles.append(module.register_forward_hook(self._place))
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._read = None
                while self._handles:
                    self._handles.pop().remove()

    def attention(self, attention: Attention, read: ReadTokens | None) -> Attention:
        """Return the attention of a pass in which only these tokens' last hidden states are read; None: all tokens'."""
        return _AttentionOfRead(self, attention, read)

    def compute(self, read: ReadTokens | None) -> None:
        """Compute what follows of these tokens alone, until an attention says otherwise; None: of all."""
        self._read = read

    def _take(self, _: nn.Module, given: tuple[Tensor]) -> Tensor | None:
        return None if self._read is None else self._read.take(given[0])

    def _place(self, _: nn.Module, __: tuple[Tensor], found: Tensor) -> Tensor | None:
        return None if self._read is None else self._read.place(found)


@dataclass(frozen=True)
class _AttentionOfRead:
    """Attends as another attention; what follows knows by it which tokens are read, also when it is computed again."""

    tail: Tail
    attention: Attention
    read: ReadTokens | None

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        attended = self.attention.attend(query_NHD, key_NKD, value_NKD, scaling)
        self.tail.compute(self.read)
        return attended


def modules_behind_attention(
    backbone: nn.Module, run: Callable[[Attention], object], attention: Attention
) -> list[nn.Module]:
    """Return the modules with matrices behind a trunk's last attention, each as large as can be.

    Left out are those that come more than once in a pass, or get or give more than states `[1, N, …]` or `[N, …]`.

    Args:
        backbone: A trunk that packs, so that all but its attention is computed token by token.
        run: Makes a pass with the attention that it is given.
        attention: Attends.
    """
    watch = _Watch(attention)
    handles = []
    for module in backbone.modules():
        handles.append(module.register_forward_pre_hook(watch.begin, with_kwargs=True))
        handles.append(module.register_forward_hook(watch.end))
    try:
        run(watch)
    finally:
        for handle in handles:
            handle.remove()
    found: list[nn.Module] = []
    for module in backbone.modules():  # those that hold others come first
        is_inside = any(module in outer.modules() for outer in found)
        if not is_inside and watch.calls[module] == 1 and module in watch.ended and _has_matrix(module):
            found.append(module)
    return found


@dataclass
class _Watch:
    """Attends as another attention does, and knows which modules began behind the last time."""

    attention: Attention
    length: int = 0  # N
    calls: Counter[nn.Module] = field(default_factory=Counter)
    begun: set[nn.Module] = field(default_factory=set)  # with states of all tokens, and nothing else
    ended: set[nn.Module] = field(default_factory=set)  # and ended with such states

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        self.begun.clear()
        self.ended.clear()
        self.length = len(query_NHD)
        return self.attention.attend(query_NHD, key_NKD, value_NKD, scaling)

    def begin(self, module: nn.Module, given: tuple[object, ...], named: dict[str, Any]) -> None:
        self.calls[module] += 1
        if len(given) == 1 and not named and self._is_of_all(given[0]):
            self.begun.add(module)

    def end(self, module: nn.Module, _: object, found: object) -> None:
        if module in self.begun and self._is_of_all(found):
            self.ended.add(module)

    def _is_of_all(self, states: object) -> bool:
        return isinstance(states, Tensor) and states.shape[:-1] in ((1, self.length), (self.length,))


def _like(states: Tensor) -> tuple[int, ...]:
    """Return the shape of other states, of which there may be more or fewer, in the form of these."""
    return (*([1] * (states.dim() - 2)), -1, states.shape[-1])


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())
