"""Policies as MLflow models: what they answer, and those whose code lies with them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import torch
import yaml
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline
from transformers import GenerationConfig, PreTrainedModel

from ppo_rlhf.checkpoints.files import checkpoint_name, write_directory
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.datasets.checkpoints import CheckpointDataset
from ppo_rlhf.evaluation.verdict import Verdict
from ppo_rlhf.hooks import model_log
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import Origin, from_json
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, METRICS, _metrics_of, metrics_of
from tests.bare_state import bare_state
from tests.own_code import save_with_own_code
from tests.ppo_runs import tensors_equal
from tests.tiny_models import CHAT_TEMPLATE, PAD, save, tiny_model, word_tokenizer


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that transformers can only load by running the Python file beside it."""
    return save_with_own_code(tmp_path / "own", monkeypatch)


@pytest.fixture
def own_adapter(own_model: Path, tmp_path: Path) -> Path:
    """A checkpoint of a LoRA run on that model: the adapter and the tokenizer."""
    settings = LoraSettings(rank=2, alpha=4, target_modules="all-linear")
    base = PretrainedHandle(str(own_model), trust_remote_code=True)
    save_adapter(with_adapter(base.causal_lm(), settings, torch.Generator()), tmp_path / "adapter", settings)
    base.tokenizer().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("best", [pytest.param("own_model", marks=pytest.mark.slow), "own_adapter"])
@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_policys_own_code_runs_just_where_the_catalog_trusts_it(
    own_model: Path,
    tmp_path: Path,
    migrated_database: Path,
    no_mlflow_left_over: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    is_trusted: bool,
    best: str,
):
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    monkeypatch.setattr(model_log, "best_checkpoint", lambda *_: (request.getfixturevalue(best), 3))
    policy = PretrainedModelDataset(str(own_model), trust_remote_code=is_trusted)
    catalog = DataCatalog({"ppo_policy": policy, "params:ppo": MemoryDataset(PPOConfig(save_interval=1))})
    with mlflow.start_run(experiment_id=experiment) as run:
        log = RunLog(run.info.run_id, Pipeline([]), catalog)
        if not is_trusted:
            with pytest.raises(ValueError, match="trust_remote_code"):
                log.saved("ppo_policy")
        else:
            log.saved("ppo_policy")
        log.close(is_finished=False)
    models = mlflow.search_logged_models([experiment], output_format="list")
    assert sorted(model.name for model in models) == (["best_checkpoint", "ppo_policy"] if is_trusted else [])


@pytest.fixture
def store(
    tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None, caplog: pytest.LogCaptureFixture
) -> Iterator[Path]:
    """An MLflow database of its own with the experiment `mine/sweep`."""
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("mine/sweep", artifact_location=str(tmp_path / "a")))
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        yield database


def test_an_exported_critic_is_logged_as_it_is_and_none_where_none_is_written(store: Path, tmp_path: Path):
    """What MLflow has of it can be downloaded, and is a stored critic."""
    dataset = PretrainedModelDataset(str(tmp_path / "ppo_critic"))
    catalog = DataCatalog({"ppo_critic": dataset, "params:ppo": MemoryDataset(PPOConfig())})
    names = []
    with mlflow.start_run() as run:
        log = RunLog(run.info.run_id, Pipeline([]), catalog, folder=tmp_path / "run")
        metrics_of(tmp_path / "run").append(ITERATION, 3, {"iteration": 3.0, "val/explained_variance": 0.25})
        log.node_ran({}, {"next_training_state": bare_state(99, 3)})
        made_from = (Origin("model", "start model", "org/base", "b45e", on_hub=True),)
        model = CausalLMRewardModel.from_causal_lm(tiny_model())
        for critic in ({}, TrainedModel(model, word_tokenizer(), made_from=made_from)):
            dataset.save(critic)
            log.saved("ppo_critic")
            log.saved("ppo_critic")  # as a resumed run may
            models = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
            names.append([model.name for model in models])
        log.close(is_finished=True)
    assert names == [[], ["ppo_critic"]]
    [model] = models
    assert [(each.key, each.value, each.step) for each in model.metrics] == [("val/explained_variance", 0.25, 3)]
    there = mlflow.artifacts.download_artifacts(f"models:/{model.model_id}", dst_path=str(tmp_path / "there"))
    origins = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/ppo_critic/made_from.json")
    assert from_json(origins) == PretrainedHandle(there).origin("critic").made_from == made_from
    found, written = PretrainedHandle(there).critic(), PretrainedHandle(str(dataset.pinned)).critic()
    assert tensors_equal(found.state_dict(), written.state_dict())
    assert f"written.ppo_critic.{dataset.pinned.name}" in mlflow.get_run(run.info.run_id).data.tags


SAMPLED = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 4}
GREEDY = {"max_new_tokens": 3, "top_k": 1}
CONTEXT = 32
TEMPLATE, CHAT = "{{ bos_token }} " + CHAT_TEMPLATE, "<s> u b c <s> a"
"""A template that writes the beginning of text itself, as Llama's does, and what it makes of the request below."""


def logged_policy(tmp_path: Path, chat_template: str | None = None) -> tuple[str, PreTrainedModel]:
    """A policy that never ends by itself, logged and then deleted where it was: its URI, and its model."""
    model, tokenizer = tiny_model(), word_tokenizer(chat_template=chat_template, prepend_begin=bool(chat_template))
    folder = Path(save(tmp_path / "policy", model, tokenizer))
    config = PPOConfig(response_length=5, temperature=0.7, top_p=0.9, top_k=4)
    generation = GenerationConfig(do_sample=True, max_length=CONTEXT, pad_token_id=PAD, eos_token_id=None)
    with mlflow.start_run():
        logged = model_log.log_policy(folder, "ppo_policy", 3, [], config, generation)
    shutil.rmtree(folder)
    return f"models:/{logged}", model


def greedy(model: PreTrainedModel, prompt: str, count: int) -> list[int]:
    """The most probable tokens after a prompt, one forward pass each."""
    ids = word_tokenizer()(prompt)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def as_text(ids: list[int]) -> str:
    return word_tokenizer().decode(ids, skip_special_tokens=True)


def test_a_text_policy_takes_the_parameters_of_its_signature_and_samples_as_ppo_did_without(
    store: Path, tmp_path: Path
):
    uri, model = logged_policy(tmp_path)
    served = mlflow.pyfunc.load_model(uri)
    assert {param.name: param.default for param in served.metadata.signature.params} == SAMPLED
    assert served.predict("a b c", params=GREEDY) == ["a b c " + as_text(greedy(model, "a b c", 3))]
    example, params = served.input_example, served.metadata.load_input_example_params(uri)
    assert (str(example), params) == (model_log.EXAMPLE, SAMPLED)
    counts = {len(word_tokenizer()(text)["input_ids"]) for _ in range(4) for text in served.predict("a b c")}
    assert max(counts) <= 3 + 5


def test_a_request_does_not_run_past_the_context(store: Path, tmp_path: Path):
    """The context has 32 tokens: of 30 words the last 27 are kept, which leaves room for 5 new tokens."""
    uri, model = logged_policy(tmp_path)
    prompt = " ".join("abcdefghij" * 3)
    (answer,) = mlflow.pyfunc.load_model(uri).predict(prompt, params={"max_new_tokens": 5, "top_k": 1})
    assert answer.endswith(as_text(greedy(model, prompt[2 * 3 :], 5)))
    generator = mlflow.transformers.load_model(uri)
    (ids,) = generator(prompt, return_tensors=True)
    assert len(ids["generated_token_ids"]) == CONTEXT


def test_a_chat_policy_answers_messages_with_a_chat_completion(store: Path, tmp_path: Path):
    """A stop text works, too, although the folder in which the policy was trained is gone."""
    uri, model = logged_policy(tmp_path, TEMPLATE)
    served = mlflow.pyfunc.load_model(uri)
    request = {"messages": [{"role": "user", "content": "b c"}], "top_k": 1}
    expected = greedy(model, CHAT, 5)
    (answer,) = served.predict(request)
    assert (answer["object"], answer["model"]) == ("chat.completion", "ppo_policy")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": as_text(expected)}
    assert choice["finish_reason"] == "length"  # as many as PPO's responses may have
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    (answer,) = served.predict({**request, "max_tokens": 2})
    assert answer["choices"][0]["message"]["content"] == as_text(expected[:2])
    word = word_tokenizer().convert_ids_to_tokens(expected[1])
    (answer,) = served.predict({**request, "stop": [word]})
    assert answer["choices"][0]["message"]["content"] == as_text(expected[: expected.index(expected[1]) + 1])
    assert (answer["model"], answer["choices"][0]["finish_reason"]) == ("ppo_policy", "stop")


def test_a_logged_policy_names_no_path_of_this_machine_and_is_served_where_it_was_copied(store: Path, tmp_path: Path):
    """Its artifacts are moved, so that a stop text works only if the tokenizer is read from the copy."""
    uri, model = logged_policy(tmp_path, TEMPLATE)
    there = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "there")))
    (tmp_path / "a").rename(tmp_path / "moved")
    flavors = yaml.safe_load((there / "MLmodel").read_text())["flavors"]
    assert str(tmp_path) not in json.dumps(flavors)
    request = {"messages": [{"role": "user", "content": "b c"}], "top_k": 1}
    expected = greedy(model, CHAT, 2)
    word = word_tokenizer().convert_ids_to_tokens(expected[1])
    (answer,) = mlflow.pyfunc.load_model(str(there)).predict({**request, "stop": [word]})
    assert answer["model"] == "ppo_policy"
    assert answer["choices"][0]["message"]["content"] == as_text(expected[: expected.index(expected[1]) + 1])


def logged_model() -> str:
    """The id of a logged model of a new run."""
    with mlflow.start_run():
        return str(mlflow.initialize_logged_model("ppo_policy").model_id)


def summary_of(
    win_rate: float, verdict: str = Verdict.BETTER, start_model: str = "aaaabbbbcccc", **conditions: str
) -> dict:
    usual = {"prompts": "64 of them", "judge": "the judge j", "sampling": "temperature=1.0"}
    return {
        "eval/win_rate": win_rate,
        "verdict": verdict,
        "conditions": {"start_model": start_model, **usual, **conditions},
    }


NAME = "mine_sweep-sft-aaaabbbb"


def champion(name: str = NAME) -> str | None:
    """The version that the alias names, as people load it: models:/<name>@champion."""
    version = mlflow.MlflowClient().get_registered_model(name).aliases.get("champion")
    return None if version is None else str(version)


SWEEP = [  # the end of a run, and the champion's version after it
    (summary_of(0.99, Verdict.TOO_FEW_PROMPTS), None),  # two of two prompts won
    (summary_of(0.55, Verdict.NO_CLEAR_DIFFERENCE), None),
    (summary_of(0.20, Verdict.WORSE), None),
    (summary_of(0.99, Verdict.REWARD_ROSE), None),  # the trained reward itself is the judge
    (summary_of(0.68), "5"),
    (summary_of(0.945), "6"),
    (summary_of(0.945), "6"),
    (summary_of(0.68), "6"),
    (summary_of(0.99, Verdict.TOO_FEW_PROMPTS), "6"),
    (summary_of(0.99, prompts="others"), "6"),
    (summary_of(0.99, judge="the judge k"), "6"),
    (summary_of(0.99, sampling="temperature=0.0"), "6"),
    (summary_of(0.95), "13"),
]


def test_the_champion_of_a_sweep_is_the_best_that_beats_sft_under_the_same_conditions(
    store: Path, caplog: pytest.LogCaptureFixture
):
    for number, (summary, expected) in enumerate(SWEEP, 1):
        caplog.clear()
        model_log.register(logged_model(), "sft", summary)
        assert champion() == expected, (number, summary)
        (line,) = [line for line in caplog.messages if line.startswith("The policy is")]
        assert line.startswith(f"The policy is version {number} of the registered model {NAME}, ")
    assert mlflow.MlflowClient().get_model_version_by_alias(NAME, "champion").tags["win_rate"] == "0.95"


def test_each_start_model_has_a_champion_of_its_own(store: Path):
    """The demo's champion does not stand in the way of a user's own model, of the same folder's name even."""
    model_log.register(logged_model(), "sft", summary_of(0.99))
    model_log.register(logged_model(), "sft", summary_of(0.60, start_model="ffff00001111"))
    model_log.register(logged_model(), "Qwen 3: 0.6B", summary_of(0.60))
    assert champion() == champion("mine_sweep-sft-ffff0000") == champion("mine_sweep-Qwen_3_0.6B-aaaabbbb") == "1"


def test_a_champion_of_other_conditions_is_moved_by_hand_and_then_defended_there(
    store: Path, caplog: pytest.LogCaptureFixture
):
    others = {"prompts": "others", "judge": "the judge k"}
    model_log.register(logged_model(), "sft", summary_of(0.90))
    model_log.register(logged_model(), "sft", summary_of(0.70, **others))
    assert champion() == "1"
    assert re.search(
        rf"champion stays version 1, .* prompts and judge\..* kedro mlflow ui, #/models/{NAME}/versions/2",
        caplog.messages[-1],
    )
    mlflow.MlflowClient().set_registered_model_alias(NAME, "champion", "2")  # the request of that page
    model_log.register(logged_model(), "sft", summary_of(0.95))
    assert champion() == "2"
    model_log.register(logged_model(), "sft", summary_of(0.71, **others))
    assert champion() == "4"


def test_a_run_that_goes_on_is_registered_once_and_takes_the_place_that_a_kill_kept_from_it(store: Path):
    model = logged_model()
    model_log.register(model, "sft", summary_of(0.90))
    mlflow.MlflowClient().delete_registered_model_alias(NAME, "champion")  # as killed before it was set
    model_log.register(model, "sft", summary_of(0.90))
    assert len(mlflow.MlflowClient().search_model_versions(f"name = '{NAME}'")) == 1
    assert champion() == "1"


def test_of_two_runs_that_end_at_once_the_better_one_becomes_champion(store: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a lock both registrations would find no champion, and the slower, worse one would set the alias last."""
    both_have_looked, set_alias = threading.Barrier(2), mlflow.MlflowClient.set_registered_model_alias
    model_log.register(logged_model(), "sft", summary_of(0.5, Verdict.NO_CLEAR_DIFFERENCE))
    models = {0.9: logged_model(), 0.6: logged_model()}

    def late(client: mlflow.MlflowClient, name: str, alias: str, version: str) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait(timeout=1.0)  # if the other one is let in, too
        rate = client.get_model_version(name, version).tags["win_rate"]
        threading.Event().wait(0.5 if rate == "0.6" else 0.0)
        set_alias(client, name, alias, version)

    monkeypatch.setattr(mlflow.MlflowClient, "set_registered_model_alias", late)
    runs = [
        threading.Thread(target=model_log.register, args=(model, "sft", summary_of(rate)))
        for rate, model in models.items()
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(mlflow.MlflowClient().search_model_versions(f"name = '{NAME}'")) == 3
    assert mlflow.MlflowClient().get_model_version(NAME, str(champion())).tags["win_rate"] == "0.9"


def save_checkpoint(run: Path, iteration: int) -> Path:
    """Write a checkpoint with a tiny policy."""
    target = run / checkpoint_name(iteration)
    write_directory(target, iteration, lambda draft: save(draft / "policy", tiny_model(), word_tokenizer()))
    return target


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 64  # an exponent's bit of the last weight
    file.write_bytes(content)


def test_a_damaged_best_checkpoint_is_said_in_one_line_and_the_finished_run_stays_finished(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A flipped bit arrived in MLflow in silence; a file that was cut off ended the run in a traceback."""
    policy = PretrainedModelDataset(save(tmp_path / "policy", tiny_model(), word_tokenizer()))
    checkpoints = CheckpointDataset(str(tmp_path / "checkpoints"))
    entries = {"ppo_policy": policy, "checkpoint": checkpoints, "params:ppo": MemoryDataset(PPOConfig(save_interval=1))}
    with mlflow.start_run() as run:
        folder = tmp_path / "checkpoints" / run.info.run_id
        weights = save_checkpoint(folder, 2) / "policy" / "model.safetensors"
        metrics_of(folder).append(EVALUATION, 2, {"iteration": 2.0, "eval/reward": 1.0, "eval/kl": 0.0})
        whole, evaluations = weights.read_bytes(), folder / METRICS
        log = RunLog(run.info.run_id, Pipeline([]), DataCatalog(entries))
        log.node_ran({}, {"next_training_state": bare_state(99, 3), "ppo_metrics": {}})

        def change_the_evaluation(_: Path) -> None:
            evaluations.write_bytes(evaluations.read_bytes().replace(b'"eval/reward": 1.0', b'"eval/reward": 3.0'))
            _metrics_of.cache_clear()  # as in a process that goes on

        damages = (flip, lambda file: os.truncate(file, 500), Path.unlink, change_the_evaluation)
        for damage, named in zip(damages, (weights, weights, weights, evaluations), strict=True):
            damage(weights)
            caplog.clear()
            log.saved("ppo_policy")
            (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
            assert line.startswith(f"MLflow gets no model best_checkpoint: {named}: ")
            assert "\n" not in line
            weights.write_bytes(whole)
        log.close(is_finished=True)
    models = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    assert [model.name for model in models] == ["ppo_policy"]


def test_the_best_checkpoint_is_the_best_evaluated_one_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_log, "run_directory", lambda root: root / "run")
    dataset = CheckpointDataset(str(tmp_path))
    config = PPOConfig(save_interval=10)
    assert model_log.best_checkpoint(dataset, config, 45) is None
    assert model_log.best_checkpoint(None, config, 45) is None
    rows = [  # the first was pruned, the third drifted too far
        {"iteration": 10.0, "eval/judge_score": 0.9, "eval/reward": 0.0, "eval/kl": 1.0},
        {"iteration": 20.0, "eval/judge_score": 0.6, "eval/reward": 0.0, "eval/kl": 2.0},
        {"iteration": 30.0, "eval/judge_score": 0.8, "eval/reward": 0.0, "eval/kl": 30.0},
        {"iteration": 40.0, "eval/judge_score": 0.5, "eval/reward": 0.0, "eval/kl": 3.0},
        {"iteration": 45.0, "eval/judge_score": 0.7, "eval/reward": 0.0, "eval/kl": 3.0},
        {"iteration": 47.0, "eval/judge_score": 0.9, "eval/reward": 0.0, "eval/kl": 3.0},  # a signal's checkpoint
    ]
    for iteration in (20, 30, 40, 45, 47):
        save_checkpoint(tmp_path / "run", iteration)
    for row in rows:
        metrics_of(tmp_path / "run").append(EVALUATION, int(row["iteration"]), row)
    for last, best in ((50, 20), (45, 45)):
        policy = tmp_path / "run" / f"iteration_{best:06d}" / "policy"
        assert model_log.best_checkpoint(dataset, config, last) == (policy, best)
