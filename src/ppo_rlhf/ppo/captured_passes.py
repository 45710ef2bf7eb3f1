"""Runs forward and backward passes of micro-batches as CUDA graphs, which also write the gradients.

A replayed CUDA graph reads and writes the same addresses as at its capture. Each micro-batch is therefore copied into
fixed buffers, and each weight has one fixed gradient tensor. autocast caches its casts of weights until the autocast
context ends, so each captured function enters and leaves its own autocast context. Before each minibatch the `.grad` of
every weight is None, as without CUDA graphs, because the optimiser skips weights without a gradient.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_rlhf.models.captures import UPDATE, Captures, fixed_state
from ppo_rlhf.models.transfers import tensors_of

log = logging.getLogger(__name__)

Inputs = tuple[Any, ...]
"""Inputs of a forward and backward pass: tensors and dataclasses of tensors, on the device."""
Compute = Callable[[Inputs], Tensor]
"""A function that runs a forward and backward pass, adds to `.grad`, and returns the losses and means as one tensor."""


class CapturedPasses:
    """Runs the passes of a run's updates as CUDA graphs, and holds the graphs' buffers and gradient tensors."""

    def __init__(self, captures: Captures, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Prepare passes with the run's CUDA graphs, the modules to capture, and the optimisers of the weights."""
        self._captures, self._optimizers, self._fixed = captures, optimizers, fixed_state(*models)
        # The gradient tensor of each weight, at a fixed address, because a CUDA graph writes to fixed addresses
        self._gradients: dict[nn.Parameter, Tensor] = {}
        # For each kind of forward and backward pass, the weights that get a gradient
        self._learners: dict[Hashable, list[nn.Parameter]] = {}
        self._buffers: dict[Hashable, _Buffers] = {}

    @classmethod
    def of(cls, captures: Captures, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> CapturedPasses:
        """Return the `CapturedPasses` in `captures`; make a new object if there is none or the models have changed.

        A callback may change the models between iterations, for example freeze weights or add hooks.
        """
        held = captures.held.get(UPDATE)
        if isinstance(held, cls):
            now = fixed_state(*models)
            if held._fixed == now:
                return held
            changed = next(name for name in held._fixed | now if held._fixed.get(name) != now.get(name))
            log.info("The update's CUDA graphs are captured anew, because the models changed: %s", changed)
            captures.release()
        passes = cls(captures, models, optimizers)
        captures.held[UPDATE] = passes
        return passes

    def give_up(self, why: str) -> None:
        """Run all later passes without CUDA graphs, and release the graphs and the buffers."""
        self._captures.give_up(UPDATE, why)

    @property
    def bytes(self) -> int:
        """Bytes of the fixed gradient tensors and of the micro-batches' buffers on the device."""
        gradient_bytes = sum(gradient.nbytes for gradient in self._gradients.values())
        return gradient_bytes + sum(tensor.nbytes for buffers in self._buffers.values() for tensor in buffers.tensors)

    def run(self, kind: Hashable, inputs: Inputs, compute: Compute) -> Tensor:
        """Run `compute(inputs)`, which adds to the gradients, and return the result of `compute`.

        All passes of one `kind` must give a gradient to the same weights, and do the same operations if their inputs
        have the same shapes. All passes of a minibatch must be of one kind. Before the first pass of a minibatch every
        `.grad` must be None.
        """
        if not self._captures.serves(UPDATE):
            return compute(inputs)
        key = UPDATE, kind, tuple(tensor.shape for tensor in _tensors_of(inputs))
        if key not in self._buffers:
            self._buffers[key] = _Buffers(inputs)
        buffers, learners = self._buffers[key], self._learners.get(kind)
        buffers.load(inputs)
        zeroed = self._attach_gradients(learners or [])
        if self._captures.run(key, lambda: buffers.compute(compute)):
            for parameter, gradient, version in zeroed:
                # Drop a gradient that the eager pass did not write: the pass does not use every weight
                if gradient._version == version:
                    parameter.grad = None
        if learners is None:
            self._learners[kind] = self._keep_gradients()
        return buffers.result.clone()

    def _attach_gradients(self, learners: list[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor, int]]:
        """Give each learner without `.grad` its fixed gradient tensor, filled with 0, in a minibatch's first pass.

        Returns:
            For each weight that got its gradient tensor: the weight, the gradient tensor, and the tensor's version
            counter, which torch raises whenever the tensor changes.
        """
        missing = {parameter: self._gradients[parameter] for parameter in learners if parameter.grad is None}
        for parameter, gradient in missing.items():
            parameter.grad = gradient
        if missing:
            # torch has no public function that zeroes many tensors in one kernel
            torch._foreach_zero_(tuple(missing.values()))
        return [(parameter, gradient, gradient._version) for parameter, gradient in missing.items()]

    def _keep_gradients(self) -> list[nn.Parameter]:
        """Return the weights that have a gradient after the first pass of a kind.

        The gradient of each weight becomes the weight's fixed gradient tensor; if the weight has a fixed gradient
        tensor already, the gradient is copied into the tensor.
        """
        trained = [
            weight for optimizer in self._optimizers for group in optimizer.param_groups for weight in group["params"]
        ]
        learners = [parameter for parameter in trained if parameter.grad is not None]
        for parameter in learners:
            gradient = self._gradients.setdefault(parameter, parameter.grad)
            if gradient is not parameter.grad:
                parameter.grad = gradient.copy_(parameter.grad)
        return learners


class _Buffers:
    """The inputs and the result of the passes that one CUDA graph replays, at fixed addresses."""

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

    def load(self, inputs: Inputs) -> None:
        for buffer, tensor in zip(_tensors_of(self.inputs), _tensors_of(inputs), strict=True):
            buffer.copy_(tensor)

    def compute(self, compute: Compute) -> None:
        result = compute(self.inputs)
        if not self._results:  # keep the result of the first run, which is not captured in a CUDA graph
            self._results.append(result.clone())
        self.result.copy_(result)


def _tensors_of(inputs: Inputs) -> list[Tensor]:
    return [tensor for each in inputs for tensor in tensors_of(each)]
