"""The processes of one run: rank and world size, process group (through accelerate), and collectives on objects.

torchrun or `accelerate launch` starts the processes. A run without a launcher has one process and no process group, and
every function of this module returns at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_rlhf.core.errors import ConfigError, DataError, LaunchError, PPORLHFError
from ppo_rlhf.core.fingerprints import fingerprint

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState

T = TypeVar("T")

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(hours=2)
"""Timeout for waiting for the main process, which may be busy with a reward function, a judge, MLflow or a disk."""
PATIENCE = timedelta(minutes=10)
"""Timeout for collectives in rollouts and updates, where all processes compute."""
SLOW_S = 60.0
"""A warning names processes that reach a collective more than `SLOW_S` seconds late, and calls of users' code that take
longer than `SLOW_S` seconds."""
ENDS_S = 3.0
"""`runtime.launcher` notices the end of the launcher within `ENDS_S` seconds."""
launcher_has_ended = threading.Event()
"""Set when the launcher has ended, by the thread of `runtime.launcher`."""

_OTHER_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_SMALLER = "ppo.use_peft, ppo.load_in_4bit or ppo.gradient_checkpointing, or launch with conf/accelerate/fsdp2.yaml"
_INSTEAD = {
    "GRADIENT_ACCUMULATION_STEPS": "ppo.gradient_accumulation_steps",
    "GRADIENT_CLIPPING": "ppo.max_grad_norm",
    "MIXED_PRECISION": "ppo.dtype, supervised_finetuning.bf16 and reward_modelling.bf16",
    "DYNAMO_BACKEND": "ppo.compile",
    "TORCH_DEVICE": "ppo.device",
    **{f"USE_{name}": _SMALLER for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")},
}
"""Maps settings of accelerate that are refused to the settings to use instead. The refused settings of accelerate would
have no effect in this project, or would silently change results."""
_FSDP2 = {
    "VERSION": ("2",),
    "AUTO_WRAP_POLICY": ("transformer_based_wrap", ""),
    "TRANSFORMER_CLS_TO_WRAP": ("",),
    "IGNORED_MODULES": ("",),
    "RESHARD_AFTER_FORWARD": ("true", "full_shard", ""),
    "OFFLOAD_PARAMS": ("false", ""),
    "ACTIVATION_CHECKPOINTING": ("false", ""),
    "CPU_RAM_EFFICIENT_LOADING": ("false", ""),
}
"""The supported values of accelerate's FSDP settings, in lower case."""
_HOW = (
    "Start the run with `torchrun --nproc_per_node N -m kedro run`, or a script with `torchrun --nproc_per_node N "
    "script.py`; `accelerate launch --config_file conf/accelerate.yaml` can replace torchrun"
)


def process_count() -> int:
    """Return the world size: the number of processes that the launcher started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shards_models() -> bool:
    """Return whether the launch uses FSDP2, with which each process holds a shard of every trainable weight."""
    return process_count() > 1 and _asks_for_fsdp(os.environ)


def refuse_sharding(what: str) -> None:
    """Raise `ConfigError` if the launch uses FSDP2, for a stage `what` that supports only unsharded models."""
    if shards_models():
        raise ConfigError(
            f"{what} does not support sharded models: launch with conf/accelerate.yaml instead of an FSDP file."
        )


def _asks_for_fsdp(environment: Mapping[str, str]) -> bool:
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def is_main_process() -> bool:
    """Return whether this is the main process (rank 0), which tracks, prints and saves."""
    return os.environ.get("RANK", "0") == "0"


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a launch of processes that is not supported.

    Without this check every process of an unsupported launcher would train a separate run in the same folders.

    Raises:
        ConfigError: A setting of accelerate is not supported, or must be made as a setting of this package.
        LaunchError: A launcher started several processes but did not set the rank of this process; or FSDP2 was
            requested for one process.
    """
    for name, setting in _INSTEAD.items():
        value = environment.get(f"ACCELERATE_{name}", "")
        if value.lower() not in ("", "0", "no", "none", "false", "" if name.startswith("USE") else "1"):
            raise ConfigError(
                f"ACCELERATE_{name}={value}: set {setting} instead, and unset ACCELERATE_{name} or launch with "
                "conf/accelerate.yaml."
            )
    if _asks_for_fsdp(environment):
        for name, supported in _FSDP2.items():
            if (value := environment.get(f"FSDP_{name}", "")).lower() not in supported:
                raise ConfigError(f"FSDP_{name}={value} is not supported: launch with conf/accelerate/fsdp2.yaml.")
        if int(environment.get("WORLD_SIZE", "1")) == 1:
            raise LaunchError(f"FSDP2 shards weights across processes, but this launch starts one process. {_HOW}.")
    if "RANK" in environment and "LOCAL_RANK" in environment:
        return
    for name in _OTHER_LAUNCHERS:
        if int(environment.get(name, "1")) > 1:
            raise LaunchError(
                f"{name}={environment[name]}: each process of this launcher would train a separate run. {_HOW}."
            )
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(f"WORLD_SIZE={environment['WORLD_SIZE']}, but RANK and LOCAL_RANK are not set. {_HOW}.")
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        raise LaunchError(f"`accelerate launch --cpu` ignores --num_processes and starts one process. {_HOW}.")


def join_processes() -> PartialState:
    """Join the process group on the first call, and return accelerate's state of this process.

    The backend is gloo without a CUDA device or with `ACCELERATE_USE_CPU=true`, else NCCL.

    Raises:
        ConfigError, LaunchError: As `check_launch`.
        LaunchError: There are fewer GPUs than processes, or accelerate's process group does not have the launcher's
            number of processes.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    check_launch()
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not cpu and local > torch.cuda.device_count():
        raise LaunchError(
            f"{local} processes were started on this machine, but they see only {torch.cuda.device_count()} GPUs, and "
            "each process needs one GPU: start fewer processes, make all GPUs visible to every process, or use the CPU "
            "(ACCELERATE_USE_CPU=true)."
        )
    state = PartialState(cpu=cpu, timeout=TIMEOUT)
    if state.num_processes != process_count():
        raise LaunchError(
            f"The launcher started {process_count()} processes, but accelerate joined {state.num_processes}: each "
            f"process would train a separate run. {_HOW}."
        )
    if state.backend == "gloo":
        _delay_exit()
    return state


@cache
def _delay_exit() -> None:
    """Delay Python's exit by 0.2 s, so that gloo's threads release their tensors: a late thread aborts the process."""
    atexit.register(time.sleep, 0.2)


def forget_accelerator() -> None:
    """Reset accelerate's state, so that the next `Accelerator` can have another precision or device.

    The process group stays. Existing accelerators must not be used after `forget_accelerator`. accelerate keeps the
    state of the first accelerator and has no public way to change the state; transformers' TrainingArguments calls the
    same private method to reset accelerate's state.
    """
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=process_count() == 1)
    # An interrupted gradient accumulation leaves accelerate's `sync_gradients` False, so reset the state
    GradientState._reset_state()


@cache
def quick_group(backend: str | None = None) -> Any:
    """Return a process group of all processes with the timeout `PATIENCE`.

    All processes must call `quick_group` in the same order.
    """
    import torch

    join_processes()
    return torch.distributed.new_group(timeout=PATIENCE, backend=backend)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Log a warning that names the processes which have not reached the `together` block after `SLOW_S` seconds.

    A block that runs out of memory does not count as reached: the process runs it again, with less.
    """
    if process_count() == 1:
        yield
        return
    import torch.distributed as dist

    from ppo_rlhf.core.memory_errors import is_out_of_memory

    join_processes()
    try:
        position = 0 if launcher_has_ended.is_set() else _collectives_reached(os.environ["RANK"], 1)
    except dist.DistError:
        # The store has ended with the launcher: SIGTERM comes, before which an update is finished and saved
        if not launcher_has_ended.wait(ENDS_S):
            raise
        position = 0

    def name_late() -> None:
        if position and (late := _late_ranks(position)):
            logger.warning("Process %s has waited %.0f s for process %s.", os.environ["RANK"], SLOW_S, late)

    try:
        with _calling_after(SLOW_S, name_late):
            yield
    except Exception as error:
        if position and is_out_of_memory(error):
            _collectives_reached(os.environ["RANK"], -1)
        raise


def warn_if_slow(what: str, advice: str = "", *, seconds: float = SLOW_S) -> contextlib.AbstractContextManager[None]:
    """Log a warning that `what` has not answered if the block takes longer than `seconds`."""
    line = f"{what} has not answered for {seconds:.0f} s. {advice}".strip()
    return _calling_after(seconds, lambda: logger.warning("%s", line))


@contextlib.contextmanager
def _calling_after(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _late_ranks(position: int) -> str:
    return ", ".join(str(rank) for rank in range(process_count()) if _collectives_reached(rank) < position)


def first_error(error: Exception, *, was_stopped: bool = False) -> Exception:
    """Return the error that ended the run.

    If another process failed before this process, the returned error is a LaunchError with the text of the other
    process's error; otherwise the returned error is `error`. `was_stopped` is True if a stop request ended this
    process; the error of a stopped process is not recorded for other processes.
    """
    import torch.distributed as dist

    if process_count() == 1 or not dist.is_initialized():
        return error
    is_peer_lost = isinstance(error, dist.DistError) or "third_party/gloo" in str(error)
    try:
        if is_peer_lost:
            late = _late_ranks(_collectives_reached(os.environ["RANK"])) or "unknown"
            minutes = PATIENCE.seconds / 60
            error = LaunchError(f"process {late} has ended, or has not reached this point for {minutes:.0f} minutes.")
        names_process = isinstance(error, LaunchError)
        text = str(error) if names_process else f"process {os.environ['RANK']} failed: {type(error).__name__}: {error}"
        first = default_store().compare_set("ppo_rlhf/failed", "-" if was_stopped else "", text).decode()
    # torch's key-value store is gone, because the launcher or process 0 that holds the store has ended
    except dist.DistError:
        gone = "the launcher or process 0, which connects the processes, has ended."
        return LaunchError(gone) if is_peer_lost else error
    return error if first in (text, "-") else LaunchError(" ".join(first.split()))


def default_store() -> Any:
    """Return torch's key-value store, which connects the processes."""
    # torch has no public function that returns the default process group's key-value store
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _collectives_reached(rank: int | str, more: int = 0) -> int:
    """Add `more` to the number of `together` blocks that a process has reached, and return the number."""
    return int(default_store().add(f"ppo_rlhf/places/{rank}", more))


def wait_for_all() -> None:
    """Wait until every process has called `wait_for_all` (a barrier)."""
    if process_count() > 1:
        with together():
            join_processes().wait_for_everyone()


_is_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make `from_main`, `on_main` and `from_all` skip their collectives in a block that only the main process runs."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def from_main(value: T) -> T:
    """Return the main process's value in every process (a broadcast); the value must be picklable."""
    if process_count() == 1 or _is_alone:
        return value
    from accelerate.utils import broadcast_object_list

    with together():
        (received,) = broadcast_object_list([value])
    return received


def on_main(function: Callable[[], T]) -> T:
    """Call the function in the main process only, and return its result (picklable) in every process.

    Raises:
        PPORLHFError: The function raised this error in the main process; every process raises the error.
    """
    outcome: T | PPORLHFError | None = None
    if is_main_process():
        try:
            outcome = function()
        except PPORLHFError as error:
            outcome = error
    outcome = from_main(outcome)
    if isinstance(outcome, PPORLHFError):
        raise outcome
    return outcome  # type: ignore[return-value]


def after_main(function: Callable[[], T]) -> T:
    """Call the function in the main process first, then in all processes, which find the main process's cache on disk.

    accelerate's `main_process_first` is not used: if the function raised in the main process, all further processes
    would wait two hours.

    Raises:
        PPORLHFError: The function raised this error in the main process; every process raises the error.
    """

    def fill_cache() -> None:
        function()

    if process_count() > 1:
        on_main(fill_cache)
    return function()


def from_all(value: T) -> list[T]:
    """Return the values of all processes in the order of their ranks (an all-gather); values must be picklable."""
    if process_count() == 1 or _is_alone:
        return [value]
    import torch

    values: list[Any] = [None] * process_count()
    with together():
        torch.distributed.all_gather_object(values, value, group=quick_group("gloo"))
    return values


def check_alike(call: str, **arguments: Any) -> None:
    """Raise `DataError` in every process unless all processes pass equal `arguments` of `call`."""
    if process_count() == 1:
        return
    fingerprints = {name: fingerprint(value) for name, value in arguments.items()}
    gathered = from_all(fingerprints)
    if differing := [name for name in fingerprints if any(one.get(name) != fingerprints[name] for one in gathered)]:
        raise DataError(
            f"{call}: the processes give different {' and '.join(differing)}. Every process must give the same "
            "arguments; the trainer divides the work. ppo_rlhf.runtime.processes.from_main(value) returns the main "
            "process's value in every process"
        )


def own_rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def own_share(count: int) -> range:
    """Return this process's shard of `count` rows: the shard is contiguous, and the sizes of two processes' shards
    differ by at most one row.
    """
    rank, world_size = own_rank(), process_count()
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def dealt_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Split rows evenly across processes, balancing tokens; return each process's rows in ascending order.

    The rows, sorted by falling length, are assigned to the processes in snake order: 0, 1, ..., n, n, ..., 1, 0, ...
    """
    shards: list[list[int]] = [[] for _ in range(process_count())]
    for position, row in enumerate(sorted(range(len(lengths)), key=lambda row: -lengths[row])):
        turn, rank = divmod(position, len(shards))
        shards[-1 - rank if turn % 2 else rank].append(row)
    return [sorted(shard) for shard in shards]


def gather_dealt(own_rows: torch.Tensor, shards: list[list[int]]) -> torch.Tensor:
    """Return the rows `[B, …]` of all processes on the CPU, in the original order.

    `own_rows` are the rows `[b, …]` of this process's shard, in the shard's order; `shards` are from `dealt_rows`.
    """
    import torch

    longest = max(map(len, shards))
    local_rows = own_rows.cpu()
    padded = torch.cat([local_rows, local_rows.new_zeros(longest - len(local_rows), *local_rows.shape[1:])])
    gathered = zip(gather_tensors(padded), shards, strict=True)
    in_shard_order = torch.cat([rows[: len(shard)] for rows, shard in gathered])
    in_row_order = torch.empty_like(in_shard_order)
    in_row_order[[row for shard in shards for row in shard]] = in_shard_order
    return in_row_order


def gather_tensors(local: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all processes in the order of their ranks.

    The gathered tensors must have the same shape and dtype in all processes, and must be on the CPU.
    """
    if process_count() == 1:
        return [local]
    import torch

    sent = local.contiguous()
    # The backend gloo cannot send tensors of dtype bool
    sent = sent.view(torch.uint8) if local.dtype == torch.bool else sent
    received = [torch.empty_like(sent) for _ in range(process_count())]
    with together():
        torch.distributed.all_gather(received, sent, group=quick_group("gloo"))
    return [tensor.view(local.dtype) for tensor in received]
