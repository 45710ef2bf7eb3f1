"""Transformers' TrainerCallbacks in PPOTrainer and in the pipeline's loop."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
)

from ppo_rlhf.checkpoints.files import checkpoint_iterations
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, RewardError, TrainingError
from ppo_rlhf.ppo import callbacks
from ppo_rlhf.ppo.callbacks import SENT, Callbacks, own_callbacks, reporting_callbacks
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, read_lines
from ppo_rlhf.runtime.signals import RunInterruptedError
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.trainer.test_trainer import FUNCTION, PROMPTS, assert_same_bits, config, early_letters, weights
from tests.trainer.test_trainer import pipeline_run as run_pipeline
from tests.trainer.test_trainer_evaluation import HELD_OUT, pipelines_rows

HERE = "tests.trainer.test_callbacks"


class Recorder(TrainerCallback):
    """Records each event; can raise or set a flag of the control at one event."""

    def __init__(self, at: tuple[str, int] | None = None, act: Any = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []
        self.at, self.act = at, act

    def _note(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        self.events.append((event, state.global_step))
        assert given["model"].config is not None
        assert given["processing_class"] is not None
        assert state.max_steps > 0
        self.args = args
        if self.at == (event, state.global_step):
            if isinstance(self.act, Exception):
                raise self.act
            setattr(control, self.act, True)
            return control
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return self._note("begin", args, state, control, **given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return self._note("step", args, state, control, **given)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> Any:
        self.logs.append(logs)
        return self._note("log", args, state, control, **given)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> Any:
        self.metrics.append(metrics)
        return self._note("evaluate", args, state, control, **given)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return self._note("save", args, state, control, **given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return self._note("end", args, state, control, **given)


MADE: list[Recorder] = []


def recorder() -> Recorder:
    MADE.append(Recorder())
    return MADE[-1]


def stopper() -> Recorder:
    MADE.append(Recorder(("step", 2), "should_training_stop"))
    return MADE[-1]


def failing() -> Recorder:
    MADE.append(Recorder(("step", 2), ValueError("no such\nplace")))
    return MADE[-1]


class OfEpochs(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise NotImplementedError


def trainer_of(*own: TrainerCallback, evaluates: bool = True, **settings: Any) -> PPOTrainer:
    return PPOTrainer(
        config(**{"eval_interval": 2, "save_interval": 2, **settings}),
        tiny_model(),
        None,
        word_tokenizer(),
        reward=early_letters,
        prompts=PROMPTS,
        evaluation_prompts=HELD_OUT if evaluates else None,
        callbacks=own,
    )


ALL_EVENTS = [
    *[("begin", 0)],
    *[("step", 1), ("log", 1)],
    *[("step", 2), ("log", 2), ("save", 2), ("log", 2), ("evaluate", 2)],
    *[("step", 3), ("log", 3), ("save", 3), ("log", 3), ("evaluate", 3)],
    *[("end", 3)],
]


def test_events_come_in_the_documented_order_with_our_numbers(tmp_path: Path):
    seen = Recorder()
    trainer = trainer_of(seen)
    trainer.train(output_dir=tmp_path)
    assert seen.events == ALL_EVENTS
    of_iterations = [logs for logs in seen.logs if "objective/kl" in logs]
    assert of_iterations == [{k: v for k, v in row.items() if k != "iteration"} for row in trainer.history]
    rows = trainer.held_out.rows  # type: ignore[union-attr]
    assert [m["eval_reward"] for m in seen.metrics] == [row["eval/reward"] for row in rows]
    assert seen.args.learning_rate == trainer.config.learning_rate
    assert seen.args.to_dict()["kl_coef"] == trainer.config.kl_coef
    assert seen.args.output_dir == str(tmp_path)


def test_callbacks_change_no_bit_and_leave_the_accelerator_as_it_was():
    plain, watched = trainer_of(), trainer_of(Recorder())
    plain.train()
    watched.train()
    assert_same_bits(weights(watched.policy), weights(plain.policy))
    assert watched.state.learner.accelerator.distributed_type is not None


def test_the_pipeline_calls_those_that_a_setting_names(tmp_path: Path):
    MADE.clear()
    sft, named = save(tmp_path / "sft", tiny_model()), f"{HERE}:recorder, {HERE}:Recorder"
    rows = pipelines_rows(sft, None, callbacks=named, save_interval=2, eval_interval=2)
    (seen,) = MADE
    assert seen.events == ALL_EVENTS
    assert [metrics["eval_kl"] for metrics in seen.metrics] == [row["eval/kl"] for row in rows]


@pytest.mark.parametrize(
    "at", ["step", *(pytest.param(at, marks=pytest.mark.slow) for at in ("log", "save", "evaluate"))]
)
def test_training_stops_where_a_callback_says_so_and_stays_stopped(tmp_path: Path, at: str):
    trainer = trainer_of(Recorder((at, 2), "should_training_stop"), total_episodes=40)
    trainer.train(output_dir=tmp_path)
    assert trainer.state.progress.iteration == 2
    assert checkpoint_iterations(tmp_path) == [2]
    again = trainer_of(total_episodes=40)
    again.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert again.state.progress.iteration == 2


def test_the_pipeline_stops_too_and_exports_what_it_has(tmp_path: Path):
    sft = save(tmp_path / "sft", tiny_model())
    outputs = run_pipeline(sft, config(callbacks=f"{HERE}:stopper", total_episodes=40), FUNCTION)
    assert outputs["checkpoint"].load().progress.iteration == 2
    assert "ppo_policy" in outputs


@pytest.mark.parametrize("at", ["step", *(pytest.param(at, marks=pytest.mark.slow) for at in ("log", "evaluate"))])
def test_a_save_that_a_callback_asks_for_is_made(tmp_path: Path, at: str):
    seen = Recorder((at, 2), "should_save")
    trainer_of(seen, save_interval=100, save_total_limit=5).train(output_dir=tmp_path)
    assert checkpoint_iterations(tmp_path) == [2, 3]
    assert [event for event in seen.events if event[0] == "save"] == [("save", 2), ("save", 3)]


def test_an_evaluation_that_a_callback_asks_for_is_made():
    trainer = trainer_of(Recorder(("step", 1), "should_evaluate"), eval_interval=100)
    trainer.train()
    assert [row["iteration"] for row in trainer.held_out.rows] == [1.0, 3.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("in_pipeline", [False, True])
def test_a_resumed_run_begins_before_the_evaluation_that_it_makes_up_for(tmp_path: Path, in_pipeline: bool):
    with pytest.raises(TrainingError):
        trainer_of(Recorder(("save", 2), ValueError("x"))).train(output_dir=tmp_path / "run")
    seen, checkpoint = Recorder(), tmp_path / "run" / "iteration_000002"
    if in_pipeline:
        MADE.clear()
        sft, settings = save(tmp_path / "sft", tiny_model()), {"save_interval": 2, "eval_interval": 2}
        pipelines_rows(sft, None, resume=checkpoint, callbacks=f"{HERE}:recorder", **settings)
        (seen,) = MADE
    else:
        trainer_of(seen).train(resume_from_checkpoint=checkpoint, output_dir=tmp_path / "run")
    assert seen.events[:4] == [("begin", 2), ("log", 2), ("evaluate", 2), ("step", 3)]


def test_what_is_not_saved_is_no_event():
    seen = Recorder(("step", 2), "should_training_stop")
    trainer_of(seen).train()
    assert ("save", 2) not in seen.events


@pytest.mark.parametrize("at", ["step", *(pytest.param(at, marks=pytest.mark.slow) for at in ("log", "evaluate"))])
def test_what_a_callback_raises_ends_the_run_in_one_line_once_the_iteration_is_saved(tmp_path: Path, at: str):
    trainer = trainer_of(Recorder((at, 2), ValueError("no such\nplace")), save_interval=100)
    with pytest.raises(TrainingError) as caught:
        trainer.train(output_dir=tmp_path)
    event = {"step": "on_step_end", "log": "on_log", "evaluate": "on_evaluate"}[at]
    assert str(caught.value) == f"The callback Recorder.{event} raised ValueError: no such place"
    assert checkpoint_iterations(tmp_path) == [2]
    resumed = trainer_of(save_interval=100)
    resumed.train(resume_from_checkpoint=True, output_dir=tmp_path)
    whole = trainer_of()
    whole.train()
    assert_same_bits(weights(resumed.policy), weights(whole.policy))


class Leaves(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        sys.exit("enough")


def test_a_callback_that_would_end_the_process_ends_the_run_likewise(tmp_path: Path):
    trainer = trainer_of(Leaves(), save_interval=100)
    with pytest.raises(TrainingError) as caught:
        trainer.train(output_dir=tmp_path)
    assert str(caught.value) == "The callback Leaves.on_step_end raised SystemExit: enough"
    assert checkpoint_iterations(tmp_path) == [1]


def test_in_the_pipeline_likewise(tmp_path: Path):
    sft = save(tmp_path / "sft", tiny_model())
    with pytest.raises(TrainingError, match=r"Recorder\.on_step_end.*ValueError: no such place$"):
        run_pipeline(sft, config(callbacks=f"{HERE}:failing", save_interval=100), FUNCTION, checkpoints=tmp_path / "c")
    (run,) = (tmp_path / "c").iterdir()
    assert checkpoint_iterations(run) == [2]


@pytest.mark.parametrize(
    ("flag", "evaluates", "folder", "needed"),
    [
        ("should_log", True, True, ""),
        ("should_epoch_stop", True, True, ""),
        ("should_evaluate", False, True, "evaluation_prompts"),
        ("should_save", True, False, "output_dir"),
    ],
)
def test_a_flag_that_does_nothing_here_is_refused(
    tmp_path: Path, flag: str, evaluates: bool, folder: bool, needed: str
):
    trainer = trainer_of(Recorder(("step", 1), flag), evaluates=evaluates)
    with pytest.raises(ConfigError, match=rf"TrainerControl\.{flag}: .*{needed}"):
        trainer.train(output_dir=tmp_path if folder else None)


def test_what_is_no_callback_or_waits_for_other_events_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"on_epoch_end.*on_train_begin"):
        trainer_of(OfEpochs())
    with pytest.raises(ConfigError, match=r"int .*transformers\.TrainerCallback"):
        trainer_of(3)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="no_such_module"):
        own_callbacks(PPOConfig(callbacks="no_such_module:x"))
    with pytest.raises(ConfigError, match=rf"^ppo\.callbacks={HERE}:OfEpochs: .*on_epoch_end"):
        own_callbacks(PPOConfig(callbacks=f"{HERE}:OfEpochs"))
    with pytest.raises(ConfigError, match=rf"^ppo\.callbacks={HERE}:trainer_with: .*needed"):
        own_callbacks(PPOConfig(callbacks=f"{HERE}:trainer_with"))
    assert own_callbacks(PPOConfig()) == []


def trainer_with(needed: int) -> None:
    """A callback's factory that cannot be called without an argument."""


def test_transformers_own_callbacks_work_where_they_can(capsys):
    trainer_of(PrinterCallback()).train()
    assert "'objective/kl'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("callback", "lacks"),
    [
        (EarlyStoppingCallback(), r"state\.best_metric"),
        (EarlyStoppingCallback, r"state\.best_metric"),
        (DefaultFlowCallback(), r"by itself.*ppo\.save_interval"),
    ],
)
def test_a_callback_of_transformers_that_ppos_loop_cannot_serve_is_refused_when_it_is_given(callback: Any, lacks: str):
    with pytest.raises(ConfigError, match=rf"^PPOTrainer: callbacks: .*{lacks}"):
        trainer_of(callback)
    with pytest.raises(ConfigError, match=r"^ppo\.callbacks=transformers:EarlyStoppingCallback: .*best_metric"):
        own_callbacks(PPOConfig(callbacks="transformers:EarlyStoppingCallback"))


class ReadsKL(TrainerCallback):
    """Reads a metric that the logs of an evaluation lack; `compare` also fails at a metric that is None."""

    def __init__(self, compare: bool) -> None:
        self.compare = compare

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        control.should_training_stop = (logs.get("objective/kl") if self.compare else logs["objective/kl"]) > 1e9


@pytest.mark.parametrize(("compare", "error"), [(False, "KeyError: 'objective/kl'"), (True, "TypeError: .*")])
def test_a_callback_that_dies_of_the_logs_of_an_evaluation_is_told_which_logs_they_are(compare: bool, error: str):
    with pytest.raises(
        TrainingError, match=rf"^The callback ReadsKL\.on_log raised {error}\. .*after an evaluation.*eval_"
    ):
        trainer_of(ReadsKL(compare)).train()


class OwnProgress(ProgressCallback):
    """A subclass of a transformers callback whose events PPO's loop partly lacks."""


class OfEpochsToo(OwnProgress, OfEpochs):
    """A subclass that also implements such an event itself."""


def test_a_class_below_one_of_transformers_is_taken_if_its_own_events_are():
    assert reporting_callbacks(PPOConfig()) == []
    trainer_of(OwnProgress())
    with pytest.raises(ConfigError, match="on_epoch_end"):
        trainer_of(OfEpochsToo())


def test_callbacks_may_be_classes_or_none_as_in_transformers():
    (made,) = trainer_of(Recorder)._callbacks  # type: ignore[arg-type]
    assert isinstance(made, Recorder)
    with pytest.raises(ConfigError, match=r"^PPOTrainer: callbacks: .*early_stopping_patience"):
        trainer_of(Patient)  # type: ignore[arg-type]
    policy, tokenizer = tiny_model(), word_tokenizer()
    assert PPOTrainer(config(), policy, None, tokenizer, callbacks=None)._callbacks == []


class Patient(EarlyStoppingCallback):
    """A class that needs an argument."""

    def __init__(self, early_stopping_patience: int) -> None:
        super().__init__(early_stopping_patience)


def test_in_a_loop_of_ones_own_callbacks_are_refused():
    trainer = trainer_of(Recorder())
    with pytest.raises(ConfigError, match=r"^step: .*ppo\.report_to"):
        trainer.step([], [], [])


SAVED: Any = SimpleNamespace(is_saved=True, can_save=True, save=lambda: None)
"""Stands for a checkpointer that has saved the iteration."""


def test_the_main_processs_flags_and_any_processs_error_count_in_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    state = trainer_of().state
    of_this = Callbacks(
        state.learner,
        state.sampler,
        state.progress,
        [Recorder(("step", 0), "should_training_stop")],
        [],
        tmp_path,
        SAVED,
    )
    none = vars(TrainerControl())
    monkeypatch.setattr(callbacks, "from_all", lambda own: [(none, None), own])  # the main process sets no flag
    of_this.iteration_ended({})
    assert not state.progress.requests.end
    monkeypatch.setattr(callbacks, "from_all", lambda own: [own, (none, "The callback of process 1 failed")])
    with pytest.raises(TrainingError, match="process 1"):
        of_this.iteration_ended({})


def test_a_run_that_a_callback_ends_before_its_first_iteration_or_that_is_complete_has_none(tmp_path: Path):
    at_once = trainer_of(Recorder(("begin", 0), "should_training_stop"))
    assert at_once.train() == []
    whole = trainer_of(seen := Recorder())
    whole.train(output_dir=tmp_path)
    seen.events.clear()
    whole.train(output_dir=tmp_path)
    assert seen.events == []
    failing_again = trainer_of(Recorder(("begin", 3), ValueError("x")), total_episodes=16)
    failing_again.load_checkpoint(tmp_path / "iteration_000003")
    with pytest.raises(TrainingError, match=r"on_train_begin.*ValueError: x"):
        failing_again.train(output_dir=tmp_path)


# --- report_to


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    actual: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        actual[tag] = {point.step: point.value for point in points}
        assert len(actual[tag]) == len(points), f"{tag} has a step twice"
    return actual


def test_tensorboard_has_every_number_once_also_after_a_kill(tmp_path: Path):
    """The first process ends after iteration 3; its last checkpoint is of iteration 2."""
    settings = {"report_to": "tensorboard", "total_episodes": 20, "save_interval": 2}

    class Kill(KeyboardInterrupt):
        pass

    class KillAt3(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 4:
                raise Kill

    first = trainer_of(KillAt3(), **settings)
    first_save = first.save_checkpoint
    first.save_checkpoint = lambda folder: first_save(folder) if first.state.progress.iteration < 4 else folder  # type: ignore
    with pytest.raises(Kill):
        first.train(output_dir=tmp_path)
    for newer in tmp_path.glob(
        "iteration_00000[34]"
    ):  # saved after the exception; a killed process would not have these
        shutil.rmtree(newer)
    assert checkpoint_iterations(tmp_path) == [2]
    second = trainer_of(**settings)
    second.train(resume_from_checkpoint=True, output_dir=tmp_path)
    actual = scalars(tmp_path / "tensorboard")
    for key in ("objective/kl", "objective/scores", "loss/policy"):
        if key in second.history[0]:
            expected = {int(row["iteration"]): pytest.approx(row[key], rel=1e-6, abs=1e-9) for row in second.history}
            assert actual[f"train/{key}"] == expected, key
    rows = second.held_out.rows  # type: ignore[union-attr]
    assert actual["eval/reward"] == {int(row["iteration"]): pytest.approx(row["eval/reward"], rel=1e-6) for row in rows}


@pytest.mark.slow
def test_tensorboard_has_every_number_once_if_the_kill_came_before_the_first_checkpoint(tmp_path: Path):
    settings = {"report_to": "tensorboard", "evaluates": False}
    trainer_of(**settings).train(output_dir=tmp_path)
    for checkpoint in tmp_path.glob("iteration_*"):  # as if the process had been killed before it saved one
        shutil.rmtree(checkpoint)
    trainer_of(**settings).train(output_dir=tmp_path)
    assert list(scalars(tmp_path / "tensorboard")["train/objective/kl"]) == [1, 2, 3]


def test_wandb_runs_offline_in_one_run_that_a_resumed_one_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    trainer_of(report_to="wandb", total_episodes=8).train(output_dir=run)
    first = json.loads((run / SENT).read_text())
    assert first["iteration"] == 2
    trainer_of(report_to="wandb", total_episodes=12).train(resume_from_checkpoint=True, output_dir=run)
    second = json.loads((run / SENT).read_text())
    assert second["wandb"] == first["wandb"]
    assert second["iteration"] == 3
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{first['wandb']}"))
    assert folders
    import wandb

    assert wandb.run is None  # the trainer finished its run


class Reporter(TrainerCallback):
    """Stands in for an integration; records (step, value of a metric, whether it is of an evaluation)."""

    def __init__(self) -> None:
        self.got: list[tuple[int, float, bool]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        is_evaluation = "eval_reward" in logs
        self.got.append((state.global_step, logs["eval_reward" if is_evaluation else "objective/kl"], is_evaluation))


class WandbCallback(Reporter):
    """Has the class name of transformers' integration, by which `Callbacks` recognises it."""


def killed_after_four(folder: Path, monkeypatch: pytest.MonkeyPatch, reporter: Reporter) -> None:
    """Train four of five iterations, then leave the folder as after a kill."""

    class KillAt4(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr("ppo_rlhf.trainer.trainer.reporting_callbacks", lambda config: [reporter])
    trainer = trainer_of(KillAt4(), total_episodes=20, save_interval=2)
    with monkeypatch.context() as patched:
        patched.setattr(Callbacks, "close", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(output_dir=folder)


def resumed_at_four(folder: Path, monkeypatch: pytest.MonkeyPatch, reporter: Reporter, own: Recorder) -> PPOTrainer:
    monkeypatch.setattr("ppo_rlhf.trainer.trainer.reporting_callbacks", lambda config: [reporter])
    trainer = trainer_of(own, total_episodes=20, save_interval=2)
    trainer.train(resume_from_checkpoint=True, output_dir=folder)
    return trainer


@pytest.mark.parametrize("known", [2, 4])
def test_after_a_kill_an_integration_gets_in_order_what_it_is_not_known_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
):
    """A kill between a report and the note of it repeats that report. The user's callbacks get no iteration twice."""
    first, second, own = Reporter(), Reporter(), Recorder()
    killed_after_four(tmp_path, monkeypatch, first)
    assert json.loads((tmp_path / SENT).read_text()) == {"iteration": 4, "evaluation": 4}
    (tmp_path / SENT).write_text(json.dumps({"iteration": known, "evaluation": known}))
    trainer = resumed_at_four(tmp_path, monkeypatch, second, own)
    metrics = [(step, trainer.history[step - 1]["objective/kl"], False) for step in range(1, 6)]
    rows = [(int(row["iteration"]), row["eval/reward"], True) for row in trainer.held_out.rows]  # type: ignore
    every = sorted([*metrics, *rows], key=lambda each: (each[0], each[2]))
    assert [each for each in first.got if each[0] <= known] + second.got == every
    assert [step for event, step in own.events if event == "step"] == [5]
    assert json.loads((tmp_path / SENT).read_text()) == {"iteration": 5, "evaluation": 5}


def test_an_evaluation_that_was_saved_with_its_iteration_is_in_the_record_once_when_the_run_goes_on(tmp_path: Path):
    class SaveAt2(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_save = state.global_step == 2

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    settings = {"save_interval": 100, "total_episodes": 12, "eval_interval": 1}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(SaveAt2(), **settings).train(output_dir=tmp_path)
    assert checkpoint_iterations(tmp_path) == [2]
    trainer_of(**settings).train(resume_from_checkpoint=True, output_dir=tmp_path)
    lines = [(line.kind, line.step) for line in read_lines(tmp_path / "metrics.jsonl")]
    assert lines == [(kind, step) for step in (1, 2, 3) for kind in (ITERATION, EVALUATION)]


def test_wandb_gets_after_a_kill_what_its_server_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The server has steps up to 2, but does not say whether it has the evaluation of step 2."""
    wandb = pytest.importorskip("wandb")
    killed_after_four(tmp_path, monkeypatch, Reporter())
    run = SimpleNamespace(id="abc", resumed=True, summary={"train/global_step": 2}, finish=lambda: None)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    reporter = WandbCallback()
    resumed_at_four(tmp_path, monkeypatch, reporter, Recorder())
    assert [step for step, _, is_evaluation in reporter.got if not is_evaluation] == [3, 4, 5]


@pytest.mark.slow
def test_a_scripts_own_wandb_run_with_later_steps_of_another_training_gets_every_iteration(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "run", SimpleNamespace(resumed=True, summary={"train/global_step": 5000}))
    reporter = WandbCallback()
    monkeypatch.setattr("ppo_rlhf.trainer.trainer.reporting_callbacks", lambda config: [reporter])
    trainer_of(evaluates=False).train()
    assert [step for step, _, _ in reporter.got] == [1, 2, 3]


class Unfinished:
    id = "abc"

    def finish(self) -> None:
        raise RuntimeError("no\nanswer")


def test_what_fails_at_the_end_of_reports_is_a_warning_and_not_the_runs_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state = trainer_of().state
    closing = Callbacks(state.learner, state.sampler, state.progress, [], [Reporter()], tmp_path, SAVED)
    closing._own_run = Unfinished()
    with pytest.raises(TerminationSignal), contextlib.closing(closing):
        raise TerminationSignal(15)
    messages = [record.getMessage() for record in caplog.records if record.name == "ppo_rlhf.ppo.callbacks"]
    (message,) = messages
    assert re.match(r"W&B's run abc .*: no answer$", message)


@pytest.mark.slow
def test_what_an_error_kept_from_the_reports_does_not_count_as_reported(tmp_path: Path):
    failing_at_2 = trainer_of(Recorder(("step", 2), ValueError("x")), report_to="tensorboard")
    with pytest.raises(TrainingError, match=r"on_step_end.*ValueError: x"):
        failing_at_2.train(output_dir=tmp_path)
    assert json.loads((tmp_path / SENT).read_text()) == {"iteration": 1}
    assert list(scalars(tmp_path / "tensorboard")["train/objective/kl"]) == [1]


@pytest.mark.parametrize(
    ("report_to", "line"),
    [("tensorbord", "report_to=tensorbord: "), ("all", "report_to=all: "), ("comet_ml", "comet")],
)
def test_a_report_that_cannot_be_made_is_refused_in_one_line(report_to: str, line: str):
    with pytest.raises(ConfigError, match=line) as caught:
        reporting_callbacks(PPOConfig(report_to=report_to))
    assert "\n" not in str(caught.value)


def test_a_report_that_is_named_twice_is_made_once():
    assert len(reporting_callbacks(PPOConfig(report_to="tensorboard,none, tensorboard"))) == 1


def test_tensorboard_needs_a_folder():
    with pytest.raises(ConfigError, match=r"report_to=tensorboard.*output_dir"):
        trainer_of(report_to="tensorboard").train()


# --- max_time


def test_after_max_time_the_iteration_is_saved_and_the_run_resumes_bit_for_bit(tmp_path: Path):
    whole = trainer_of(evaluates=False)
    whole.train()
    limited = trainer_of(evaluates=False, max_time=1e-9, save_interval=100)
    with pytest.raises(RunInterruptedError, match=r"ppo\.max_time=1e-09") as caught:
        limited.train(output_dir=tmp_path)
    assert caught.value.exit_code == 143
    assert checkpoint_iterations(tmp_path) == [1]
    resumed = trainer_of(evaluates=False, max_time=1000.0)
    resumed.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert_same_bits(weights(resumed.policy), weights(whole.policy))


def test_after_max_time_a_due_evaluation_is_left_to_the_run_that_resumes(tmp_path: Path):
    whole = trainer_of(eval_interval=1)
    whole.train()
    limited = trainer_of(eval_interval=1, max_time=1e-9)
    with pytest.raises(RunInterruptedError):
        limited.train(output_dir=tmp_path)
    assert limited.held_out is not None
    assert limited.held_out.rows == []
    resumed = trainer_of(eval_interval=1)
    resumed.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert whole.held_out is not None
    assert resumed.held_out is not None
    assert resumed.held_out.rows == whole.held_out.rows
    assert [row["iteration"] for row in whole.held_out.rows] == [1, 2, 3]


def test_max_time_needs_a_folder():
    with pytest.raises(ConfigError, match=r"ppo\.max_time.*output_dir"):
        trainer_of(max_time=1.0).train()
