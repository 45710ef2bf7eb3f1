"""A person's reward functions: found by name, called, and checked."""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.core.errors import RewardError

RewardFunction = Callable[..., list[float]]


def load_function(reference: str, project_path: Path | None = None) -> RewardFunction:
    """Import `module:name`, looked up from the project's directory, its `src`, and the Python path.

    Args:
        reference: For example `my_rewards:brevity` for `brevity` in `my_rewards.py`.
        project_path: The project's directory; by default the nearest one above the working directory.

    Raises:
        RewardError: The module or the name does not exist, is not callable, or importing the module fails.
    """
    module_name, name = split_reference(reference)
    project = project_path or _project_above(Path.cwd())
    searched = [str(project), str(project / "src")]
    added = [path for path in searched if path not in sys.path]
    sys.path[:0] = added
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"{reference}: there is no module {module_name} in {', '.join(searched)} or on the Python path. "
                f"Put {module_name.replace('.', '/')}.py into the project's directory."
            ) from error
        raise RewardError(f"{reference}: importing {module_name} fails: {error}.") from error
    except Exception as error:  # a person's file can raise anything
        raise RewardError(f"{reference}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    finally:
        for path in added:
            sys.path.remove(path)
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist there"
        raise RewardError(f"{reference}: {name} {what} ({getattr(module, '__file__', module_name)}).")
    return function


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
) -> list[float]:
    """Call a person's function and check what it returns: one finite number a response.

    Columns go in as keyword arguments; a function without `**columns` gets those it names.

    Raises:
        RewardError: It raised, or returned another count, or something that is not a finite number.
    """
    try:
        result = function(list(prompts), list(completions), **_accepted(function, columns))
    except Exception as error:
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    values = _as_list(result, name)
    if len(values) != len(completions):
        raise RewardError(
            f"reward function {name} returned {len(values)} scores for {len(completions)} responses. Return one each."
        )
    scores = []
    for row, value in enumerate(values):
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise RewardError(
                f"reward function {name} returned {value!r} for response {row} ({completions[row][:60]!r}). "
                "Return finite numbers."
            )
        scores.append(score)
    return scores


def _accepted(function: RewardFunction, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    reserved = {name: values for name, values in columns.items() if name not in ("prompts", "completions")}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return reserved
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return reserved
    return {name: values for name, values in reserved.items() if name in parameters}


def _as_list(result: Any, name: str) -> list[Any]:
    if hasattr(result, "tolist"):  # tensors, arrays, series
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward function {name} returned a {type(result).__name__}. Return a list of numbers.")
    return list(result)


def split_reference(reference: str) -> tuple[str, str]:
    """Return the module and the name of `module:name`; raise `RewardError` if it is not of that form."""
    module_name, _, name = reference.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise RewardError(f"{reference!r} does not name a function: write module:name, for example my_rewards:score.")
    return module_name, name


def _project_above(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if (path / "pyproject.toml").is_file()), folder)
