"""`kedro doctor`: a healthy project passes, each fault is one line with its fix, and nothing is written."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from packaging.version import Version

from ppo_rlhf.cli.doctor import _stages_beside_own
from tests.cli.test_cli import files_below
from tests.tiny_models import save, tiny_model

Kedro = Callable[..., Result]
ALIGN = ("--pipelines", "align")
PASSING = ("one token", "prompt", "constant reward", "KL penalty")


def examined(kedro: Kedro, project: Path, *arguments: str, exit_code: int) -> dict[tuple[str, str], list[str]]:
    """Run `kedro doctor` and return its lines by level and part."""
    before = files_below(project)
    result = kedro(project, "doctor", *arguments)
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    assert files_below(project) == before
    found: dict[tuple[str, str], list[str]] = {}
    for line in result.stdout.splitlines():
        level, part = line[:8].strip(), line[9:18].strip()
        if level in ("ok", "advice", "problem"):
            found.setdefault((level, part), []).append(line[19:])
    problems = sum(len(lines) for (level, _), lines in found.items() if level == "problem")
    assert f"{problems} problem" in result.stderr if problems else result.stdout.endswith("No problem found.\n")
    return found


@pytest.fixture
def own(project: Path, tmp_path: Path) -> Path:
    """A project with a user's own small model and prompts, and a reward function."""
    model = save(tmp_path / "own", tiny_model())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c d e"}\n{"prompt": "a b"}\n')
    (project / "conf" / "local" / "globals.yml").write_text(
        f"sft_model_path: {model}\nprompts_path: {tmp_path / 'prompts.jsonl'}\n"
    )
    (project / "conf" / "local" / "parameters.yml").write_text(
        "reward: {components: [{type: function, function: 'doctored_reward:lengths'}]}\n"
        "ppo: {value_model: separate, response_length: 8, learning_rate: 1.0e-5, value_learning_rate: 2.0e-5,\n"
        "      per_device_train_batch_size: 8, total_episodes: 80}\n"
    )
    (project / "doctored_reward.py").write_text(
        "def lengths(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    return project


def test_a_fresh_project_passes_and_the_store_need_not_exist_yet(kedro: Kedro, project: Path):
    (project / "mlflow.db").unlink()
    found = examined(kedro, project, "--env", "demo", exit_code=0)
    assert {level for level, _ in found} == {"ok"}
    assert {part for _, part in found} == {"Versions", "Device", "MLflow", "Settings", "Memory"}
    assert found["ok", "Settings"][0].startswith("`kedro run --env demo`, 34 nodes.")
    built = Version(torch.__version__)  # PyPI's CUDA build says 2.14.1+cu130 and is installed as 2.14.1
    assert f"torch {built.public}" in found["ok", "Versions"][0]


@pytest.mark.slow
def test_an_own_model_passes_with_its_memory_and_disk(kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_rlhf.preflight.memory_plan.available_memory", lambda _: (2**40, 2**40))
    found = examined(kedro, own, *ALIGN, "--params", "ppo.kl_coef=9", exit_code=0)
    assert "of 1024.00 GiB free on cpu" in found["ok", "Memory"][0]
    assert " an iteration, " in found["ok", "Time"][0]
    assert "data" in found["ok", "Disk"][0]
    assert "ppo.kl_coef=9" in found["advice", "Settings"][0]
    monkeypatch.setattr("ppo_rlhf.preflight.memory_plan.available_memory", lambda _: (2**20, 2**20))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**10))
    found = examined(kedro, own, *ALIGN, exit_code=1)
    assert found["problem", "Memory"][0].endswith(" does not fit.")
    assert "ppo.save_total_limit" in found["problem", "Disk"][0]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_the_disk_suffices_to_the_last_byte(kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch, missing: int):
    """Disk space is needed for three checkpoints and an export."""
    monkeypatch.setattr("ppo_rlhf.preflight.memory_plan.available_memory", lambda _: (2**40, 2**40))
    monkeypatch.setattr("ppo_rlhf.preflight.memory.MemoryPlan.checkpoint", 2**30)
    monkeypatch.setattr("ppo_rlhf.datasets.checkpoints.most_checkpoints", lambda *_: 3)
    exported = 4 * sum(weight.numel() for weight in tiny_model().parameters())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 2**30 + exported - missing))
    found = examined(kedro, own, *ALIGN, exit_code=missing)
    assert ("problem" if missing else "ok", "Disk") in found


@pytest.mark.slow
def test_of_an_own_sft_model_align_is_checked_since_the_whole_chain_would_write_it(kedro: Kedro, own: Path):
    found = examined(kedro, own, exit_code=0)
    assert "align, " in found["ok", "Settings"][0]
    assert "kedro run --pipelines align" in found["advice", "Settings"][0]


@pytest.mark.parametrize(
    ("own_model", "data", "reward", "stages"),
    [
        ("sft_model_path", "preferences_path", "model", "reward_modelling,align"),
        ("sft_model_path", "preferences_path", "function", "align"),
        ("sft_model_path", "demonstrations_path", "model", "align"),
        ("reward_model_path", "demonstrations_path", "model", "data_preparation,supervised_finetuning,align"),
    ],
)
def test_the_stages_beside_an_own_model_are_named(own_model: str, data: str, reward: str, stages: str):
    """After a conversion of two stages this is the command of both."""
    given = {"sft_model_path": "sft_policy", "reward_model_path": "reward_model"}
    given |= {"preferences_path": "raw_preferences", "demonstrations_path": "raw_demonstrations"}
    sources = {"sft_policy": "data/06_models/sft_policy", "reward_model": "data/06_models/reward_model"}
    sources |= {given[own_model]: "/models/own", given[data]: "rows.jsonl"}
    request = SimpleNamespace(source=sources.get, is_ours=lambda source: source.startswith("data/06_models"))
    params = {"reward": {"components": [{"type": reward}]}}
    assert _stages_beside_own(request, params) == (own_model, stages.split(","))  # type: ignore[arg-type]


@pytest.mark.slow
def test_settings_files_and_functions_are_checked_as_before_a_run(kedro: Kedro, own: Path):
    wrong = "prompts_path=missing.jsonl,ppo.gradient_checkpointing=true,ppo.sft_model_path=x"
    lines = examined(kedro, own, *ALIGN, "--params", wrong, exit_code=1)["problem", "Settings"]
    assert any("missing.jsonl" in line for line in lines)
    assert any("ppo.sft_model_path" in line for line in lines)
    run = kedro(own, "run", *ALIGN, "--params", wrong)
    assert [line.removeprefix("Error: ") for line in run.stderr.splitlines() if line.startswith("Error:")] == lines
    [line] = examined(kedro, own, *ALIGN, "--params", "resume=lost", exit_code=1)["problem", "Settings"]
    assert "resume=lost" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--params", "ppo.kl_coeff=1"], "`kl_coef`"),
        pytest.param(["--params", "sead=1"], "`seed`", marks=pytest.mark.slow),
        (["--pipelines", "algin"], "align"),
        pytest.param(["--env", "nowhere"], "nowhere", marks=pytest.mark.slow),
        (["--params", "ppo=1", "--batch", "8"], "Expected dict for dataclass PPOConfig"),
    ],
    ids=lambda value: "".join(value),
)
def test_bad_options_are_problems(kedro: Kedro, toy_project: Path, arguments: list[str], named: str):
    [line] = examined(kedro, toy_project, *arguments, exit_code=1)["problem", "Settings"]
    assert named in line


@pytest.mark.slow
def test_other_versions_than_pyproject_asks_for_are_named(kedro: Kedro, project: Path):
    file = project / "pyproject.toml"
    asked, count = re.subn(r'"torch>=[^"]*"', '"torch>=99"', file.read_text())
    assert count == 1
    file.write_text(asked.replace('"rich>=', '"no-such-package>='))
    lines = examined(kedro, project, exit_code=1)["problem", "Versions"]
    assert [line.split()[0] for line in lines] == ["no-such-package", "torch"]
    assert all("`pip install -e . -c constraints.txt` fixes it" in line for line in lines)


@pytest.mark.slow
def test_a_store_that_does_not_answer_or_cannot_be_read_is_named_without_its_password(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = toy_project / "conf" / "local" / "mlflow.yml"
    settings.write_text(f"server: {{mlflow_tracking_uri: 'http://me:secret@127.0.0.1:{port}'}}\n")
    [line] = examined(kedro, toy_project, exit_code=1)["problem", "MLflow"]
    assert f"127.0.0.1:{port}" in line
    assert "secret" not in line
    settings.write_text("server: {mlflow_tracking_uri: 'sqlite:///broken.db'}\n")
    (toy_project / "broken.db").write_text("this is no database " * 100)
    [line] = examined(kedro, toy_project, exit_code=1)["problem", "MLflow"]
    assert "broken.db" in line


@pytest.mark.slow
def test_the_probes_train_a_project_s_settings_and_a_failed_one_is_a_problem(
    kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ppo_rlhf.preflight.probes.ITERATIONS", 8)
    monkeypatch.setattr("ppo_rlhf.preflight.probes.CONSTANT_ITERATIONS", 6)
    changed = "ppo.gamma=0,ppo.temperature=1.0,ppo.kl_coef=0.08,ppo.missing_eos_penalty=1.0"
    found = examined(kedro, own, *ALIGN, "--probe", "--params", changed, exit_code=1)
    model, sizes, replaced, missing, *outcomes = found["ok", "Probe"]
    assert model == "a tiny random model: LlamaConfig"
    assert "batch 256" in sizes
    assert replaced.startswith("replaced for the probes: ppo.kl_coef=")
    assert missing == "not probed: ppo.missing_eos_penalty"
    assert [line.split(";")[0] for line in outcomes] == [f"{name}: passed" for name in PASSING]
    (problem,) = found["problem", "Probe"]
    assert problem.startswith("delayed reward: BROKEN, the policy does not learn from a reward two tokens later")


@pytest.mark.slow
def test_pipelines_that_do_not_train_by_ppo_have_nothing_to_probe(kedro: Kedro, project: Path):
    found = examined(kedro, project, "--env", "test", "--pipelines", "data_preparation", "--probe", exit_code=0)
    (line,) = found["ok", "Probe"]
    assert "do not train" in line


@pytest.mark.slow
def test_a_model_that_cannot_be_read_is_a_problem_of_the_memory_and_of_the_probes(kedro: Kedro, own: Path):
    found = examined(kedro, own, *ALIGN, "--model", "missing/config.json", "--probe", exit_code=1)
    for part in ("Memory", "Probe"):
        (line,) = found["problem", part]
        assert line.startswith("missing: ")
