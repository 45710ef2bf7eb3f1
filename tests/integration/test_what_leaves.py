"""What leaves the project opens in other people's tools, and gives the project's own values there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from click.testing import Result
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from ppo_rlhf.hooks.model_log import log_policy
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.hub_stand_in import running_hub
from tests.integration.outcomes import Run

PROMPT, TOKENS = "the film was", 4
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def greedy(folder: Path) -> str:
    """The most probable tokens after the prompt, one forward pass of ours each."""
    handle = PretrainedHandle(str(folder))
    model, tokenizer = handle.causal_lm(), handle.tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


def bare(text: str) -> str:
    """Without spaces, which depend on where the tokenizer begins."""
    return "".join(text.split())


@pytest.fixture
def store(chain: Run, no_mlflow_left_over: None) -> str:
    """The MLflow store of the run, in this process."""
    uri = f"sqlite:///{chain.project}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    return uri


def registered(chain: Run) -> str:
    (model,) = chain.client.search_registered_models()
    return f"models:/{model.name}/{model.latest_versions[0].version}"


@contextlib.contextmanager
def served(uri: str, store: str, folder: Path) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Start `mlflow models serve`; yield what sends it a request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model-uri", uri, "--port", str(port), "--env-manager", "local", "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "models", "serve", *options]
    server = subprocess.Popen(
        command, env={**os.environ, "MLFLOW_TRACKING_URI": store}, cwd=folder, start_new_session=True
    )

    def ask(body: dict[str, Any]) -> Any:
        for _ in range(240):
            assert server.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ping"):
                break
            time.sleep(0.5)
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    try:
        yield ask
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


@pytest.mark.slow
def test_the_registered_policy_is_served_and_loaded_by_mlflow_and_transformers(
    chain: Run, store: str, tmp_path: Path
) -> None:
    expected, params = PROMPT + greedy(chain.model("ppo_policy")), {"max_new_tokens": TOKENS, "top_k": 1}
    with served(registered(chain), store, tmp_path) as ask:
        loaded = mlflow.pyfunc.load_model(registered(chain)).predict(PROMPT, params=params)
        generator = pipeline("text-generation", model=str(chain.model("ppo_policy")))
        (shown,) = generator(PROMPT, max_new_tokens=TOKENS, do_sample=False)
        answered = ask({"inputs": [PROMPT], "params": params})["predictions"]
    found = {"served": answered[0], "pyfunc": loaded[0], "transformers": shown["generated_text"]}
    assert {name: bare(text) for name, text in found.items()} == dict.fromkeys(found, bare(expected))


@pytest.mark.slow
def test_a_policy_with_a_chat_template_is_served_as_a_chat(chain: Run, store: str, tmp_path: Path) -> None:
    """The trained policy with a template that leaves the text as it is; its folder is gone when it is served."""
    folder = tmp_path / "chat"
    shutil.copytree(chain.model("ppo_policy"), folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copy(chain.project / "mlflow.db", tmp_path / "mlflow.db")
    mlflow.set_tracking_uri(own := f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("chats", artifact_location=str(tmp_path / "a")))
    handle = PretrainedHandle(str(folder))
    with mlflow.start_run():
        logged = log_policy(folder, "ppo_policy", 1, [], PPOConfig(response_length=TOKENS), handle.generation_config())
    expected = greedy(folder)
    shutil.rmtree(folder)
    request = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "top_k": 1}
    with served(f"models:/{logged}", own, tmp_path) as ask:
        answer = ask(request)
    (choice,) = (answer[0] if isinstance(answer, list) else answer)["choices"]
    assert bare(choice["message"]["content"]) == bare(expected)


def test_the_reward_model_is_transformers_own_class_with_our_scores_up_to_its_mean(chain: Run) -> None:
    folder = str(chain.model("reward_model"))
    texts = ["the film was great and the cast was fine", "the plot was dull"]
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
    assert type(theirs).__module__.startswith("transformers.models.")
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    ours = PretrainedHandle(folder).reward_model()
    with torch.no_grad():
        found, expected = theirs(**batch).logits, ours(**batch).logits
    torch.testing.assert_close(found - theirs.config.score_mean, expected, rtol=0.0, atol=1e-6)
    assert not torch.equal(expected[0], expected[1])


def test_an_exported_adapter_opens_by_peft_as_the_policy_that_trained(chain: Run, tmp_path: Path) -> None:
    settings = {"use_peft": True, "lora_r": 2, "export": "adapter", "learning_rate": 1e-2, "response_length": TOKENS}
    trainer = PPOTrainer(
        PPOConfig(total_episodes=8, **settings),
        str(chain.model("sft_policy")),
        reward=lambda completions: [float(len(text)) for text in completions],
        prompts=[PROMPT, "a story of"],
    )
    trainer.train()
    trainer.save_pretrained(tmp_path / "adapter")
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    batch = trainer.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        found, expected = opened(**batch).logits, trainer.policy(**batch).logits
        untrained = trainer.reference_policy(**batch).logits
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    assert not torch.allclose(found, untrained, atol=1e-3)


def test_policy_and_reward_model_are_pushed_and_open_from_what_arrived(
    chain: Run, kedro: Callable[..., Result], no_mlflow_left_over: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = {"ppo_policy": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    with running_hub(monkeypatch) as hub:
        for name, auto in opens.items():
            options = ["--reward-model"] if name == "reward_model" else []
            result = kedro(chain.project, "push", f"me/{name}", *options)
            assert result.exit_code == 0, result.output
            arrived = auto.from_pretrained(hub.repositories[f"me/{name}"].save(tmp_path / name))
            sent = auto.from_pretrained(chain.model(name))
            pairs = zip(arrived.parameters(), sent.parameters(), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_the_runs_completions_are_read_by_datasets_and_have_the_metrics_of_mlflow(chain: Run, tmp_path: Path) -> None:
    files = str(chain.folder / "completions" / "*.jsonl")
    table = load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path)).to_pandas()
    by_iteration = table.groupby("iteration")
    for column, metric in {"score": "objective/scores", "kl": "objective/kl", "tokens": "response/length"}.items():
        logged = dict(chain.metrics()[metric])
        sampled = {iteration: logged[iteration] for iteration in (1, 3)}
        assert by_iteration[column].mean().to_dict() == pytest.approx(sampled), metric


def test_tensorboard_has_mlflows_numbers(chain: Run) -> None:
    """Each step once. MLflow's last evaluation is the final one, on all prompts; standard errors are tags there."""
    events = EventAccumulator(str(chain.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    metrics = chain.metrics()
    of_training = {tag.removeprefix("train/"): points for tag, points in found.items() if tag.startswith("train/")}
    assert {key for key in metrics if key.startswith("objective/")} <= of_training.keys()
    for key, points in of_training.items():
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in metrics[key]], key
    assert [point for point in found["eval/win_rate"] if point[0] < 3] == [
        (step, pytest.approx(value, rel=1e-6)) for step, value in metrics["eval/win_rate"] if step < 3
    ]
