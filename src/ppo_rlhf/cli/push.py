"""`kedro push`: the policy of a run, or its reward model, to the Hugging Face hub."""

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


@click.command(cls=Command)
@click.argument("repository", metavar="ORG/NAME")
@click.option("--run", "run_id", metavar="ID", help="The MLflow run; without it the newest finished one that wrote it.")
@click.option("--reward-model", "name", flag_value="reward_model", default=POLICY, help="Its reward model, no policy.")
@click.option("--license", metavar="NAME", help="For the model card; without it that of the model it started from.")
@click.option("--public", is_flag=True, help="Let everybody see a new repository.")
@click.option("--dry-run", is_flag=True, help="List the files; send nothing.")
@click.option("--env", "-e", help="Kedro's environment, whose runs are meant.")
def push(repository: str, name: str, run_id: str | None, env: str | None, **options: Any) -> Iterator[str]:
    """Send the exported policy of a run to the repository ORG/NAME of the Hugging Face hub, as one commit.

    A repository that is not there is made, and is private. `hf auth login` or HF_TOKEN gives the right to write.
    """
    from ppo_rlhf.checkpoints import hub  # heavy: other commands do not wait for it

    (hub.check_name if options["dry_run"] else hub.check_push)(repository)
    with recorded_runs(env) as (client, experiment):
        found = None if run_id else client.get_experiment_by_name(experiment)
        finished = client.search_runs([found.experiment_id], "attributes.status = 'FINISHED'") if found else []
        runs = [client.get_run(run_id)] if run_id else [run for run in finished if _written(run, name)]
    if not runs or not (folder := _written(runs[0], name)):
        where = f"MLflow run {run_id}" if run_id else f"any finished run of the MLflow experiment {experiment}"
        made = f"`kedro run{env_option(env)}` writes one"
        raise DataError(f"{name}: there is none of {where}; {made}, and --run names another run.")
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
    """Return the folder of the newest model of this name that a run wrote."""
    folders = [Path(path) for tag, path in run.data.tags.items() if tag.startswith(f"{WRITTEN}{name}.")]
    return max(folders, key=lambda folder: folder.name, default=None)
