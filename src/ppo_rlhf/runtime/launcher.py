"""Ends the processes of torchrun or `accelerate launch` together: after a signal to one, and without their launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.signals import SIGNALS, send_to_main_thread

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks for the launcher, and for a signal that another process got."""
PASS_ON_S = 5.0
"""A signal to one process is passed to the other processes after `PASS_ON_S` seconds, so that a signal that a launcher
or Slurm sends to all processes does not count as a second signal."""
_STORE_KEY = "ppo_rlhf/signal"
_END = 0  # the byte that ends the watching thread; no signal has the number 0
_watching = False


@contextmanager
def ending_together() -> Iterator[None]:
    """End this process as by SIGTERM if its launcher ends, and as by a signal that another process got.

    A process that waits for another in a collective runs no Python signal handler, so a thread acts. Only processes of
    torchrun's agent, which is also the launcher of `accelerate launch`, are watched; a run of one process is not.
    """
    global _watching
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _watching or not in_main_thread or processes.process_count() == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    watch = threading.Thread(target=_watch, args=(os.getppid(), signals), name="launcher", daemon=True)
    former = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    _watching = True
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        _watching = False
        wakeup.send(bytes([_END]))
        watch.join(LOOK_S)


def _forget() -> None:
    """Keep the signals of a forked process from the thread of its parent."""
    if _watching:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


def _watch(launcher: int, signals: socket.socket) -> None:
    signum, since = 0, 0.0
    while os.getppid() == launcher:
        for number in _received(signals, LOOK_S):
            if number == _END:
                return
            if number in SIGNALS and not signum:
                signum, since = number, monotonic()
        try:
            if (store := _store()) is None:
                continue
            if not signum and store.check([_STORE_KEY]):
                signum, since = int(store.get(_STORE_KEY)), float("inf")
                send_to_main_thread(signum)
            elif signum and monotonic() - since >= PASS_ON_S:
                store.set(_STORE_KEY, str(signum))
                since = float("inf")
        except (RuntimeError, ValueError):  # the store has ended with its process: the launcher, or process 0
            continue
    processes.launcher_has_ended.set()
    if not signum:
        send_to_main_thread(signal.SIGTERM)
    logger.warning("The launcher of process %s has ended: the process ends as by SIGTERM.", os.environ["RANK"])
    end = monotonic() + processes.PATIENCE.total_seconds()
    while monotonic() < end:
        if _END in _received(signals, LOOK_S):
            return
    os._exit(128 + signal.SIGTERM)


def _received(signals: socket.socket, seconds: float) -> bytes:
    return signals.recv(64) if select.select([signals], [], [], seconds)[0] else b""


def _store() -> Any:
    """Return torch's key-value store; None before the processes have joined."""
    torch = sys.modules.get("torch")
    return processes.default_store() if torch is not None and torch.distributed.is_initialized() else None
