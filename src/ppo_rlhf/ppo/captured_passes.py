"""Forward and backward passes of micro-batches that CUDA replays as one graph, gradients and all.

A graph reads and writes where it did when it was captured. So the micro-batch is copied into buffers, and a weight's
gradient always lies in one place. autocast keeps its casts of weights until its context ends: each of those begins and
ends within a pass. Between two steps `.grad` is None nevertheless, as without graphs: an optimiser
leaves out the weights that took no part in a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_rlhf.models.captures import UPDATE, Captures, addresses
from ppo_rlhf.models.transfers import tensors_of

Inputs = tuple[Any, ...]
"""Dataclasses of tensors, and tensors, on the device."""
Compute = Callable[[Inputs], Tensor]
"""Adds to `.grad`, and returns the other results of a pass."""


class CapturedPasses:
    """The passes of one run's updates, and the buffers that their graphs use."""

    def __init__(self, captures: Captures, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Take the run's graphs, its forward passes, and the optimisers of all weights that train."""
        self._captures, self._optimizers, self._places = captures, optimizers, addresses(*models)
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._learners: dict[Hashable, list[nn.Parameter]] = {}  # by kind of pass: the weights that take part
        self._buffers: dict[Hashable, _Buffers] = {}

    @classmethod
    def of(cls, captures: Captures, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> CapturedPasses:
        """Return the passes whose buffers `captures` holds, or new ones: none are held, or the weights have moved."""
        held = captures.held.get(UPDATE)
        if isinstance(held, cls) and held._places == addresses(*models):
            return held
        if held is not None:
            captures.release()
        passes = cls(captures, models, optimizers)
        captures.held[UPDATE] = passes
        return passes

    @property
    def bytes(self) -> int:
        """Bytes of gradients and micro-batches on the device."""
        of_gradients = sum(gradient.nbytes for gradient in self._gradients.values())
        return of_gradients + sum(tensor.nbytes for each in self._buffers.values() for tensor in each.tensors)

    def run(self, kind: Hashable, inputs: Inputs, compute: Compute) -> Tensor:
        """Return `compute(inputs)`, which adds to the gradients.

        Passes of a kind are the same operations if their inputs have the same shapes, and the same weights take part in
        all of them. All passes of a minibatch are of one kind, and before its first `.grad` is None.
        """
        if not self._captures.serves(UPDATE):
            return compute(inputs)
        key = UPDATE, kind, tuple(tensor.shape for tensor in _tensors_of(inputs))
        if key not in self._buffers:
            self._buffers[key] = _Buffers(inputs)
        buffers, learners = self._buffers[key], self._learners.get(kind)
        buffers.take(inputs)
        put = self._put_gradients(learners or [])
        if self._captures.run(key, lambda: buffers.compute(compute)):
            for parameter, gradient, version in put:
                if gradient._version == version:  # this pass went without the weight, as one that no graph holds may
                    parameter.grad = None
        if learners is None:
            self._learners[kind] = self._kept_gradients()
        return buffers.result.clone()

    def _put_gradients(self, learners: list[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor, int]]:
        """Let the weights that take part have gradients in their places: of zeros, if this is a minibatch's first.

        Returns which got one, that, and its version, which each change raises.
        """
        missing = {parameter: self._gradients[parameter] for parameter in learners if parameter.grad is None}
        for parameter, gradient in missing.items():
            parameter.grad = gradient
        if missing:
            torch._foreach_zero_(tuple(missing.values()))  # torch has no public one for many tensors
        return [(parameter, gradient, gradient._version) for parameter, gradient in missing.items()]

    def _kept_gradients(self) -> list[nn.Parameter]:
        """Return the weights that took part in a kind's first pass; their gradients get places, or move into them."""
        trained = [
            weight for optimizer in self._optimizers for group in optimizer.param_groups for weight in group["params"]
        ]
        learners = [parameter for parameter in trained if parameter.grad is not None]
        for parameter in learners:
            place = self._gradients.setdefault(parameter, parameter.grad)
            if place is not parameter.grad:
                parameter.grad = place.copy_(parameter.grad)
        return learners


class _Buffers:
    """The inputs and the results of the passes of one graph, in their places."""

    def __init__(self, inputs: Inputs) -> None:
        tensors = _tensors_of(inputs)
        self.inputs: Inputs = copy.deepcopy(inputs, {id(tensor): tensor.clone() for tensor in tensors})
        self._results: list[Tensor] = []

    @property
    def result(self) -> Tensor:
        (result,) = self._results
        return result

    @property
    def tensors(self) -> list[Tensor]:
        return [*_tensors_of(self.inputs), *self._results]

    def take(self, inputs: Inputs) -> None:
        for buffer, tensor in zip(_tensors_of(self.inputs), _tensors_of(inputs), strict=True):
            buffer.copy_(tensor)

    def compute(self, compute: Compute) -> None:
        found = compute(self.inputs)
        if not self._results:  # the first run, which is not captured
            self._results.append(found.clone())
        self.result.copy_(found)


def _tensors_of(inputs: Inputs) -> list[Tensor]:
    return [tensor for each in inputs for tensor in tensors_of(each)]
