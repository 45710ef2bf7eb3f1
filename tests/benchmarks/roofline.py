"""The least time that this machine needs for an iteration's work; compare.py reports it as a share of the time taken.

Measured (`measure`), in the precision of the run, best of a few repetitions:

- every matrix product of the model's linear layers with the tokens of one minibatch as rows: forward (x W), and
  backward (the gradients of x and of W); the head with its response positions alone as rows;
- the two products of attention, as batched products over the heads of one minibatch;
- the same products by oneDNN, in float32 on a CPU: on some processors they take half of the time (`Rates.fastest`);
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
    onednn_forward: dict[str, float] = field(
        default_factory=dict
    )  # likewise, by oneDNN; empty where torch asks it anyway
    onednn_backward: dict[str, float] = field(default_factory=dict)

    def fastest(self) -> Rates:
        """Return the same, of each product by whichever library is faster."""
        forward, backward = (
            {name: max(rate, other.get(name, 0.0)) for name, rate in rates.items()}
            for rates, other in ((self.forward, self.onednn_forward), (self.backward, self.onednn_backward))
        )
        return replace(self, forward=forward, backward=backward)


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

    shape, dtype = preset.shape, {"float32": torch.float32, "bf16": torch.bfloat16}[precision]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    def onednn(left: torch.Tensor, right: torch.Tensor) -> Any:
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")

    def seconds(work: Callable[[], Any]) -> float:
        work()
        calls = 1 if device == "cpu" else LAUNCHES
        times = []
        for _ in range(REPETITIONS):
            started = _now(device)
            for _ in range(calls):
                work()
            times.append((_now(device) - started) / calls)
        return min(times)

    length = preset.prompt_length + preset.response_length
    forward, backward, onednn_forward, onednn_backward = {}, {}, {}, {}
    asks_another = precision == "float32" and device == "cpu" and torch.backends.mkldnn.is_available()
    head = (shape.width, shape.vocabulary)
    for k, n in {*shape.linears, head}:
        rows = preset.minibatch * (preset.response_length if (k, n) == head else length)
        x, weight, gradient = random(rows, k), random(k, n), random(rows, n)
        operations = 2 * rows * k * n
        forward[_key(k, n)] = operations / seconds(lambda x=x, w=weight: x @ w)
        both = seconds(lambda g=gradient, w=weight: g @ w.T) + seconds(lambda g=gradient, x=x: x.T @ g)
        backward[_key(k, n)] = 2 * operations / both
        if asks_another:
            onednn_forward[_key(k, n)] = operations / seconds(lambda x=x, w=weight: onednn(x, w.T))
            both = seconds(lambda g=gradient, w=weight: onednn(g, w))
            both += seconds(lambda g=gradient, x=x: onednn(x.T, g.T))
            onednn_backward[_key(k, n)] = 2 * operations / both
    heads, depth = preset.minibatch * shape.heads, shape.width // shape.heads
    queries, keys, shares = random(heads, length, depth), random(heads, depth, length), random(heads, length, length)
    both = seconds(lambda: queries @ keys) + seconds(lambda: shares @ queries)
    attention = 4 * heads * length * length * depth / both
    buffer = random(matrix_elements(shape))
    target, moved = torch.empty_like(buffer), buffer.numel() * buffer.element_size()
    bandwidth = max(moved / seconds(buffer.sum), 2 * moved / seconds(lambda: target.copy_(buffer)))
    return Rates(forward, backward, attention, bandwidth, onednn_forward, onednn_backward)


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
