"""Calls a user's functions (rewards, judges, environments) and checks their results."""

import contextlib
import copy
import inspect
import math
import traceback
from collections.abc import Iterable, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from ppo_rlhf.core.errors import DataError, RewardError, kind_and_text
from ppo_rlhf.rewards.scoring import AGAINST, MESSAGES, TURNS
from ppo_rlhf.runtime.processes import warn_if_slow
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal
from ppo_rlhf.runtime.user_functions import RewardFunction, awaited, place_in_file, restoring_globals

RESPONSE_IDS = "completion_ids"
_OURS = ("prompts", "completions", RESPONSE_IDS, TURNS)
# Arguments that a reward function gets only if its signature names the argument
_ON_REQUEST = (RESPONSE_IDS, TURNS, MESSAGES, AGAINST)


def check_column_names(columns: Iterable[str], where: str, prompt_column: str | None = None) -> None:
    """Raise `DataError` if a column has the name of an argument that carries prompts or responses to functions.

    `prompt_column`, the column of the prompts, may have such a name. `where` names the table in errors.
    """
    for name in set(columns).intersection((*_OURS, AGAINST)) - {prompt_column}:
        raise DataError(
            f"{where}: reward functions get the prompts and responses as the arguments {', '.join(_OURS)}, so no "
            f"other column can be called `{name}`. Rename or remove the column."
        )


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[list[int]] | None = None,
) -> list[Any]:
    """Call a user's function and check that it returns one finite number per response.

    Prompts, completions and columns are passed as keyword arguments; a function without `**columns` gets only the
    arguments that its signature names. A coroutine function (`async def`) is awaited. A function whose signature names
    `completion_ids` gets the token ids of each response, stop token included. A function that gets `completion_ids` may
    return per-token rewards: for each response a list, a 1-D array or a 1-D tensor with one number per token.

    Raises:
        RewardError: The function does not accept the arguments or raised an exception; the number of returned entries
            is not the number of responses; the number of per-token rewards is not the number of tokens of a response;
            or a returned value is not a finite float32 number.
    """
    if completion_ids is not None:
        columns = {**columns, RESPONSE_IDS: list(map(list, completion_ids))}
    rows = call_function(function, f"reward function {name}", prompts, completions, columns)
    if completion_ids is not None:
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    if completion_ids is None or not any(isinstance(row, list | tuple) for row in rows):
        return [_score(value, name, row, completions[row]) for row, value in enumerate(rows)]
    for row, (numbers, ids) in enumerate(zip(rows, completion_ids, strict=True)):
        if not isinstance(numbers, list | tuple) or len(numbers) != len(ids):
            returned = f"{len(numbers)} numbers" if isinstance(numbers, list | tuple) else "only one number"
            raise RewardError(
                f"reward function {name} returned {returned} for response {row} ({completions[row][:60]!r}) of "
                f"{len(ids)} tokens. Return for every response either one score or one number per completion_id."
            )
    return [[_score(number, name, row, completions[row]) for number in numbers] for row, numbers in enumerate(rows)]


def call_function(
    function: RewardFunction,
    title: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
) -> list[Any]:
    """Call a user's function as `call_reward_function` describes, and return a list with one entry per response.

    `title` begins the text of errors. The function gets copies of its arguments, so it may change the arguments in
    place.

    Raises:
        RewardError: The function does not accept the arguments, raised an exception, or did not return one entry per
            response.
    """
    arguments = _arguments(function, title, {"prompts": list(prompts), "completions": list(completions)}, columns)
    try:
        with restoring_globals(), warn_if_slow(f"{title} ({len(completions)} responses to {prompts[:1]!r:.60}, …)"):
            result = awaited(function(**{name: _copies(rows) for name, rows in arguments.items()}))
        # tensors, NumPy arrays and pandas Series have `tolist`
        values = result.tolist() if hasattr(result, "tolist") else result
        values = list(values) if isinstance(values, list | tuple) else values
    # Signals and Ctrl-C are no errors of the user's function: re-raise them unchanged
    except (TerminationSignal, KeyboardInterrupt):
        raise
    except RewardError:  # an LLM judge's RewardError needs no traceback, which could show the key
        raise
    except BaseException as error:
        source = getattr(inspect.unwrap(function), "__code__", None)
        place = "" if source is None else place_in_file(error, lambda file: file == source.co_filename)
        row, report = _failing_row(error, prompts, completions), traceback.format_exception(error)
        at = ""
        if row is not None:
            at = f" at row {row}, prompt {prompts[row][:60]!r}, response {completions[row][:60]!r}"
            report = [f"Row {row}\nPrompt: {prompts[row]}\nResponse: {completions[row]}\n\n", *report]
        raise RewardError(f"{title} raised {kind_and_text(error)}{place}{at}{_written(report)}") from error
    if not isinstance(values, list):
        raise RewardError(f"{title} returned a {type(values).__name__}. Return a list with one entry per response.")
    if len(values) != len(completions):
        raise RewardError(
            f"{title} returned {len(values)} values for {len(completions)} responses. Return one value per response."
        )
    return values


def _copies(rows: list[Any]) -> list[Any]:
    """Return deep copies of rows. Each row is copied separately, because rows of a repeated prompt share objects."""
    return [copy.deepcopy(row) for row in rows]


def _arguments(
    function: RewardFunction, title: str, texts: dict[str, list[str]], columns: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Return the keyword arguments for a user's function; raise `RewardError` if its signature does not accept the
    arguments.
    """
    try:
        signature = inspect.signature(function)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        named = {
            name: values
            for name, values in {**columns, **texts}.items()
            if name in signature.parameters or (takes_all and name not in _ON_REQUEST)
        }
        signature.bind(**named)
    except (TypeError, ValueError) as error:  # some built-in functions have no signature
        reserved = [*_OURS, *(name for name in columns if name in (MESSAGES, AGAINST))]
        others = ", ".join(name for name in columns if name not in reserved) or "none"
        raise RewardError(
            f"{title} cannot be called with keyword arguments ({error}). Define the function with (prompts, "
            f"completions, **columns), or with some of {', '.join(reserved)} and the table's other columns: {others}."
        ) from None
    return named


def _score(value: Any, name: str, row: int, completion: str) -> float:
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # calling float on a user's object can raise any exception
        score = math.nan
    if not abs(score) <= torch.finfo(torch.float32).max:  # `not <=` is also True for a score of NaN
        shown = f"{value!r:.40}" if isinstance(value, float | str | None) else f"a value of type {type(value).__name__}"
        raise RewardError(
            f"reward function {name} returned {shown} for response {row} ({completion[:60]!r}). "
            "Return finite float32 numbers."
        )
    return score


def _failing_row(error: BaseException, prompts: Sequence[str], completions: Sequence[str]) -> int | None:
    """Return the row that the user's function was reading at `error`.

    The innermost frame of the traceback in which a prompt or a response is a local variable determines the row. Return
    None if no frame has a prompt or a response as a local variable.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        local_ids = {id(value) for value in frame.f_locals.values() if isinstance(value, str)}
        matches = [sum(id(text) in local_ids for text in row) for row in zip(prompts, completions, strict=True)]
        if any(matches):
            return matches.index(max(matches))
    return None


def _written(report: list[str]) -> str:
    """Write an error report to a new temporary file; return '. Traceback: <file>', or '' if no file can be written."""
    with contextlib.suppress(OSError), NamedTemporaryFile(prefix="traceback_", delete=False) as file:
        file.write("".join(report).encode(errors="backslashreplace"))
        return f". Traceback: {file.name}"
    return ""
