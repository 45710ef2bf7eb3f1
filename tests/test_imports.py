"""Packages that are imported while the garbage collector is held back, and those that are kept out."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ppo_rlhf.imports import collector_paused, not_installed


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_the_collector_waits_and_goes_on():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_import_that_failed():
    @collector_paused()
    def load() -> None:
        assert not gc.isenabled()
        raise ModuleNotFoundError

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            load()
        assert gc.isenabled()


def test_a_collector_that_somebody_switched_off_stays_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_settings_and_stages_are_imported_without_a_full_collection():
    """A full collection goes through all objects; without the pause there are six."""
    code = (
        "import gc, kedro.framework.cli, kedro.pipeline\n"
        "before = gc.get_stats()[2]['collections']\n"
        "import ppo_rlhf.settings\n"
        "from ppo_rlhf.pipeline_registry import register_pipelines\n"
        "register_pipelines()['__default__'].nodes\n"
        "print(gc.get_stats()[2]['collections'] - before, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_a_package_that_nobody_has_imported_cannot_be_imported_within_the_block_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with not_installed("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    with pytest.raises(ZeroDivisionError), not_installed("this"):
        raise ZeroDivisionError
    assert "this" not in sys.modules


def test_a_package_that_was_imported_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "this", os)
    with not_installed("this"):
        assert importlib.import_module("this") is os
    assert sys.modules["this"] is os
