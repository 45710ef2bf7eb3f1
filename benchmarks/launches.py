"""Counts what parts of an iteration launch on a GPU, casts among them, without one.

    python benchmarks/launches.py --layers 12

GPT-2 in bfloat16 with narrow layers, on which counts do not depend. Parts without gradients are counted on fake CUDA
tensors, which have shapes and no numbers: torch dispatches the operations that it would launch on a GPU, and a fused
kernel, or one over many tensors, counts as one. The pretended device of the tests has no autocast, so it sees no casts.
Autocast keeps no cast of a fake tensor for the next pass.

Without a GPU torch has no gradients of CUDA tensors. So an optimiser step and a decoding step are those of a run on the
CPU, with all operations that torch dispatches there; a replay of a captured function counts as one.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import gpu_parts
from ppo_rlhf.config import ppo
from ppo_rlhf.models import captures, packed_attention, transfers
from ppo_rlhf.models.averages import WeightAverage, trained_parameters
from ppo_rlhf.models.captures import Captures
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.forward import logits_of, packs
from ppo_rlhf.models.transfers import to_device
from ppo_rlhf.models.weight_copies import WeightCopies
from ppo_rlhf.ppo import sampling, update
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward
from ppo_rlhf.ppo.sequences import make_batch

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
ROWS, PROMPT, RESPONSE = 32, 40, 64
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
"""Operations that launch nothing: they only create a tensor or a view."""
REPLAY = "a replay"


class Launches(TorchDispatchMode):
    """The operations of a block, by name; a cast is one that changes the type of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, returns = func._schema.name.removeprefix("aten::"), func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if not is_view and name not in NO_KERNEL and func.namespace not in ("prim", "profiler"):
            self.by_name[name] += 1
            self.casts += name == "_to_copy" and found.dtype != args[0].dtype
        return found

    @property
    def total(self) -> int:
        """Number of all launches."""
        return sum(self.by_name.values())

    def take(self) -> Launches:
        """Return the counts since the last call."""
        taken = Launches()
        taken.by_name, taken.casts = self.by_name, self.casts
        self.by_name, self.casts = Counter(), 0
        return taken

    @contextmanager
    def as_replay(self) -> Iterator[None]:
        """Count all operations of a block as one launch."""
        before = self.by_name.copy(), self.casts
        yield
        self.by_name, self.casts = before
        self.by_name[REPLAY] += 1


class _PlainIndexing(TorchFunctionMode):
    """Indexes by operations: torch's own `tensor[…]` asks for the device, which a torch without CUDA does not know."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _view(*args)
        if func is Tensor.__setitem__:
            return torch._foreach_copy_([_view(*args[:2])], [args[2]])  # one launch, as `copy_`, which asks, too
        return func(*args, **(kwargs or {}))


def _view(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]`; the index has numbers, slices, None and an ellipsis."""
    parts, dimension = index if isinstance(index, tuple) else (index,), 0
    for place, part in enumerate(parts):
        if part is None:
            tensor = tensor.unsqueeze(dimension)
        elif isinstance(part, int):
            tensor, dimension = tensor.select(dimension, part), dimension - 1
        elif part is Ellipsis:
            dimension = tensor.dim() - sum(later is not None for later in parts[place + 1 :]) - 1
        else:
            tensor = torch.ops.aten.slice(tensor, dimension, part.start, part.stop, part.step or 1)
        dimension += 1
    return tensor


class Parts:
    """Parts of an iteration of GPT-2 as functions to count, within `on_a_fake_gpu`."""

    def __init__(self, layers: int) -> None:
        """Make policy and critic on the CPU, and probe them as a run does."""
        shape = {"n_embd": 64, "n_head": 8, "n_layer": layers, "vocab_size": 500, "n_positions": 256}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(**shape, **dropout, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
        self.policy = GPT2LMHeadModel(config).eval()
        self.critic = Critic.from_policy(self.policy)
        self.average = WeightAverage(self.policy, 0.99)
        packs(self.policy.base_model)
        packs(self.critic.backbone)
        logits_of(self.policy)
        responses, lengths = torch.ones(ROWS, RESPONSE, dtype=torch.long), torch.full((ROWS,), RESPONSE)
        self.batch = make_batch([[1] * PROMPT] * ROWS, responses, lengths, 0, fill=True)

    @contextmanager
    def on_a_fake_gpu(self) -> Iterator[None]:
        """Move everything to a fake GPU, which has autocast and FlashAttention's kernel without being there."""
        with (
            mock.patch.object(packed_attention, "kernel_fits", return_value=True),
            mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
            mock.patch("torch.cuda.is_bf16_supported", return_value=True),
            mock.patch.object(transfers, "_copied", lambda tensors, _: [_fake(tensor, {}) for tensor in tensors]),
            _PlainIndexing(),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
        ):
            fakes: dict[int, Tensor] = {}
            for module in (*self.policy.modules(), *self.critic.modules()):
                for table in (module._parameters, module._buffers):
                    table.update({name: _fake(tensor, fakes) for name, tensor in table.items() if tensor is not None})
            self.average.weights = {name: _fake(weight, fakes) for name, weight in self.average.weights.items()}
            (self.batch,) = to_device([self.batch], GPU)
            no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=GPU)  # runs keep theirs, which is none of this
            with mock.patch.object(packed_attention, "_no_mask", return_value=no_mask):
                yield

    def scoring_pair(self) -> None:
        """Run a micro-batch's passes of policy and critic for old log-probabilities and values."""
        with torch.autocast(GPU.type, DTYPE):
            PolicyForward(self.policy, self.critic, 1.0)(self.batch, with_entropy=True)
            CriticForward(self.critic)(self.batch)

    @contextmanager
    def weights_cast(self) -> Iterator[None]:
        """Let both models have 16-bit weights: copies, or casts that autocast keeps for a block of passes."""
        models = self.policy, self.critic.backbone
        with ExitStack() as stack:
            with torch.autocast(GPU.type, DTYPE):
                blocks = [WeightCopies(model).in_place() for model in models]
            for block in blocks:
                stack.enter_context(block)
            yield

    def move_average_by_weight(self) -> None:
        """Move the average of the policy's weights as a loop over them does."""
        for name, weight in trained_parameters(self.policy).items():
            self.average.weights[name].lerp_(weight, 1.0 - self.average.decay)

    def move_average(self) -> None:
        """Move the average of the policy's weights."""
        self.average.update(self.policy)


def _fake(tensor: Tensor, fakes: dict[int, Tensor]) -> Tensor:
    """Return a fake tensor on the GPU in the place of one on the CPU: the same one for weights that are shared."""
    if id(tensor) not in fakes:
        made = torch.empty_like(tensor, device=GPU)
        fakes[id(tensor)] = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    return fakes[id(tensor)]


def count(function: Callable[[], object]) -> Launches:
    """Count the launches of a function."""
    with Launches() as launches:
        function()
    return launches


def rows(layers: int) -> Iterator[tuple[str, Launches, Launches]]:
    """Yield each part's name, with its launches before this was mended, and now."""
    parts = Parts(layers)
    with parts.on_a_fake_gpu():
        before = count(parts.scoring_pair)
        with parts.weights_cast():
            yield "passes of a micro-batch for old log-probabilities and values", before, count(parts.scoring_pair)
        parts.policy.requires_grad_(True)
        yield "moving average of the weights", count(parts.move_average_by_weight), count(parts.move_average)


@contextmanager
def captured_on_cpu(launches: Launches) -> Iterator[None]:
    """Let a run on the CPU capture: a function's first run is plain, and each later one counts as a replay."""
    known: set[tuple[Captures, Hashable]] = set()

    def run(own: Captures, key: tuple[Hashable, ...], function: Callable[[], None]) -> bool:
        is_plain = not own.serves(key[0]) or (own, key) not in known
        known.add((own, key))
        with nullcontext() if is_plain else launches.as_replay():
            function()
        return is_plain

    with (
        mock.patch.object(ppo, "GRAPHS_BY_DEFAULT", True),
        mock.patch.object(captures, "CAPTURED_ON", ("cpu",)),
        mock.patch.object(Captures, "run", run),
    ):
        yield


def steps(layers: int, *, captured: bool) -> tuple[Launches, Launches]:
    """Return the launches of an optimiser step and of a decoding step, the last ones of a run on the CPU.

    The optimiser step has one micro-batch. The run checks which sequences have ended as seldom as on a GPU, so this
    decoding step has no check.
    """
    part = gpu_parts.Part("cpu", small=True)
    part.shapes = {"gpt2": {**part.shapes["gpt2"], "n_layer": layers}}
    part.dtype, part.epochs = "bfloat16", 3
    launches, decoding, optimiser = Launches(), [], []

    def is_check_due(step: int, device: torch.device) -> bool:  # called once a step
        decoding.append(launches.take())
        return step % sampling.STEPS_BETWEEN_CHECKS == sampling.STEPS_BETWEEN_CHECKS - 1

    def gradients(*args: Any) -> Any:
        launches.take()
        with launches:
            return compute_gradients(*args)

    def step(*args: Any) -> None:
        with launches:
            take_step(*args)
        optimiser.append(launches.take())

    compute_gradients, take_step = update.compute_gradients, update.take_step
    with (
        captured_on_cpu(launches) if captured else nullcontext(),
        mock.patch.object(sampling, "is_check_due", is_check_due),
        mock.patch.object(update, "compute_gradients", gradients),
        mock.patch.object(update, "take_step", step),
    ):
        run = gpu_parts.Run(part, "gpt2", num_mini_batches=1, cuda_graphs=None if captured else False)
        with launches:
            run.rollouts()
        run.update()
    return optimiser[-1], decoding[-1]


def step_rows(layers: int) -> Iterator[tuple[str, Launches, Launches]]:
    """Yield the names of steps, with their launches in plain runs and in captured ones."""
    names = "optimiser step, on a CPU", "decoding step, on a CPU"
    yield from zip(names, steps(layers, captured=False), steps(layers, captured=True), strict=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count launches and casts of GPT-2 without a GPU.")
    parser.add_argument("--layers", type=int, default=12)
    logging.disable(logging.WARNING)
    print("| part | launches before | casts among them | launches now | casts among them |")
    print("| --- | --- | --- | --- | --- |")
    layers = parser.parse_args().layers
    for name, before, now in (*rows(layers), *step_rows(layers)):
        print(f"| {name} | {before.total:,} | {before.casts:,} | {now.total:,} | {now.casts:,} |")


if __name__ == "__main__":
    main()
