"""The `accelerate.Accelerator` of a run: device, processes, precision and gradient scaling; and types of weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env
from torch import nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import Precision
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.sharding import sharded
from ppo_rlhf.models.token_rows import few_shapes_are_faster
from ppo_rlhf.runtime import processes

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def trained_dtype(config: PPOConfig) -> torch.dtype:
    """Return the type of weights that train: float32, or float64 if `ppo.dtype` says so.

    Never less than float32: at the learning rates of RLHF a bfloat16 weight is too coarse to move.
    """
    return torch.float64 if config.dtype == "float64" else torch.float32


def frozen_dtype(config: PPOConfig) -> torch.dtype:
    """Return the type of weights that never train (reference policy, reward model): the one that `ppo.dtype` names."""
    dtype: torch.dtype = getattr(torch, _dtype_name(config))
    return dtype


def with_dtype(config: PPOConfig) -> PPOConfig:
    """Return the settings with the precision that `ppo.dtype=auto` stands for on this machine."""
    return replace(config, dtype=_dtype_name(config)) if config.dtype == "auto" else config


def _dtype_name(config: PPOConfig) -> Precision:
    if config.dtype != "auto":
        return config.dtype
    device = resolve_device(config.device)
    return "bfloat16" if device.type == "cuda" and has_bfloat16(device) else "float32"


def device_of(config: PPOConfig) -> torch.device:
    """Return `resolve_device(config.device)`; on CUDA float32 products then read TF32 unless `deterministic` is set."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = not config.deterministic
    return device


def resolve_device(name: str) -> torch.device:
    """Return the device that `ppo.device` names: `auto` is this process's own GPU where there is one.

    On CUDA this process attends without cuDNN from now on: its attention makes a plan for each new shape, which took
    40 ms on an H100, where torch's other kernels take 0.1 (docs/speed.md).

    Raises:
        ConfigError: torch knows no such device, this machine has none, accelerate keeps to the CPU, or several
            processes would share it; or `check_launch` refuses the launch.
    """
    processes.check_launch()
    keeps_to_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    if (count := processes.process_count()) > 1:
        device = processes.join_processes().device
        if name not in ("auto", device.type):
            raise ConfigError(
                f"device={name}: with {count} processes each has the {device.type} device of its local "
                "rank; use auto (ACCELERATE_USE_CPU=true keeps all of them on the CPU)"
            )
    elif name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() and not keeps_to_cpu else "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(f"device={name} is not a device; use auto, cpu, cuda, or one such as cuda:1") from None
        if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
            raise ConfigError(f"device={name}: this machine has {gpus} CUDA devices; use auto or cpu")
        if device.type == "cuda" and keeps_to_cpu:
            raise ConfigError(f"device={name}: ACCELERATE_USE_CPU keeps the run on the CPU; use auto, or unset it")
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def make_accelerator(config: PPOConfig, device: torch.device, *, finds_unused: bool = False) -> Accelerator:
    """Return an Accelerator of this run's precision. It is cheap: all of them share the process group.

    `finds_unused`: some steps leave weights without a gradient, which DDP must then look for.
    """
    if processes.process_count() > 1:
        processes.join_processes()
    # Buffers are equal in all processes. To send them at each pass, all would need equally many passes.
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, find_unused_parameters=finds_unused, gradient_as_bucket_view=True
    )
    precision = _MIXED.get(_dtype_name(config), "no")
    make = partial(Accelerator, cpu=device.type == "cpu", mixed_precision=precision, kwargs_handlers=[ddp])
    with contextlib.suppress(ValueError):  # an earlier run or stage of this process has another precision
        accelerator = make()
        if accelerator.device.type == device.type:
            return accelerator
    processes.forget_accelerator()
    return make()


def wrap(accelerator: Accelerator, forward: nn.Module) -> nn.Module:
    """Return a forward pass whose gradients are summed over the run's processes; of one process the pass itself.

    The pass is on its device already, unless FSDP2 is to share it out: then `sharded` brings it there.
    """
    if processes.shards_models():
        return sharded(forward, accelerator.device)
    with warnings.catch_warnings():  # torch renames the option, accelerate does not know the new name yet
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped: nn.Module = accelerator.prepare_model(forward, device_placement=False)
    if hasattr(wrapped, "register_comm_hook"):  # DDP's wrapper
        wrapped.register_comm_hook(processes.quick_group(), _sum_over_processes)  # type: ignore[operator]
    return wrapped


def _sum_over_processes(group, bucket):  # type: ignore[no-untyped-def]  # torch wants types here, not texts
    """Sum gradients. DDP would average them; to undo that, a loss times the number of processes rounds differently."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def autocast(config: PPOConfig, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return the context of every forward pass: matrix products in `ppo.dtype` where that is a 16-bit type.

    All passes of a run go through it, so that old and new log-probabilities come from the same computation.
    """
    if _dtype_name(config) not in _MIXED:
        return contextlib.nullcontext()
    return torch.autocast(device.type, frozen_dtype(config))


def fills_rows(config: PPOConfig, device: torch.device) -> bool:
    """Return whether packed rows are filled up, so that few shapes occur, in the passes of a run."""
    return few_shapes_are_faster(device, frozen_dtype(config))


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CPU or GPU has instructions for bfloat16."""
    if device.type != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_warning(config: PPOConfig, device: torch.device) -> str | None:
    """Return one line if the processor has no instructions for `ppo.dtype`, so that the run will be slow."""
    if device.type != "cpu" or config.dtype != "bfloat16" or has_bfloat16(device):
        return None
    return "ppo.dtype=bfloat16: this processor has no instructions for it, so the run will be slow; use float32"


@contextlib.contextmanager
def deterministic(config: PPOConfig) -> Iterator[None]:
    """Use only deterministic kernels if `ppo.deterministic` says so; restore torch's setting afterwards.

    Decoding is excluded: torch refuses prefix sums on CUDA, although those of a batch of rows repeat exactly.
    """
    if not config.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
