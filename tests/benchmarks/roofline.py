"""The least time that this machine needs for an iteration's work; compare.py reports it as a share of the time taken.

Measured (`measure`), in the precision of the run, best of a few repetitions:

- every matrix product of the model's linear layers with the tokens of one minibatch as rows: forward (x W), and
  backward (the gradients of x and of W); the head with its response positions alone as rows;
- the two products of attention, as batched products over the heads of one minibatch;
- the same products another way, on a CPU: in float32 by oneDNN, which on some processors takes half of the time; in
  bf16, where there are no fast instructions for it, those of float32 numbers (`Rates.fastest`);
- memory bandwidth: a buffer as large as the model's matrices, summed up, or copied (which moves it twice), whichever is
  faster.

Counted, of real tokens alone, never of padding (`Work`). A product of m x k with k x n has 2mkn operations. A sequence
of S tokens has S (S + 1) / 2 pairs of positions, 4 x width operations each in a layer (scores and weighted sum), 8 in
the backward pass. Then, in seconds at those rates:

- update = epochs x (policy forward and backward + critic forward and backward). The head is the policy's alone.
- score = forward passes of policy, reference, critic and reward model.
- rollout = one forward pass over the prompts, and for each further token of the longest response the larger of (bytes
  of the matrices and of the keys and values of the rows still going) / bandwidth and the operations of these rows.
- iteration = all three.

Not counted, though it has to be done: norms, activations, soft-maxima, and AdamW. `adamw_seconds` says what the last
takes at that bandwidth (7 passes over the float32 weights of both models in a step), for reading the update's share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from speed.workload import Preset, Shape

BYTES = {"float32": 4, "bf16": 2}
ADAMW_PASSES = 7  # reads weight, gradient, both moments; writes weight and moments
REPETITIONS = 3
LAUNCHES = 30  # of each, one behind the other, where a product takes as long as its launch


@dataclass(frozen=True)
class Rates:
    """Measured speeds; products by "inputs x outputs"."""

    forward: dict[str, float]  # FLOP/s
    backward: dict[str, float]  # FLOP/s of both gradients together
    attention: float  # FLOP/s
    bandwidth: float  # bytes/s
    other_forward: dict[str, float] = field(default_factory=dict)  # the other way; empty where there is none
    other_backward: dict[str, float] = field(default_factory=dict)
    other_attention: float = 0.0

    def fastest(self) -> Rates:
        """Return the same, of each product by whichever way is faster."""
        forward, backward = (
            {name: max(rate, other.get(name, 0.0)) for name, rate in rates.items()}
            for rates, other in ((self.forward, self.other_forward), (self.backward, self.other_backward))
        )
        return replace(self, forward=forward, backward=backward, attention=max(self.attention, self.other_attention))


@dataclass(frozen=True)
class Work:
    """One iteration's sequences, and what they take of a machine with given rates."""

    preset: Preset
    precision: str
    prompt_tokens: list[int]
    response_tokens: list[int]

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Return the least seconds by phase."""
        phases = {"rollout": self.rollout(rates), "score": self.score(rates), "update": self.update(rates)}
        return {**phases, "iteration": sum(phases.values())}

    def score(self, rates: Rates) -> float:
        """Four forward passes, two of them with the head."""
        return 4 * self._trunk(rates, backward=False) + 2 * self._head(rates, backward=False)

    def update(self, rates: Rates) -> float:
        """Forward and backward passes of policy and critic, each epoch."""
        trunk = self._trunk(rates, backward=False) + self._trunk(rates, backward=True)
        head = self._head(rates, backward=False) + self._head(rates, backward=True)
        return self.preset.epochs * (2 * trunk + head)

    def rollout(self, rates: Rates) -> float:
        """The prompts in one pass, then one token of every response that goes on at a time."""
        shape, size = self.preset.shape, BYTES[self.precision]
        rows = len(self.prompt_tokens)
        pairs = sum(n * (n + 1) // 2 for n in self.prompt_tokens)
        seconds = _trunk_seconds(shape, rates.forward, rates.attention, sum(self.prompt_tokens), pairs)
        seconds += rows * _head_seconds(shape, rates.forward)
        matrices = matrix_elements(shape) * size
        for step in range(1, max(self.response_tokens)):
            going_on = [p + step for p, r in zip(self.prompt_tokens, self.response_tokens, strict=True) if r > step]
            cached = sum(going_on)
            moved = matrices + cached * 2 * shape.layers * shape.kv_width * size
            computed = _trunk_seconds(shape, rates.forward, rates.attention, len(going_on), cached)
            computed += len(going_on) * _head_seconds(shape, rates.forward)
            seconds += max(moved / rates.bandwidth, computed)
        return seconds

    def _trunk(self, rates: Rates, *, backward: bool) -> float:
        lengths = [p + r for p, r in zip(self.prompt_tokens, self.response_tokens, strict=True)]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        products, attention = (rates.backward, rates.attention / 2) if backward else (rates.forward, rates.attention)
        return _trunk_seconds(self.preset.shape, products, attention, sum(lengths), pairs, 2 if backward else 1)

    def _head(self, rates: Rates, *, backward: bool) -> float:
        each = _head_seconds(self.preset.shape, rates.backward if backward else rates.forward, 2 if backward else 1)
        return sum(self.response_tokens) * each


def adamw_seconds(preset: Preset, rates: Rates) -> float:
    """Return what an iteration's optimiser steps take if memory bandwidth is all that limits them."""
    steps = preset.epochs * (preset.batch // preset.minibatch)
    return steps * 2 * ADAMW_PASSES * matrix_elements(preset.shape) * 4 / rates.bandwidth


def matrix_elements(shape: Shape) -> int:
    """Return the weights of all matrices that a decoding step reads: the blocks' and the head's."""
    return shape.layers * sum(k * n for k, n in shape.linears) + shape.width * shape.vocabulary


def _trunk_seconds(
    shape: Shape, products: dict[str, float], attention: float, tokens: int, pairs: int, gradients: int = 1
) -> float:
    """Seconds of all blocks; `gradients` is 2 for a backward pass, whose attention rate is halved by the caller."""
    linear = sum(gradients * 2 * tokens * k * n / products[_key(k, n)] for k, n in shape.linears)
    return shape.layers * (linear + 4 * pairs * shape.width / attention)


def _head_seconds(shape: Shape, products: dict[str, float], gradients: int = 1) -> float:
    d, vocabulary = shape.width, shape.vocabulary
    return gradients * 2 * d * vocabulary / products[_key(d, vocabulary)]


def _key(inputs: int, outputs: int) -> str:
    return f"{inputs}x{outputs}"


def measure(preset: Preset, precision: str, device: str) -> Rates:
    """Measure this machine's rates on the preset's shapes."""
    import torch

    from ppo_rlhf.models.products.processors import lacks_fast_instructions

    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[precision]
    forward, backward, attention = _product_rates(preset, device, dtype, torch.matmul)
    other: tuple[Any, ...] = ()
    if device == "cpu" and torch.backends.mkldnn.is_available():
        if precision == "float32":
            other = _product_rates(preset, device, dtype, _by_onednn)
        elif lacks_fast_instructions(dtype):
            other = _product_rates(preset, device, torch.float32, torch.matmul)
    buffer = torch.randn(matrix_elements(preset.shape), device=device).to(dtype)
    target, moved = torch.empty_like(buffer), buffer.numel() * buffer.element_size()
    bandwidth = max(moved / _seconds(device, buffer.sum), 2 * moved / _seconds(device, lambda: target.copy_(buffer)))
    return Rates(forward, backward, attention, bandwidth, *other)


def _by_onednn(left: Any, right: Any) -> Any:
    import torch

    if left.dim() > 2:
        return left @ right  # it has no batched products
    return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")


def _product_rates(
    preset: Preset, device: str, dtype: Any, product: Callable[[Any, Any], Any]
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the FLOP/s of linear layers forward and backward, and of attention."""
    import torch

    shape, length = preset.shape, preset.prompt_length + preset.response_length
    head = (shape.width, shape.vocabulary)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        return _seconds(device, lambda: product(left, right))

    forward, backward = {}, {}
    for k, n in {*shape.linears, head}:
        rows = preset.minibatch * (preset.response_length if (k, n) == head else length)
        x, weight, gradient = random(rows, k), random(k, n), random(rows, n)
        operations = 2 * rows * k * n
        forward[_key(k, n)] = operations / seconds(x, weight)
        backward[_key(k, n)] = 2 * operations / (seconds(gradient, weight.T) + seconds(x.T, gradient))
    heads, depth = preset.minibatch * shape.heads, shape.width // shape.heads
    queries, keys, shares = random(heads, length, depth), random(heads, depth, length), random(heads, length, length)
    attention = 4 * heads * length * length * depth / (seconds(queries, keys) + seconds(shares, queries))
    return forward, backward, attention


def _seconds(device: str, work: Callable[[], Any]) -> float:
    work()
    calls = 1 if device == "cpu" else LAUNCHES
    times = []
    for _ in range(REPETITIONS):
        started = _now(device)
        for _ in range(calls):
            work()
        times.append((_now(device) - started) / calls)
    return min(times)


def _now(device: str) -> float:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Serve compare.py: the rates, once a command."""
    from speed.channel import Channel
    from speed.workload import Job

    channel, job = Channel(), Job.read(sys.argv[1])
    channel.send()
    while channel.wait():
        channel.send(**asdict(measure(job.preset, job.precision, job.device)))


if __name__ == "__main__":
    main()
