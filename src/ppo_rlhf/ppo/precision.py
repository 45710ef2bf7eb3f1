"""Chooses a run's device, its precision, the dtypes of its weights, and its `accelerate.Accelerator`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env
from torch import nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import Precision
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.passes.sharding import sharded
from ppo_rlhf.passes.token_rows import few_shapes_are_faster
from ppo_rlhf.passes.transfers import on_device
from ppo_rlhf.runtime import processes

LEAST_MAPPED = 2**20
"""Bytes from which on glibc gives a freed block back. By its own rule it keeps blocks of up to 32 MiB, and a run takes
more memory with each micro-batch, although as much is in use (docs/decisions/0021-memory-is-planned-by-formula.md)."""

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def trained_dtype(config: PPOConfig) -> torch.dtype:
    """Return the dtype of weights that train: float64 with `ppo.dtype=float64`, else float32.

    Trainable weights never have a 16-bit dtype: at the learning rates of RLHF, steps are too small to change a bfloat16
    weight.
    """
    return torch.float64 if config.dtype == "float64" else torch.float32


def frozen_dtype(config: PPOConfig) -> torch.dtype:
    """Return the dtype of weights that never train, such as the reward model's: the dtype of `ppo.dtype`."""
    dtype: torch.dtype = getattr(torch, _dtype_name(config))
    return dtype


def with_dtype(config: PPOConfig, auto: str | None = None) -> PPOConfig:
    """Return the settings with the precision that `ppo.dtype=auto` stands for: `auto`, by default this machine's."""
    name = _dtype_name(config, auto)
    return config if name == config.dtype else replace(config, dtype=cast(Precision, name))


def _dtype_name(config: PPOConfig, auto: str | None = None) -> str:
    """Return `ppo.dtype`, or what auto stands for: `auto`, by default bfloat16 on a GPU that supports it, else float32.

    Only this function asks whether `ppo.dtype` is auto.
    """
    if config.dtype != "auto":
        return config.dtype
    if auto is not None:
        return auto
    device = resolve_device(config.device)
    return "bfloat16" if device.type == "cuda" and has_bfloat16(device) else "float32"


def device_of(config: PPOConfig) -> torch.device:
    """Return `resolve_device(config.device)`.

    On CUDA `device_of` also lets float32 matrix products use TF32, unless `ppo.deterministic` is set.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = not config.deterministic
    return device


def resolve_device(name: str) -> torch.device:
    """Return the device that `ppo.device` names; `auto` is this process's GPU, or the CPU without a GPU.

    On CUDA `resolve_device` also switches cuDNN's attention off for the whole process: cuDNN plans each new shape,
    which took 40 ms on an H100, where torch's other attention kernels take 0.1 ms (docs/speed.md). On a CPU it lets
    the process give large freed blocks back to the system (`LEAST_MAPPED`).

    Raises:
        ConfigError: torch does not know the device, this machine does not have the device, ACCELERATE_USE_CPU excludes
            the device, several processes would share the device, or `check_launch` refuses the launch.
    """
    processes.check_launch()
    cpu_only = parse_flag_from_env("ACCELERATE_USE_CPU")
    if (count := processes.process_count()) > 1:
        device = processes.join_processes().device
        if name not in ("auto", device.type):
            raise ConfigError(
                f"device={name}: with {count} processes each process uses the {device.type} device of its local "
                "rank; use auto (ACCELERATE_USE_CPU=true keeps all processes on the CPU)"
            )
    elif name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() and not cpu_only else "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(
                f"device={name} is not a device; use auto, cpu, cuda, or a device such as cuda:1"
            ) from None
        if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
            raise ConfigError(f"device={name}: this machine has {gpus} CUDA devices; use auto or cpu")
        if device.type == "cuda" and cpu_only:
            raise ConfigError(
                f"device={name}: ACCELERATE_USE_CPU keeps the run on the CPU; use auto, or unset ACCELERATE_USE_CPU"
            )
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif device.type == "cpu":
        _give_freed_blocks_back()
    return device


def _give_freed_blocks_back() -> None:
    """Let glibc give each freed block of at least `LEAST_MAPPED` bytes back, unless the user's variable says when."""
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(-3, LEAST_MAPPED)  # M_MMAP_THRESHOLD


def make_accelerator(config: PPOConfig, device: torch.device, *, finds_unused: bool = False) -> Accelerator:
    """Return an Accelerator with the run's precision.

    A further Accelerator is cheap: all Accelerators of a process share the process group. `finds_unused` lets DDP
    search for weights without a gradient in each backward pass.
    """
    if processes.process_count() > 1:
        processes.join_processes()
    # Do not broadcast buffers in DDP, because buffers are equal in all processes.
    # A broadcast in each forward pass would require all processes to run equally many forward passes.
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, find_unused_parameters=finds_unused, gradient_as_bucket_view=True
    )
    precision = _MIXED.get(_dtype_name(config), "no")
    make = partial(Accelerator, cpu=device.type == "cpu", mixed_precision=precision, kwargs_handlers=[ddp])
    # accelerate raises ValueError if an earlier run or stage of this process used another precision
    with contextlib.suppress(ValueError):
        accelerator = make()
        if accelerator.device.type == device.type:
            return accelerator
    processes.forget_accelerator()
    return make()


def wrap(accelerator: Accelerator, forward: nn.Module) -> nn.Module:
    """Wrap a forward pass so that its gradients are summed over all processes; with one process, return it unchanged.

    The forward pass must be on the run's device already; only with FSDP2 `sharded` moves the forward pass there.
    """
    if processes.shards_models():
        return sharded(forward, accelerator.device)
    # Hide a warning: torch renamed an option, and accelerate still uses the option's old name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped: nn.Module = accelerator.prepare_model(forward, device_placement=False)
    if hasattr(wrapped, "register_comm_hook"):  # DDP has wrapped the model
        wrapped.register_comm_hook(processes.quick_group(), _sum_over_processes)  # type: ignore[operator]
    return wrapped


def _sum_over_processes(group, bucket):  # type: ignore[no-untyped-def]  # torch rejects annotations that are strings
    """Sum gradients over processes.

    DDP's average of gradients, with a loss multiplied by the world size, would round differently.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def autocast(config: PPOConfig, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return the autocast context of every forward pass: matrix products in `ppo.dtype` if `ppo.dtype` has 16 bits.

    All forward passes of a run use the same autocast context, so that old and new log-probabilities come from the same
    computation.
    """
    if _dtype_name(config) not in _MIXED:
        return contextlib.nullcontext()
    return torch.autocast(device.type, frozen_dtype(config))


def fills_rows(config: PPOConfig, device: torch.device) -> bool:
    """Return whether a run pads packed token rows to a few common sizes, so that forward passes have few shapes."""
    return few_shapes_are_faster(device, frozen_dtype(config))


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CPU or GPU has instructions for bfloat16."""
    if device.type != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_warning(config: PPOConfig, device: torch.device) -> str | None:
    """Return a one-line warning if the CPU has no instructions for `ppo.dtype`, so that the run will be slow."""
    if device.type != "cpu" or config.dtype != "bfloat16" or has_bfloat16(device):
        return None
    return "ppo.dtype=bfloat16: this processor has no bfloat16 instructions, so the run will be slow; use float32"


@contextlib.contextmanager
def deterministic(config: PPOConfig) -> Iterator[None]:
    """Use only deterministic kernels if `ppo.deterministic` is set; restore torch's setting afterwards.

    Do not decode inside `deterministic`: torch then refuses the sampler's cumulative sums on CUDA, although row-wise
    cumulative sums repeat exactly.
    """
    if not config.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only_before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only_before)


@contextlib.contextmanager
def without_gradients(config: PPOConfig, device: torch.device, *models: nn.Module) -> Iterator[None]:
    """Run forward passes without gradients, in the precision and by the kernels of the passes that train.

    Offloaded or sharded models are whole on the device within the block. Open one block around all passes, so that
    autocast casts each weight only once. Do not decode inside (`deterministic`).
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for model in models:
            stack.enter_context(on_device(model, device))
        stack.enter_context(deterministic(config))
        stack.enter_context(autocast(config, device))
        yield
