"""The processes of one run, joined through accelerate: who this process is, and what the processes tell each other.

torchrun or `accelerate launch` starts the processes. A run that was started plainly is one process; then every function
here returns at once and no process group exists.
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
"""How long a process waits for the main one, which a reward function, a judge, MLflow or a disk may keep busy."""
PATIENCE = timedelta(minutes=10)
"""How long a process waits in rollouts and updates, where all of them compute."""
SLOW_S = 60.0
"""A process that comes later than this is named, and so is a call of somebody else's code that takes longer."""

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
"""Settings of accelerate that would do nothing here, or change numbers unseen; and ours."""
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
"""What accelerate's settings of FSDP may say, in lower case."""
_HOW = (
    "Start it with `torchrun --nproc_per_node N -m kedro run`, a script with `torchrun --nproc_per_node N script.py`; "
    "`accelerate launch --config_file conf/accelerate.yaml` takes the place of torchrun"
)


def process_count() -> int:
    """Return the number of processes that the launcher started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shards_models() -> bool:
    """Return whether the launch asks for FSDP2: each process then holds a share of every weight that trains."""
    return process_count() > 1 and _asks_for_fsdp(os.environ)


def refuse_sharding(what: str) -> None:
    """Raise `ConfigError` if the launch asks for FSDP2: what is named here is done on whole models only."""
    if shards_models():
        raise ConfigError(f"{what} does not shard models: launch with conf/accelerate.yaml instead of an FSDP file.")


def _asks_for_fsdp(environment: Mapping[str, str]) -> bool:
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def is_main_process() -> bool:
    """Return whether this process tracks, prints and saves."""
    return os.environ.get("RANK", "0") == "0"


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a launch whose processes would each train a run of their own over the same folders.

    Raises:
        ConfigError: accelerate is told what is a setting of ours, or is not done here.
        LaunchError: A launcher was asked for several processes, but did not say which of them this one is; or FSDP2 was
            asked for with one process.
    """
    for name, ours in _INSTEAD.items():
        value = environment.get(f"ACCELERATE_{name}", "")
        if value.lower() not in ("", "0", "no", "none", "false", "" if name.startswith("USE") else "1"):
            raise ConfigError(
                f"ACCELERATE_{name}={value}: set {ours} instead, and unset it or launch with conf/accelerate.yaml."
            )
    if _asks_for_fsdp(environment):
        for name, done in _FSDP2.items():
            if (value := environment.get(f"FSDP_{name}", "")).lower() not in done:
                raise ConfigError(f"FSDP_{name}={value} is not done here: launch with conf/accelerate/fsdp2.yaml.")
        if int(environment.get("WORLD_SIZE", "1")) == 1:
            raise LaunchError(f"FSDP2 shares weights out among processes, and this launch starts one. {_HOW}.")
    if "RANK" in environment and "LOCAL_RANK" in environment:
        return
    for name in _OTHER_LAUNCHERS:
        if int(environment.get(name, "1")) > 1:
            raise LaunchError(
                f"{name}={environment[name]}: this launcher's processes would train one run each. {_HOW}."
            )
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(f"WORLD_SIZE={environment['WORLD_SIZE']}, but RANK and LOCAL_RANK are not set. {_HOW}.")
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        raise LaunchError(f"`accelerate launch --cpu` starts one process, whatever --num_processes says. {_HOW}.")


def join_processes() -> PartialState:
    """Join the process group on the first call, and return what accelerate knows of this process.

    The backend is gloo without a CUDA device or with `ACCELERATE_USE_CPU=true`, else NCCL.

    Raises:
        LaunchError: The launch is refused, GPUs are missing, or the processes did not find each other.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    check_launch()
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not cpu and local > torch.cuda.device_count():
        raise LaunchError(
            f"{local} processes were started on a machine that shows them {torch.cuda.device_count()} GPUs, and each "
            "needs its own: start fewer, let all of them see all GPUs, or keep to the CPU (ACCELERATE_USE_CPU=true)."
        )
    found = PartialState(cpu=cpu, timeout=TIMEOUT)
    if found.num_processes != process_count():
        raise LaunchError(
            f"The launcher started {process_count()} processes, but accelerate joined {found.num_processes}: each "
            f"would train a run of its own. {_HOW}."
        )
    if found.backend == "gloo":
        _linger()
    return found


@cache
def _linger() -> None:
    """Let gloo's threads drop their last tensors before Python ends: one that is late aborts the process."""
    atexit.register(time.sleep, 0.2)


def forget_accelerator() -> None:
    """Let the next `Accelerator` of this process have another precision or device; the process group stays.

    Accelerators that were made before must not be used any more. accelerate keeps the first one's state for good and
    has no public way to change it; transformers' TrainingArguments makes the same call.
    """
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=process_count() == 1)
    GradientState._reset_state()  # an interrupted accumulation would leave `sync_gradients` False


@cache
def quick_group(backend: str | None = None) -> Any:
    """Return a group of all processes that wait for each other for PATIENCE; they call this in the same order."""
    import torch

    join_processes()
    return torch.distributed.new_group(timeout=PATIENCE, backend=backend)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Name the processes that do not come to this block within SLOW_S."""
    if process_count() == 1:
        yield
        return
    join_processes()
    place = _places(os.environ["RANK"], 1)

    def name_late() -> None:
        if late := _late(place):
            logger.warning("Process %s has waited %.0f s for process %s.", os.environ["RANK"], SLOW_S, late)

    with _calling_after(SLOW_S, name_late):
        yield


def warn_if_slow(what: str, advice: str = "", *, seconds: float = SLOW_S) -> contextlib.AbstractContextManager[None]:
    """Log what is waited for if the block takes long."""
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


def _late(place: int) -> str:
    return ", ".join(str(rank) for rank in range(process_count()) if _places(rank) < place)


def first_error(error: Exception, *, was_stopped: bool = False) -> Exception:
    """Return what ended the run: this error, or a LaunchError with that of the process that failed before this one."""
    import torch.distributed as dist

    if process_count() == 1 or not dist.is_initialized():
        return error
    is_left = isinstance(error, dist.DistError) or "third_party/gloo" in str(error)
    try:
        if is_left:
            late = _late(_places(os.environ["RANK"])) or "unknown"
            error = LaunchError(f"process {late} has ended, or has not come for {PATIENCE.seconds / 60:.0f} minutes.")
        is_told = isinstance(error, LaunchError)
        own = str(error) if is_told else f"process {os.environ['RANK']} failed: {type(error).__name__}: {error}"
        first = _store().compare_set("ppo_rlhf/failed", "-" if was_stopped else "", own).decode()
    except dist.DistError:  # the launcher, or process 0, holds the store
        gone = "the launcher or process 0 has ended, through which the processes find each other."
        return LaunchError(gone) if is_left else error
    return error if first in (own, "-") else LaunchError(" ".join(first.split()))


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public way to it

    return _get_default_store()


def _places(rank: int | str, more: int = 0) -> int:
    return int(_store().add(f"ppo_rlhf/places/{rank}", more))


def wait_for_all() -> None:
    """Wait until every process has come here."""
    if process_count() > 1:
        with together():
            join_processes().wait_for_everyone()


_is_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let the main process call by itself, within the block, what otherwise all processes call together."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def from_main(value: T) -> T:
    """Return the main process's value in every process; it must be picklable."""
    if process_count() == 1 or _is_alone:
        return value
    from accelerate.utils import broadcast_object_list

    with together():
        (received,) = broadcast_object_list([value])
    return received


def on_main(function: Callable[[], T]) -> T:
    """Call the function on the main process only, and return its result (picklable) in every process.

    Raises:
        PPORLHFError: The function raised it on the main process; every process raises it.
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
    """Call the function on the main process first, then on the others, which find on disk what it keeps there.

    With accelerate's `main_process_first` they would wait two hours for a main process in which it raises.

    Raises:
        PPORLHFError: The function raised it on the main process; every process raises it.
    """

    def keep() -> None:
        function()

    if process_count() > 1:
        on_main(keep)
    return function()


def from_all(value: T) -> list[T]:
    """Return each process's value, in the order of their ranks; it must be picklable."""
    if process_count() == 1 or _is_alone:
        return [value]
    import torch

    found: list[Any] = [None] * process_count()
    with together():
        torch.distributed.all_gather_object(found, value, group=quick_group("gloo"))
    return found


def check_alike(call: str, **arguments: Any) -> None:
    """Raise `DataError` in every process unless all of them come here with equal arguments of a call."""
    if process_count() == 1:
        return
    own = {name: fingerprint(value) for name, value in arguments.items()}
    all_of_them = from_all(own)
    if differing := [name for name in own if any(one.get(name) != own[name] for one in all_of_them)]:
        raise DataError(
            f"{call}: the processes give different {' and '.join(differing)}. Each gives the same arguments, and the "
            "trainer shares the work; ppo_rlhf.runtime.processes.from_main(value) hands the main process's value to all"
        )


def own_rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def own_share(count: int) -> range:
    """Return the rows of `count` that this process computes: contiguous, and in all processes as equal as can be."""
    rank, processes = own_rank(), process_count()
    return range(count * rank // processes, count * (rank + 1) // processes)


def dealt_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows that each process computes, ascending: as many for each as can be, and of about as many tokens.

    The processes take the longest rows first, in snake order: 0, 1, ..., n, n, ..., 1, 0, and so on.
    """
    shards: list[list[int]] = [[] for _ in range(process_count())]
    for place, row in enumerate(sorted(range(len(lengths)), key=lambda row: -lengths[row])):
        turn, seat = divmod(place, len(shards))
        shards[-1 - seat if turn % 2 else seat].append(row)
    return [sorted(shard) for shard in shards]


def gather_dealt(own_rows: torch.Tensor, shards: list[list[int]]) -> torch.Tensor:
    """Return the rows `[B, …]` of all processes on the CPU, each in its place.

    This process has the rows `[b, …]` of its shard, in its order; `shards` are from `dealt_rows`.
    """
    import torch

    most = max(map(len, shards))
    own = own_rows.cpu()
    filled = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    of_all = zip(gather_tensors(filled), shards, strict=True)
    found = torch.cat([rows[: len(shard)] for rows, shard in of_all])
    placed = torch.empty_like(found)
    placed[[row for shard in shards for row in shard]] = found
    return placed


def gather_tensors(own: torch.Tensor) -> list[torch.Tensor]:
    """Return each process's tensor, in the order of their ranks; all have one shape and type, and are on the CPU."""
    if process_count() == 1:
        return [own]
    import torch

    sent = own.contiguous()
    sent = sent.view(torch.uint8) if own.dtype == torch.bool else sent  # gloo knows no truth values
    found = [torch.empty_like(sent) for _ in range(process_count())]
    with together():
        torch.distributed.all_gather(found, sent, group=quick_group("gloo"))
    return [tensor.view(own.dtype) for tensor in found]
