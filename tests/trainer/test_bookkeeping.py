"""What PPOTrainer prints during training, and what is on disk after an exception."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from datasets import load_dataset
from rich.console import Console

from ppo_rlhf.core.errors import CheckpointError, ConfigError, RewardError
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.runtime import progress_display, signals
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import DATED_TEMPLATE, save, set_today, tiny_model, word_tokenizer
from tests.trainer.test_trainer import (
    PROMPTS,
    assert_same_bits,
    config,
    early_letters,
    repeatable,
    trainer_of,
    weights,
)


@pytest.fixture
def sft(tmp_path: Path) -> str:
    return save(tmp_path / "sft", tiny_model())


def forget_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the log handlers of pytest and Kedro, as in a script that has not set up logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert not logging.getLogger("ppo_rlhf.trainer.trainer").hasHandlers()


def test_a_script_without_logging_sees_each_iteration(sft: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    forget_logging(monkeypatch)
    trainer_of(sft).train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[:3]] == [f"Iteration {i}/3" for i in (1, 2, 3)]
    assert "score" in lines[0]
    assert lines[3].startswith("3 iterations of the policy")


def test_a_script_is_told_where_checkpoint_and_policy_are(
    sft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_logging(monkeypatch)
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(sft)
    trainer.train(output_dir="my-run")
    trainer.save_pretrained("my-policy")
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "The last checkpoint is my-run/iteration_000003"
    assert lines[-1] == "The policy is saved in my-policy"
    assert Path("my-run/iteration_000003").is_dir()
    trainer_of(sft).train(resume_from_checkpoint="my-run/iteration_000003", output_dir="other")
    assert "The last checkpoint" not in capsys.readouterr().out


def test_of_many_iterations_a_script_sees_the_first_the_last_and_one_line_in_ten_seconds(
    sft: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_logging(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(progress_display, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(prompts: list[str], completions: list[str]) -> list[float]:
        now[0] += 3.0  # an iteration takes three seconds
        return early_letters(prompts, completions)

    trainer = trainer_of(sft, config(total_episodes=22 * config().batch_size, num_ppo_epochs=1), reward=slow)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Iteration ")]
    assert [line.partition(",")[0] for line in lines] == [f"Iteration {i}/22" for i in (1, 5, 9, 13, 17, 21, 22)]
    assert ", 0:00:51 left" in lines[1]  # 17 iterations
    assert len(trainer.history) == 22


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_with_the_time_left_below_the_lines(sft: str, monkeypatch: pytest.MonkeyPatch):
    forget_logging(monkeypatch)
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console(width=80)
    monkeypatch.setattr(rich, "get_console", lambda: console)

    def slow_letters(prompts: list[str], completions: list[str]) -> list[float]:
        time.sleep(0.5)  # the bar is drawn four times a second
        return early_letters(prompts, completions)

    trainer_of(sft, reward=slow_letters).train()
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"PPO \S+ \S+ 1/3 \d:\d\d:\d\d left, score 0\.", re.sub(r"\x1b\[[\d;?]*\w", "", shown))
    assert shown.index("Iteration 1/3, score 0.") < shown.index("Iteration 2/3, score 0.")


@pytest.mark.slow
def test_with_logging_set_up_the_log_has_the_lines_and_nothing_is_printed(
    sft: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        trainer_of(sft).train()
    assert len([record for record in caplog.records if record.message.startswith("Iteration ")]) == 3
    assert (sys.stdout.getvalue(), sys.stderr.getvalue()) == ("", "")  # type: ignore[attr-defined]


def failing(calls: int, error: BaseException) -> Any:
    """Return the reward of the other tests; it raises after the given number of calls."""
    left = [calls]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return early_letters(prompts, completions)

    reward.__name__ = "early_letters"  # the metric's name
    return reward


def saved(folder: Path) -> list[str]:
    return (
        sorted(path.name for path in folder.iterdir() if path.name not in ("run.lock", "completions", "metrics.jsonl"))
        if folder.exists()
        else []
    )


@pytest.mark.parametrize(
    "error",
    [pytest.param(ZeroDivisionError("x"), marks=pytest.mark.slow), KeyboardInterrupt()],
    ids=["error", "Ctrl-C"],
)
def test_an_exception_saves_the_last_whole_iteration_and_training_resumes_from_it(
    sft: str, tmp_path: Path, error: BaseException
):
    """With the default save_interval nothing would be on disk. The reward is called once before the run."""
    with pytest.raises((RewardError, KeyboardInterrupt)):
        trainer_of(sft, reward=failing(1 + 2, error)).train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["iteration_000002"]
    whole, again = trainer_of(sft), trainer_of(sft)
    whole.train()
    again.train(resume_from_checkpoint=True, output_dir=tmp_path / "run")
    assert repeatable(again.history) == repeatable(whole.history)
    assert_same_bits(weights(again.policy), weights(whole.policy))
    assert_same_bits(weights(again.state.learner.critic), weights(whole.state.learner.critic))


def test_a_process_that_is_forked_in_training_saves_and_closes_nothing(sft: str, tmp_path: Path, monkeypatch):
    parent, trained = os.getpid(), loop.train
    closed = tmp_path / "closed"

    def forks(*given: Any) -> None:
        trained(*given)
        if (child := os.fork()) == 0:
            raise ValueError("no")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    monkeypatch.setattr(loop, "train", forks)
    monkeypatch.setattr(Callbacks, "close", lambda _: closed.open("a").write(f"{os.getpid()}\n"))
    try:
        trainer_of(sft, config(save_interval=99)).train(output_dir=tmp_path / "run")
    finally:
        if os.getpid() != parent:
            os._exit(99)  # a child process must not continue with the tests
    assert closed.read_text().split() == [str(parent)]


@pytest.mark.slow
def test_nothing_is_saved_without_a_directory_or_a_whole_iteration(sft: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = saved(tmp_path)
    with pytest.raises(RewardError):
        trainer_of(sft, reward=failing(1 + 2, ZeroDivisionError())).train()
    assert saved(tmp_path) == before
    with pytest.raises(RewardError):
        trainer_of(sft, reward=failing(1, ZeroDivisionError())).train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == []


def raising_at(call: int, function: Any) -> Any:
    calls = []

    def wrapped(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("the device is lost")
        return function(*arguments)

    return wrapped


STEPS = 4  # optimiser steps of an iteration: 2 epochs of 2 minibatches


def test_an_update_that_took_no_step_yet_is_no_loss(sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Learner, "compute_gradients", raising_at(STEPS + 1, Learner.compute_gradients))
    with pytest.raises(RuntimeError, match="device is lost"):
        trainer_of(sft).train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["iteration_000001"]


def interrupting(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGINT to this process, as Ctrl-C does, in the given optimiser steps, counted from 1."""
    function, calls = Learner.take_step, itertools.count(1)

    def wrapped(*arguments: Any) -> None:
        if next(calls) in steps:
            signal.raise_signal(signal.SIGINT)
        function(*arguments)

    monkeypatch.setattr(Learner, "take_step", wrapped)


def test_ctrl_c_in_an_update_saves_that_iteration_once_it_is_whole(
    sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Ctrl-C comes in step 2 of 4 of iteration 2; with the default save_interval no checkpoint is due."""
    trainer, whole = trainer_of(sft), trainer_of(sft)
    with monkeypatch.context() as patched:
        interrupting([STEPS + 2], patched)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["iteration_000002"]
    line = r"SIGINT: finishing iteration 2 and saving it in about \d+ s, then stopping; a second signal stops at once\."
    assert re.search(line, capfd.readouterr().err)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trainer.train(output_dir=tmp_path / "run")
    whole.train()
    assert_same_bits(weights(trainer.policy), weights(whole.policy))


def test_a_second_ctrl_c_in_an_update_stops_at_once(sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    interrupting([STEPS + 2, STEPS + 3], monkeypatch)
    trainer = trainer_of(sft)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(output_dir=tmp_path / "run")
    assert trainer.state.progress.updating
    assert saved(tmp_path / "run") == []


def signalling(calls: int) -> Any:
    """Return the reward of the other tests; it sends SIGINT to this process after the given number of calls."""
    left = [calls]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        return early_letters(prompts, completions)

    reward.__name__ = "early_letters"  # the metric's name
    return reward


def test_ctrl_c_outside_of_an_update_stops_at_once(sft: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trainer = trainer_of(sft, reward=signalling(1 + 1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["iteration_000001"]
    line = "SIGINT: stopping before the update of iteration 2; iteration 1 is saved; a second signal stops at once."
    assert line in capfd.readouterr().err
    assert len(trainer.train(output_dir=tmp_path / "run")) == 3  # the interruption left no request


def test_a_handler_of_the_callers_own_is_kept(sft: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        interrupting([STEPS + 2], monkeypatch)
        assert len(trainer_of(sft).train()) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_outside_of_the_main_thread_training_leaves_the_handler_alone(sft: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    trainer, step = trainer_of(sft), Learner.take_step
    monkeypatch.setattr(
        Learner, "take_step", lambda *given: seen.append(signal.getsignal(signal.SIGINT)) or step(*given)
    )
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert len(trainer.history) == 3
    assert set(seen) == {signal.default_int_handler}


def test_a_reading_that_is_rounded_to_zero_has_no_minus_sign():
    names = ("objective/scores", "objective/kl", "objective/entropy")
    assert progress_display.readings(dict.fromkeys(names, -1e-6)) == ["score 0.000", "KL 0.00", "entropy 0.00"]
    assert progress_display.readings(dict.fromkeys(names, -1.5)) == ["score -1.500", "KL -1.50", "entropy -1.50"]


def test_a_half_done_update_is_not_saved_and_a_line_says_so(
    sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(Learner, "compute_gradients", raising_at(2 * STEPS + 2, Learner.compute_gradients))
    trainer = trainer_of(sft, config(save_interval=1))
    with pytest.raises(RuntimeError, match="device is lost"):
        trainer.train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["iteration_000001", "iteration_000002"]
    monkeypatch.setattr(Learner, "compute_gradients", raising_at(STEPS + 2, Learner.compute_gradients))
    with pytest.raises(RuntimeError, match="device is lost"):
        trainer_of(sft).train(output_dir=tmp_path / "other")
    assert saved(tmp_path / "other") == []
    assert "iteration 2" in caplog.records[-1].message


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_does_not_hide_the_exception(
    sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("ppo_rlhf.trainer.bookkeeping.write_checkpoint", full)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        trainer_of(sft, reward=failing(1 + 2, ZeroDivisionError())).train(output_dir=tmp_path / "run")
    assert "the disk is full" in caplog.records[-1].message


def test_only_the_main_process_saves(sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("trainer", "bookkeeping"):
        monkeypatch.setattr(f"ppo_rlhf.trainer.{module}.is_main_process", lambda: False)
    with pytest.raises(RewardError):
        trainer_of(sft, reward=failing(1 + 2, ZeroDivisionError())).train(output_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == []


def test_completions_of_sampled_iterations_are_files_that_datasets_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Iterations 1, 2 and 3 of 3; a resumed run that repeats an iteration replaces its file by the same one."""
    monkeypatch.setattr("ppo_rlhf.config.ppo.SAMPLE_INTERVAL", 2)
    settings = config(save_interval=1, save_total_limit=3)

    def trainer() -> PPOTrainer:
        return PPOTrainer(settings, tiny_model(), None, word_tokenizer(), reward=early_letters, prompts=PROMPTS)

    first = trainer()
    first.train(output_dir=tmp_path)
    files = sorted((tmp_path / "completions").glob("*.jsonl"))
    assert [file.name for file in files] == [f"iteration_{number:06d}.jsonl" for number in (1, 2, 3)]
    table = load_dataset("json", data_files=[str(file) for file in files], split="train", cache_dir=str(tmp_path / "c"))
    assert len(table) == 3 * settings.batch_size
    assert table["score"] == pytest.approx(early_letters(table["prompt"], table["completion"]))
    for row in first.history:
        of_iteration = table.filter(lambda each, number=row["iteration"]: each["iteration"] == number)
        assert sum(of_iteration["score"]) / len(of_iteration) == pytest.approx(row["objective/scores"])
        assert sum(of_iteration["kl"]) / len(of_iteration) == pytest.approx(row["objective/kl"])
        assert sum(of_iteration["tokens"]) / len(of_iteration) == pytest.approx(row["response/length"])
    before = [file.read_bytes() for file in files]
    files[2].unlink()
    for newer in ("iteration_000002", "iteration_000003"):
        shutil.rmtree(tmp_path / newer)
    trainer().train(resume_from_checkpoint=tmp_path / "iteration_000001", output_dir=tmp_path)
    assert [file.read_bytes() for file in files] == before


def test_only_the_first_each_fifth_and_the_last_iteration_have_a_file(tmp_path: Path):
    settings = config(total_episodes=28)
    PPOTrainer(settings, tiny_model(), None, word_tokenizer(), reward=early_letters, prompts=PROMPTS).train(
        output_dir=tmp_path
    )
    assert [file.name[-7:-6] for file in sorted((tmp_path / "completions").iterdir())] == ["1", "5", "7"]


def test_a_run_whose_template_prints_the_date_goes_on_the_next_day_and_a_line_says_so(
    sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tokenizer = word_tokenizer(chat_template=DATED_TEMPLATE)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    set_today(monkeypatch, 3)
    begun = trainer_of(sft, tokenizer=tokenizer, prompts=chats)
    begun.save_checkpoint(tmp_path / "run")
    set_today(monkeypatch, 4)
    resumed = trainer_of(sft, tokenizer=tokenizer, prompts=chats)
    assert resumed._prompts is not None
    assert resumed._prompts.texts[0].startswith("04 u a")  # "04" is unknown to this tokenizer, so are all numbers
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        resumed.load_checkpoint(tmp_path / "run" / "iteration_000000")
    assert re.search("contain 04 .* contained 03", caplog.text)
    for others in (chats[::-1], PROMPTS):
        with pytest.raises(ConfigError, match=r"^prompts: "):
            trainer_of(sft, tokenizer=tokenizer, prompts=others).load_checkpoint(tmp_path / "run" / "iteration_000000")
    edited = word_tokenizer(chat_template=DATED_TEMPLATE + " ")
    with pytest.raises(ConfigError, match=r"^prompts: "):
        trainer_of(sft, tokenizer=edited, prompts=chats).load_checkpoint(tmp_path / "run" / "iteration_000000")
