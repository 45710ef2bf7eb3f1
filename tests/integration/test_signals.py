"""SIGTERM, Ctrl-C, and a reader of the output that ends: the run ends in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run


@pytest.mark.slow
def test_sigterm_before_an_update_stops_with_the_last_iteration_saved(make_project: Callable[[], Path]) -> None:
    """Resuming from this checkpoint works as after a kill, which test_resume.py tests."""
    project = make_project()
    stopped = kedro_run(project, "--env", "test", interrupted=("SIGTERM", "ppo.score_responses", 2))
    run = Run(project, stopped.stdout)
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    assert run.says(
        "SIGTERM: stopping before the update of iteration 2; iteration 1 is saved; a second signal stops at "
    )
    assert "The run was stopped by SIGTERM." in stopped.stderr
    assert run.tracked.info.status == "KILLED"
    assert run.tracked.data.tags["last_checkpoint"].endswith("iteration_000001")
    assert (run.folder / "iteration_000001/manifest.json").is_file()


@pytest.mark.slow
def test_a_run_whose_reader_has_ended_is_killed_and_goes_on(make_project: Callable[[], Path]) -> None:
    """As `kedro run | head` does; nothing it prints is kept back, so the reader can end in the loop."""
    project = make_project()
    command = [sys.executable, "-m", "kedro", "run", "--env", "test"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=project, text=True, **pipes) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert any("Iteration 1/" in line for line in running.stdout)
        running.stdout.close()
        assert "SIGPIPE" in running.stderr.read()
    left = Run(project, "").tracked
    assert (running.returncode, left.info.status) == (128 + signal.SIGPIPE, "KILLED")
    resumed = kedro_run(project, "--env", "test", "--params", "resume=latest")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    whole = Run(project, resumed.stdout)
    assert whole.says(f"Resuming MLflow run {left.info.run_id} from ")
    assert (whole.tracked.info.run_id, whole.tracked.info.status) == (left.info.run_id, "FINISHED")
    assert [step for step, _ in whole.metrics()["objective/kl"]] == [1, 2, 3]


@pytest.mark.slow
def test_ctrl_c_in_a_reward_saves_the_iteration_before_and_stops_at_once(project: Path) -> None:
    """Nothing else has made the iteration due. The reward sleeps for 3 s when the signal comes."""
    (project / "slow_reward.py").write_text(
        "import time\n\n\ndef slow(prompts, completions, **columns):\n"
        "    time.sleep(3.0)\n    return [float(len(text)) for text in completions]\n"
    )
    (project / "conf/test/parameters_reward.yml").write_text(
        "reward:\n  components:\n    - type: function\n      function: slow_reward:slow\n"
    )
    settings = "ppo.total_episodes=1600,ppo.value_model=separate,ppo.save_interval=100,ppo.eval_interval=100"
    stages = "data_preparation,supervised_finetuning,align"  # nothing reads a reward model
    command = [sys.executable, "-m", "kedro", "run", "--env", "test", "--pipelines", stages]
    running = subprocess.Popen(
        [*command, "--params", settings], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if "Iteration 1/" in line:
            time.sleep(0.5)
            running.send_signal(signal.SIGINT)
    running.wait(60)
    text = "".join(lines)
    assert running.returncode == 130, text
    assert "SIGINT: stopping before the update of iteration 2; iteration 1 is saved" in " ".join(text.split())
    assert "The run was stopped by SIGINT." in text
    run = Run(project, text)
    assert run.tracked.info.status == "KILLED"
    assert run.tracked.data.tags["last_checkpoint"].endswith("iteration_000001")
