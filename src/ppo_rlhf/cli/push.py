"""`kedro push`: sends the policy or the reward model of a run to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mlflow.entities import Run

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import recorded_runs
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.hooks.run_log import POLICY, WRITTEN
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import in_project


@click.command(cls=Command)
@click.argument("repository", metavar="ORG/NAME")
@click.option("--run", "run_id", metavar="ID", help="The MLflow run; by default the newest finished one with a model.")
@click.option("--reward-model", "name", flag_value="reward_model", default=POLICY, help="Send the run's reward model.")
@click.option("--license", metavar="NAME", help="License for the model card; by default the start model's license.")
@click.option("--public", is_flag=True, help="Let everybody see a new repository.")
@click.option("--dry-run", is_flag=True, help="List the files; send nothing.")
@click.option("--env", "-e", help="The Kedro environment of the run.")
def push(repository: str, name: str, run_id: str | None, env: str | None, **options: Any) -> Iterator[str]:
    """Send the exported policy of a run to the repository ORG/NAME of the Hugging Face hub, as one commit.

    A repository that does not exist is created as a private one. Log in by `hf auth login` or HF_TOKEN, with permission
    to write.
    """
    from ppo_rlhf.checkpoints import hub

    (hub.check_name if options["dry_run"] else hub.check_push)(repository)
    with recorded_runs(env) as (client, experiment):
        entity = None if run_id else client.get_experiment_by_name(experiment)
        finished = client.search_runs([entity.experiment_id], "attributes.status = 'FINISHED'") if entity else []
        runs = [client.get_run(run_id)] if run_id else [run for run in finished if _written(run, name)]
    if not runs or not (folder := _written(runs[0], name)):
        where = f"MLflow run {run_id}" if run_id else f"no finished run of the MLflow experiment {experiment}"
        has = "has written no" if run_id else "has written a"
        command = f"`kedro run{env_option(env)}` writes one"
        raise DataError(f"{where} {has} {name}: {command}, or name another run with --run.")
    if not folder.is_dir():
        raise DataError(f"{name}: MLflow run {runs[0].info.run_id} wrote it to {folder}, which is not there any more.")
    message = f"{name} of MLflow run {runs[0].info.run_id}"
    yield f"{message}: {folder}"
    if not options["dry_run"]:
        yield hub.push(folder, repository, message, private=not options["public"], license=options["license"])
        return
    yield f"Would be sent to {repository}, {'public' if options['public'] else 'private'} if it is new:"
    for file, path in hub.files_to_push(folder).items():
        yield f"  {file}  {path.stat().st_size / 1e6:.1f} MB"


def _written(run: Run, name: str) -> Path | None:
    """Return the folder of the newest model that a run wrote under the dataset `name`."""
    folders = [in_project(path) for tag, path in run.data.tags.items() if tag.startswith(f"{WRITTEN}{name}.")]
    return max(folders, key=lambda folder: folder.name, default=None)
