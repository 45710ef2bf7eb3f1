"""A user's reward functions: found by name, called, and checked."""

import contextlib
import functools
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ppo_rlhf.core.errors import DataError, RewardError

RewardFunction = Callable[..., list[float]]

_TEXTS = ("prompts", "completions")


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
    try:
        importlib.invalidate_caches()
        with _first_on_path(searched):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"{reference}: there is no module {module_name} in {', '.join(searched)} or on the Python path. "
                f"Put {module_name.replace('.', '/')}.py into the project's directory."
            ) from error
        raise RewardError(f"{reference}: importing {module_name} fails: {error}.") from error
    except (Exception, SystemExit) as error:  # a user's file can raise anything, and a script may end itself
        place = _place(error, lambda file: Path(file).is_relative_to(project))
        raise RewardError(f"{reference}: importing {module_name} fails: {_told(error)}{place}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist there"
        raise RewardError(f"{reference}: {name} {what} ({getattr(module, '__file__', module_name)}).")

    @functools.wraps(function)  # its signature decides what it is called with
    def in_its_project(*positional: Any, **named: Any) -> list[float]:
        with _first_on_path(searched):  # it may import its neighbours when it is called
            return cast("list[float]", function(*positional, **named))

    return in_its_project


@contextlib.contextmanager
def _first_on_path(folders: list[str]) -> Iterator[None]:
    """Let imports find the user's files first; not for long, as they could hide libraries' modules of the same name."""
    added = [path for path in folders if path not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


def check_column_names(columns: Iterable[str], where: str, own: str | None = None) -> None:
    """Raise `DataError` if a column is called `prompts` or `completions`: functions get texts by these names.

    Args:
        columns: Names of the prompt table's columns.
        where: Where the table comes from, for errors.
        own: The column of the prompts, which may have any name.
    """
    for name in set(columns).intersection(_TEXTS) - {own}:
        raise DataError(
            f"{where}: reward functions get the prompts and responses by the names prompts and completions, so no "
            f"other column can be called `{name}`. Rename it, or remove it."
        )


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
) -> list[float]:
    """Call a user's function and check its result: one finite number a response.

    A function with a parameter `completions` gets prompts and completions by name, any other as its first two
    arguments. Columns are keyword arguments; a function without `**columns` gets those that it names.

    Raises:
        RewardError: It raised, or returned another count, or something that is not a finite float32 number.
    """
    try:
        result = _bound(function, list(prompts), list(completions), columns)()
        values = result.tolist() if hasattr(result, "tolist") else result  # tensors, arrays, series
        values = list(values) if isinstance(values, list | tuple) else values
    except (Exception, SystemExit) as error:
        source = getattr(inspect.unwrap(function), "__code__", None)
        place = "" if source is None else _place(error, lambda file: file == source.co_filename)
        raise RewardError(f"reward function {name} raised {_told(error)}{place}") from error
    if not isinstance(values, list):
        raise RewardError(f"reward function {name} returned a {type(values).__name__}. Return a list of numbers.")
    if len(values) != len(completions):
        raise RewardError(
            f"reward function {name} returned {len(values)} scores for {len(completions)} responses. Return one each."
        )
    return [_score(value, f"reward function {name}", row, completions[row]) for row, value in enumerate(values)]


def _bound(
    function: RewardFunction, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
) -> Callable[[], Any]:
    """Return the function with its arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have no signature
        return functools.partial(function, prompts, completions, **columns)
    names = list(signature.parameters)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    texts = {"prompts": prompts, "completions": completions}
    named = {n: values for n, values in {**columns, **texts}.items() if takes_all or n in names}
    if "completions" in names:
        with contextlib.suppress(TypeError):  # positional only, or another required parameter
            signature.bind(**named)
            return functools.partial(function, **named)
    others = {n: values for n, values in named.items() if n not in (*texts, *names[:2])}
    return functools.partial(function, prompts, completions, **others)


def _score(value: Any, where: str, row: int, completion: str) -> float:
    try:
        score = float(value)
    except Exception:  # an object of the user's own can raise anything
        score = math.nan
    if not abs(score) <= torch.finfo(torch.float32).max:  # NaN included
        shown = f"{value!r:.40}" if isinstance(value, float | str | None) else f"a value of type {type(value).__name__}"
        raise RewardError(
            f"{where} returned {shown} for response {row} ({completion[:60]!r}). Return finite float32 numbers."
        )
    return score


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place(error: BaseException, is_theirs: Callable[[str], bool]) -> str:
    """Return ' (file, line n)' of the innermost call in the user's files, empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_theirs(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def split_reference(reference: str) -> tuple[str, str]:
    """Return the module and the name of `module:name`; raise `RewardError` if it is not of that form."""
    module_name, _, name = reference.partition(":")
    if module_name.endswith(".py"):
        module = Path(module_name).stem if Path(module_name).is_absolute() else module_name[:-3].replace("/", ".")
        raise RewardError(f"{reference!r} does not name a function: write module:name, here {module}:{name or 'name'}.")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise RewardError(f"{reference!r} does not name a function: write module:name, for example my_rewards:score.")
    return module_name, name


def _project_above(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if (path / "pyproject.toml").is_file()), folder)
