"""`resume`: the run that it names, the differences that it refuses, and its tags in MLflow; on the toy project."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import Result
from kedro.io import DataCatalog, DatasetError, MemoryDataset
from kedro.pipeline import Node, Pipeline
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow.entities import LoggedModel, LoggedModelStatus, Run, RunData, RunInfo
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from mlflow.utils.file_utils import local_file_uri_to_path

from ppo_rlhf.checkpoints.files import checkpoint_name, write_directory
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset, ResumeCheckpointDataset
from ppo_rlhf.hooks import TrackingHook
from ppo_rlhf.hooks.resume import Resumption, differences, find_named, find_resumption
from ppo_rlhf.hooks.run_description import RunDescription, describe_run, settle_dtype
from ppo_rlhf.hooks.run_record import RunRecord
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipeline_registry import register_pipelines
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runner import ITERATION_TAG
from tests.integration.processes import kedro_run
from tests.tiny_models import save, tiny_model

ENTRY = """
evaluation_summary: # a resumed run skips nodes that give nothing but data in memory
  type: json.JSONDataset
  filepath: data/08_reporting/evaluation_summary.json
"""
STATE = '{"metrics": {"bytes": 0, "sha256": ""}}'
MAKES_STATE = Node(lambda checkpoint: checkpoint, "resume_checkpoint", "training_state", name="make_state")
ITERATES = Node(lambda state: state, "training_state", "next_training_state", name="iterate", tags=ITERATION_TAG)
HOLD_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def checkpoint(root: Path, run_id: str, iteration: int) -> Path:
    """Put a whole checkpoint without models on the disk."""
    target = root / run_id / checkpoint_name(iteration)
    write_directory(target, iteration, lambda directory: (directory / "state.json").write_text(STATE))
    return target


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
        """Run until an iteration fails, and return the run's id."""
        before = {run.info.run_id for run in self.runs()}
        self.monkeypatch.setenv("TOY_FAIL_AT", str(at))
        assert isinstance(self.kedro(*params, **options).exception, ZeroDivisionError)
        self.monkeypatch.delenv("TOY_FAIL_AT")
        (new,) = {run.info.run_id for run in self.runs()} - before
        return new

    def left(self, start_time: int | None = None, params: dict[str, Any] | None = None, **tags: str) -> str:
        """Make an MLflow run as a killed one leaves it, without running anything; return its id."""
        found = self.client.get_experiment_by_name("ppo_rlhf")
        experiment = found.experiment_id if found else self.client.create_experiment("ppo_rlhf")
        read = {"raw_prompts": "data/01_raw/prompts.jsonl", "toy_ppo.rewards": "src/toy_ppo/rewards.py"}
        data = {
            f"data.{name}.fingerprint": hashlib.sha256((self.project / file).read_bytes()).hexdigest()
            for name, file in read.items()
        }
        tags = {"pipeline": "align", "environment": "local", **data, **tags}
        run = self.client.create_run(experiment, start_time=start_time, tags=tags)
        (self.root / run.info.run_id).mkdir(parents=True)
        RunRecord(self.project, self.root / run.info.run_id, params or {}, tags, can_resume=True).note()
        return str(run.info.run_id)

    def killed_at(self, place: str, *params: str) -> None:
        """Run in a process that dies at the first call of this function, given as `module.name`."""
        child = os.fork()
        if child == 0:
            self.monkeypatch.setattr(place, lambda *_, **__: os._exit(9))
            self.kedro(*params)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    def runs(self) -> list[Run]:
        """All runs, the one that started last first."""
        found = self.client.get_experiment_by_name("ppo_rlhf")
        return list(self.client.search_runs([found.experiment_id])) if found else []

    def get(self, run_id: str) -> Run:
        return self.client.get_run(run_id)

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.client.get_metric_history(run_id, key)]

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


def error(result: Result) -> str:
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("Error: ")


# --- where a run is


@pytest.mark.slow
def test_a_run_notes_where_its_checkpoints_are_and_goes_on_in_a_project_that_was_moved(toy: Toy, tmp_path: Path):
    run_id = toy.interrupted()
    tags = toy.get(run_id).data.tags
    assert (tags["project_path"], tags["checkpoints"]) == (str(toy.project), "data/06_models/ppo_checkpoints")
    moved = Toy(toy.project.rename(tmp_path / "moved"), toy.invoke, toy.monkeypatch)
    _artifact_repos_cache.clear()  # by which MLflow remembers the artifacts' places within a process
    run = moved.run(f"resume={run_id}")
    assert run.info.status == "FINISHED"
    assert local_file_uri_to_path(run.info.artifact_uri) == str(moved.project / "mlartifacts" / run_id / "artifacts")
    assert not toy.project.exists()
    assert (moved.root / run_id / "run.json").is_file()


@pytest.mark.slow
def test_each_run_has_a_folder_with_its_lock_and_what_it_reads_and_writes(toy: Toy):
    def left(run: Run) -> dict[str, Any]:
        assert (toy.root / run.info.run_id / "run.lock").is_file()
        return dict(json.loads((toy.root / run.info.run_id / "run.json").read_text()))

    trained = left(toy.run(pipelines="supervised_finetuning"))
    (version,) = (toy.root.parent / "sft_policy").iterdir()
    assert (trained["can_resume"], trained["reads"]) == (False, [])
    assert trained["writes"] == [f"data/06_models/sft_policy/{version.name}"]
    aligned = left(toy.run())
    (policy,) = (toy.root.parent / "ppo_policy").iterdir()
    assert aligned["can_resume"] is True
    assert aligned["reads"] == ["data/01_raw/prompts.jsonl", "src/toy_ppo/rewards.py"]
    assert aligned["writes"] == [f"data/06_models/ppo_policy/{policy.name}"]


# --- runs that ended without a word


@pytest.mark.slow
def test_a_run_that_ended_without_a_word_is_marked_by_the_next_one_with_those_below_it(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    toy.killed_at("ppo_rlhf.runner._iterate")
    (killed,) = (run.info.run_id for run in toy.runs())
    place = {"checkpoints": toy.get(killed).data.tags["checkpoints"]}
    alive, elsewhere = toy.left(**place), toy.left(**place)
    below = toy.left(**{"mlflow.parentRunId": killed})
    shutil.rmtree(toy.root / elsewhere)  # its folder is on another host
    newer = 4_000_000_000  # later than the run's start
    os.utime(toy.root / killed, (newer, newer))
    with caplog.at_level(logging.INFO), held_by_another_process(toy.root / alive / "run.lock"):
        toy.run(pipelines="supervised_finetuning")
    assert [toy.get(run).info.status for run in (killed, below, alive, elsewhere)] == ["KILLED"] * 2 + ["RUNNING"] * 2
    assert toy.get(killed).info.end_time == toy.get(below).info.end_time == 1000 * newer
    (line,) = [message for message in caplog.messages if "SIGKILL" in message]
    assert killed in line
    assert "KILLED" in line
    toy.run(f"resume={killed}")
    assert toy.get(killed).info.status == "FINISHED"


@pytest.mark.slow
def test_a_run_whose_folder_is_older_than_it_ends_no_earlier_than_it_began(toy: Toy):
    """The file system's clock may be behind."""
    started = 10**12
    run = toy.left(checkpoints=str(toy.root), start_time=started)
    (toy.root / run / "run.lock").write_text("")
    os.utime(toy.root / run, (1.0e8, 1.0e8))
    toy.run(pipelines="supervised_finetuning")
    assert (toy.get(run).info.status, toy.get(run).info.end_time) == ("KILLED", started)


@pytest.mark.slow
def test_a_run_below_a_killed_one_that_holds_a_lock_of_its_own_goes_on(toy: Toy):
    toy.killed_at("ppo_rlhf.runner._iterate")
    (killed,) = (run.info.run_id for run in toy.runs())
    place = {"checkpoints": toy.get(killed).data.tags["checkpoints"]}
    alive, dead = (toy.left(**place, **{"mlflow.parentRunId": killed}) for _ in range(2))
    (toy.root / dead).mkdir(exist_ok=True)
    (toy.root / dead / "run.lock").write_text("")
    with held_by_another_process(toy.root / alive / "run.lock"):
        toy.run(pipelines="supervised_finetuning")
    assert [toy.get(run).info.status for run in (killed, alive, dead)] == ["KILLED", "RUNNING", "KILLED"]


@pytest.mark.slow
def test_a_sweep_that_goes_on_marks_the_training_that_was_killed_with_it(toy: Toy):
    sweep = toy.interrupted(pipelines="sweep")
    below = toy.left(**{"mlflow.parentRunId": sweep})
    toy.run(f"resume={sweep}", pipelines="sweep")
    assert toy.get(sweep).info.status == "FINISHED"
    assert toy.get(below).info.status == "KILLED"


# --- latest


def test_latest_goes_on_with_the_interrupted_run_and_logs_no_step_twice(toy: Toy, caplog: pytest.LogCaptureFixture):
    run_id = toy.interrupted("ppo.kl_coef=0.2")
    left = toy.get(run_id)
    assert left.info.status == "FAILED"
    assert toy.history(run_id, "objective/scores") == [(1, 0.25)]
    with caplog.at_level(logging.INFO):
        run = toy.run("ppo.kl_coef=0.2", "resume=latest")
    assert [each.info.run_id for each in toy.runs()] == [run_id]
    assert run.info.status == "FINISHED"
    assert toy.history(run_id, "objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert toy.history(run_id, "eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert any(re.match(f"Resuming MLflow run {run_id} from its beginning", line) for line in caplog.messages)
    assert run.data.params == left.data.params
    assert run.data.tags["resume.checkpoint"] == "none"
    assert "bit_identical" not in run.data.tags
    kept = ("git.commit", "pipeline", "seed")
    assert {name: run.data.tags.get(name) for name in kept} == {name: left.data.tags.get(name) for name in kept}
    assert run.info.run_name == left.info.run_name
    assert not {"error", "last_checkpoint"} & run.data.tags.keys()  # they belong to the interruption
    table = mlflow.load_table("samples.json", run_ids=[run_id])
    assert table["iteration"].tolist() == [1, 1, 1, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["o'brien", "both \" and '"])
def test_latest_finds_the_run_of_an_environment_whose_name_has_quotes(toy: Toy, env: str):
    shutil.copytree(toy.project / "conf" / "local", toy.project / "conf" / env)
    meant = toy.interrupted(env=env)
    toy.left(environment="other")
    toy.run("resume=latest", env=env)
    assert toy.get(meant).info.status == "FINISHED"
    assert len(toy.runs()) == 2


@pytest.mark.slow
def test_a_stopped_sweep_says_what_it_keeps_and_how_it_is_resumed(toy: Toy, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        run_id = toy.interrupted(pipelines="sweep")
        assert toy.run("resume=latest", pipelines="sweep").info.run_id == run_id
    (hint,) = [line for line in caplog.messages if "To resume: resume=latest " in line]
    assert "rainings" in hint
    assert any(re.match(f"Resuming MLflow run {run_id} from .*trainings", line) for line in caplog.messages)
    assert not any("no checkpoint" in line for line in caplog.messages)


def test_latest_takes_the_newest_run_of_this_pipeline_environment_and_machine_that_is_not_trained_now(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    toy.left()
    meant = toy.left()
    toy.left(pipeline="__default__")
    toy.left(environment="other")
    shutil.rmtree(toy.root / toy.left())  # of another machine
    shutil.rmtree(toy.root / toy.left(host="elsewhere", project_path=str(toy.project)))
    # From another container with this host name and path, on another disk, where the run begins just now
    shutil.rmtree(toy.root / toy.left(project_path=str(toy.project)))
    running = toy.left()
    with held_by_another_process(toy.root / running / "run.lock"), caplog.at_level(logging.INFO):
        toy.run("resume=latest")
    assert any(re.match(f"MLflow run {running} still runs", line) for line in caplog.messages)
    assert [run.info.run_id for run in toy.runs() if run.info.status == "FINISHED"] == [meant]


@pytest.mark.slow
def test_latest_takes_the_newest_run_with_these_settings_and_names_those_that_it_leaves(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    meant = toy.left()
    other = toy.left(params={"ppo.kl_coef": 0.5})
    whole = checkpoint(toy.root, other, 1)
    finished = toy.run()  # a newer finished run must not hide these runs
    empty = toy.left(params={"ppo.kl_coef": 0.5})
    with caplog.at_level(logging.INFO):
        toy.run("resume=latest")
    assert toy.get(meant).info.status == "FINISHED"
    assert toy.get(other).info.status == "RUNNING"
    difference = r"resume=latest: MLflow run {} .*ppo\.kl_coef \(0\.5 before, 0\.05 now\)\."

    def lines(run_id: str, advice: str) -> int:
        return sum(bool(re.fullmatch(difference.format(run_id) + advice, line)) for line in caplog.messages)

    assert lines(other, f" .* resume={other} .*") == lines(empty, "") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        new = toy.run("resume=latest")
    assert new.info.run_id not in (meant, other, finished.info.run_id)
    assert lines(other, f" .* resume={other} .*") == 1
    assert any(re.match("resume=latest: .*a new run starts", line) for line in caplog.messages)
    assert toy.run("ppo.kl_coef=0.5", f"resume={other}").info.status == "FINISHED"  # what the line advises
    assert toy.get(other).data.tags["resume.checkpoint"] == str(whole.relative_to(toy.project))


@pytest.mark.slow
def test_latest_is_the_run_that_was_written_last_though_the_clock_was_set_back(toy: Toy):
    older, newer = toy.left(), toy.left()
    os.utime(toy.root / older, (1.0, 1.0))  # MLflow recorded the times of a clock that was ahead
    with sqlite3.connect(toy.project / "mlflow.db") as database:
        database.execute("UPDATE runs SET start_time = 9999999999999 WHERE run_uuid = ?", (older,))
    toy.run("resume=latest")
    assert [toy.get(run).info.status for run in (older, newer)] == ["RUNNING", "FINISHED"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "mlflow.log_params",
        pytest.param("ppo_rlhf.hooks.tracking.log_inputs", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_while_it_started_goes_on_and_has_all_that_a_run_has(toy: Toy, place: str):
    """Without params; without inputs. A run without a folder cannot be told from one that another container begins."""
    toy.killed_at(place)
    (killed,) = toy.runs()
    whole = toy.run("resume=latest")
    assert [run.info.run_id for run in toy.runs()] == [killed.info.run_id]
    assert whole.info.status == "FINISHED"
    assert [each.dataset.name for each in whole.inputs.dataset_inputs] == ["raw_prompts"]
    assert whole.data.params["ppo.kl_coef"] == "0.05"
    assert {"pipeline", "environment", "seed", "versions", "data.raw_prompts.path"} <= whole.data.tags.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["mlflow.transformers.save_model", pytest.param("mlflow.MlflowClient.log_outputs", marks=pytest.mark.slow)],
)
def test_a_model_that_a_kill_left_half_logged_is_logged_anew_and_the_half_is_gone(toy: Toy, place: str):
    toy.killed_at(place)
    (left,) = mlflow_models(toy)
    whole = toy.run("resume=latest")
    (model,) = mlflow_models(toy)
    assert model.model_id != left.model_id
    assert model.status == LoggedModelStatus.READY
    assert [output.model_id for output in whole.outputs.model_outputs] == [model.model_id]


def mlflow_models(toy: Toy) -> list[LoggedModel]:
    experiment = toy.client.get_experiment_by_name("ppo_rlhf")
    assert experiment is not None
    return list(toy.client.search_logged_models([experiment.experiment_id]))


@pytest.mark.slow
def test_two_jobs_with_one_command_take_a_run_each(toy: Toy):
    """Both start at once. The process that finds the other's run locked starts a new run or resumes an older one."""
    _, newest = toy.left(), toy.left()
    arguments = ("--pipelines", "align", "--params", "resume=latest")
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda _: kedro_run(toy.project, *arguments), range(2)))
    assert [job.returncode for job in jobs] == [0, 0], [job.stderr for job in jobs]
    assert toy.get(newest).info.status == "FINISHED"
    assert [run.info.status for run in toy.runs()].count("FINISHED") == 2
    for run in toy.runs():
        assert [step for step, _ in toy.history(run.info.run_id, "objective/scores")] in ([], [1, 2, 3])


# --- what may change and what must not


def test_a_run_that_is_named_with_other_settings_and_data_is_refused_by_one_line_and_nothing_is_written(toy: Toy):
    run_id = toy.interrupted()
    checkpoint(toy.root, run_id, 1)
    prompts = toy.project / "data" / "01_raw" / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": "one more", "genre": "war"}\n')
    untouched = toy.state_of_everything()
    line = error(toy.kedro("ppo.kl_coef=0.1", "ppo.gamma=0.9", "ppo.save_interval=3", f"resume={run_id}"))
    assert line.startswith(f"resume={run_id}: ")
    for part in (f"raw_prompts ({prompts})", "ppo.gamma (1.0 before, 0.9 now)", "ppo.kl_coef (0.05 before, 0.1 now)"):
        assert part in line
    assert "save_interval" not in line
    assert toy.state_of_everything() == untouched


@pytest.mark.slow
def test_a_run_goes_on_with_a_function_that_was_mended_and_says_that_it_is_not_bit_identical(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    rewards = toy.project / "edited_rewards.py"
    rewards.write_text("def score(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    (toy.project / "conf" / "local" / "parameters.yml").write_text(
        'reward: {components: [{type: function, function: "edited_rewards:score", weight: 1.0}]}\n'
    )
    run_id = toy.interrupted()
    checkpoint(toy.root, run_id, 1)
    before = hashlib.sha256(rewards.read_bytes()).hexdigest()
    rewards.write_text(rewards.read_text().replace("float(len(c))", "-float(len(c))"))
    mended = hashlib.sha256(rewards.read_bytes()).hexdigest()
    with caplog.at_level(logging.INFO):
        run = toy.run("resume=latest")
    assert run.info.run_id == run_id
    assert run.info.status == "FINISHED"
    name = "data.edited_rewards.fingerprint"
    assert any(line.endswith(f": {name} was {before[:40]}, is {mended[:40]}.") for line in caplog.messages)
    assert run.data.tags[name] == before
    assert run.data.tags[f"resume.{name}"] == mended
    assert run.data.tags["bit_identical"] == "false"


OUTPUTS = {"demonstrations", "sft_policy", "preferences", "reward_model", "sft_evaluation"}


@pytest.mark.parametrize(
    ("changed", "read", "left"),
    [
        ("my_labels", {}, {"demonstrations", "sft_policy"}),
        ("my_labels", {"data.raw_preferences.path": "given.jsonl"}, OUTPUTS - {"sft_evaluation"}),
        ("my_rewards", {}, OUTPUTS - {"sft_evaluation"}),  # compared with PPO's, which the changed function scores
        (None, {}, OUTPUTS),
    ],
)
def test_what_a_changed_function_made_before_ppo_is_made_anew_with_all_that_depends_on_it(
    tmp_path: Path, changed: str | None, read: dict[str, str], left: set[str]
):
    outputs = tmp_path / "outputs.json"
    outputs.write_text(json.dumps({name: {"path": name} for name in OUTPUTS}))
    this = now({"reward_modelling.labeller": "my_labels:score", "reward.components": [{"function": "my_rewards:f"}]})
    this.tags.update(read)
    changes = {f"data.{changed}.fingerprint": ("a", "b")} if changed else {"total_episodes": ("24", "32")}
    with (tmp_path / "run.lock").open("ab") as lock:
        stages = Resumption(RUN, earlier({}), None, lock, changes).make_anew(this, register_pipelines()["__default__"])
    assert set(json.loads(outputs.read_text())) == left
    assert ("reward_model" in stages) is ("reward_model" not in left)
    assert "sft" not in stages


@pytest.mark.slow
def test_what_may_change_becomes_a_tag_and_a_longer_run_is_not_bit_identical(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.interrupted()
    checkpoint(toy.root, run_id, 1)
    leftover = toy.root / run_id / ".iteration_000002.0123456789abcdef.draft"  # of a killed writer
    leftover.mkdir()
    (leftover / "lock").touch()
    with caplog.at_level(logging.INFO):
        run = toy.run("ppo.total_episodes=32", "ppo.save_interval=3", "resume=latest")
    assert {name: value for name, value in run.data.tags.items() if name.startswith("resume.")} == {
        "resume.checkpoint": f"data/06_models/ppo_checkpoints/{run_id}/iteration_000001",
        "resume.total_episodes": "32",
        "resume.save_interval": "3",
    }
    assert run.data.tags["bit_identical"] == "false"
    assert run.data.params["ppo.total_episodes"] == "24"
    assert any(line.endswith(": total_episodes was 24, is 32.") for line in caplog.messages)
    assert [step for step, _ in toy.history(run_id, "objective/scores")] == [1, 2, 3, 4]
    assert not leftover.exists()


RUN = Run(RunInfo("a", "1", "user", "RUNNING", 0, None, "active", "uri"), RunData())


def earlier(params: dict[str, Any], **tags: str) -> RunDescription:
    return now(params, **tags)


def now(params: dict[str, Any], **tags: str) -> RunDescription:
    return RunDescription(params, {"pipeline": "align", "environment": "local", **tags})


@pytest.mark.parametrize(
    ("before", "after", "refused", "changed"),
    [
        ({"ppo.gamma": 1.0}, {"ppo.gamma": 0.9}, "ppo.gamma", ""),
        ({"ppo.gamma": 1.0}, {"ppo.gamma": 1}, "", ""),  # one number
        ({"ppo.gamma": 1.0}, {"ppo.lam": 1.0}, "ppo.gamma", ""),
        ({"ppo.total_episodes": 24}, {"ppo.total_episodes": 32}, "", "total_episodes"),
        (
            {"ppo.local_rollout_forward_batch_size": 64},
            {"ppo.local_rollout_forward_batch_size": None},
            "",
            "local_rollout_forward_batch_size",
        ),
        ({"sft.device": "cpu"}, {"sft.device": "cuda"}, "sft.device", ""),
        ({"sft.text": "None"}, {"sft.text": None}, "sft.text", ""),  # the same text in MLflow
        ({"reporting.points": 100}, {"reporting.points": 50}, "", "reporting.points"),
        ({"sft.epochs": 1}, {"ppo.lam": 1.0}, "", ""),  # a group that this run does not read
        ({"ppo.long": "x" * 6000}, {"ppo.long": "x" * 7000}, "ppo.long", ""),  # MLflow cuts both to the same text
        (
            {"reward.components": [{"function": "a:b", "weight": 1.0}]},
            {"reward.components": [{"function": "a:b", "weight": 2.0}]},
            "reward.components",
            "",
        ),
        (
            {"reward.components": [{"llm": {"model": "m", "base_url": "u", "unparsable": "error"}, "weight": 1.0}]},
            {"reward.components": [{"llm": {"model": "m", "base_url": "v", "unparsable": 1.0}, "weight": 1.0}]},
            "",
            "reward.components",
        ),
        (
            {"reward.components": [{"llm": {"model": "m", "base_url": "u"}, "weight": 1.0}]},
            {"reward.components": [{"llm": {"model": "m", "base_url": "v"}, "weight": 2.0}]},
            "reward.components",
            "",
        ),
        ({"evaluation.judge": "a:b"}, {"evaluation.judge": "a:c"}, "evaluation.judge", ""),
        ({"evaluation.judge": "a:b"}, {"evaluation.judge": {"model": "m", "base_url": "u"}}, "evaluation.judge", ""),
        (
            {"evaluation.judge": {"model": "m", "base_url": "u"}},
            {"evaluation.judge": {"model": "n", "base_url": "u"}},
            "",
            "evaluation.judge",
        ),
    ],
)
def test_each_setting_is_refused_or_a_change(before: dict[str, Any], after: dict[str, Any], refused: str, changed: str):
    found, changes = differences(now(after), earlier(before))
    assert [line.split(" ")[0] for line in found] == ([refused] if refused else [])
    assert list(changes) == ([changed] if changed else [])


def test_the_batch_may_be_divided_otherwise_and_another_batch_is_refused_before_anything_is_written():
    def sizes(micro: int, accumulation: int) -> dict[str, Any]:
        return {"ppo.per_device_train_batch_size": micro, "ppo.gradient_accumulation_steps": accumulation}

    before = earlier(sizes(8, 4), **{"launch.processes": "1"})
    refused, changes = differences(now(sizes(8, 2), **{"launch.processes": "2"}), before)
    assert not refused
    assert changes == {"gradient_accumulation_steps": (4, 2), "launch.processes": ("1", "2")}
    refused, _ = differences(now(sizes(4, 4), **{"launch.processes": "1"}), before)
    assert refused == [
        "the rollout batch, per_device_train_batch_size x gradient_accumulation_steps x processes (32 before, 16 now)"
    ]
    assert differences(now(sizes(4, 4), **{"launch.processes": "1"}), earlier({})) == ([], {})


def test_a_run_that_compares_its_evaluations_keeps_judge_and_reward():
    params: dict[str, Any] = {"reward.components": [{"function": "mine:reward"}], "evaluation.judge": "other:judge"}
    old, new = ({f"data.{name}.fingerprint": value for name in ("mine", "other", "rates")} for value in ("a", "b"))
    params["evaluation.rates"] = {"r": "rates:r"}
    for action, refused in (("off", []), ("stop", ["data.mine", "data.other"])):
        given = params | {"evaluation.on_exploitation": action}
        found, changes = differences(now(given, **new), earlier(given, **old))
        assert [line.split(",")[0] for line in found] == refused
        assert len(changes) == 3 - len(refused)
    assert found[0].endswith("as evaluation.on_exploitation=stop compares the scores of all evaluations")


def test_pipeline_environment_and_data_must_be_the_same_and_versions_and_processes_may_change():
    before, after = (
        make(
            {},
            **{
                "versions": f"python 3.11, torch {number}+cpu",
                "launch.processes": number,
                "data.prompts.fingerprint": number,
                "seed": number,
            },
        )
        for make, number in ((earlier, "1"), (now, "2"))
    )
    after.tags.update(pipeline="ppo", environment="test")
    refused, changes = differences(after, before)
    assert [" ".join(line.split(" ")[:3]) for line in refused] == [
        "the data prompts",
        "environment (local before,",
        "pipeline (align before,",
    ]
    assert changes == {"launch.processes": ("1", "2"), "version.torch": ("1+cpu", "2+cpu")}
    assert tags_of(before, changes)["bit_identical"] == "false"


@pytest.mark.parametrize("name", ["audited_holes", "human_evaluation"])
def test_an_audit_or_a_verdict_made_since_the_interruption_stops_no_resume(name):
    assert differences(now({}, **{f"data.{name}.fingerprint": "a"}), earlier({})) == ([], {})


def test_a_callback_that_is_left_out_takes_its_file_with_it():
    before = earlier({"ppo.callbacks": "mine:Stop"}, **{"data.mine.fingerprint": "a", "data.prompts.fingerprint": "b"})
    refused, changes = differences(now({"ppo.callbacks": None}), before)
    assert changes == {"callbacks": ("mine:Stop", None), "data.mine.fingerprint": ("a", "none")}
    (refusal,) = refused
    assert refusal.startswith("the data prompts ")


def test_a_precision_that_the_machine_chose_stays_the_runs_and_one_line_says_so(caplog: pytest.LogCaptureFixture):
    before = earlier({"ppo.dtype": "bfloat16"})
    this = dataclasses.replace(now({"ppo.dtype": "float32"}), chosen_here=frozenset({"ppo.dtype"}))
    assert differences(this, before) == ([], {})
    assert differences(now({"ppo.dtype": "float32"}), before)[0] == ["ppo.dtype (bfloat16 before, float32 now)"]
    with caplog.at_level(logging.INFO):
        Resumption(RUN, before, None, io.BytesIO()).say(Path("/project"), this)
    (line,) = [record.getMessage() for record in caplog.records if "dtype" in record.getMessage()]
    assert re.match(r"ppo\.dtype=auto: .* bfloat16.* float32\.$", line)


def test_a_resume_with_vllm_is_not_bit_identical_and_vllm_may_be_elsewhere():
    before = earlier({"ppo.rollout_engine": "vllm", "ppo.vllm_server_base_url": "http://a:1"})
    refused, changes = differences(
        now({"ppo.rollout_engine": "vllm", "ppo.vllm_server_base_url": "http://b:1"}), before
    )
    assert not refused
    assert changes == {"vllm_server_base_url": ("http://a:1", "http://b:1")}
    assert tags_of(before, {})["bit_identical"] == "false"
    assert "bit_identical" not in tags_of(earlier({"ppo.rollout_engine": "static"}), {})


def tags_of(before: RunDescription, changes: dict[str, tuple[Any, Any]]) -> dict[str, str]:
    return Resumption(RUN, before, None, io.BytesIO(), changes).tags(Path("/project"))


def test_models_that_the_run_does_not_use_are_not_compared(tmp_path: Path):
    catalog = DataCatalog(
        {
            "raw_prompts": RecordsDataset(str(tmp_path / "prompts.jsonl")),
            "reward_model": PretrainedModelDataset("hub/model"),
            "pretrained_critic": PretrainedModelDataset("hub/critic"),
            "params:reward": MemoryDataset(RewardConfig(components=[{"type": "function", "function": "a:b"}])),
        }
    )
    inputs = ["raw_prompts", "reward_model", "pretrained_critic", "params:reward"]
    pipeline = Pipeline([Node(lambda *_: 1, inputs, "x", name="n")])
    run_params = {"project_path": str(tmp_path), "pipeline_names": ["align"], "env": None}
    read = [name for name in describe_run(run_params, pipeline, catalog).tags if name.startswith("data.")]
    assert read == ["data.raw_prompts.path"]


def test_each_reward_model_of_a_path_is_compared(tmp_path: Path):
    """A relative path is below the project, wherever the command is typed."""
    paths = {name: save(tmp_path / name, tiny_model("gpt2", reward=True, seed=seed)) for seed, name in enumerate("ab")}
    reward = RewardConfig(components=[{"type": "model", "path": name} for name in paths], combine="mean")
    catalog = DataCatalog({"reward_model": PretrainedModelDataset("hub/model"), "params:reward": MemoryDataset(reward)})
    pipeline = Pipeline([Node(lambda *_: 1, ["reward_model", "params:reward"], "x", name="n")])
    run_params = {"project_path": str(tmp_path), "pipeline_names": ["align"], "env": None}
    tags = describe_run(run_params, pipeline, catalog).tags
    read = {name: value for name, value in tags.items() if name.startswith("data.")}
    assert {name for name in read if name.endswith(".path")} == {"data.reward.a.path", "data.reward.b.path"}
    for name, path in paths.items():
        assert read[f"data.reward.{name}.path"] == path
        assert read[f"data.reward.{name}.fingerprint"] == PretrainedHandle(path).fingerprint()
    assert read["data.reward.a.fingerprint"] != read["data.reward.b.fingerprint"]


def test_the_precision_is_known_before_params_are_logged_and_is_the_one_that_the_nodes_get():
    catalog = DataCatalog({"params:ppo": MemoryDataset(PPOConfig(learning_rate=1e-4))})
    pipeline = Pipeline([Node(lambda *_: 1, "params:ppo", "x", name="n")])
    described = describe_run({"project_path": ".", "pipeline_names": ["ppo"], "env": None}, pipeline, catalog)
    assert described.params["ppo.dtype"] == "float32"
    assert described.chosen_here == {"ppo.dtype"}
    assert described.tags["ppo.not_default"] == "learning_rate=0.0001"
    for began_with, expected in ((None, "float32"), ("bfloat16", "bfloat16")):
        catalog.save("params:ppo", PPOConfig(dtype="auto"))
        settle_dtype(catalog, began_with)
        assert catalog.load("params:ppo") == PPOConfig(dtype=expected)
    settle_dtype(catalog, "float16")  # the user's own setting stays
    assert catalog.load("params:ppo") == PPOConfig(dtype="bfloat16")


@pytest.mark.slow
def test_a_setting_is_compared_with_the_value_of_the_last_resume(toy: Toy):
    """MLflow keeps the first value as a param, and the last one as a tag."""
    run_id = toy.interrupted()
    for episodes in (32, 40):
        toy.monkeypatch.setenv("TOY_FAIL_AT", "2")
        toy.kedro(f"ppo.total_episodes={episodes}", f"resume={run_id}")
        toy.monkeypatch.delenv("TOY_FAIL_AT")
        record = RunRecord.of_folder(toy.root / run_id, toy.project)
        assert record is not None
        assert record.params["ppo.total_episodes"] == episodes
    data = toy.get(run_id).data
    assert (data.params["ppo.total_episodes"], data.tags["resume.total_episodes"]) == ("24", "40")


def test_settings_of_a_run_are_read_back_with_their_types_and_damage_is_named(tmp_path: Path):
    params = {"ppo.kl_coef": 0.05, "ppo.seed": 1, "ppo.dtype": "auto", "ppo.callbacks": None, "reward.components": [{}]}
    RunRecord(tmp_path, tmp_path, params, {"seed": "1"}).note()
    found = RunRecord.of_folder(tmp_path, tmp_path)
    assert found is not None
    assert (found.params, found.tags["seed"]) == (params, "1")
    for damage in ("{", "[]", "{}", '{"params": 3, "tags": {}}'):
        (tmp_path / "run.json").write_text(damage)
        with pytest.raises(ConfigError, match=rf"^{tmp_path / 'run.json'}: ") as caught:
            RunRecord.of_folder(tmp_path, tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_without_its_settings_is_refused_by_name_and_skipped_by_latest(
    toy: Toy, caplog: pytest.LogCaptureFixture
):
    run_id = toy.left()
    (toy.root / run_id / "run.json").unlink()
    line = f"resume={run_id}: {toy.root / run_id / 'run.json'} is missing, so the run's settings are not known"
    assert error(toy.kedro(f"resume={run_id}")).startswith(line)
    with caplog.at_level(logging.INFO):
        assert toy.run("resume=latest").info.run_id != run_id
    assert any(
        re.match(r"resume=latest: .*run\.json is missing, .*; the run is skipped\.", line) for line in caplog.messages
    )


def test_a_changed_language_model_is_a_tag_and_not_bit_identical():
    first, second = ({"model": name, "base_url": "u"} for name in "mn")
    tags = tags_of(earlier({}), {"evaluation.judge": (first, second)})
    assert tags["bit_identical"] == "false"
    assert json.loads(tags["resume.evaluation.judge"]) == second


# --- by name


def test_a_run_is_named_by_its_id_its_folder_or_a_checkpoint(tmp_path: Path):
    root = tmp_path / "checkpoints"
    whole = checkpoint(root, "abc", 10)
    names = {"abc": None, "checkpoints/abc": None, "checkpoints/abc/iteration_000010": whole, str(whole): whole}
    for requested, expected in names.items():
        assert find_named(requested, root, tmp_path) == ("abc", expected)
    for requested in ("nothing", ".", str(checkpoint(tmp_path / "backup", "abc", 1))):
        with pytest.raises(ConfigError, match=r"the newest: abc"):
            find_named(requested, root, tmp_path)


def test_a_run_or_a_checkpoint_that_is_a_link_is_named_by_the_place_of_the_link(tmp_path: Path):
    root = tmp_path / "checkpoints"
    for link in (checkpoint(root, "abc", 10), root / "abc"):
        link.rename(there := tmp_path / f"disk-{link.name}")
        link.symlink_to(there)
        assert find_named("abc/iteration_000010", root, tmp_path) == ("abc", root / "abc" / "iteration_000010")
        assert find_named("abc", root, tmp_path) == ("abc", None)


def test_a_checkpoint_that_is_damaged_or_of_another_run_is_refused(tmp_path: Path):
    root = tmp_path / "checkpoints"
    (checkpoint(root, "abc", 10) / "state.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        find_named("abc/iteration_000010", root, tmp_path)
    other = checkpoint(root, "other", 10)
    other.parent.rename(root / "renamed")
    with pytest.raises(CheckpointError, match="run other"):
        find_named(f"renamed/{other.name}", root, tmp_path)


def test_a_run_that_is_not_there_is_refused_and_leaves_no_database(toy: Toy):
    (toy.project / "mlflow.db").unlink()
    untouched = toy.state_of_everything()
    assert error(toy.kedro("resume=0123456789abcdef")).startswith("resume=0123456789abcdef: ")
    assert toy.state_of_everything() == untouched


@pytest.mark.slow
def test_a_run_that_is_trained_now_is_refused(toy: Toy):
    run_id = toy.left()
    with held_by_another_process(toy.root / run_id / "run.lock"):
        untouched = toy.state_of_everything()
        assert error(toy.kedro(f"resume={run_id}")).startswith(f"resume={run_id}: MLflow run {run_id} still runs")
        assert toy.state_of_everything() == untouched


def test_a_run_that_was_deleted_in_mlflow_or_for_good_is_refused_by_what_happened_to_it(
    tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch, no_mlflow_left_over: None
):
    database = shutil.copy(migrated_database, tmp_path / "mlflow.db")
    client = mlflow.MlflowClient(f"sqlite:///{database}")
    mlflow.set_tracking_uri(client.tracking_uri)
    run_id = client.create_run("0").info.run_id
    client.delete_run(run_id)
    for named, fix in ((run_id, "deleted in MLflow; restore"), ("f" * 32, "Start a new run")):
        with pytest.raises(ConfigError, match=f"^resume={named}: .*{fix}"):
            find_resumption(named, (named, None), now({}), tmp_path, "0")
    assert not (tmp_path / run_id).exists()


@pytest.mark.slow
def test_runs_that_the_store_does_not_know_that_were_deleted_or_are_elsewhere_are_refused(toy: Toy):
    deleted, elsewhere = toy.left(), toy.left()
    (toy.root / ("f" * 32)).mkdir()
    assert "the tracking store does not know this MLflow run" in error(toy.kedro(f"resume={'f' * 32}"))
    toy.client.delete_run(deleted)
    assert "was deleted in MLflow" in error(toy.kedro(f"resume={deleted}"))
    (toy.project / "conf" / "local" / "mlflow.yml").write_text("tracking: {experiment: {name: another}}\n")
    assert "experiment" in error(toy.kedro(f"resume={elsewhere}"))
    assert toy.get(elsewhere).info.status == "RUNNING"
    assert "resume.checkpoint" not in toy.get(elsewhere).data.tags


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mlflow.yml", "MLFLOW_RUN_ID"])
def test_a_new_training_does_not_begin_in_an_mlflow_run_that_has_trained(toy: Toy, way: str):
    run_id = toy.left()
    before = toy.get(run_id).data.to_dictionary()
    if way == "mlflow.yml":
        (toy.project / "conf" / "local" / "mlflow.yml").write_text(f"tracking: {{run: {{id: {run_id}}}}}\n")
    else:
        toy.monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    assert re.match(f"MLflow run {run_id} .*resume={run_id}.* tracking.run.id .*MLFLOW_RUN_ID", error(toy.kedro()))
    assert toy.get(run_id).data.to_dictionary() == before


def untracked(entry: ResumeCheckpointDataset, project: Path) -> None:
    """Call the hook as Kedro does before the first node, with tracking disabled."""
    hook = TrackingHook()
    hook.mlflow_config = KedroMlflowConfig.model_validate({"tracking": {"disable_tracking": {"pipelines": ["ppo"]}}})
    run_params = {"pipeline_names": ["ppo"], "project_path": str(project), "env": None}
    catalog = DataCatalog({"resume_checkpoint": entry})
    hook.before_pipeline_run(run_params, Pipeline([MAKES_STATE, ITERATES]), catalog)


def test_without_tracking_only_a_path_can_be_resumed(tmp_path: Path):
    root = tmp_path / "checkpoints"
    whole = checkpoint(root, "untracked-1", 1)
    entry = ResumeCheckpointDataset(str(root), str(whole.relative_to(tmp_path)))
    untracked(entry, tmp_path)
    assert entry.load() == whole
    for requested in ("latest", "untracked-1"):
        entry = ResumeCheckpointDataset(str(root), requested)
        untracked(entry, tmp_path)
        with pytest.raises(DatasetError, match=f"^resume={requested}: without MLflow"):
            entry.load()


@pytest.mark.slow
def test_a_longer_run_goes_on_only_from_the_newest_checkpoint(toy: Toy):
    run_id = toy.interrupted()
    newest, older = checkpoint(toy.root, run_id, 2), checkpoint(toy.root, run_id, 1)
    line = error(toy.kedro("ppo.total_episodes=32", f"resume={older}"))
    assert line.startswith(f"{older}: the run has the newer checkpoint {newest.name}, ")
    with (toy.root / run_id / "run.lock").open("a") as file:  # the refused run has released the lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads((newest / "manifest.json").read_text())["iteration"] == 2


@pytest.mark.slow
def test_a_finished_run_that_is_named_goes_on_and_logs_nothing_twice(toy: Toy):
    run = toy.run()
    models = [model.model_id for model in mlflow.search_logged_models(output_format="list")]
    again = toy.run(f"resume={run.info.run_id}")
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    assert toy.history(run.info.run_id, "objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert toy.history(run.info.run_id, "eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert [model.model_id for model in mlflow.search_logged_models(output_format="list")] == models
