"""From the start of `kedro run` to its first node the garbage collector is held back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kedro.pipeline.node import Node

from ppo_rlhf.hooks import checks, tracking
from ppo_rlhf.hooks.start_up import StartUpHook


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_waits_for_the_first_node_and_leaves_out_what_is_there_by_then():
    hook, frozen = StartUpHook(), gc.get_freeze_count()
    with hook.of_command():
        assert not gc.isenabled()
        hook.before_node_run()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        gc.unfreeze()
        hook.before_node_run()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_collector_goes_on_after_a_command_that_ran_no_node():
    hook = StartUpHook()
    with pytest.raises(ZeroDivisionError), hook.of_command():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_somebody_switched_off_stays_off():
    hook, frozen = StartUpHook(), gc.get_freeze_count()
    gc.disable()
    with hook.of_command():
        hook.before_node_run()
        assert not gc.isenabled()
    assert not gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_run_that_no_command_started_is_left_alone():
    frozen = gc.get_freeze_count()
    StartUpHook().before_node_run()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_kedro_run_starts_without_the_collector_and_runs_its_nodes_with_it(
    kedro: Callable[..., Result], toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: dict[str, set[bool]] = {}

    def noting(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(where, set()).add(gc.isenabled())
            return function(*args, **kwargs)

        return noted

    for module, name in ((checks, "check_runner"), (tracking, "describe_run"), (Node, "run")):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    result = kedro(toy_project, "run")
    assert result.exit_code == 0, result.output
    assert seen == {"check_runner": {False}, "describe_run": {False}, "run": {True}}
    assert gc.isenabled()
