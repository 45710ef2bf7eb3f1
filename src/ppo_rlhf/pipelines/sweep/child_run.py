"""A separate MLflow run for each training of a sweep, nested below the sweep's run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import mlflow
from mlflow.entities import Metric, Param, Run
from mlflow.tracking.context.registry import resolve_tags

from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.runtime.names import SET
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.signals import RunInterruptedError, as_error, deferring_signals

Log = Callable[[int, Mapping[str, float]], None]
"""The type of a function that logs the metrics of an iteration."""


def child_runs() -> Callable[[str, Mapping[str, str]], AbstractContextManager[Log]]:
    """Return a function that opens MLflow runs nested below the active run.

    The nested runs stay in the active run's store, even if a reward function sets another store. Without an active run
    (tracking is off, or the process is not the main process) the nested runs log nothing.
    """
    if (parent := mlflow.active_run()) is None:
        return _no_child_run
    return partial(_child_run, parent, mlflow.MlflowClient())


def _no_child_run(name: str, params: Mapping[str, str]) -> AbstractContextManager[Log]:
    def log_nothing(iteration: int, metrics: Mapping[str, float]) -> None:
        pass

    return nullcontext(log_nothing)


def finished_trainings() -> list[tuple[dict[str, str], dict[str, float]]]:
    """Return the params and last metrics of each finished run below the active run; empty without an active run."""
    if (parent := mlflow.active_run()) is None:
        return []
    below = equals("tags.`mlflow.parentRunId`", parent.info.run_id)
    runs = mlflow.MlflowClient().search_runs([parent.info.experiment_id], f"{below} and attributes.status = 'FINISHED'")
    return [(run.data.params, run.data.metrics) for run in runs]


@contextmanager
def _child_run(parent: Run, client: mlflow.MlflowClient, name: str, params: Mapping[str, str]) -> Iterator[Log]:
    """Open a nested run with the given params, and yield a function that logs to the run.

    The nested run ends with the status FINISHED, with KILLED after a signal, or with FAILED after an error.
    """
    status, run_id = "FINISHED", ""

    def log(iteration: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        with deferring_signals():
            client.log_batch(run_id, [Metric(key, float(value), now, iteration) for key, value in metrics.items()])

    try:
        with deferring_signals():
            tags = resolve_tags({"mlflow.parentRunId": parent.info.run_id, SET: name})
            run_id = client.create_run(parent.info.experiment_id, tags=tags, run_name=name).info.run_id
            client.log_batch(run_id, params=[Param(*each) for each in params.items()])
        with ending_children():
            yield log
    except BaseException as stop:
        status = "KILLED" if isinstance(as_error(stop), RunInterruptedError) else "FAILED"
        raise
    finally:
        if run_id:
            with deferring_signals():
                client.set_terminated(run_id, status)
