"""Imports functions that a user names as `module:name`, from the project or the Python path."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from ppo_rlhf.core.errors import RewardError, kind_and_text
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.paths import project_folder
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal

RewardFunction = Callable[..., list[float]]
"""A user's function, such as a reward: it returns one number for each response."""


def load_function(reference: str, project_path: Path | None = None) -> RewardFunction:
    """Import `module:name` from the project's directory, the project's `src` or the Python path.

    `project_path` defaults to the project that runs, or the nearest at or above the working directory.

    Raises:
        RewardError: The module or the name does not exist, the object is not callable, or importing the module fails.
    """
    module_name, name = split_reference(reference)
    project = project_path or project_folder()
    searched = [str(project), str(project / "src")]
    try:
        importlib.invalidate_caches()
        with _first_on_path(searched), restoring_globals():
            module = importlib.import_module(module_name)
    except (TerminationSignal, KeyboardInterrupt):
        raise
    except BaseException as error:  # importing a user's module can raise any exception, and a script may call sys.exit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name + ".").startswith(missing + "."):
            raise RewardError(
                f"{reference}: there is no module {module_name} in {', '.join(searched)} or on the Python path. "
                f"Put {module_name.replace('.', '/')}.py into the project's directory."
            ) from error
        place = place_in_file(error, lambda file: Path(file).is_relative_to(project))
        raise RewardError(f"{reference}: importing {module_name} fails: {kind_and_text(error)}{place}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist there"
        raise RewardError(f"{reference}: {name} {what} ({getattr(module, '__file__', module_name)}).")

    # functools.wraps keeps the signature of the user's function, which decides the arguments that the function gets
    @functools.wraps(function)
    def in_project(*positional: Any, **named: Any) -> list[float]:
        with _first_on_path(searched):  # the reward function may import other files of the project while it runs
            return cast("list[float]", awaited(function(*positional, **named)))

    return in_project


@contextlib.contextmanager
def _first_on_path(folders: list[str]) -> Iterator[None]:
    """Put `folders` first on `sys.path` within the block.

    The folders do not stay on `sys.path`, because a user's file could hide a library's module of the same name.
    """
    added = [path for path in folders if path not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


@contextlib.contextmanager
def restoring_globals() -> Iterator[None]:
    """Restore the global state of torch and of the process that a user's code changed within the block."""
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        # Restore the grad mode (`set_grad_enabled`) and the directory (`chdir`) that a user's function may change
        with ending_children(), torch.set_grad_enabled(torch.is_grad_enabled()), contextlib.chdir("."):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def awaited(result: Any) -> Any:
    """Return the result of a coroutine; return any other value unchanged."""
    if not inspect.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    # Run the coroutine in another thread, because a notebook already runs an event loop in this thread
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, result).result()


def place_in_file(error: BaseException, is_users: Callable[[str], bool]) -> str:
    """Return ' (file, line n)' of the innermost call in the user's files; empty if no call is in a user's file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def split_reference(reference: str) -> tuple[str, str]:
    """Return the module and the name of `module:name`; raise `RewardError` for a reference of another form."""
    module_name, _, name = reference.partition(":")
    parts = [name, *module_name.split(".")]
    if module_name.endswith(".py") or not all(part.isidentifier() for part in parts):
        raise RewardError(f"{reference!r} does not name a function: write module:name, for example my_rewards:score.")
    return module_name, name
