"""Calls transformers' TrainerCallbacks in PPO's loop: the user's callbacks and reporting callbacks (TensorBoard, W&B).

docs/trainer.md says when each callback event is called and which flags of TrainerControl have an effect.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, TrainingError, in_one_line, kind_and_text
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, METRICS, read_lines
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.processes import from_all, from_main, is_main_process
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal
from ppo_rlhf.runtime.user_functions import load_function
from ppo_rlhf.runtime.whole_files import replace_text

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from ppo_rlhf.ppo.batch_sampling import Sampler
    from ppo_rlhf.ppo.checkpointer import Checkpointer
    from ppo_rlhf.ppo.learner import Learner
    from ppo_rlhf.ppo.progress import Progress

logger = logging.getLogger(__name__)

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
SENT = "callbacks.sent.json"
"""File beside metrics.jsonl with the id of W&B's run, and the last iteration and evaluation that were reported. It is
written after each report."""
NONE, TENSORBOARD, WANDB = "none", "tensorboard", "wandb"


def own_callbacks(config: PPOConfig, project_path: Path | None = None) -> list[TrainerCallback]:
    """Return the callbacks that `ppo.callbacks` names.

    Raises:
        ConfigError: A callback is not a TrainerCallback, or has an event that PPO's loop lacks.
        RewardError: A name cannot be imported.
    """
    callbacks = []
    for name in [name.strip() for name in (config.callbacks or "").split(",") if name.strip()]:
        where = f"ppo.callbacks={name}"
        callbacks.append(checked(_create(load_function(name, project_path), where), where))
    return callbacks


def _create(factory: Callable[[], Any], where: str) -> Any:
    try:
        with ending_children():
            return factory()
    except (TerminationSignal, KeyboardInterrupt):
        raise
    except BaseException as error:  # the constructor of a user's callback class can raise any exception
        raise ConfigError(f"{where}: creating the callback raised {in_one_line(error)}") from error


def reporting_callbacks(config: PPOConfig) -> list[TrainerCallback]:
    """Return transformers' reporting callbacks for the integrations that `ppo.report_to` names.

    Raises:
        ConfigError: transformers has no integration with a name in `ppo.report_to`, or the integration's package is not
            installed.
    """
    unique_names = dict.fromkeys(name.strip() for name in config.report_to.split(","))
    names = [name for name in unique_names if name not in ("", NONE)]
    if not names:
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    if "all" in names:
        raise ConfigError("ppo.report_to=all: name the integrations, such as tensorboard,wandb")
    try:
        return [callback() for callback in get_reporting_integration_callbacks(names)]
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"ppo.report_to={config.report_to}: {in_one_line(error)}") from None


def checked(callback: Any, where: str) -> TrainerCallback:
    """Return a callback, which is given as an object or as a class, after checking that PPO's loop can call it.

    Raises:
        ConfigError: The callback is not a TrainerCallback, cannot be created, implements an event that PPO's loop
            lacks, or is a callback of transformers that needs what PPO's loop lacks.
    """
    from transformers import DefaultFlowCallback, EarlyStoppingCallback, TrainerCallback

    callback = _create(callback, where) if isinstance(callback, type) else callback
    if not isinstance(callback, TrainerCallback):
        raise ConfigError(f"{where}: {type(callback).__name__} is not a transformers.TrainerCallback")
    lacking: dict[type[TrainerCallback], str] = {
        EarlyStoppingCallback: "EarlyStoppingCallback reads state.best_metric, which PPO's loop does not have. Set "
        "control.should_training_stop in on_evaluate of a callback of your own.",
        DefaultFlowCallback: "DefaultFlowCallback asks to log, save and evaluate, which PPO's loop does by itself. Set "
        "ppo.save_interval and ppo.eval_interval.",
    }
    for kind, why in lacking.items():
        if isinstance(callback, kind):
            raise ConfigError(f"{where}: {why}")
    missing = sorted({name for name in dir(TrainerCallback) if name.startswith("on_")} - set(EVENTS))
    used = [name for name in missing if not getattr(type(callback), name).__module__.startswith("transformers.")]
    if used:
        raise ConfigError(f"{where}: PPO's loop has no {', '.join(used)}; its events are {', '.join(EVENTS)}")
    return callback


class Callbacks:
    """Calls a run's callbacks and acts on the flags of TrainerControl that the callbacks set.

    Every process calls the callbacks; all processes act on the flags of the main process.

    After each event the iteration is saved if a callback asked for a checkpoint, ended training, or failed. After the
    save, the error of a failed callback is raised: TrainingError for an exception in a callback, `sys.exit` included;
    ConfigError for a flag that has no effect in PPO's loop.
    """

    def __init__(
        self,
        learner: Learner,
        sampler: Sampler,
        progress: Progress,
        own: Sequence[TrainerCallback],
        reporting: Sequence[TrainerCallback],
        folder: Path | None,
        checkpointer: Checkpointer,
        *,
        can_evaluate: bool = True,
    ) -> None:
        """Prepare the callbacks of a new or resumed run.

        Args:
            learner: Its policy and optimiser are arguments of each event.
            sampler: Its tokenizer is an argument of each event.
            progress: `progress.iteration` is the current iteration.
            own: The user's callbacks.
            reporting: The reporting callbacks (W&B, TensorBoard); each is sent the steps that it has not reported yet.
            folder: The folder of the run's checkpoints; None if the run saves no checkpoints.
            checkpointer: Saves the current iteration.
            can_evaluate: Whether the run can evaluate; if not, a callback that sets `should_evaluate` is an error.
        """
        from transformers import TrainerControl, TrainerState

        self._learner, self._sampler, self._progress = learner, sampler, progress
        self._folder, self._checkpointer, self._can_evaluate = folder, checkpointer, can_evaluate
        self._own, self._reporting = list(own), list(reporting)
        self._all = [*own, *reporting]
        self._control = TrainerControl()
        self._error: Exception | None = None
        self._is_begun = False
        # The W&B run that this object began; None: the user's script began the run, or no run exists
        self._own_run: Any = None
        self._reported: dict[str, Any] = {}
        # The last steps that each reporting callback (W&B, TensorBoard) had already logged before a resume
        self._last_reported: list[dict[str, int]] = []
        if not self._all:
            return
        self._args = _training_arguments(progress.config, folder)
        main = is_main_process()
        self._shown = TrainerState(
            max_steps=progress.total_iterations,
            train_batch_size=progress.config.per_device_train_batch_size,
            is_local_process_zero=main,
            is_world_process_zero=main,
        )
        self._shown.compute_steps(self._args, progress.total_iterations)
        path = None if folder is None else folder / SENT
        self._reported = json.loads(path.read_bytes()) if path is not None and path.is_file() else {}
        self._begin_reports()
        self._last_reported = from_main([self._last_steps(callback) for callback in self._reporting])
        self._catch_up()

    @property
    def is_empty(self) -> bool:
        """Whether the run has no callback."""
        return not self._all

    def begin(self) -> None:
        """Call `on_train_begin` of all callbacks, before this process's first iteration."""
        self._is_begun = True
        self._call("on_train_begin")
        self._settle()

    def iteration_ended(self, metrics: Mapping[str, float]) -> None:
        """Call the events of a complete iteration."""
        self._control.should_save = self._control.should_evaluate = False
        self._call("on_step_end")
        self._log(ITERATION, metrics)
        if self._checkpointer.is_saved and self._checkpointer.can_save:
            self._call("on_save")
        self._progress.requests.evaluate = self._control.should_evaluate
        self._settle()

    def evaluated(self, row: Mapping[str, Any] | None) -> None:
        """Call the events of an evaluation.

        `row` has the metrics `eval/*`, which callbacks get as `eval_*`. If `row` is None or belongs to another
        iteration than the current iteration, no event is called.
        """
        self._progress.requests.evaluate = False
        if not row or row["iteration"] != self._progress.iteration:
            return
        metrics = _named_as_in_transformers(row)
        self._control.should_save = False
        self._log(EVALUATION, metrics)
        self._call("on_evaluate", metrics=metrics)
        self._settle()

    def _settle(self) -> None:
        if not self._all:
            return
        # Save again, because the iteration's earlier checkpoint does not record that a callback ended training
        is_new = self._control.should_training_stop and not self._progress.requests.end
        self._progress.requests.end |= is_new
        is_asked = self._control.should_save or self._error is not None
        if self._progress.iteration and (is_new or (is_asked and not self._checkpointer.is_saved)):
            self.save()
        if self._error is not None:
            raise self._error

    def save(self) -> None:
        """Save the current iteration, whether or not a checkpoint is due, and call `on_save`."""
        self._checkpointer.save()
        if self._checkpointer.can_save:
            self._call("on_save")

    def end(self) -> None:
        """Call `on_train_end` of all callbacks, if `begin` was called."""
        if self._is_begun:
            self._call("on_train_end")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Finish W&B's run if `Callbacks` began the W&B run; call `close` after an error, too.

        An error of W&B is logged as a warning and does not fail the run.
        """
        run, self._own_run = self._own_run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:  # W&B raises exception types of its own
                logger.warning("W&B's run %s did not finish: %s", run.id, in_one_line(error))

    def _log(self, what: str, logs: Mapping[str, float], step: int | None = None) -> None:
        """Call `on_log` for the current iteration, or for an earlier `step`.

        Reporting callbacks that already have the step are not called. The user's callbacks are not called for an
        earlier step.
        """
        logged_step = self._progress.iteration if step is None else step
        reported = zip(self._reporting, self._last_reported, strict=True)
        without = [callback for callback, last in reported if last[what] >= logged_step]
        logs = {name: value for name, value in logs.items() if name != "iteration"}
        self._call("on_log", without=without if step is None else [*self._own, *without], step=step, logs=logs)
        if self._error is None and self._reporting:
            self._reported[what] = max(self._reported.get(what, 0), logged_step)
            self._write_reported()

    def _last_steps(self, callback: TrainerCallback) -> dict[str, int]:
        """Return the last steps, of metrics and of evaluations, that a reporting callback already has.

        TensorBoard gets the steps from the resumed iteration on again, since `_hide_repeated` hides the earlier reports
        of these steps. W&B is asked for the last step of a W&B run that `Callbacks` resumed, but not of a W&B run that
        the user's script began, which may have the steps of another training. For all other integrations the file
        `SENT` has the last steps.
        """
        resumed_at, kind = self._progress.iteration, type(callback).__name__
        if kind == "TensorBoardCallback":
            return {ITERATION: resumed_at - 1, EVALUATION: resumed_at - 1}
        if kind == "WandbCallback" and self._own_run is not None and self._own_run.resumed:
            last = self._own_run.summary.get("train/global_step")
            if last is not None:
                # An evaluation is logged after the metrics of its iteration, so the last evaluation may be missing
                return {ITERATION: int(last), EVALUATION: int(last) - 1}
        return {what: self._reported.get(what, 0) for what in (ITERATION, EVALUATION)}

    def _catch_up(self) -> None:
        """Send the lines of metrics.jsonl that a reporting callback lacks, up to the resumed iteration."""
        if not self._reporting:
            return
        rows = [(ITERATION, row) for row in self._progress.history]
        if self._folder is not None:
            lines = read_lines(self._folder / METRICS) if is_main_process() else ()
            rows = from_main([(line.kind, line.metrics) for line in lines if line.kind in (ITERATION, EVALUATION)])
        for kind, row in rows:
            step = int(row["iteration"])
            if any(last[kind] < step for last in self._last_reported):
                self._log(kind, row if kind == ITERATION else _named_as_in_transformers(row), step)

    def _call(
        self, event: str, *, without: Sequence[TrainerCallback] = (), step: int | None = None, **given: Any
    ) -> None:
        """Call an event of all callbacks except `without`; then all processes take the main process's flags.

        `step` is given for an earlier step than the current iteration. transformers' `CallbackHandler.call_event` is
        not used, because `call_event` cannot leave out a callback, does not say which callback raised an error, and
        does not share flags and errors between processes.
        """
        if not self._all or self._error is not None:
            return
        self._shown.global_step = self._progress.iteration if step is None else step
        if "logs" in given and step is None:
            self._shown.log_history.append({**given["logs"], "step": self._progress.iteration})
        given |= {
            "model": self._learner.policy,
            "processing_class": self._sampler.tokenizer,
            "optimizer": self._learner.policy_optimizer,
        }
        given |= dict.fromkeys(("lr_scheduler", "train_dataloader", "eval_dataloader"))
        error: Exception | None = None
        for callback in [callback for callback in self._all if callback not in without]:
            try:
                with ending_children():
                    answer = getattr(callback, event)(self._args, self._shown, self._control, **given)
                self._control = answer or self._control
            # Signals and Ctrl-C are not caused by the callback: re-raise them unchanged
            except (TerminationSignal, KeyboardInterrupt):
                raise
            except BaseException as raised:  # a user's callback can raise any exception, SystemExit included
                name = f"{type(callback).__name__}.{event}"
                error = TrainingError(f"The callback {name} raised {kind_and_text(raised)}{_which_logs(raised, given)}")
                error.__cause__ = raised
                break
        message = None if error is None else str(error)
        flags, errors = zip(*from_all((asdict(self._control), message)), strict=True)
        for name, value in flags[0].items():  # all processes use the control flags of the main process
            setattr(self._control, name, value)
        self._error = error or self._refusal()
        if self._error is None and any(errors):
            self._error = TrainingError(next(filter(None, errors)))
            self._error.__cause__ = RuntimeError("in another process")

    def _refusal(self) -> ConfigError | None:
        """Return an error if a callback set a flag that has no effect in this run, else None."""
        control = self._control
        asked = {
            "should_epoch_stop: PPO's loop has no epochs of data": control.should_epoch_stop,
            "should_log: every iteration is logged": control.should_log,
            "should_save: give train() an output_dir": control.should_save and self._folder is None,
            "should_evaluate: there are no evaluation_prompts": control.should_evaluate and not self._can_evaluate,
        }
        why = next((why for why, is_asked in asked.items() if is_asked), None)
        return None if why is None else ConfigError(f"A callback set TrainerControl.{why}")

    def _begin_reports(self) -> None:
        """Continue a resumed run's reports: set TensorBoard's folder, resume W&B's run."""
        for callback in self._reporting:
            kind = type(callback).__name__
            # A folder from TENSORBOARD_LOGGING_DIR may also hold the files of other runs
            is_shared = bool(os.environ.get("TENSORBOARD_LOGGING_DIR"))
            if kind == "TensorBoardCallback" and not is_shared:
                if self._folder is None:
                    raise ConfigError("ppo.report_to=tensorboard: give train() an output_dir for TensorBoard's files")
                callback.logging_dir = str(self._folder / TENSORBOARD)  # type: ignore[attr-defined]
            if kind == "TensorBoardCallback" and (self._progress.iteration or not is_shared) and is_main_process():
                self._hide_repeated(callback)
            if kind == "WandbCallback" and is_main_process():
                self._begin_wandb()

    def _begin_wandb(self) -> None:
        import wandb

        if wandb.run is not None:  # the user's script has already begun a W&B run
            return
        resumption = {"id": self._reported[WANDB], "resume": "allow"} if WANDB in self._reported else {}
        try:
            self._own_run = wandb.init(project=os.environ.get("WANDB_PROJECT", "huggingface"), **resumption)
        except Exception as error:  # W&B cannot begin a run, for example without an API key or a network
            raise ConfigError(f"ppo.report_to=wandb: {in_one_line(error)}") from error
        self._reported[WANDB] = self._own_run.id
        self._write_reported()

    def _hide_repeated(self, callback: Any) -> None:
        """Let TensorBoard hide the earlier reports of steps from the resumed iteration on, which are reported again."""
        from torch.utils.tensorboard import SummaryWriter

        callback.tb_writer = SummaryWriter(callback.logging_dir, purge_step=self._progress.iteration)

    def _write_reported(self) -> None:
        if self._folder is not None and is_main_process():
            try:
                replace_text(self._folder / SENT, json.dumps(self._reported))
            except OSError as error:
                logger.warning("%s: %s. A resumed run may report some steps twice.", SENT, in_one_line(error))


def _named_as_in_transformers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's metrics `eval/*` under the names `eval_*`."""
    return {f"eval_{name[5:]}": value for name, value in row.items() if name.startswith("eval/")}


def _which_logs(raised: BaseException, given: Mapping[str, Any]) -> str:
    """Return the end of the line on an error in `on_log` that the logs of an evaluation explain, else "".

    A callback that reads `logs["objective/kl"]` works until the first evaluation.
    """
    logs: Mapping[str, float] = given.get("logs") or {}
    is_evaluation = bool(logs) and all(name.startswith("eval_") for name in logs)
    if not is_evaluation or not isinstance(raised, KeyError | TypeError):
        return ""
    return ". on_log is also called after an evaluation, with the metrics eval_* alone: look whether logs has the name"


def _training_arguments(config: PPOConfig, folder: Path | None) -> Any:
    """Return TrainingArguments for callbacks, whose `to_dict` also has the settings of PPOConfig for W&B to report."""
    from transformers import TrainingArguments

    class Arguments(TrainingArguments):
        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), **asdict(config)}

    return Arguments(
        output_dir=None if folder is None else str(folder),
        # `use_configured_state` keeps transformers' TrainingArguments from resetting the run's Accelerator
        accelerator_config={"use_configured_state": True},
        report_to="none",  # no integrations from TrainingArguments, because this class calls the callbacks itself
        max_steps=config.num_total_batches,
        logging_steps=1,
        save_steps=config.save_interval,
        save_total_limit=config.save_total_limit,
        eval_strategy="steps",
        eval_steps=config.eval_interval,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
