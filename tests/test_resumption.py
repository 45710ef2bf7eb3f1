"""`resume`: which run it means, what it refuses, and what of it stands in MLflow; on the toy project."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from click.testing import Result
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow.entities import Run
from safetensors.torch import save_file

from ppo_rlhf.checkpoints.files import checkpoint_name, write_directory
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets import ResumeCheckpointDataset
from ppo_rlhf.hooks import TrackingHook
from ppo_rlhf.hooks.resume_comparison import compare_runs
from ppo_rlhf.hooks.run_description import RunDescription
from ppo_rlhf.runner import ITERATION_TAG
from tests.integration.processes import kedro_run

ENTRY = """
resume_checkpoint:
  type: ppo_rlhf.datasets.ResumeCheckpointDataset
  filepath: data/06_models/ppo_checkpoints
  resume: ${runtime_params:resume, null}
"""
MAKES_STATE = Node(lambda checkpoint: checkpoint, "resume_checkpoint", "training_state", name="make_state")
HOLD_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@dataclasses.dataclass
class Toy:
    """The toy project with an entry for `resume`, and the command."""

    project: Path
    invoke: Callable[..., Result]
    monkeypatch: pytest.MonkeyPatch

    @property
    def root(self) -> Path:
        return self.project / "data" / "06_models" / "ppo_checkpoints"

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.project / 'mlflow.db'}")

    def kedro(self, *params: str, pipelines: str = "align", env: str | None = None) -> Result:
        options = ["--pipelines", pipelines, *(["--env", env] if env else [])]
        return self.invoke(self.project, "run", *options, *(["--params", ",".join(params)] if params else []))

    def run(self, *params: str, **options: Any) -> Run:
        result = self.kedro(*params, **options)
        assert result.exit_code == 0, result.output
        return self.runs()[0]

    def interrupted(self, *params: str, at: int = 2, **options: Any) -> str:
        """Fail in an iteration, and return the run's id."""
        before = {run.info.run_id for run in self.runs()}
        self.monkeypatch.setenv("TOY_FAIL_AT", str(at))
        assert isinstance(self.kedro(*params, **options).exception, ZeroDivisionError)
        self.monkeypatch.delenv("TOY_FAIL_AT")
        (new,) = {run.info.run_id for run in self.runs()} - before
        return new

    def runs(self) -> list[Run]:
        """All runs, the one that started last first."""
        experiments = self.client.search_experiments(filter_string="name = 'ppo_rlhf'")
        return list(self.client.search_runs([e.experiment_id for e in experiments])) if experiments else []

    def get(self, run_id: str) -> Run:
        return self.client.get_run(run_id)

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.client.get_metric_history(run_id, key)]

    def checkpoint(self, run_id: str, iteration: int, **settings: Any) -> Path:
        """Put a whole checkpoint of a toy run on the disk: settings and history, but no models."""
        config = PPOConfig(**{"total_episodes": 24, "sample_interval": 2, "seed": 7, **settings})

        def write(directory: Path) -> None:
            names = ["iteration", "objective/scores", "episode"]
            rows = [[float(i), i / 4, 8.0 * i] for i in range(1, iteration + 1)]
            tensors = {
                "values": torch.tensor(rows, dtype=torch.float64),
                "is_present": torch.ones(iteration, len(names), dtype=torch.bool),
            }
            save_file(tensors, directory / "history.safetensors")
            values = {"config": dataclasses.asdict(config), "history_names": names}
            (directory / "state.json").write_text(json.dumps(values))

        target = self.root / run_id / checkpoint_name(iteration)
        write_directory(target, iteration, write)
        return target

    def state_of_everything(self) -> dict[str, str]:
        """Return a hash of every file of the project that a run could write."""
        return {
            str(path.relative_to(self.project)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.project.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


@pytest.fixture
def toy(toy_project: Path, kedro: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Toy:
    (toy_project / "conf" / "local" / "catalog.yml").write_text(ENTRY)
    (toy_project / "conf" / "other" / "catalog.yml").write_text(ENTRY)
    return Toy(toy_project, kedro, monkeypatch)


@contextmanager
def held_by_another_process(lock: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()


def errors(result: Result) -> list[str]:
    assert result.exit_code == 1
    return [line.removeprefix("Error: ") for line in result.stderr.splitlines()]


# --- latest


def test_without_an_unfinished_run_latest_starts_a_new_one_and_says_so(toy: Toy, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        first = toy.run("resume=latest")
    line = "resume=latest: pipeline align has no unfinished run in environment local to go on with; a new one starts "
    assert f"{line}from the beginning." in caplog.messages
    assert first.info.status == "FINISHED"
    assert [name for name in first.data.tags if name.startswith("resume.")] == []
    second = toy.run("resume=latest")  # a finished one is none to go on with
    assert second.info.run_id != first.info.run_id


def test_latest_goes_on_with_the_interrupted_run_and_logs_no_step_twice(toy: Toy, caplog: pytest.LogCaptureFixture):
    run_id = toy.interrupted("ppo.kl_coef=0.2")
    left = toy.get(run_id)
    assert left.info.status == "FAILED"
    assert toy.history(run_id, "objective/scores") == [(1, 0.25)]
    with caplog.at_level(logging.INFO):
        (run,) = [toy.run("ppo.kl_coef=0.2", "resume=latest")]
    assert len(toy.runs()) == 1
    assert run.info.run_id == run_id
    assert run.info.status == "FINISHED"
    assert toy.history(run_id, "objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert toy.history(run_id, "eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert f"Going on with MLflow run {run_id} from its beginning: it has no checkpoint yet." in caplog.messages
    assert run.data.params == left.data.params
    assert run.data.tags["resume.1.checkpoint"] == "none"
    assert "bit_identical" not in run.data.tags
    kept = ("runtime_params", "run_id", "kedro_command", "git.commit", "pipeline", "seed")
    assert {name: run.data.tags.get(name) for name in kept} == {name: left.data.tags.get(name) for name in kept}
    assert run.info.run_name == left.info.run_name
    assert not {"error", "last_checkpoint"} & run.data.tags.keys()  # of the end that was none
    table = mlflow.load_table("samples.json", run_ids=[run_id])
    assert table["iteration"].tolist() == [1, 1, 1, 2, 2, 2]


def test_each_further_resumption_has_a_number_of_its_own(toy: Toy):
    run_id = toy.interrupted()
    toy.monkeypatch.setenv("TOY_FAIL_AT", "3")
    toy.kedro("resume=latest")
    toy.monkeypatch.delenv("TOY_FAIL_AT")
    toy.run("resume=latest")
    tags = toy.get(run_id).data.tags
    assert [name for name in sorted(tags) if name.endswith(".checkpoint")] == [
        "resume.1.checkpoint",
        "resume.2.checkpoint",
    ]


def test_of_several_latest_takes_the_one_that_started_last(toy: Toy):
    first, second = toy.interrupted(), toy.interrupted()
    assert toy.run("resume=latest").info.run_id == second
    assert toy.get(first).info.status == "FAILED"
    assert toy.get(second).info.status == "FINISHED"


def test_latest_leaves_out_runs_of_other_pipelines_and_environments_and_of_other_machines(toy: Toy):
    """Each of those started later than the one to go on with."""
    meant = toy.interrupted()
    toy.interrupted(pipelines="__default__")
    toy.interrupted(pipelines="align", env="other", at=1)
    elsewhere = toy.interrupted()
    (toy.root / elsewhere / "run.lock").unlink()
    (toy.root / elsewhere).rmdir()
    toy.run("resume=latest")
    assert len(toy.runs()) == 4
    assert [run.info.run_id for run in toy.runs() if run.info.status == "FINISHED"] == [meant]


def test_a_run_that_another_process_holds_is_left_out(toy: Toy, caplog: pytest.LogCaptureFixture):
    older, newest = toy.interrupted(), toy.interrupted()
    with held_by_another_process(toy.root / newest / "run.lock"), caplog.at_level(logging.INFO):
        toy.run("resume=latest")
        assert f"MLflow run {newest} is left out: it still runs." in caplog.messages
        assert toy.get(older).info.status == "FINISHED"
        assert toy.run("resume=latest").info.run_id not in (older, newest)
    toy.run("resume=latest")  # the process was killed, so the kernel freed the lock
    assert toy.get(newest).info.status == "FINISHED"


def test_a_run_without_checkpoint_and_with_other_settings_is_not_gone_on_with(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.interrupted()
    with caplog.at_level(logging.INFO):
        new = toy.run("ppo.kl_coef=0.5", "resume=latest")
    assert new.info.run_id != run_id
    assert toy.get(run_id).info.status == "FAILED"
    said = "has no checkpoint, and was started otherwise (ppo.kl_coef: 0.05 in the run, 0.5 now); a new run starts"
    assert said in caplog.text


def test_a_pipeline_without_the_loop_takes_latest_and_has_no_lock(toy: Toy):
    toy.run("resume=latest", pipelines="supervised_finetuning")
    assert not toy.root.exists()


def test_of_a_run_whose_checkpoints_are_all_damaged_latest_names_them_and_begins_anew(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.interrupted()
    damaged = toy.checkpoint(run_id, 1) / "state.json"
    damaged.write_text("{}")
    toy.run("resume=latest")
    assert f"A damaged checkpoint is left out: {damaged}: damaged" in caplog.text
    assert toy.get(run_id).data.tags["resume.1.checkpoint"] == "none"


def test_a_part_of_the_loop_starts_from_the_beginning_whatever_latest_would_mean_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Such a slice has no state to carry on; `resume: latest` in globals.yml is for all runs."""
    entry = ResumeCheckpointDataset(str(tmp_path), "latest")
    with caplog.at_level(logging.INFO):
        start_untracked(Pipeline([MAKES_STATE]), entry, tmp_path)
    assert "resume=latest: this run holds a part of the loop alone, so it starts from the beginning." in caplog.messages
    assert entry.load() is None


# --- what may change and what must not


def test_settings_and_data_that_changed_are_refused_line_by_line_and_nothing_is_written(toy: Toy):
    run_id = toy.interrupted()
    toy.checkpoint(run_id, 1)
    prompts = toy.project / "data" / "01_raw" / "prompts.jsonl"
    before = hashlib.sha256(prompts.read_bytes()).hexdigest()[:12]
    prompts.write_text(prompts.read_text() + '{"prompt": "one more", "genre": "war"}\n')
    after = hashlib.sha256(prompts.read_bytes()).hexdigest()[:12]
    (toy.project / "conf" / "local" / "parameters.yml").write_text("prompts: {max_held_out: 3}\n")
    untouched = toy.state_of_everything()
    expected = [
        "ppo.gamma: 1.0 in the checkpoint, 0.9 now",
        "ppo.kl_coef: 0.05 in the checkpoint, 0.1 now",
        "prompts.max_held_out: 512 in the run, 3 now",
        f"raw_prompts: other data than in the run, {before} by its fingerprint then, {after} now ({prompts})",
        f"MLflow run {run_id} goes on only as it was started; leave out resume to start a new run.",
    ]
    for resume in ("latest", run_id):
        refused = toy.kedro("ppo.kl_coef=0.1", "ppo.gamma=0.9", "ppo.save_interval=3", f"resume={resume}")
        assert errors(refused) == expected
    assert toy.state_of_everything() == untouched


def test_a_reward_function_that_was_edited_is_refused(toy: Toy):
    rewards = toy.project / "edited_rewards.py"
    rewards.write_text("def score(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    (toy.project / "conf" / "local" / "parameters.yml").write_text(
        'reward: {components: [{type: function, function: "edited_rewards:score", weight: 1.0}]}\n'
    )
    run_id = toy.interrupted()
    toy.checkpoint(run_id, 1)
    rewards.write_text(rewards.read_text().replace("float(len(c))", "-float(len(c))"))
    first, _ = errors(toy.kedro("resume=latest"))
    assert first.startswith("edited_rewards: other data than in the run, ")
    assert first.endswith(f"({rewards})")


def test_what_may_change_becomes_a_tag_and_a_longer_run_is_not_bit_identical(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.interrupted()
    toy.checkpoint(run_id, 1)
    with caplog.at_level(logging.INFO):
        run = toy.run("ppo.total_episodes=32", "ppo.save_interval=3", "resume=latest")
    assert {name: value for name, value in run.data.tags.items() if name.startswith("resume.")} == {
        "resume.1.checkpoint": f"data/06_models/ppo_checkpoints/{run_id}/iteration_000001",
        "resume.1.total_episodes": "32",
        "resume.1.save_interval": "3",
    }
    assert run.data.tags["bit_identical"] == "false"
    assert run.data.params["ppo.total_episodes"] == "24"
    assert "Changed since it was interrupted: total_episodes was 24, is 32." in caplog.messages
    assert [step for step, _ in toy.history(run_id, "objective/scores")] == [1, 2, 3, 4]


def test_a_change_that_touches_no_number_leaves_the_run_bit_identical(toy: Toy):
    toy.checkpoint(toy.interrupted(), 1)
    run = toy.run("ppo.save_interval=3", "resume=latest")
    assert run.data.tags["resume.1.save_interval"] == "3"
    assert "bit_identical" not in run.data.tags


def test_a_setting_that_is_the_checkpoints_again_is_tagged_after_a_resume_that_left_no_checkpoint(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.interrupted()
    first = toy.checkpoint(run_id, 1)
    toy.monkeypatch.setenv("TOY_FAIL_AT", "2")
    toy.kedro("ppo.save_interval=3", "ppo.total_episodes=32", f"resume={run_id}")
    toy.monkeypatch.delenv("TOY_FAIL_AT")
    with caplog.at_level(logging.INFO):
        run = toy.run("ppo.total_episodes=32", f"resume={first}")
    assert run.data.tags["resume.1.save_interval"] == "3"
    assert run.data.tags["resume.2.save_interval"] == "10"
    assert run.data.tags["resume.2.total_episodes"] == "32"
    assert "Changed since it was interrupted: save_interval was 3, is 10." in caplog.messages


def test_other_versions_of_the_libraries_are_tagged(toy: Toy):
    run_id = toy.interrupted()
    toy.client.set_tag(run_id, "version.torch", "1.0")
    run = toy.run("resume=latest")
    assert run.data.tags["version.torch"] == "1.0"
    assert run.data.tags["resume.1.version.torch"] == torch.__version__
    assert run.data.tags["bit_identical"] == "false"


def description(**params: str) -> RunDescription:
    groups = {name.split(".")[0]: object() for name in params}
    return RunDescription(params, {"pipeline": "align", "environment": "local"}, groups)


def left_run(params: dict[str, str], **tags: str) -> Any:
    data = mlflow.entities.RunData(
        params=[mlflow.entities.Param(*pair) for pair in params.items()],
        tags=[mlflow.entities.RunTag(*pair) for pair in {"pipeline": "align", "environment": "local", **tags}.items()],
    )
    info = mlflow.entities.RunInfo("a", "1", "user", "RUNNING", 0, None, "active", "uri")
    return mlflow.entities.Run(info, data)


def test_settings_of_the_report_may_change_and_new_ones_are_compared_with_nothing():
    before = left_run({"reporting.points": "100", "evaluation.seed": "1"})
    now = description(**{"reporting.points": "50", "evaluation.seed": "1", "evaluation.new": "x"})
    comparison = compare_runs(now, before, None)
    assert comparison.refused == []
    assert comparison.changes == {"reporting.points": ("100", "50")}


def test_without_a_checkpoint_ppos_settings_are_compared_with_those_in_mlflow():
    before = left_run({"ppo.gamma": "1.0", "ppo.total_episodes": "24"})
    comparison = compare_runs(description(**{"ppo.gamma": "0.9", "ppo.total_episodes": "32"}), before, None)
    assert comparison.refused == ["ppo.gamma: 1.0 in the run, 0.9 now"]
    assert comparison.changes == {"total_episodes": ("24", "32")}


def test_a_setting_is_compared_with_what_the_last_resumption_made_of_it():
    tags = {
        "resume.2.total_episodes": "32",
        "resume.10.total_episodes": "40",
        "resume.1.total_episodes": "28",
        "resume.10.checkpoint": "none",
    }
    before = left_run({"ppo.total_episodes": "24"}, **tags)
    assert compare_runs(description(**{"ppo.total_episodes": "40"}), before, None).changes == {}
    assert compare_runs(description(**{"ppo.total_episodes": "24"}), before, None).changes == {
        "total_episodes": ("40", "24")
    }


def test_another_pipeline_or_environment_is_a_difference():
    run = left_run({}, pipeline="ppo", environment="test")
    assert compare_runs(description(), run, None).refused == [
        "pipeline: ppo in the run, align now",
        "environment: test in the run, local now",
    ]


# --- by name


def test_what_is_not_there_is_refused_before_anything_is_written(toy: Toy):
    untouched = toy.state_of_everything()
    root = toy.root
    ending = "No run has a checkpoint there: leave out resume to start one."
    for resume in ("0123456789abcdef", "data/06_models/ppo_checkpoints/abc/iteration_000010"):
        expected = f"resume={resume}: there is no such checkpoint, and no run of that id below {root}. {ending}"
        assert errors(toy.kedro(f"resume={resume}")) == [expected]
    assert toy.state_of_everything() == untouched


def test_the_runs_that_have_checkpoints_are_named(toy: Toy):
    run_id = toy.interrupted()
    toy.checkpoint(run_id, 1)
    (line,) = errors(toy.kedro("resume=elsewhere"))
    assert line.endswith(f"The newest there: {run_id}. Or give resume=latest.")


def test_a_checkpoint_outside_the_project_is_refused(toy: Toy, tmp_path: Path):
    target = tmp_path / "backup" / "run" / "iteration_000001"
    target.mkdir(parents=True)
    place = toy.root / "<MLflow run id>" / "iteration_NNNNNN"
    assert errors(toy.kedro(f"resume={target}")) == [
        f"resume={target}: is not a checkpoint below {toy.root}. Name its folder there, {place}."
    ]


def test_a_checkpoint_that_no_run_of_the_project_wrote_is_refused_with_what_goes_on_from_it(toy: Toy, tmp_path: Path):
    run_id = toy.interrupted()
    target = tmp_path / "trainers" / "iteration_000001"
    shutil.copytree(toy.checkpoint(run_id, 1), target)
    untouched = toy.state_of_everything()
    (line,) = errors(toy.kedro(f"resume={target}"))
    assert line.startswith(f"resume={target}: is not a checkpoint below {toy.root}. Name its folder there, ")
    assert line.endswith(". One that PPOTrainer wrote goes on in PPOTrainer: train(resume_from_checkpoint=…).")
    assert toy.state_of_everything() == untouched


def test_a_damaged_checkpoint_that_is_named_is_refused_with_the_file(toy: Toy):
    run_id = toy.interrupted()
    checkpoint = toy.checkpoint(run_id, 1)
    (checkpoint / "state.json").write_text("{}")
    untouched = toy.state_of_everything()
    expected = f"{checkpoint / 'state.json'}: damaged; size or SHA-256 differs from the manifest"
    assert errors(toy.kedro(f"resume={checkpoint.relative_to(toy.project)}")) == [expected]
    assert toy.state_of_everything() == untouched


def test_a_whole_checkpoint_of_another_run_is_refused_though_it_lies_in_this_ones_folder(toy: Toy):
    other, run_id = toy.interrupted(), toy.interrupted()
    checkpoint = toy.root / run_id / "iteration_000001"
    shutil.copytree(toy.checkpoint(other, 1), checkpoint)
    untouched = toy.state_of_everything()
    expected = f"{checkpoint / 'manifest.json'}: is of run {other}, not of this directory"
    assert errors(toy.kedro(f"resume={checkpoint}")) == [expected]
    assert toy.state_of_everything() == untouched


def test_a_damaged_log_of_evaluations_is_named_in_one_line(toy: Toy):
    run_id = toy.interrupted()
    damaged = toy.checkpoint(run_id, 1).parent / "evaluations.json"
    damaged.write_text('[{"iteration": 1.0, "eval/win')
    (line,) = errors(toy.kedro("resume=latest"))
    assert line.startswith(f"{damaged}: damaged (")
    damaged.unlink()
    assert toy.run("resume=latest").info.run_id == run_id


def test_a_pipeline_that_does_not_train_says_which_one_would(toy: Toy):
    run_id = toy.interrupted()
    (line,) = errors(toy.kedro(f"resume={run_id}", pipelines="supervised_finetuning"))
    assert line == (
        f"resume={run_id}: nothing in this run trains by PPO, so there is nothing to go on with. Run the pipeline that "
        "was interrupted: --pipelines ppo or align, or none of both for the whole chain."
    )


def test_a_run_that_is_alive_is_not_gone_on_with(toy: Toy):
    run_id = toy.interrupted()
    with held_by_another_process(toy.root / run_id / "run.lock"):
        untouched = toy.state_of_everything()
        expected = f"resume={run_id}: MLflow run {run_id} still runs; stop it first, or wait for its end."
        assert errors(toy.kedro(f"resume={run_id}")) == [expected]
        assert toy.state_of_everything() == untouched


@pytest.mark.parametrize("way", ["mlflow.yml", "MLFLOW_RUN_ID", "an open run"])
def test_a_new_training_does_not_begin_in_an_mlflow_run_of_another(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, no_mlflow_left_over: None, way: str
):
    run_id = toy.interrupted()
    toy.checkpoint(run_id, 1)
    before = toy.get(run_id)

    def name_run() -> None:
        if way == "mlflow.yml":
            settings = f"tracking:\n  run:\n    id: {run_id}\n"
            (toy.project / "conf" / "local" / "mlflow.yml").write_text(settings)
        elif way == "MLFLOW_RUN_ID":
            monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        elif mlflow.active_run() is None:
            mlflow.set_tracking_uri(f"sqlite:///{toy.project / 'mlflow.db'}")
            mlflow.start_run(run_id)

    with held_by_another_process(toy.root / run_id / "run.lock"):
        name_run()
        assert errors(toy.kedro()) == [f"MLflow run {run_id} still runs; stop it first, or wait for its end."]
    name_run()
    (line,) = errors(toy.kedro())
    assert line.startswith(
        f"MLflow run {run_id} has checkpoints. Go on from them by resume={run_id}, or start a new run"
    )
    assert toy.get(run_id).data.to_dictionary() == before.data.to_dictionary()
    if way != "an open run":
        assert toy.get(run_id).info.status == before.info.status
        assert toy.run(f"resume={run_id}").info.run_id == run_id


def test_a_run_that_the_store_does_not_know_is_refused(toy: Toy):
    run_id = toy.interrupted()
    (toy.root / run_id).rename(toy.root / ("f" * 32))
    (line,) = errors(toy.kedro(f"resume={'f' * 32}"))
    assert line == (
        f"resume={'f' * 32}: the tracking store of mlflow.yml has no run {'f' * 32}; use the store that it was logged "
        "to."
    )


def test_a_deleted_run_is_refused(toy: Toy):
    run_id = toy.interrupted()
    toy.client.delete_run(run_id)
    assert errors(toy.kedro(f"resume={run_id}")) == [
        f"resume={run_id}: MLflow run {run_id} was deleted; restore it: mlflow runs restore."
    ]


def test_a_run_of_another_experiment_is_refused(toy: Toy):
    run_id = toy.interrupted()
    (toy.project / "conf" / "local" / "mlflow.yml").write_text("tracking: {experiment: {name: another}}\n")
    (line,) = errors(toy.kedro(f"resume={run_id}"))
    assert "is in another experiment than mlflow.yml names" in line


def test_while_another_mlflow_run_is_open_none_is_gone_on_with(toy: Toy):
    run_id = toy.interrupted()
    mlflow.set_tracking_uri(f"sqlite:///{toy.project / 'mlflow.db'}")
    mlflow.set_experiment("ppo_rlhf")
    with mlflow.start_run() as outer:
        (line,) = errors(toy.kedro(f"resume={run_id}"))
        assert line == (
            f"resume={run_id}: MLflow run {outer.info.run_id} is open already; end it before another one goes on."
        )
        assert mlflow.active_run().info.run_id == outer.info.run_id
    assert toy.get(outer.info.run_id).info.status == "FINISHED"


def test_without_tracking_only_a_path_can_be_resumed(toy: Toy):
    (toy.project / "conf" / "local" / "mlflow.yml").write_text("tracking: {disable_tracking: {pipelines: [align]}}\n")
    (line,) = errors(toy.kedro("resume=latest"))
    assert line == (
        "resume=latest: mlflow.yml disables tracking for align, so no run can be looked up; give the directory of a "
        "checkpoint."
    )


def start_untracked(pipeline: Pipeline, entry: ResumeCheckpointDataset, project: Path) -> None:
    """Let the hook do what it does before the first node."""
    hook = TrackingHook()
    hook.mlflow_config = KedroMlflowConfig.model_validate({"tracking": {"disable_tracking": {"pipelines": ["ppo"]}}})
    run_params = {"pipeline_names": ["ppo"], "project_path": str(project)}
    hook.before_pipeline_run(run_params, pipeline, DataCatalog({"resume_checkpoint": entry}))


def test_without_tracking_a_relative_path_is_the_projects_from_every_folder(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    checkpoint = toy.checkpoint("untracked-1", 1)
    entry = ResumeCheckpointDataset(str(toy.root), str(checkpoint.relative_to(toy.project)))
    iteration = Node(lambda state: state, "training_state", "next_training_state", name="iterate", tags=ITERATION_TAG)
    start_untracked(Pipeline([MAKES_STATE, iteration]), entry, toy.project)
    assert entry.load() == checkpoint


def test_a_finished_run_that_is_named_goes_on_and_logs_nothing_twice(toy: Toy):
    run = toy.run()
    models = [model.model_id for model in mlflow.search_logged_models(output_format="list")]
    again = toy.run(f"resume={run.info.run_id}")
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    assert toy.history(run.info.run_id, "objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert toy.history(run.info.run_id, "eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert [model.model_id for model in mlflow.search_logged_models(output_format="list")] == models


def test_a_run_can_be_named_by_its_id_its_folder_or_a_checkpoint(toy: Toy):
    run_id = toy.interrupted()
    newest = toy.checkpoint(run_id, 2)
    older = toy.checkpoint(run_id, 1)
    folder = str(older.parent.relative_to(toy.project))
    for number, (resume, expected) in enumerate([(run_id, newest), (folder, newest), (str(older), older)], 1):
        toy.run(f"resume={resume}")
        tag = toy.get(run_id).data.tags[f"resume.{number}.checkpoint"]
        assert tag == str(expected.relative_to(toy.project))


def test_a_longer_run_goes_on_only_from_the_newest_checkpoint(toy: Toy):
    run_id = toy.interrupted()
    newest, older = toy.checkpoint(run_id, 2), toy.checkpoint(run_id, 1)
    assert errors(toy.kedro("ppo.total_episodes=32", f"resume={older}")) == [
        f"resume={older}: with another ppo.total_episodes a run goes on only from its newest checkpoint, "
        f"{newest.relative_to(toy.project)}."
    ]
    toy.run("ppo.total_episodes=32", f"resume={newest}")


# --- what MLflow gets


def test_metrics_that_mlflow_lacks_are_taken_from_the_checkpoint(toy: Toy):
    """The toy run measures from iteration 1 on; what it measured before is made to be lost."""
    run_id = toy.interrupted(at=1)
    assert toy.history(run_id, "objective/scores") == []
    checkpoint = toy.checkpoint(run_id, 2)
    rows = [{"iteration": 1.0, "eval/win_rate": 0.4}, {"iteration": 3.0, "eval/win_rate": 0.9}]
    (checkpoint.parent / "evaluations.json").write_text(json.dumps(rows))
    toy.monkeypatch.setenv("TOY_FAIL_AT", "1")
    toy.kedro("resume=latest")
    assert toy.history(run_id, "objective/scores") == [(1, 0.25), (2, 0.5)]
    assert toy.history(run_id, "eval/win_rate") == [(1, 0.4)]  # iteration 3 is behind the checkpoint


def test_a_value_that_is_not_repeated_is_said_once_and_tagged(toy: Toy, caplog: pytest.LogCaptureFixture):
    run_id = toy.interrupted(at=3)
    other = toy.client.get_metric_history(run_id, "objective/scores")[0]
    assert other.value == 0.25
    with sqlite(toy.project) as connection:
        connection.execute("UPDATE metrics SET value = value + 1 WHERE key = 'objective/scores'")
    toy.run("resume=latest")
    said = [line for line in caplog.messages if line.startswith("This run does not repeat")]
    assert said == [
        "This run does not repeat what it measured before it was interrupted: objective/scores at step 1 was 1.25 and "
        "is 0.25 now. What was logged first stays, and the run is tagged bit_identical=false."
    ]
    assert toy.history(run_id, "objective/scores") == [(1, 1.25), (2, 1.5), (3, 0.75)]
    assert toy.get(run_id).data.tags["bit_identical"] == "false"


@contextmanager
def sqlite(project: Path) -> Iterator[Any]:
    import sqlite3

    connection = sqlite3.connect(project / "mlflow.db")
    try:
        yield connection
        connection.commit()
    finally:
        connection.close()


def test_leftovers_of_a_killed_writer_are_cleared_away_by_the_run_that_goes_on(toy: Toy):
    run_id = toy.interrupted()
    leftover = toy.root / run_id / ".iteration_000002.4711.tmp"
    leftover.mkdir()
    toy.kedro("ppo.kl_coef=0.1", f"resume={run_id}")  # refused: it is not this run's to clear away
    assert leftover.exists()
    toy.run("resume=latest")
    assert not leftover.exists()


def test_two_jobs_with_one_command_take_a_run_each(toy: Toy):
    """Both start at once; whoever finds the other's run locked begins one of its own, or takes an older one."""
    older, newest = toy.interrupted(), toy.interrupted()
    arguments = ("--pipelines", "align", "--params", "resume=latest")
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda _: kedro_run(toy.project, *arguments), range(2)))
    assert [job.returncode for job in jobs] == [0, 0], [job.stderr for job in jobs]
    assert toy.get(newest).info.status == "FINISHED"
    for run in toy.runs():
        steps = [step for step, _ in toy.history(run.info.run_id, "objective/scores")]
        assert steps in ([1], [1, 2, 3])
    assert toy.get(older).info.status in ("FINISHED", "FAILED")
    assert [run.info.status for run in toy.runs()].count("FINISHED") == 2
