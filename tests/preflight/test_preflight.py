"""The preflight: each rule finds its mistake in a user's input and names the setting, file or function."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from packaging.requirements import Requirement
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.datasets import (
    OptionalTableDataset,
    PretrainedModelDataset,
    RecordsDataset,
    TableDataset,
)
from ppo_rlhf.evaluation.attacks import attacks
from ppo_rlhf.evaluation.best_of_n import BestOfNConfig
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.evaluation.reward_holes import reward_digest
from ppo_rlhf.models import quantisation
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.gguf import GGUFFile
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipeline_registry import register_pipelines
from ppo_rlhf.pipelines.audit_reward.reward_audit import AuditConfig
from ppo_rlhf.preflight import RunRequest, describe_audit, describe_parts, find_problems, run_checks
from ppo_rlhf.preflight.request import TABLES
from ppo_rlhf.preflight.run_checks import check_exploitation
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig
from tests.own_code import save_with_own_code
from tests.tiny_models import CHAT_TEMPLATE, not_causal_models, save, tiny_model, word_tokenizer, write_gguf

CONTEXT = 32
ROOM = CONTEXT - 4  # of a prompt: a response has 4 tokens
MODEL = {"type": "model"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(folder / "policy", tiny_model("gpt2"))
    save(folder / "reward", tiny_model("gpt2", reward=True, num_labels=1))
    more_words = word_tokenizer()
    more_words.add_tokens(["more"])
    save(folder / "other_words", tiny_model("gpt2", reward=True, num_labels=1, vocab_size=26), more_words)
    return folder


class User:
    """A user whose input is right until a test spoils something, and the run that they ask for."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self.paths: dict[str, str | None] = {
            "sft_policy": str(shutil.copytree(models / "policy", folder / "policy")),
            "reward_model": str(models / "reward"),
            "raw_prompts": str(folder / "prompts.jsonl"),
            "raw_evaluation_prompts": None,
        }
        self.groups: dict[str, Any] = {
            "ppo": PPOConfig(response_length=4),
            "prompts": PromptsConfig(),
            "evaluation": EvaluationConfig(),
        }
        self.write("prompts", *({"prompt": prompt, "genre": "drama"} for prompt in ("a b c", "b c", "c d")))
        self.write_reward("[float(len(text)) for text in completions]")
        self.made: list[str] = []
        self.data_root = "data"

    def write(self, name: str, *rows: dict[str, Any]) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def write_reward(self, result: str) -> None:
        module = f"rewards_{abs(hash((self.folder, result)))}"  # Python imports a module's name once
        function = f"def score(prompts, completions, genre=None, completion_ids=None):\n    return {result}\n"
        (self.folder / f"{module}.py").write_text(function)
        self.groups["reward"] = function_reward(f"{module}:score")

    def set_ppo(self, **settings: Any) -> None:
        self.groups["ppo"] = PPOConfig(**{"response_length": 4, **settings})

    def problems(self) -> list[str]:
        return find_problems(self.request())

    def request(self) -> RunRequest:
        """Return a run whose nodes read all inputs except those that other nodes of the run make."""
        datasets: dict[str, Any] = {f"params:{name}": MemoryDataset(group) for name, group in self.groups.items()}
        for name, path in self.paths.items():
            datasets[name] = (RecordsDataset if name.startswith("raw_") else PretrainedModelDataset)(path)
        inputs = [*self.paths, *(f"params:{group}" for group in self.groups)]
        nodes = [Node(lambda *_: 0, inputs, "prompt_dataset", name="align")]
        nodes += [Node(lambda _: 0, "params:ppo", name, name=f"make_{name}") for name in self.made]
        return RunRequest(Pipeline(nodes), DataCatalog(datasets), self.folder, self.data_root)


def function_reward(reference: str) -> RewardConfig:
    return RewardConfig(components=[{"type": "function", "function": reference}])


@pytest.fixture
def user(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.chdir(tmp_path)  # nodes look for functions in the project of the working directory
    return User(tmp_path, models)


@pytest.fixture
def chain(user: User) -> User:
    """The whole chain on a user's own data: it fine-tunes their model."""
    user.write("texts", {"text": "a b c"}, {"text": "b c"})
    user.write("pairs", *({"prompt": prompt, "chosen": " b", "rejected": " c"} for prompt in ("a", "b")))
    user.made = ["sft_policy", "preferences", "reward_model"]
    user.paths |= {
        "base_model": user.paths["sft_policy"],
        "sft_policy": "data/06_models/sft_policy",
        "reward_model": "data/06_models/reward_model",
        "raw_demonstrations": str(user.folder / "texts.jsonl"),
        "raw_preferences": str(user.folder / "pairs.jsonl"),
    }
    user.groups |= {
        "data_preparation": DataPreparationConfig(),
        "supervised_finetuning": SupervisedFinetuningConfig(),
        "reward_modelling": RewardModellingConfig(),
    }
    return user


Spoil = Callable[[User], object]


def paths(**paths: str | None) -> Spoil:
    return lambda user: user.paths.update(paths)


def group(name: str, settings: Any) -> Spoil:
    return lambda user: user.groups.update({name: settings})


def ppo(**settings: Any) -> Spoil:
    return lambda user: user.set_ppo(**settings)


def prompts(*rows: dict[str, Any]) -> Spoil:
    return lambda user: user.write("prompts", *rows)


def reward(result: str) -> Spoil:
    return lambda user: user.write_reward(result)


def without(file: str) -> Spoil:
    return lambda user: (user.folder / "policy" / file).unlink()


def fewer_rows(user: User) -> None:
    config = user.folder / "policy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 20}))


LONG = {"prompt": " ".join("a" * (ROOM + 1))}


BY_TOKEN = "[[0.0] * len(ids) for ids in completion_ids]"


def clip_token_rewards(user: User) -> None:
    user.set_ppo(reward_clip=1.0)
    user.write_reward(BY_TOKEN)


def test_a_reward_by_token_is_tried_with_the_policys_tokens(user: User):
    assert user.problems() == []
    user.write_reward(BY_TOKEN)
    assert user.problems() == []


def test_a_function_is_tried_with_whole_conversations_without_their_last_reply(user: User):
    word_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(str(user.paths["sft_policy"]))
    chats = [[{"role": "user", "content": word}, {"role": "assistant", "content": "b"}] for word in "acd"]
    user.write("prompts", *({"messages": chat, "genre": "drama"} for chat in chats))
    user.write_reward("[float('a' in text) for text in prompts]")
    assert user.problems() == []
    user.write_reward("[1 / ('b' in text) for text in prompts]")
    (problem,) = user.problems()
    assert "division by zero" in problem


def test_functions_are_tried_with_prompts_as_the_template_renders_them(user: User):
    """`CHAT_TEMPLATE` writes a message as the first letter of its role, its content and `<s>`, then `a ` to answer."""
    shows_tools = "{% for t in tools or [] %}{{ t['function']['name'] + ' ' }}{% endfor %}" + CHAT_TEMPLATE
    word_tokenizer(chat_template=shows_tools).save_pretrained(str(user.paths["sft_policy"]))
    tool = {"type": "function", "function": {"name": "q"}}
    chats = [[{"role": "user", "content": word}] for word in "bcd"]
    user.write("prompts", *({"prompt": chat, "system": "k", "tools": [tool]} for chat in chats))
    (user.folder / "rendered.py").write_text(
        "def check(prompts, given):\n"
        "    assert prompts == ['q s k <s> u c <s> a ', 'q s k <s> u d <s> a '], prompts\n"
        "    return given\n\n"
        "def score(prompts, completions, messages, system, tools):\n"
        "    roles = [[m['role'] for m in chat] for chat in messages]\n"
        "    assert roles == [['system', 'user', 'assistant']] * 2, roles\n"
        "    assert system == ['k', 'k'] and [t[0]['function']['name'] for t in tools] == ['q', 'q']\n"
        "    assert completions == ['k\\nc', 'k\\nd'], completions\n"
        "    return check(prompts, [0.0, 1.0])\n\n"
        "def reply(prompts, completions):\n"
        "    return check(prompts, [None, None])\n"
    )
    user.groups["reward"] = function_reward("rendered:score")
    user.set_ppo(environment="rendered:reply", turn_length=2)
    assert user.problems() == []


REFUSES_SYSTEM = CHAT_TEMPLATE.replace(
    "{{ m['role'][0]", "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ m['role'][0]"
)


def test_a_conversation_that_the_reward_models_template_refuses_is_one_line_with_its_row(user: User, models: Path):
    word_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(str(user.paths["sft_policy"]))
    reward_model = shutil.copytree(models / "reward", user.folder / "reward")
    word_tokenizer(chat_template=REFUSES_SYSTEM).save_pretrained(reward_model)
    user.paths["reward_model"] = str(reward_model)
    user.groups["reward"] = RewardConfig(components=[MODEL])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    user.write("prompts", *({"messages": [*turns, {"role": "user", "content": word}]} for word in "acd"))
    assert user.problems() == []
    chats = [turns, [*turns, {"role": "user", "content": "d"}], [{"role": "system", "content": "c"}, *turns]]
    user.write("prompts", *({"messages": chat} for chat in chats))
    (problem,) = user.problems()
    assert problem == (
        f"{user.folder}/prompts.jsonl: row 2, for the reward model ({reward_model}): the chat template refuses these "
        "messages: no system role"
    )


def test_a_reference_text_that_leaves_nothing_to_measure_is_found(chain: User):
    chain.write("reference", {"text": "a b c"}, {"text": "</s>"})
    chain.paths["raw_reference_texts"] = str(chain.folder / "reference.jsonl")
    (problem,) = chain.problems()
    assert problem.startswith("reference texts: row 1 has no token whose probability could be measured")


SKIPS_DEVELOPER = CHAT_TEMPLATE.replace("in messages", "in messages if m['role'] != 'developer'")
LEFT_OUT = [{"role": "developer", "content": "c"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize("table", [*TABLES])
def test_a_message_that_the_template_leaves_out_is_found_in_every_table(chain: User, table: str):
    """The chat template is the start model's, and the row number in the message is the file's."""
    word_tokenizer(chat_template=SKIPS_DEVELOPER).save_pretrained(str(chain.paths["base_model"]))
    reply = [{"role": "assistant", "content": "b"}]
    rows = [LEFT_OUT[1:], [{"role": "user", "content": "d"}], LEFT_OUT]
    beside: dict[str, Any] = {"genre": "drama"}
    if table in ("raw_demonstrations", "raw_reference_texts"):
        beside = {"completion": reply}
    elif table == "raw_preferences":
        beside = {"chosen": reply, "rejected": [{"role": "assistant", "content": "c"}]}
    chain.write("table", *({"prompt": chat, **beside} for chat in rows))
    assert chain.problems() == []
    chain.paths[table] = str(chain.folder / "table.jsonl")
    (problem,) = chain.problems()
    assert "row 2" in problem
    assert "message 0 has the role `developer`" in problem


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(paths(raw_prompts="/no/p.jsonl"), "/no/p.jsonl", id="no prompts file"),
        pytest.param(paths(raw_prompts=None), "prompts_path", id="no prompts"),
        pytest.param(prompts({"text": "a"}, {"text": "b"}), "prompts.column", id="no such column"),
        pytest.param(prompts({"prompt": "a"}, {"prompt": "a"}), "evaluation_prompts_path", id="one prompt"),
        pytest.param(prompts({"prompt": "a"}, LONG), "ppo.overlong_prompts", id="long prompt"),
        pytest.param(ppo(response_length=CONTEXT), "ppo.response_length", id="no room for prompts"),
        pytest.param(paths(sft_policy="/no/model"), "/no/model", id="no model"),
        pytest.param(paths(sft_policy=None), "sft_model_path", id="model path is null"),
        pytest.param(without("model.safetensors"), "model.safetensors", id="no weights"),
        pytest.param(fewer_rows, "tokenizer", id="tokenizer of another model"),
        pytest.param(group("reward", function_reward("no_module:f")), "no_module:f", id="no reward module"),
        pytest.param(reward("[0.0]"), ":score", id="wrong number of rewards"),
        pytest.param(reward("1 / 0"), "ZeroDivisionError", id="reward raises"),
        pytest.param(clip_token_rewards, "ppo.reward_clip", id="clip of a reward by token"),
        pytest.param(
            group("evaluation", EvaluationConfig(judge="no_judge:f")),
            "no_judge:f",
            id="no judge module",
        ),
        pytest.param(ppo(value_model="reward_init"), "ppo.value_model", id="critic from no reward model"),
        pytest.param(ppo(sft_model_path="models/mine"), "conf/local/globals.yml", id="path in another group"),
        pytest.param(lambda user: setattr(user, "data_root", "~/d"), "data_root=~/d: ~ is not", id="home in data_root"),
        pytest.param(ppo(device="cuda:99"), "cuda:99", id="no such device"),
        pytest.param(ppo(rollout_engine="vllm"), "ppo.rollout_engine=vllm: vllm is not installed", id="no vLLM"),
        pytest.param(ppo(use_peft=True, lora_target_modules="q_proj"), "ppo.lora_target_modules", id="no such layer"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(user: User, spoil: Spoil, named: str):
    spoil(user)
    (problem,) = user.problems()
    assert named in problem
    assert "\n" not in problem


def test_a_package_that_settings_need_and_that_is_not_installed_is_named_with_them(user: User, monkeypatch):
    monkeypatch.setattr(quantisation, "NEEDED", Requirement("no-such-package>=1"))
    user.set_ppo(use_peft=True, load_in_4bit=True, optim="adamw_8bit")
    (problem,) = user.problems()
    assert problem.startswith("ppo.load_in_4bit=true and ppo.optim=adamw_8bit")
    assert 'pip install "no-such-package>=1"' in problem


@pytest.mark.parametrize("overlong", ["drop", "truncate_left"])
def test_long_prompts_that_are_dropped_or_cut_are_no_problem(user: User, overlong: str):
    user.write("prompts", {"prompt": "a"}, {"prompt": "b"}, LONG)
    user.set_ppo(overlong_prompts=overlong)
    assert user.problems() == []


def test_a_held_out_part_that_is_dropped_whole_is_found_before_the_run(user: User):
    user.write("prompts", {"prompt": "a"}, LONG)  # the long prompt is held out
    user.set_ppo(overlong_prompts="drop")
    (problem,) = user.problems()
    assert problem.startswith("evaluation prompts: none of 1 prompts has at most 28 tokens")


def test_a_reward_model_is_checked_only_if_the_reward_uses_it(user: User, models: Path):
    user.paths["reward_model"] = str(models / "policy")  # of the other kind
    assert user.problems() == []
    user.groups["reward"] = RewardConfig(components=[MODEL])
    (problem,) = user.problems()
    assert "num_labels=1, this is a GPT2LMHeadModel" in problem


def test_the_inputs_that_the_settings_leave_unused_are_those_that_the_run_does_not_make(user: User):
    user.paths["pretrained_critic"] = "critic"
    assert user.request().unused == {"reward_model", "pretrained_critic"}
    user.made = ["reward_model"]
    user.set_ppo(value_model="pretrained")
    assert user.request().unused == set()


def test_a_stored_critic_is_checked_only_if_it_is_asked_for(user: User, models: Path):
    user.paths["pretrained_critic"] = "data/06_models/pretrained_critic"  # none is there yet
    assert user.problems() == []
    user.set_ppo(value_model="pretrained")
    (problem,) = user.problems()
    assert "kedro run --pipelines critic_pretraining" in problem
    user.paths["pretrained_critic"] = None
    (problem,) = user.problems()
    assert problem.startswith("critic_path is not set")
    user.paths["pretrained_critic"] = str(models / "policy")
    (problem,) = user.problems()
    assert re.search("critic.* num_labels=1", problem)
    user.paths["pretrained_critic"] = str(models / "other_words")
    (problem,) = user.problems()
    assert problem.startswith("ppo.value_model=pretrained")
    user.paths["pretrained_critic"] = str(models / "reward")
    assert user.problems() == []


def test_functions_are_called_with_each_table_whose_prompts_they_get(user: User):
    user.write("evaluation", {"prompt": "a b", "answer": "c"})
    user.paths["raw_evaluation_prompts"] = str(user.folder / "evaluation.jsonl")
    (user.folder / "judge_of_answers.py").write_text(
        "def judge(prompts, completions, **columns):\n    return [float(len(text)) for text in columns['answer']]\n"
    )
    user.groups["evaluation"] = EvaluationConfig(judge="judge_of_answers:judge")
    assert user.problems() == []  # the judge gets no training prompts
    user.write_reward("[float(len(text)) for text in genre]")
    (problem,) = user.problems()
    assert "evaluation.jsonl" in problem


def test_callbacks_and_reports_that_cannot_be_made_are_problems(user: User):
    user.set_ppo(callbacks="my_callbacks:Mine")
    (problem,) = user.problems()
    assert "my_callbacks" in problem
    user.set_ppo(report_to="tensorbord")
    (problem,) = user.problems()
    assert problem.startswith("ppo.report_to=tensorbord: ")
    user.set_ppo(report_to="mlflow")
    assert (
        "ppo.report_to: the pipeline tracks its runs in MLflow itself (mlflow.yml); leave mlflow out" in user.problems()
    )


def test_an_environment_is_tried_with_prompts_of_each_table(user: User):
    user.set_ppo(environment="my_environment:reply", turn_length=2)
    (problem,) = user.problems()
    assert "my_environment" in problem
    (user.folder / "my_environment.py").write_text(
        "def reply(prompts, completions, turns, genre):\n    return [text[0] or None for text in turns]\n"
    )
    assert user.problems() == []
    user.write("evaluation", {"prompt": "a b", "answer": "c"})
    user.paths["raw_evaluation_prompts"] = str(user.folder / "evaluation.jsonl")
    (problem,) = user.problems()
    assert problem.startswith("environment my_environment:reply on ")
    assert "evaluation.jsonl" in problem


def test_a_missing_argument_is_named_with_the_names_of_ours_apart_from_the_tables_columns(user: User):
    (user.folder / "asks_for_answers.py").write_text(
        "def score(prompts, completions, answer):\n    return [0.0, 0.0]\n"
    )
    user.groups["reward"] = function_reward("asks_for_answers:score")
    (problem,) = user.problems()
    assert "missing a required argument: 'answer'" in problem
    assert problem.endswith(
        "or with some of prompts, completions, completion_ids, turns, messages and the table's other columns: genre."
    )


def test_pairs_of_episodes_cannot_be_sampled(user: User):
    (user.folder / "my_environment.py").write_text(
        "def reply(prompts, completions):\n    return [None] * len(prompts)\n"
    )
    user.set_ppo(environment="my_environment:reply", turn_length=2)
    assert user.problems() == []
    user.made = ["preferences"]
    (problem,) = user.problems()
    assert "preferences_path" in problem
    user.made = ["reward_audit"]
    assert user.problems() == []


def test_a_column_of_reference_answers_that_the_prompts_lack_is_named(user: User):
    user.groups["audit"] = AuditConfig(reference_column="answer")
    (problem,) = user.problems()
    assert problem == "audit.reference_column=answer: the prompts have no such column; their columns: genre."
    user.groups["audit"] = AuditConfig(reference_column="genre")
    assert user.problems() == []


def test_a_run_names_the_holes_that_an_audit_found_in_its_reward_and_in_no_other(user: User):
    reward = user.groups["reward"]
    digest = reward_digest(reward, None, user.folder)

    def line(audit: dict[str, Any]) -> str:
        run = user.request()
        run.pipeline = run.pipeline + Pipeline([Node(lambda _: 0, "audited_holes", "reward_holes", name="read_audit")])
        run.catalog["audited_holes"] = MemoryDataset(audit)
        return describe_audit(run)

    holes = [{"attack": "echo"}, {"attack": "keywords"}]
    assert line({"reward": digest, "holes": holes}) == "Audited: 2 holes (echo, keywords)."
    assert line({"reward": digest, "holes": holes[:1]}) == "Audited: 1 hole (echo)."
    for silent in ({}, {"reward": digest, "holes": []}, {"reward": "other", "holes": holes}):
        assert line(silent) == ""


def test_an_audit_by_a_language_model_says_its_bill_before_the_first_request(user: User):
    judge: dict[str, Any] = {"model": "big", "base_url": "http://127.0.0.1:1/v1", "max_retries": 0}
    judge |= {"max_tokens": 50, "template": "{{ prompt }}"}
    user.groups["reward"] = RewardConfig(components=[{"type": "llm", "llm": judge, "name": "helpful"}])
    user.groups["audit"] = AuditConfig(suffixes=[], search_rewards=100)
    user.groups["best_of_n"] = BestOfNConfig(prompts=2, samples=8)
    run = user.request()
    assert describe_audit(run) == ""  # no prompts were read yet
    assert any("127.0.0.1" in problem for problem in find_problems(run))  # nobody answers there
    requests = 2 * 8 + 2 * len(attacks()) + 100
    line = describe_audit(run)
    assert f"The audit asks reward.helpful (big): at most {requests:,} requests, about " in line
    assert f"tokens in by the policy's tokenizer, at most {50 * requests:,} out. best_of_n.prompts" in line


def test_a_policy_of_ones_own_is_not_scored_by_the_reward_model_of_the_projects_own_sft_policy(
    user: User, models: Path
):
    made_here = user.folder / "data" / "06_models" / "reward_model"
    shutil.copytree(models / "reward", made_here / "version")
    user.groups["reward"] = RewardConfig(components=[MODEL])
    user.paths["reward_model"] = str(made_here)
    (problem,) = user.problems()
    assert problem.startswith("reward_model_path=data/06_models/reward_model is ")
    user.paths["reward_model"] = str(made_here / "version")  # this one is meant
    assert user.problems() == []


def test_a_policy_of_ones_own_is_scored_by_the_reward_model_that_was_trained_from_it(user: User, models: Path):
    version = user.folder / "data" / "06_models" / "reward_model" / "version"
    shutil.copytree(models / "reward", version)
    config = json.loads((version / "config.json").read_text())
    policy = PretrainedHandle(str(user.paths["sft_policy"]))
    (version / "config.json").write_text(json.dumps({**config, "trained_from": policy.fingerprint()}))
    user.groups["reward"] = RewardConfig(components=[MODEL])
    user.paths["reward_model"] = str(version.parent)
    assert user.problems() == []
    (version / "config.json").write_text(json.dumps({**config, "trained_from": "another"}))
    (problem,) = user.problems()
    assert problem.startswith("reward_model_path=data/06_models/reward_model is ")


def test_a_reward_model_that_is_trained_and_that_nothing_reads_is_found_before_the_run(chain: User):
    chain.made.append("training_state")
    [problem] = [line for line in chain.problems() if "reward model that nothing reads" in line]
    assert re.search(
        r"reward_components.* ppo\.value_model=separate\. .*reward_components=\[\{type: model\}\]", problem
    )
    chain.set_ppo(value_model="reward_init")
    assert not any("nothing reads" in line for line in chain.problems())
    chain.set_ppo()
    chain.groups["reward"] = RewardConfig(components=[MODEL])
    assert not any("nothing reads" in line for line in chain.problems())


def test_a_stop_at_exploitation_needs_a_judge_of_its_own_and_enough_prompts(user: User):
    (term,) = user.groups["reward"].components
    user.made = [*user.made, "evaluation_metrics"]
    user.groups["evaluation"] = EvaluationConfig(judge=term.function, on_exploitation="stop")
    of_judge, of_prompts = [line for line in user.problems() if "on_exploitation=stop" in line]
    assert f"the judge {term.function} is part of the reward" in of_judge
    assert "with 1 of 1 held-out prompts" in of_prompts
    user.groups["evaluation"] = EvaluationConfig(judge=term.function)
    assert user.problems() == []


def test_where_no_evaluation_is_compared_a_stop_at_exploitation_is_refused_or_not_checked(user: User):
    (term,) = user.groups["reward"].components
    user.groups["evaluation"] = EvaluationConfig(judge=term.function, on_exploitation="stop")
    run = user.request()
    for outputs, lines in (({"sweep_trainings"}, 1), ({"prompt_dataset"}, 0)):
        run.pipeline = Pipeline([Node(lambda *_: 1, ["params:evaluation", "params:reward"], [*outputs], name="n")])
        found = list(check_exploitation(run))
        assert len(found) == lines
    run.pipeline = Pipeline([Node(lambda *_: 1, ["params:evaluation"], ["sweep_trainings"], name="n")])
    assert "are evaluated only at their end" in next(check_exploitation(run))


def test_where_the_parts_of_a_run_come_from_is_one_line(user: User):
    user.groups["reward"] = RewardConfig(components=[MODEL, {"type": "function", "function": "my:f", "weight": 0.5}])
    line = describe_parts(user.request())
    reward = f"1 x ({user.paths['reward_model']}) + 0.5 x (my:f)"
    judge = "The win rate is decided by the reward, as evaluation.judge is not set."
    assert line == f"Policy: policy. Reward: {reward}. Prompts: prompts.jsonl. {judge}"
    user.made = ["sft_policy"]
    assert "Policy: trained by this run, from random weights." in str(describe_parts(user.request()))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("sft_policy", "sft_model_path"),
        ("reward_model", "reward_model_path"),
        ("pretrained_critic", "critic_path"),
    ],
)
def test_a_model_of_ones_own_is_never_written(user: User, models: Path, name: str, setting: str):
    user.made = [name]
    user.paths.setdefault(name, str(models / "reward"))
    (problem,) = user.problems()
    assert problem.startswith(f"{setting}={user.paths[name]} is outside data/06_models")
    user.paths[name] = f"data/06_models/{name}"
    assert user.problems() == []
    user.data_root = "bigdisk"  # the layers are moved, the model is not
    (problem,) = user.problems()
    assert problem.startswith(f"{setting}=data/06_models/{name} is outside bigdisk/06_models")


def test_a_link_out_of_the_projects_models_is_outside(user: User):
    (user.folder / "data" / "06_models").mkdir(parents=True)
    (user.folder / "data" / "06_models" / "sft_policy").symlink_to(user.folder / "policy")
    user.paths["sft_policy"] = "data/06_models/sft_policy"
    user.made = ["sft_policy"]
    (problem,) = user.problems()
    assert problem.startswith("sft_model_path=data/06_models/sft_policy is outside data/06_models")
    assert re.search(r"`--pipelines align`\. .*sft_model_path null.* base_model_path ", problem)


def test_a_model_that_the_project_has_not_trained_yet_is_named_with_the_pipeline_that_does(user: User):
    user.paths["sft_policy"] = str(user.folder / "data" / "06_models" / "sft_policy")
    (problem,) = user.problems()
    command = "`kedro run --pipelines data_preparation,supervised_finetuning`"
    assert re.match(f"data/06_models/sft_policy: .*{command}.* sft_model_path", problem)
    (problem,) = find_problems(replace(user.request(), env="demo"))
    assert "`kedro run --env demo --pipelines data_preparation,supervised_finetuning`" in problem
    user.paths["sft_policy"] = str(user.folder / "data" / "06_models" / "typed")
    (problem,) = user.problems()
    assert re.match("data/06_models/typed: .*sft_model_path.*`kedro run ", problem)


# --- the whole chain -------------------------------------------------------------------------------------------------


def start_from_scratch(user: User) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = SupervisedFinetuningConfig(from_scratch=shape | {"max_position_embeddings": CONTEXT})
    user.paths["base_model"], user.groups["supervised_finetuning"] = None, settings


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_chain_without_mistakes_has_no_problems(chain: User, from_scratch: bool):
    if from_scratch:
        start_from_scratch(chain)
    assert chain.problems() == []
    chain.write("prompts", {"prompt": "a"}, LONG)
    (problem,) = chain.problems()
    assert "ppo.overlong_prompts" in problem


def chats_from_scratch(user: User) -> None:
    user.write("texts", *({"messages": [{"role": "user", "content": word}]} for word in "ab"))
    start_from_scratch(user)


def two_starts(user: User) -> None:
    base = user.paths["base_model"]
    start_from_scratch(user)
    user.paths["base_model"] = base


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(paths(raw_demonstrations="/no/d.jsonl"), "/no/d.jsonl", id="no demonstrations file"),
        pytest.param(
            group("data_preparation", DataPreparationConfig(text_column="body")),
            "data_preparation.text_column",
            id="no such column of demonstrations",
        ),
        pytest.param(chats_from_scratch, "base_model_path", id="chats from scratch"),
        pytest.param(paths(base_model=None), "base_model_path (or, for a small model", id="nothing to start from"),
        pytest.param(two_starts, "there is a base model", id="two starts"),
        pytest.param(paths(base_model="/no/base"), "/no/base", id="no base model"),
        pytest.param(paths(raw_preferences=None), "preferences_path", id="nobody makes preferences"),
    ],
)
def test_a_mistake_in_a_chain_is_one_line_that_names_it(chain: User, spoil: Spoil, named: str):
    spoil(chain)
    (problem,) = chain.problems()
    assert named in problem


def test_chats_without_a_base_model_are_found_also_where_no_prompts_are_read(chain: User):
    chats_from_scratch(chain)
    del chain.groups["prompts"]
    (problem,) = chain.problems()
    assert "base_model_path" in problem


def test_what_a_chain_lacks_is_one_line_with_the_ways_that_lack_nothing(chain: User):
    chain.paths |= dict.fromkeys(("raw_preferences", "raw_demonstrations", "raw_prompts"))
    chain.made.append("ppo_policy")
    names = "demonstrations_path, prompts_path and preferences_path (or reward_modelling.labeller)"
    (line,) = chain.problems()
    assert line.startswith(f"{names} are not set. ")
    assert re.search(r"conf/local/globals\.yml .*--params.*`--pipelines align`", line)
    (in_environment,) = find_problems(replace(chain.request(), env="mine"))
    assert in_environment == line.replace("conf/local/", "conf/mine/")  # which replaces conf/local
    (chain.folder / "conf/demo").mkdir(parents=True)
    (with_demo,) = chain.problems()
    assert re.fullmatch(r" .*`--env demo`\.", with_demo.removeprefix(line))
    chain.groups["reward_modelling"] = RewardModellingConfig(labeller=chain.groups["reward"].components[0].function)
    (problem,) = chain.problems()
    assert problem.startswith("demonstrations_path and prompts_path are not set")


@pytest.mark.parametrize(
    ("made", "named"), [("reward_model", "reward_model_path"), ("pretrained_critic", "ppo.critic_warmup_iterations")]
)
def test_nothing_is_trained_on_a_backbone_whose_code_would_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, named: str
):
    own = PretrainedModelDataset(str(save_with_own_code(tmp_path / "own", monkeypatch)), trust_remote_code=True)
    train = Node(lambda _: 0, "sft_policy", made, name="train")
    (problem,) = find_problems(RunRequest(Pipeline([train]), DataCatalog({"sft_policy": own}), tmp_path))
    assert named in problem


# --- slices ----------------------------------------------------------------------------------------------------------


def test_a_slice_that_starts_from_what_no_file_holds_is_refused(tmp_path: Path):
    missing = str(tmp_path / "pairs.parquet")
    datasets = {"rollouts": MemoryDataset(), "given": MemoryDataset(3), "pairs": TableDataset(filepath=missing)}
    late = Node(lambda *_: 0, ["rollouts", "scores", "given", "pairs"], "x", name="late")
    in_memory, in_file = find_problems(RunRequest(Pipeline([late]), DataCatalog(datasets), tmp_path))
    assert "rollouts, scores" in in_memory
    assert missing in in_file


@pytest.fixture
def evaluating(user: User) -> User:
    """An evaluation alone, of prompts of one's own, in a project that has held out none yet."""
    user.paths |= {"raw_evaluation_prompts": str(user.folder / "test.jsonl")}
    del user.paths["raw_prompts"]
    user.write("test", {"prompt": "a b"}, {"prompt": "b"})
    return user


def evaluation_problems(user: User, stored: str = "evaluation_prompts") -> list[str]:
    run = user.request()
    run.catalog[stored] = OptionalTableDataset(filepath=str(user.folder / "stored.parquet"))
    answer = Node(lambda *_: 0, [stored, *run.pipeline.inputs()], "answers", name="answer")
    return find_problems(replace(run, pipeline=Pipeline([answer])))


def test_evaluation_prompts_of_ones_own_need_no_stored_ones(evaluating: User):
    assert evaluation_problems(evaluating) == []
    evaluating.paths["raw_evaluation_prompts"] = None
    (problem,) = evaluation_problems(evaluating)
    assert "stored.parquet: nothing is there yet" in problem


def test_only_an_evaluation_of_held_out_demonstrations_needs_them(evaluating: User, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_checks, "pipelines", register_pipelines())
    assert evaluation_problems(evaluating, "evaluation_demonstrations") == []
    evaluating.groups["evaluation"] = EvaluationConfig(reference_texts=HELD_OUT_DEMONSTRATIONS)
    (problem,) = evaluation_problems(evaluating, "evaluation_demonstrations")
    command = "kedro run --pipelines data_preparation --to-nodes data_preparation.split_demonstrations"
    assert f"stored.parquet: nothing is there yet. Make it by `{command}`." in problem


# --- what a configuration and a tokenizer tell without weights --------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gemma 3"])
def test_a_policy_that_reads_later_tokens_is_found_before_the_run(user: User, kind: str):
    user.paths["sft_policy"] = save(user.folder / "encoder", not_causal_models()[kind])
    (problem,) = user.problems()
    assert problem.startswith(f"{user.folder}/encoder: ")
    assert "give a language model" in problem


def test_a_policy_to_evaluate_with_another_vocabulary_is_found_before_the_run(evaluating: User):
    evaluating.paths["ppo_policy"] = evaluating.paths["sft_policy"]
    assert evaluation_problems(evaluating) == []
    more_words = word_tokenizer()
    more_words.add_tokens(["more"])
    evaluating.paths["ppo_policy"] = save(evaluating.folder / "other", tiny_model(vocab_size=26), more_words)
    (problem,) = evaluation_problems(evaluating)
    assert "have different vocabularies" in problem


def test_a_stop_token_that_the_tokenizer_does_not_have_is_found_before_the_run(user: User):
    user.set_ppo(stop_token_id=24)
    assert user.problems() == []
    user.set_ppo(stop_token_id=25)
    assert user.problems() == ["stop_token_id=25 is not an id of the tokenizer (0 to 24)."]
    user.set_ppo()
    (user.folder / "policy" / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    (problem,) = user.problems()
    assert "eos_token_id='</s>'" in problem


def test_an_adapter_that_ppo_cannot_start_from_as_asked_is_found_before_the_run(user: User):
    base = tiny_model("llama")
    place = save(user.folder / "base", base)
    settings = LoraSettings(rank=2, alpha=4, target_modules="all-linear")
    base.name_or_path = place
    save_adapter(with_adapter(base, settings, torch.Generator()), user.folder / "adapter", settings)
    user.paths["sft_policy"] = str(user.folder / "adapter")
    user.made = ["training_state"]
    user.set_ppo(use_peft=True)
    assert user.problems() == []
    user.set_ppo(use_peft=True, export="adapter")
    (problem,) = user.problems()
    assert problem.startswith(f"ppo.export=adapter: {user.folder}/adapter ")
    user.set_ppo(use_peft=True, load_in_4bit=True)
    refused = [problem for problem in user.problems() if "ppo.load_in_4bit=false" in problem]
    assert [problem.partition(": ")[0] for problem in refused] == [f"{user.folder}/adapter"]


def test_a_gguf_file_is_checked_without_its_weights_and_refused_where_it_cannot_serve(user: User, monkeypatch):
    write_gguf(user.folder / "tiny.gguf")
    user.paths["sft_policy"] = str(user.folder / "tiny.gguf")
    user.made = ["training_state"]
    monkeypatch.setattr(GGUFFile, "dequantise", lambda file: pytest.fail("weights were read"))
    assert user.problems() == []
    user.set_ppo(use_peft=True, export="adapter")
    (problem,) = user.problems()
    assert problem.startswith(f"ppo.export=adapter: {user.folder}/tiny.gguf is a GGUF file")
    user.set_ppo()
    user.paths["reward_model"] = str(user.folder / "tiny.gguf")
    user.groups["reward"] = RewardConfig(components=[MODEL])
    assert f"{user.folder}/tiny.gguf: a GGUF file has no score head, so it is no reward model" in user.problems()[0]


def test_a_reward_model_to_offload_that_is_not_there_is_found_before_the_run(user: User, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.preflight.run_checks.check_device", lambda ppo, device: None)  # it needs a GPU
    user.set_ppo(offload_reward_model=True)
    (problem,) = user.problems()
    assert problem.startswith("ppo.offload_reward_model=true")


def test_components_that_nothing_normalises_are_found_before_the_run(user: User):
    terms = [{"type": "function", "function": "builtins:len", "name": name} for name in ("one", "other")]
    user.groups["reward"] = RewardConfig(components=terms, normalise="component")
    assert not any("reward.normalise" in line for line in user.problems())  # an evaluation normalises nothing
    user.made.append("training_state")
    [problem] = [line for line in user.problems() if "reward.normalise" in line]
    assert problem.startswith("reward.normalise=component and ppo.reward_normalisation=none: nothing says how")
    user.set_ppo(reward_normalisation="batch")
    assert not any("reward.normalise" in line for line in user.problems())


def test_each_reward_model_of_a_path_is_checked_before_the_run(user: User, models: Path):
    """A path without a model, one of the wrong kind, one too short, and a first one that no critic can start from."""
    short = save(user.folder / "short", tiny_model("gpt2", reward=True, num_labels=1, n_positions=6))
    user.made = ["training_state"]
    user.write("prompts", *({"prompt": prompt} for prompt in ("a b c", "b c d", "c d e")))

    def lines(*paths: str | None, **ppo: Any) -> list[str]:
        terms = [{"type": "model", "path": path, "name": f"m{n}"} for n, path in enumerate(paths)]
        user.groups["reward"] = RewardConfig(components=terms, combine="mean")  # type: ignore[arg-type]
        user.set_ppo(**ppo)
        return user.problems()

    assert lines(str(models / "reward"), None) == []
    user.paths["reward_model"] = None
    assert lines(str(models / "reward"), str(models / "reward")) == []
    [missing] = lines(str(models / "reward"), None)
    assert missing.startswith("reward_model_path is not set")
    [missing] = lines(str(models / "reward"), str(user.folder / "nothing"))
    assert missing.startswith(f"{user.folder}/nothing: ")
    [wrong] = lines(str(models / "reward"), str(models / "policy"))
    assert wrong.startswith(f"{models}/policy: a reward model is a sequence classifier with num_labels=1")
    [small] = lines(str(models / "reward"), short)
    assert f"the reward model {short}'s context is 6" in small
    other = str(models / "other_words")
    assert lines(str(models / "reward"), other, value_model="reward_init") == []
    [words] = lines(other, str(models / "reward"), value_model="reward_init")
    assert words.startswith("ppo.value_model=reward_init: ")
    assert f"and {other} have different vocabularies" in words


def test_the_runs_line_says_how_reward_models_are_combined(user: User, models: Path):
    path = str(models / "reward")
    user.groups["reward"] = RewardConfig(components=[MODEL, {**MODEL, "path": path}], combine="mean")
    assert f"Reward: mean of {user.paths['reward_model']}, {path}. " in describe_parts(user.request())


def test_rewards_per_token_are_refused_with_a_combination_before_the_run(user: User):
    user.write_reward("[[0.0] * len(ids) for ids in completion_ids]")
    reference = user.groups["reward"].components[0].function
    terms = [{"type": "function", "function": reference, "name": name} for name in ("one", "other")]
    user.groups["reward"] = RewardConfig(components=terms, combine="mean")
    [problem] = user.problems()
    assert problem.startswith(f"reward.combine=mean combines scores of whole responses, but {reference} returns one")


def test_a_reward_model_that_no_critic_can_start_from_is_found_before_the_run(user: User):
    user.groups["reward"] = RewardConfig(components=[MODEL])
    user.made = ["training_state"]
    user.set_ppo(value_model="reward_init")
    assert user.problems() == []
    more_rows = tiny_model("gpt2", reward=True, num_labels=1, vocab_size=32)  # of the same tokenizer
    user.paths["reward_model"] = save(user.folder / "more_rows", more_rows)
    assert user.problems() == [
        "ppo.value_model=reward_init: its model's vocabulary has 32 tokens, the policy's 25; set "
        "ppo.value_model=separate"
    ]
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForSequenceClassification(BertConfig(vocab_size=25, num_labels=1, max_position_embeddings=32, **shape))
    user.paths["reward_model"] = save(user.folder / "bert", bert)
    (problem,) = user.problems()
    assert "BertForSequenceClassification" in problem
    assert "`score`" in problem


def test_a_critic_may_start_from_a_language_model_with_llama_factorys_value_head(user: User):
    user.groups["reward"] = RewardConfig(components=[MODEL])
    user.made = ["training_state"]
    user.set_ppo(value_model="reward_init")
    user.paths["reward_model"] = save(user.folder / "llama_factory", tiny_model("gpt2"))
    head = {"v_head.summary.weight": torch.zeros(1, 16), "v_head.summary.bias": torch.zeros(1)}
    save_file(head, user.folder / "llama_factory" / "value_head.safetensors")
    assert user.problems() == []


def test_a_reward_model_that_leaves_a_response_no_room_is_found_before_the_run(user: User):
    user.groups["reward"] = RewardConfig(components=[MODEL])
    user.made = ["training_state"]
    user.write("prompts", *({"prompt": prompt} for prompt in ("a b c", "b c d", "c d e")))
    for context, has_room in ((7, True), (6, False)):  # prompts of 3 tokens, responses of 4
        short = tiny_model("gpt2", reward=True, num_labels=1, n_positions=context)
        user.paths["reward_model"] = save(user.folder / f"short_{context}", short)
        problems = user.problems()
        assert (problems == []) is has_room, problems
    assert re.search(r" 3 tokens.* 4 .* 7", problems[0])
