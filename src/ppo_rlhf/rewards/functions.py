"""A person's reward functions: found by name, called, and checked."""

import functools
import hashlib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ppo_rlhf.core.errors import DataError, RewardError

RewardFunction = Callable[..., list[float]]

GIVEN_OTHERWISE = {"prompts": "the prompts as text", "completions": "the responses"}
"""What functions get by names that a column cannot have beside it."""

_imported: dict[str, tuple[Path, str]] = {}
"""Files of the modules that `load_function` imported, with their SHA-256 as they were then."""


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
        _remember(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"{reference}: there is no module {module_name} in {', '.join(searched)} or on the Python path. "
                f"Put {module_name.replace('.', '/')}.py into the project's directory."
            ) from error
        raise RewardError(f"{reference}: importing {module_name} fails: {error}.") from error
    except (Exception, SystemExit) as error:  # a person's file can raise anything, and a script may end itself
        place = _place(error, lambda file: Path(file).is_relative_to(project))
        raise RewardError(f"{reference}: importing {module_name} fails: {_told(error)}{place}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist there"
        raise RewardError(f"{reference}: {name} {what} ({getattr(module, '__file__', module_name)}).")

    @functools.wraps(function)  # its signature decides what it is called with
    def in_its_project(*positional: Any, **named: Any) -> list[float]:
        with _first_on_path(searched):  # it may import its neighbours only when it is called
            return cast("list[float]", function(*positional, **named))

    return in_its_project


def forget_edited_modules() -> None:
    """Let `load_function` import anew the modules whose files have changed since it did: Python reads a file once.

    To be called where a run starts, before its tags are made, so that they have the fingerprints of what is called.
    Within a run a function stays as it is, whatever becomes of its file. What a module imports is not looked at.
    """
    for name, (file, digest) in list(_imported.items()):
        if _digest(file) != digest:
            del _imported[name]
            for module in [known for known in sys.modules if (known + ".").startswith(name + ".")]:
                del sys.modules[module]


def _remember(module: ModuleType) -> None:
    name, file = module.__name__, getattr(module, "__file__", None)
    if file is not None and name not in _imported and name != "__main__":  # a script that runs is not imported again
        _imported[name] = Path(file), _digest(Path(file))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes() if file.is_file() else b"").hexdigest()


@contextmanager
def _first_on_path(folders: list[str]) -> Iterator[None]:
    """Let imports find a person's files for a while; beyond it they must not take the place of libraries' modules."""
    added = [path for path in folders if path not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


def check_column_names(columns: Iterable[str], where: str, own: str | None = None) -> None:
    """Raise `DataError` if a column has the name of what functions are called with: they would not be given it.

    Args:
        columns: Names of the prompt table's columns.
        where: Where the table comes from, for errors.
        own: The column of the prompts, which may have any name.
    """
    names = set(columns)
    for taken, given in GIVEN_OTHERWISE.items():
        if taken in names and taken != own:
            raise DataError(
                f"{where}: a column is called `{taken}`, and by that name functions get {given}, so they "
                "could not be given it. Rename it, or take it out"
            )


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
) -> list[float]:
    """Call a person's function and check what it returns: one finite number a response.

    Prompts and completions go in by name where the function calls them so (in whichever order; one that only reads
    completions may leave prompts out), else as its first two arguments. Columns are keyword arguments; a function
    without `**columns` gets those it names. A column with the name of one of its first two arguments is left out, and
    so is one called `prompts` or `completions` (`check_column_names` refuses it before a run).

    Raises:
        RewardError: It raised, or returned another count, or something that is not a finite number.
    """
    try:
        positional, named = _arguments(function, list(prompts), list(completions), columns)
        result = function(*positional, **named)
    except (Exception, SystemExit) as error:
        source = getattr(inspect.unwrap(function), "__code__", None)
        place = "" if source is None else _place(error, lambda file: file == source.co_filename)
        raise RewardError(f"reward function {name} raised {_told(error)}{place}") from error
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


def _arguments(
    function: RewardFunction, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
) -> tuple[list[list[str]], dict[str, list[Any]]]:
    """Return what a function is called with: positional and keyword arguments."""
    texts = {"prompts": prompts, "completions": completions}
    others = {name: values for name, values in columns.items() if name not in texts}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return [prompts, completions], others
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = [name for name, parameter in parameters.items() if parameter.kind in _BY_NAME]
    wanted = others if takes_all else {name: values for name, values in others.items() if name in by_name}
    if "completions" not in by_name or not ("prompts" in by_name or by_name[0] == "completions"):
        # given by position, they cannot be given by name again; what is positional only leaves its name to a column
        filled = [p.name for p in list(parameters.values())[:2] if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return [prompts, completions], {name: values for name, values in wanted.items() if name not in filled}
    return [], {name: values for name, values in texts.items() if takes_all or name in by_name} | wanted


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place(error: BaseException, is_theirs: Callable[[str], bool]) -> str:
    """Return ' (file, line n)' of the innermost call in a file of the person's, empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_theirs(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _as_list(result: Any, name: str) -> list[Any]:
    if hasattr(result, "tolist"):  # tensors, arrays, series
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward function {name} returned a {type(result).__name__}. Return a list of numbers.")
    return list(result)


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
