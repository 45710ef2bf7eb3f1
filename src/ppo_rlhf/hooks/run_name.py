"""The name of a run in MLflow."""

from collections.abc import Sequence
from datetime import datetime

from ppo_rlhf.runtime.paths import last_name

MOST, MOST_OF_A_MODEL = 60, 20
"""Largest number of characters in a run's name, and in the model's part of it: MLflow's tables cut longer names."""


def run_name(settings: str, pipelines: Sequence[str], model_path: str | None) -> str:
    """Return the name of a run, such as `align · kl_coef=0.1 seed=2 · my-sft · 11-25 18:35`.

    The parts are the pipelines, the settings of the command line, the model and the time. Long parts are cut, and the
    settings left out if nothing is left for them; the run's tags have them whole.

    Args:
        settings: The settings of the command line, such as `kl_coef=0.1 seed=2`; may be empty.
        pipelines: The names of the pipelines.
        model_path: Path or hub id of the model that the run starts from, or of the policy that it evaluates. None means
            that the run trains a model from scratch.
    """
    names = "+".join("all" if name == "__default__" else name for name in pipelines)
    model = "scratch" if model_path is None else last_name(model_path)
    parts = [_cut(names, MOST_OF_A_MODEL), settings, _cut(model, MOST_OF_A_MODEL), f"{datetime.now():%m-%d %H:%M}"]
    parts[1] = _cut(settings, MOST - len(" · ".join(parts)) + len(settings))
    return " · ".join(filter(None, parts))


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…" if most > 0 else ""
