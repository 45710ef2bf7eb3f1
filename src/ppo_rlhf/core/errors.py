"""Every error that a user can cause or must see: one tree, each leaf also a standard-library type.

A message says where, what was given, the rule, and the fix, in one line: the command line prints only this line.
A new class is added only where a caller would handle it differently from its siblings.
"""


class PPORLHFError(Exception):
    """Base of all errors raised on purpose by this project; the command line shows its text without a traceback."""


class ConfigError(PPORLHFError, ValueError):
    """A parameter, or a combination of parameters, is not acceptable."""


class DataError(PPORLHFError, ValueError):
    """A data file, column or row that a user gave is not acceptable."""


class ModelError(PPORLHFError, ValueError):
    """A model directory, its weights or its tokenizer is not acceptable."""


class RewardError(PPORLHFError, ValueError):
    """A reward, judge or environment cannot be found, or returned something else than what is asked of it."""


class ShapeError(PPORLHFError, ValueError):
    """Tensors handed to a numeric function do not fit together."""


class CheckpointError(PPORLHFError, RuntimeError):
    """A checkpoint cannot be written, or is damaged, incomplete or of another run."""


class TrainingError(PPORLHFError, RuntimeError):
    """Training cannot continue, or cannot be trusted."""


class DivergenceError(TrainingError):
    """Training left the region where it can be trusted; what was saved before is still good.

    Attributes:
        last_good_iteration: The newest iteration whose state is known to be good; 0 is the state before the first.
    """

    def __init__(self, message: str, last_good_iteration: int = 0) -> None:
        super().__init__(message)
        self.last_good_iteration = last_good_iteration


class LaunchError(PPORLHFError, RuntimeError):
    """Several processes were started in a way that does not join them into one run."""


def in_one_line(error: BaseException) -> str:
    """Return an error's text in one line; of one without a text, such as MemoryError, its name."""
    return " ".join(str(error).split()) or type(error).__name__


def kind_and_text(error: BaseException) -> str:
    """Return an error's kind and its text in one line, `ValueError: no such place`; of one without a text the kind."""
    kind, text = type(error).__name__, in_one_line(error)
    return kind if text == kind else f"{kind}: {text}"


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and what caused it: Kedro's `DatasetError` has the error in a dataset as its cause."""
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def project_error(error: BaseException) -> PPORLHFError | None:
    """Return the error of ours that `error` is or was caused by, None if there is none."""
    return next((cause for cause in causes(error) if isinstance(cause, PPORLHFError)), None)
