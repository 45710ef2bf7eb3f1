"""The classes of all errors that a user can cause or must see; all but the base class are also standard error types.

An error message says where, what was given, the rule, and the fix, in one line: the command line prints only the
message. Add an error class only if a caller would handle the new error differently from the existing errors.
"""

from ppo_rlhf.core.addresses import without_secrets


class PPORLHFError(Exception):
    """Base of all errors raised on purpose by this project; the command line shows its text without a traceback.

    The text has no password or token of an address, whoever shows it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(each) if isinstance(each, str) else each for each in args))


class ConfigError(PPORLHFError, ValueError):
    """A parameter, or a combination of parameters, is not acceptable."""


class TrackingStoreError(ConfigError):
    """MLflow's tracking store cannot be used: the same run may go on when the store is there again."""


class DataError(PPORLHFError, ValueError):
    """A data file, column or row that a user gave is not acceptable."""


class ModelError(PPORLHFError, ValueError):
    """A model directory, its weights or its tokenizer is not acceptable."""


class RewardError(PPORLHFError, ValueError):
    """A reward, judge or environment cannot be found, or returned a value of the wrong kind."""


class ShapeError(PPORLHFError, ValueError):
    """Tensors given to a numeric function have shapes that do not fit together."""


class CheckpointError(PPORLHFError, RuntimeError):
    """A checkpoint cannot be written, is damaged or incomplete, or belongs to another run."""


class TrainingError(PPORLHFError, RuntimeError):
    """Training cannot continue, or the results of training cannot be trusted."""


class DivergenceError(TrainingError):
    """Training diverged; checkpoints saved before the divergence are still good.

    Attributes:
        last_good_iteration: The newest iteration whose state is known to be good; 0 is the state before iteration 1.
    """

    def __init__(self, message: str, last_good_iteration: int = 0) -> None:
        super().__init__(message)
        self.last_good_iteration = last_good_iteration


class LaunchError(PPORLHFError, RuntimeError):
    """Several processes were started in a way that does not join the processes into one run."""


def in_one_line(error: BaseException) -> str:
    """Return an error's text in one line. For an error without a text, such as MemoryError, return its class name."""
    return " ".join(str(error).split()) or type(error).__name__


def kind_and_text(error: BaseException) -> str:
    """Return an error's class name and text in one line (`ValueError: no such place`); without a text only the name."""
    kind, text = type(error).__name__, in_one_line(error)
    return kind if text == kind else f"{kind}: {text}"


def causes(error: BaseException) -> list[BaseException]:
    """Return an error followed by its causes; Kedro's `DatasetError`, for example, has a dataset's error as cause."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def project_error(error: BaseException) -> PPORLHFError | None:
    """Return the first PPORLHFError among `error` and its causes; None if no PPORLHFError is among them."""
    return next((cause for cause in causes(error) if isinstance(cause, PPORLHFError)), None)
