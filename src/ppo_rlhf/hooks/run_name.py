"""The name of a run in MLflow."""

from collections.abc import Sequence
from datetime import datetime

from ppo_rlhf.runtime.paths import last_name


def run_name(settings: str, pipelines: Sequence[str], model_path: str | None) -> str:
    """Return the name of a run, such as `kl_coef=0.1 seed=2 · my-sft · 11-25 18:35`.

    The parts are the settings of the command line, the pipelines, the model and the time. The pipelines `all` and
    `align` are named only if no setting was given on the command line.

    Args:
        settings: The settings of the command line, such as `kl_coef=0.1 seed=2`; may be empty.
        pipelines: The names of the pipelines.
        model_path: Path or hub id of the model that the run starts from, or of the policy that it evaluates. None means
            that the run trains a model from scratch.
    """
    names = "+".join("all" if name == "__default__" else name for name in pipelines)
    model = "scratch" if model_path is None else last_name(model_path)
    named = "" if settings and names in ("all", "align") else names
    return " · ".join(filter(None, (settings, named, model, f"{datetime.now():%m-%d %H:%M}")))
