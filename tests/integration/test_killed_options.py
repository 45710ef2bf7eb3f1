"""kill -9 again and again in runs with options that are off by default: they end as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_rlhf.checkpoints.evaluations import read_evaluations
from ppo_rlhf.evaluation.exploitation import EXPLOITS
from ppo_rlhf.runtime.names import EXPORTED
from tests.integration.outcomes import Run
from tests.integration.processes import Moment, kedro_run

pytestmark = pytest.mark.slow

OWN = '''"""What the project rewards and judges, and memory that runs out while there is the file short_memory."""
from pathlib import Path

import pytest

from tests.ppo.short_memory import ShortMemory

if Path("short_memory").exists():
    ShortMemory(pytest.MonkeyPatch(), "sampling", 4)
    ShortMemory(pytest.MonkeyPatch(), "policy's update", 12)


def share(text):
    words = text.split()
    return words.count(".") / max(1, len(words))


def stops(prompts, completions, **columns):
    return [share(text) for text in completions]


def some_stops(prompts, completions, **columns):
    return [-abs(share(text) - 0.15) for text in completions]


def solved(prompts, completions, **columns):
    """Some prompts are always solved, the others sometimes."""
    return [10.0 if prompt < "j" else 10.0 * (len(text) % 2) for prompt, text in zip(prompts, completions)]
'''


@pytest.fixture
def make(chain: Run, make_project: Callable[[], Path]) -> Callable[..., Path]:
    """Return a function that makes a project with a policy, two reward models, few prompts and a reward."""

    def project(**reward: Any) -> Path:
        folder = make_project()
        for name in ("sft_policy", "reward_model"):
            shutil.copytree(chain.model(name), folder / "data/test/06_models" / name / "version")
        second = shutil.copytree(chain.model("reward_model"), folder / "data/second") / "model.safetensors"
        save_file({name: tensor.flip(-1) for name, tensor in load_file(second).items()}, second, {"format": "pt"})
        (folder / "own.py").write_text(OWN)
        (folder / "conf/test/parameters_reward.yml").write_text(json.dumps({"reward": reward}))
        for name in ("prompts", "demonstrations"):
            rows = (folder / f"data/01_raw/{name}.jsonl").read_text().splitlines(keepends=True)
            (folder / f"data/01_raw/few_{name}.jsonl").write_text("".join(rows[:12]))
        return folder

    return project


def run(project: Path, params: str, killed: Moment | None = None) -> Run:
    """Run `align`, to its end or until it is killed; later calls resume the run."""
    is_first = not (project / "data/test/06_models/ppo_checkpoints").exists()
    params = params if is_first else f"{params},resume=latest"
    ended = kedro_run(project, "--env", "test", "--pipelines", "align", "--params", params, interrupted=killed)
    output = ended.stdout + ended.stderr
    assert ended.returncode == (-9 if killed else 0), output
    return Run(project, output)


def state(run: Run) -> dict[str, Any]:
    """Return what the newest checkpoint says beside its tensors."""
    stored = dict(json.loads((max(run.folder.glob("iteration_*")) / "state.json").read_text()))
    del stored["metrics"]  # the length of metrics.jsonl, whose lines have seconds
    return stored


def assert_equal(resumed: Run, whole: Run) -> None:
    assert resumed.outcome() == whole.outcome()
    assert state(resumed) == state(whole)


def test_a_stop_at_exploitation_that_was_killed_at_each_step_exports_the_policy_of_the_best_evaluation(make) -> None:
    reward = {"components": [{"type": "function", "function": "own:stops"}]}
    params = (
        "ppo.value_model=separate,ppo.eval_interval=1,ppo.save_total_limit=1,ppo.total_episodes=768,"
        "ppo.per_device_train_batch_size=32,ppo.local_rollout_forward_batch_size=64,ppo.learning_rate=0.02,"
        "ppo.value_learning_rate=0.01,ppo.kl_coef=0.0,ppo.missing_eos_penalty=null,ppo.num_ppo_epochs=8,"
        "prompts.max_held_out=64,evaluation.iteration_prompts=32,"
        "evaluation.judge=own:some_stops,evaluation.on_exploitation=stop"
    )
    whole, project = run(make(**reward), params), make(**reward)
    rows = {int(row["iteration"]): row for row in read_evaluations(whole.folder)}
    end = max(rows)
    best = int(rows[end][EXPORTED])
    assert (1 < best < end, end < 12, rows[end][EXPLOITS]) == (True, True, 1.0)

    before = run(project, params, ("SIGKILL", "ppo.optimise_policy", end))
    assert state(before)["iteration"] == end - 1
    # After the evaluation of iteration end - 1, which is made up for, and of the iteration that decides to stop
    decided = run(project, params, ("SIGKILL", "evaluation_metrics", 2))
    assert (state(decided)["iteration"], state(decided)["restore_best"]) == (end, False)
    restored = run(project, params, ("SIGKILL", "ppo.export_policy", 1))
    assert state(restored)["restore_best"] is True
    resumed = run(project, params)
    assert_equal(resumed, whole)
    exported, saved = resumed.model("ppo_policy"), resumed.folder / f"iteration_{best:06d}" / "policy"
    for file in exported.glob("*.safetensors"):
        wanted = load_file(saved / file.name)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in load_file(file).items())


def test_combined_rewards_short_memory_and_reference_texts_survive_kills(make) -> None:
    components = [
        {"type": "model"},
        {"type": "model", "path": "data/second"},
        {"type": "function", "function": "own:solved"},
    ]
    reward = {"components": components, "combine": "mean_minus_std", "normalise": "component"}
    params = (
        "prompts_path=data/01_raw/few_prompts.jsonl,reference_texts_path=data/01_raw/few_demonstrations.jsonl,"
        "ppo.responses_per_prompt=4,ppo.reward_normalisation=running,"
        "ppo.per_device_train_batch_size=24,ppo.num_mini_batches=1,ppo.total_episodes=240,evaluation.batch_size=4"
    )
    projects = make(**reward), make(**reward)
    for project in projects:
        (project / "short_memory").touch()
    whole = run(projects[0], params)
    assert {"reward/disagreement", "eval/reference_nll_change"} <= whole.outcome().keys()

    killed = run(projects[1], params, ("SIGKILL", "ppo.optimise_policy", 4))
    saved = state(killed)
    assert saved["iteration"] == 3
    assert (saved["rollout_halvings"], saved["update_halvings"]) == (1, 1)
    assert saved["extra"]["component_moments"]["solved"]["count"] == 3 * 48
    (projects[1] / "short_memory").unlink()  # what was halved stays so
    run(projects[1], params, ("SIGKILL", "evaluation.measure_reference_texts", 1))
    assert_equal(run(projects[1], params), whole)
