"""kill -9 at any moment, then the same command with resume=latest: as if nothing had happened, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.integration.interruptions import ARGUMENTS, PHASES, RESUMING, Interruption, Reference, two_at_a_time
from tests.integration.outcomes import Outcome
from tests.integration.processes import kedro_run

PER_PHASE = 5
SMALL = ("fine-tuning", "reward training", "update", "saving", "after training")  # one kill each in the default suite


def difference(make_project: Callable[[], Path], reference: Reference, kill: Interruption) -> str | None:
    """Kill a run, resume it, and say what differs from the run that nobody killed; None if nothing does."""
    project = make_project()
    killed = kedro_run(project, *ARGUMENTS, watched=kill.order("SIGKILL"))
    if killed.returncode != -9:
        return f"{kill}: was not killed but ended with {killed.returncode}\n{killed.stdout}{killed.stderr}"
    resumed = kedro_run(project, *RESUMING)
    if resumed.returncode != 0:
        return f"{kill}: the resumed run ended with {resumed.returncode}\n{resumed.stdout}{resumed.stderr}"
    differing = Outcome.of(project).differences(reference.outcome)
    return f"{kill}: {differing}\n{resumed.stdout}" if differing else None


def differences(make_project: Callable[[], Path], reference: Reference, kills: list[Interruption]) -> list[str]:
    return two_at_a_time(lambda kill: difference(make_project, reference, kill), kills)


def test_a_run_killed_in_each_of_five_phases_ends_as_if_it_had_not_been(
    make_project: Callable[[], Path], reference: Reference
) -> None:
    kills = [kill for phase in SMALL for kill in reference.interruptions(phase, 1, Random(phase))]
    assert differences(make_project, reference, kills) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_50_runs_killed_in_every_phase_all_end_as_if_they_had_not_been(
    make_project: Callable[[], Path], reference: Reference
) -> None:
    kills = [kill for phase in PHASES for kill in reference.interruptions(phase, PER_PHASE, Random(phase))]
    assert len(kills) == 50
    found = differences(make_project, reference, kills)
    print(f"{len(kills) - len(found)} of {len(kills)} killed and resumed runs are bit-identical")
    assert found == []
