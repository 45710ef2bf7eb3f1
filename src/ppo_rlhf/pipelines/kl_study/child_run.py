"""A run of its own in MLflow for each training of a study, below the study's run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import mlflow

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.signals import RunInterruptedError, as_error, deferring_signals

Log = Callable[[int, Mapping[str, float]], None]
"""Takes an iteration and its metrics."""


@contextmanager
def child_run(name: str, config: PPOConfig) -> Iterator[Log]:
    """Open a run below the active one, with the training's settings as params, and yield a function that logs to it.

    Without an active run (tracking is switched off, or this is not the main process) the function does nothing. The run
    ends FINISHED, KILLED by a signal, or FAILED.
    """
    parent = mlflow.active_run()
    if parent is None:
        yield lambda iteration, metrics: None
        return

    def log(iteration: int, metrics: Mapping[str, float]) -> None:
        with deferring_signals():
            mlflow.log_metrics({key: float(value) for key, value in metrics.items()}, step=iteration)

    status = "FINISHED"
    try:
        with deferring_signals():
            mlflow.start_run(run_name=name, nested=True)
            mlflow.log_params({f"ppo.{setting}": str(value) for setting, value in asdict(config).items()})
        yield log
    except BaseException as stop:
        status = "KILLED" if isinstance(as_error(stop), RunInterruptedError) else "FAILED"
        raise
    finally:
        active = mlflow.active_run()
        if active is not None and active.info.run_id != parent.info.run_id:
            with deferring_signals():
                mlflow.end_run(status)
