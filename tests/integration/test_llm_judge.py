"""`kedro run` with a language model as reward and as judge: a stand-in of its server, tiny models, one process each."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tests.chat_stand_in import KEY, ChatServer, between, running_chat
from tests.integration.processes import kedro_run
from tests.tiny_models import save, tiny_model

PROMPTS = ["a b c", "b c d", "c d e", "d e f", "e f g", "f g h"]
VARIABLE = "KEY_OF_THE_STAND_IN"
slow = partial(pytest.param, marks=pytest.mark.slow)
EPISODES, EVALUATED, ITERATIONS = 12, 2, 3


def opinion(text: str) -> str:
    """Scores by the letters a; of two responses the one with more different words, or else it goes by the place."""
    if "<response_a>" not in text:
        return f"Score: {min(10, 1 + between(text, 'response').count('a'))}"
    first, second = (len(set(between(text, f"response_{name}").split())) for name in "ab")
    return f"Verdict: {'A' if first >= second else 'B'}"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running_chat(opinion) as server:
        yield server


@pytest.fixture
def own(project: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a tiny policy whose reward and judge are the server's model."""
    monkeypatch.setenv(VARIABLE, KEY)
    model = {"model": "stand-in", "base_url": server.url, "api_key_variable": VARIABLE}
    save(project / "models" / "mine", tiny_model())
    (project / "data" / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    settings: dict[str, dict[str, Any]] = {
        "globals": {"prompts_path": "data/prompts.jsonl", "sft_model_path": "models/mine"},
        "parameters": {
            "ppo": {
                "response_length": 4,
                "per_device_train_batch_size": 4,
                "total_episodes": EPISODES,
                "value_model": "separate",
                "missing_eos_penalty": None,
                "learning_rate": 0.01,
                "eval_interval": 1,
                "save_interval": 1,
            },
            "prompts": {"max_held_out": EVALUATED},
            "reward": {"components": [{"type": "llm", "llm": model, "name": "helpful"}]},
            "evaluation": {"judge": {**model, "answer": "pairwise"}},
        },
    }
    for name, values in settings.items():
        (project / "conf" / "local" / f"{name}.yml").write_text(yaml.safe_dump(values))
    return project


def metrics_of(project: Path) -> dict[str, list[tuple[int, float]]]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {
        key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


@pytest.mark.slow
def test_a_language_model_rewards_and_judges_a_run_and_its_key_is_nowhere(own: Path, server: ChatServer) -> None:
    done = kedro_run(own, "--pipelines", "align")
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.keys == {f"Bearer {KEY}"}
    assert max(Counter(server.texts).values()) == 1, "no answer is paid twice"
    pairs = sum("<response_a>" in text for text in server.texts)
    metrics = metrics_of(own)
    last = {key: values[-1] for key, values in metrics.items() if key.startswith("judge/")}
    assert last["judge/reward.helpful/requests"] == (ITERATIONS, len(server.bodies) - pairs)
    assert last["judge/evaluation.judge/requests"] == (ITERATIONS, pairs)
    assert last["judge/evaluation.judge/tokens_out"] == (ITERATIONS, 3 * pairs)
    assert last["judge/reward.helpful/cached"][1] > 0, "evaluations repeat prompts and responses"
    assert [step for step, _ in metrics["judge/reward.helpful/requests"]] == [1, 2, 3]
    assert [step for step, _ in metrics["reward/helpful"]] == [1, 2, 3]
    summary = json.loads((own / "data/08_reporting/evaluation_summary.json").read_text())
    assert summary["decided_by"] == "the judge stand-in (language model, pairwise)"
    assert summary["eval/judge_score_sft"] == 0.5
    assert summary["eval/judge_score"] == summary["eval/win_rate"]
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search(rf"evaluation\.judge, stand-in \(language model, pairwise\): {pairs} requests", said), said
    assert KEY not in done.stdout + done.stderr
    kept = [file for file in own.rglob("*") if file.is_file()]
    assert [file for file in kept if KEY.encode() in file.read_bytes()] == []
    assert any(file.name == "judge_answers.sqlite" for file in kept)


@pytest.mark.slow
def test_a_killed_run_is_resumed_without_paying_an_answer_twice(own: Path, server: ChatServer) -> None:
    killed = kedro_run(own, "--pipelines", "align", interrupted=("SIGKILL", "ppo.optimise_policy", 2))
    assert killed.returncode == -signal.SIGKILL
    before = len(server.bodies)
    file = own / "conf" / "local" / "parameters.yml"
    settings = yaml.safe_load(file.read_text())
    settings["reward"]["components"][0]["llm"] |= {"concurrency": 2, "unparsable": 5}  # as one that failed is mended
    file.write_text(yaml.safe_dump(settings))
    resumed = kedro_run(own, "--pipelines", "align", "--params", "resume=latest")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert before < len(server.bodies)
    assert max(Counter(server.texts).values()) == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        slow(lambda llm: llm.update(base_url="http://127.0.0.1:9/v1", max_retries=0), "ConnectError"),
        slow(lambda llm: llm.update(api_key_variable="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE is not set"),
        slow(lambda llm: llm.update(template="{{ respnse }}"), "'respnse' is undefined"),
        (lambda llm: llm.update(answer="pairwise"), "needs llm.against"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_the_run(kedro, own, spoil, said) -> None:
    file = own / "conf" / "local" / "parameters.yml"
    settings = yaml.safe_load(file.read_text())
    spoil(settings["reward"]["components"][0]["llm"])
    file.write_text(yaml.safe_dump(settings))
    result = kedro(own, "run", "--pipelines", "align")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert said in line
    assert KEY not in result.output


@pytest.mark.slow
def test_an_audit_refuses_a_judge_that_compares_with_sft(kedro, own, server) -> None:
    result = kedro(own, "run", "--pipelines", "audit_reward")
    assert result.exit_code == 1
    assert "evaluation.judge: this pipeline scores single responses" in result.stderr
