"""The reward functions of this project. conf/base/globals.yml names the function as PROJECT_NAME.rewards:score."""

from typing import Any


def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return one number for each response; a better response has a higher number.

    This example counts the different words of a response: replace it by your own measure. `columns` holds the other
    columns of the file of prompts, one value for each response. If the function raises, or returns NaN or infinity, the
    run stops with a message that names the row.
    """
    return [float(len(set(text.split()))) for text in completions]
