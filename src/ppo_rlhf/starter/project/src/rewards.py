"""Rewards of this project; conf/base/globals.yml names them as PROJECT_NAME.rewards:score."""

from typing import Any


def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return one number for each response, higher for a better one: here how many different words it has.

    Put your own measure in its place. `columns` are the other columns of the prompts' file, one value for each
    response. A number that is NaN or infinite, or an error, stops the run and names the row.
    """
    return [float(len(set(text.split()))) for text in completions]
