"""SIGTERM in every phase, and Ctrl-C twice: the run ends in order, says where it stands, and can go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest

from tests.integration.interruptions import ARGUMENTS, PHASES, RESUMING, Interruption, Reference, two_at_a_time
from tests.integration.outcomes import Outcome, tracked
from tests.integration.processes import kedro_run

# in the first iteration nothing says yet how long one takes, so it is not waited for
BEFORE_A_CHECKPOINT = (
    "preparation",
    "fine-tuning",
    "preferences",
    "reward training",
    "start of PPO",
    "rollouts",
    "update",
)
SMALL = ("fine-tuning", "saving")  # in the default suite; the other phases take minutes


def complaint(make_project: Callable[[], Path], reference: Reference, interruption: Interruption) -> str | None:
    """Send SIGTERM, look at how the run ended, resume it, and say what is wrong; None if nothing is."""
    project = make_project()
    stopped = kedro_run(project, *ARGUMENTS, watched=interruption.order("SIGTERM"))
    where = f"{interruption}\n{stopped.stdout}{stopped.stderr}\n"
    if stopped.returncode != 143 or "The run was stopped by SIGTERM." not in stopped.stderr:
        return f"{where}exit code {stopped.returncode}"
    _, [run] = tracked(project)
    if run.info.status != "KILLED":
        return f"{where}MLflow has {run.info.status}"
    checkpoint = run.data.tags.get("last_checkpoint")
    if (checkpoint is None) != (interruption.phase in BEFORE_A_CHECKPOINT):
        return f"{where}last_checkpoint={checkpoint}"
    if checkpoint is not None and not (project / checkpoint / "manifest.json").is_file():
        return f"{where}{checkpoint} is not there"
    resumed = kedro_run(project, *RESUMING)
    if resumed.returncode != 0:
        return f"{where}the resumed run ended with {resumed.returncode}\n{resumed.stdout}{resumed.stderr}"
    differing = Outcome.of(project).differences(reference.outcome)
    return f"{where}{differing}\n{resumed.stdout}" if differing else None


def complaints(make_project: Callable[[], Path], reference: Reference, phases: Iterable[str]) -> list[str]:
    drawn = [moment for phase in phases for moment in reference.interruptions(phase, 1, Random(f"SIGTERM {phase}"))]
    return two_at_a_time(lambda moment: complaint(make_project, reference, moment), drawn)


def test_sigterm_while_training_and_before_ends_the_run_as_killed_and_it_goes_on_as_if_nothing_had_happened(
    make_project: Callable[[], Path], reference: Reference
) -> None:
    assert complaints(make_project, reference, SMALL) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sigterm_in_every_other_phase_does_too(make_project: Callable[[], Path], reference: Reference) -> None:
    assert complaints(make_project, reference, [phase for phase in PHASES if phase not in SMALL]) == []


def test_a_second_ctrl_c_stops_at_once_where_the_first_lets_the_iteration_be_finished(project: Path) -> None:
    """The first would save the iteration, which nothing else has made due; the second comes before that."""
    (project / "slow_reward.py").write_text(
        "import time\n\n\ndef slow(prompts, completions, **columns):\n"
        "    time.sleep(2.0)\n    return [float(len(text)) for text in completions]\n"
    )
    (project / "conf/test/parameters_reward.yml").write_text(
        "reward:\n  components:\n    - type: function\n      function: slow_reward:slow\n"
    )
    settings = "ppo.total_episodes=1600,ppo.value_model=separate,ppo.save_interval=100,ppo.eval_interval=100"
    command = [sys.executable, "-m", "kedro", "run", "--env", "test", "--params", settings]
    running = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if "Iteration 3/" in line:
            time.sleep(0.5)
            running.send_signal(signal.SIGINT)
        if "SIGINT: finishing iteration" in line:
            time.sleep(0.3)
            running.send_signal(signal.SIGINT)
    running.wait(60)
    text = "".join(lines)
    assert running.returncode == 130, text
    assert "SIGINT: finishing iteration" in text
    assert "The run was stopped by SIGINT." in text
    _, [run] = tracked(project)
    assert run.info.status == "KILLED"
    assert "last_checkpoint" not in run.data.tags, "the iteration that the first signal let go on was saved"
