"""From the start of `kedro run` until its pipeline runs the garbage collector is held back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from kedro.pipeline.node import Node

from ppo_rlhf.hooks import checks, start_up, tracking
from ppo_rlhf.hooks.start_up import StartUpHook


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.unfreeze()
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> StartUpHook:
    """A hook of a project's settings."""
    hook = StartUpHook()
    monkeypatch.setattr(start_up, "settings", SimpleNamespace(HOOKS=(hook,)))
    return hook


def test_the_collector_waits_until_the_pipeline_runs(hook: StartUpHook):
    for _ in range(2):
        with hook.of_command():
            assert not gc.isenabled()
            hook.before_pipeline_run()
            assert gc.isenabled()
        assert gc.isenabled()


def test_what_is_there_when_the_first_pipeline_runs_is_left_out_and_nothing_later(hook: StartUpHook):
    with hook.of_command():
        hook.before_pipeline_run()
        assert gc.get_freeze_count() > 0
    gc.unfreeze()
    with hook.of_command():
        hook.before_pipeline_run()
    assert gc.get_freeze_count() == 0


def test_the_collector_goes_on_after_a_command_that_ran_nothing_and_leaves_nothing_out(hook: StartUpHook):
    with pytest.raises(ZeroDivisionError), hook.of_command():
        raise ZeroDivisionError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_run_that_no_command_started_is_left_alone(hook: StartUpHook):
    hook.before_pipeline_run()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_somebody_switched_off_stays_off(hook: StartUpHook):
    gc.disable()
    with hook.of_command():
        hook.before_pipeline_run()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_in_a_project_without_the_hook_the_collector_does_not_wait(hook: StartUpHook):
    with StartUpHook().of_command():
        assert gc.isenabled()


@pytest.mark.parametrize("runner", [[], ["--runner", "ThreadRunner", "--pipelines", "supervised_finetuning"]], ids=str)
def test_kedro_run_starts_without_the_collector_and_runs_its_nodes_with_it(
    kedro: Callable[..., Result], toy_project: Path, monkeypatch: pytest.MonkeyPatch, runner: list[str]
):
    seen: dict[str, set[bool]] = {}

    def noting(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(where, set()).add(gc.isenabled())
            return function(*args, **kwargs)

        return noted

    for module, name in ((checks, "check_runner"), (tracking, "pipeline_names"), (Node, "run")):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    result = kedro(toy_project, "run", *runner)
    assert result.exit_code == 0, result.output
    assert seen == {"check_runner": {False}, "pipeline_names": {False}, "run": {True}}
    assert gc.isenabled()
