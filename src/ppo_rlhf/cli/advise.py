"""`kedro advise`: says which settings to change first, from the settings and curves of a run in MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import recorded_runs
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.hooks.resume import as_last_resumed
from ppo_rlhf.hooks.run_description import PROCESSES
from ppo_rlhf.hooks.run_log import WRITTEN
from ppo_rlhf.people.win_rate import JUDGED_POLICY
from ppo_rlhf.runtime.names import POLICY, env_option

GROUP = "ppo."
CURVES = ("objective/", "policy/", "loss/", "val/", "value/", "response/", "optimiser/", "eval/")
TRAINED = "objective/kl"
"""Key of a metric that every run which trained a policy has."""


@click.command(cls=Command)
@click.option("--run", "run_id", metavar="ID", help="The MLflow run; by default the project's newest that trained.")
@click.option("--all", "everything", is_flag=True, help="Show all advice, not only the most important.")
@click.option("--env", "-e", help="The Kedro environment of the run.")
def advise(run_id: str | None, everything: bool, env: str | None) -> Iterator[str]:
    """Say which settings to change first after a PPO run.

    The order is the order of tuning: first KL, then learning rates and batch sizes, then epochs and clipping.
    docs/tuning.md has every rule.
    """
    from ppo_rlhf.advice import SHOWN, in_words

    with recorded_runs(env) as (client, experiment):
        run = recorded_run(client, run_id or newest_run(client, experiment, env))
    yield from run.heading
    command = f"kedro advise{env_option(env)}{f' --run {run_id}' if run_id else ''}"
    yield from in_words(run.config, run.history, most=None if everything else SHOWN, command=command)


@dataclass(frozen=True)
class RecordedRun:
    """The settings and the curves of a run in MLflow."""

    config: PPOConfig
    history: list[dict[str, float]]
    """One mapping of metrics per iteration, as `ppo_rlhf.advice.advise` takes them."""
    heading: list[str]
    """A line with the run's name and its last iteration, and one with what people decided about its policy."""


def newest_run(client: MlflowClient, experiment: str, env: str | None = None) -> str:
    """Return the id of the newest run of an experiment that trained a policy.

    Child runs, such as the trainings of a sweep, do not count; a user names a child run by --run.

    Raises:
        DataError: No run of the experiment has trained.
    """
    entity = client.get_experiment_by_name(experiment)
    runs = [] if entity is None else client.search_runs([entity.experiment_id])
    for run in runs:
        if TRAINED in run.data.metrics and MLFLOW_PARENT_RUN_ID not in run.data.tags:
            return str(run.info.run_id)
    raise DataError(
        f"No run of the MLflow experiment {experiment} has trained a policy yet: `kedro run{env_option(env)}` does. "
        "Choose another experiment by its environment with --env, or name a run with --run."
    )


def recorded_run(client: MlflowClient, run_id: str) -> RecordedRun:
    """Read the settings and the curves of a run.

    Raises:
        MlflowException: There is no such run.
        DataError: The run did not train a policy.
        ConfigError: A setting of the run is refused.
    """
    run = client.get_run(run_id)
    if TRAINED not in run.data.metrics:
        raise DataError(
            f"MLflow run {run_id} ({run.data.tags.get('pipeline', run.info.run_name)}) has no curves of PPO ({TRAINED} "
            "is missing): name a run that trained, or leave --run out to take the newest run that did."
        )
    # A resumed run records changed settings in tags of its MLflow run, and never changes the run's params
    params = {**run.data.params, **as_last_resumed(run.data.tags)}
    given = {name.removeprefix(GROUP): text for name, text in params.items() if name.startswith(GROUP)}
    values: dict[str, Any] = {name: None if text == "None" else text for name, text in given.items()}
    try:
        config = PPOConfig.of_run(int(run.data.tags.get(PROCESSES, 1)), values)
    except ConfigError as error:
        where = f"MLflow run {run_id} has settings that are refused"
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
    history = _history(client, run)
    heading = [
        f"MLflow run {run_id} ({run.info.run_name}, {run.info.status}): iteration {history[-1]['iteration']:g} of "
        f"{config.num_total_batches}"
    ]
    return RecordedRun(config, history, heading + _by_people(client, run))


def _by_people(client: MlflowClient, run: Run) -> list[str]:
    """Return a line with the newest result of `human_evaluation` about the policy that a run exported, if any."""
    for tag, path in run.data.tags.items():
        if tag.startswith(f"{WRITTEN}{POLICY}."):
            condition = equals(f"tags.`{JUDGED_POLICY}`", path)
            for judged in client.search_runs([run.info.experiment_id], condition, max_results=1):
                return [f"By people: {judged.data.tags[MLFLOW_RUN_NOTE]}"]
    return []


def _history(client: MlflowClient, run: Run) -> list[dict[str, float]]:
    """Return the metrics of each iteration. If a resumed run repeated an iteration, the metrics of the repetition
    count.

    Steps without training metrics are left out, such as step 0, an evaluation before training.
    """
    rows: dict[int, dict[str, float]] = {}
    for key in run.data.metrics:
        if key.startswith(CURVES):
            points = client.get_metric_history(run.info.run_id, key)
            for point in sorted(points, key=lambda point: point.timestamp):
                rows.setdefault(point.step, {})[key] = point.value
    return [{"iteration": float(step), **row} for step, row in sorted(rows.items()) if TRAINED in row]
