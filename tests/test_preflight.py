"""The preflight: what it finds wrong in a person's input, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompts import PromptsConfig, split_held_out
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset, TableDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo.evaluation import DEMO_JUDGE, EvaluationConfig
from ppo_rlhf.preflight import find_problems
from ppo_rlhf.rewards.scorers import NOTHING_TO_OFFLOAD, RewardConfig
from ppo_rlhf.training.supervised.demonstrations import DataPreparationConfig, split_demonstrations
from ppo_rlhf.training.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.training.supervised.sft import SupervisedFinetuningConfig
from tests.own_code import save_with_own_code

WORDS = ["<unk>", "</s>", "the", "film", "was", "a", "story", "of", "i", "have", "seen"]
FUNCTION = {"type": "function", "function": "my_rewards:count"}
MODEL = {"type": "model"}


def save_model(folder: Path, *, words: list[str] = WORDS, rows: int | None = None, reward: bool = False) -> Path:
    vocabulary = {word: index for index, word in enumerate(words)}
    words_apart = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words_apart.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_apart, unk_token="<unk>", eos_token="</s>")
    config = GPT2Config(
        vocab_size=rows or len(words), n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    if reward:
        config.num_labels = 1
    (GPT2ForSequenceClassification if reward else GPT2LMHeadModel)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "policy")
    save_model(folder / "reward", reward=True)
    save_model(folder / "other_words", words=[*WORDS, "more"], reward=True)
    return folder


class Desk:
    """A person's folder with everything right, and the run that they ask for."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self.paths: dict[str, str | None] = {
            "sft_policy": str(shutil.copytree(models / "policy", folder / "policy")),
            "reward_model": str(shutil.copytree(models / "reward", folder / "reward")),
            "raw_prompts": str(folder / "prompts.jsonl"),
            "raw_evaluation_prompts": None,
        }
        self.groups: dict[str, Any] = {
            "ppo": PPOConfig(response_length=4),
            "prompts": PromptsConfig(),
            "reward": RewardConfig(components=[FUNCTION]),
            "evaluation": EvaluationConfig(prompts_path="prompts.jsonl"),
        }
        self.write_prompts(["the film was", "a story of", "i have seen"])
        self.write_rewards("    return [float(len(text)) for text in completions]")
        self.made: list[str] = []
        self.data_root = "data"

    def write_prompts(self, prompts: list[str], column: str = "prompt") -> None:
        rows = [json.dumps({column: prompt, "genre": "drama"}) for prompt in prompts]
        (self.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")

    def write_rewards(self, body: str) -> None:
        # a module of its own name for each test: Python imports a name once
        name = f"rewards_{abs(hash((self.folder, body)))}"
        (self.folder / f"{name}.py").write_text(f"def count(prompts, completions, genre=None):\n{body}\n")
        self.groups["reward"] = RewardConfig(components=[FUNCTION | {"function": f"{name}:count"}])

    def problems(self) -> list[str]:
        """Ask for a run whose nodes read everything but what other nodes of it make."""
        datasets: dict[str, Any] = {f"params:{name}": MemoryDataset(group) for name, group in self.groups.items()}
        for name, path in self.paths.items():
            kind = RecordsDataset if name.startswith("raw_") else PretrainedModelDataset
            datasets[name] = kind(path)
        inputs = [*self.paths, *(f"params:{group}" for group in self.groups)]
        nodes = [Node(lambda *_: 0, inputs, "prompt_dataset", name="align")]
        nodes += [Node(lambda _: 0, "params:ppo", name, name=f"make_{name}") for name in self.made]
        return find_problems(Pipeline(nodes), DataCatalog(datasets), self.folder, self.data_root)


@pytest.fixture
def desk(tmp_path: Path, models: Path) -> Desk:
    return Desk(tmp_path, models)


def test_a_desk_with_everything_right_has_no_problems(desk: Desk):
    before = sorted(desk.folder.rglob("*"))
    assert desk.problems() == []
    assert sorted(desk.folder.rglob("*")) == before  # importing the reward left no __pycache__


def test_a_reward_that_imports_its_neighbour_when_called_leaves_no_trace_either(desk: Desk):
    (desk.folder / "neighbour_in_preflight.py").write_text("one = 1.0\n")
    desk.write_rewards("    import neighbour_in_preflight as n\n    return [n.one] * len(completions)")
    before = sorted(desk.folder.rglob("*"))
    assert desk.problems() == []
    assert sorted(desk.folder.rglob("*")) == before


def test_functions_are_called_with_each_table_of_prompts_that_they_will_get(desk: Desk):
    other = desk.folder / "evaluation.jsonl"
    other.write_text('{"prompt": "a film", "answer": "story"}\n')
    desk.paths["raw_evaluation_prompts"] = str(other)
    desk.groups["evaluation"] = EvaluationConfig(prompts_path="prompts.jsonl", judge="judge_of_evaluation:judge")
    (desk.folder / "judge_of_evaluation.py").write_text(
        "def judge(prompts, completions, **columns):\n    return [float(len(text)) for text in columns['answer']]\n"
    )
    assert desk.problems() == []  # the judge never sees prompts that are trained on
    desk.write_rewards("    return [float(len(text)) for text in genre]")
    (problem,) = desk.problems()
    assert f" on {other} raised TypeError: 'NoneType' object is not iterable" in problem
    desk.write_rewards("    return 1 / 0")
    (problem,) = desk.problems()
    assert "raised ZeroDivisionError" in problem


def test_a_reward_that_was_edited_since_the_run_before_is_called_as_it_is_now(desk: Desk):
    desk.write_rewards("    return [1.0] * len(completions)")
    assert desk.problems() == []
    [file] = desk.folder.glob(f"{desk.groups['reward'].components[0].function.partition(':')[0]}.py")
    file.write_text("def count(prompts, completions, genre=None):\n    return 1 / 0\n")
    (problem,) = desk.problems()
    assert "raised ZeroDivisionError" in problem


@pytest.mark.parametrize(("taken", "given"), [("prompts", "the prompts as text"), ("completions", "the responses")])
def test_a_column_with_the_name_of_what_functions_are_called_with_is_refused_once(desk: Desk, taken: str, given: str):
    rows = [{"prompt": "the film was", taken: "a"}, {"prompt": "a story of", taken: "b"}]
    (desk.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (first,) = desk.groups["reward"].components
    desk.groups["reward"] = RewardConfig(components=[first, FUNCTION | {"function": first.function, "name": "other"}])
    assert desk.problems() == [
        f"{desk.folder}/prompts.jsonl: a column is called `{taken}`, and by that name functions get {given}, so they "
        "could not be given it. Rename it, or take it out"
    ]
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    assert desk.problems() == []  # no function misses it


def test_the_column_of_the_prompts_may_be_called_prompts(desk: Desk):
    desk.write_prompts(["the film was", "a story of"], column="prompts")
    desk.groups["prompts"] = PromptsConfig(column="prompts")
    assert desk.problems() == []


def test_no_reward_model_is_trained_on_a_backbone_whose_code_would_not_be_saved(desk: Desk, monkeypatch):
    own = save_with_own_code(desk.folder / "own", monkeypatch)
    backbone = PretrainedHandle(str(own), trust_remote_code=True)
    datasets = {"sft_policy": MemoryDataset(backbone, copy_mode="assign")}
    train = Node(lambda _: 0, "sft_policy", "reward_model", name="train_reward_model")
    (problem,) = find_problems(Pipeline([train]), DataCatalog(datasets), desk.folder)
    assert problem.startswith(f"{own} has Python code of its own, which a reward model trained on it would be saved ")


def test_an_end_of_text_that_the_model_does_not_have_ends_no_response(desk: Desk):
    folder = Path(str(desk.paths["sft_policy"]))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 50256}))
    (problem,) = desk.problems()
    assert "the tokenizer has no token for stop_token=eos" in problem


def _remove(name: str) -> Callable[[Desk], None]:
    return lambda desk: (desk.folder / name).unlink()


def _rename_column(desk: Desk) -> None:
    desk.write_prompts(["the film was", "a story of"], column="text")


def _damage_line(desk: Desk) -> None:
    (desk.folder / "prompts.jsonl").write_text('{"prompt": "the film"}\n{"prompt": "a sto\n')


def _empty(desk: Desk) -> None:
    (desk.folder / "prompts.jsonl").write_text("")


def _rows_without_prompt(desk: Desk) -> None:
    (desk.folder / "prompts.jsonl").write_text('{"prompt": "the film was"}\n{"text": "a story of"}\n')


def _tokens_alone(desk: Desk) -> None:
    for path in (desk.folder / "policy").glob("tokenizer*"):
        path.unlink()


def _long_prompt(desk: Desk) -> None:
    desk.write_prompts(["the film was", "a story of", " ".join(["the"] * 13)])


def _few_rows(desk: Desk) -> None:
    config = json.loads((desk.folder / "policy" / "config.json").read_text())
    (desk.folder / "policy" / "config.json").write_text(json.dumps(config | {"vocab_size": len(WORDS) - 3}))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda d: d.paths.update(raw_prompts="/nowhere/p.jsonl"), "/nowhere/p.jsonl: this data file does not exist."),
        (lambda d: d.paths.update(raw_evaluation_prompts="/nowhere/e.csv"), "/nowhere/e.csv: this data file does not"),
        (lambda d: d.paths.update(sft_policy="/nowhere/model"), "/nowhere/model: there is no such model directory."),
        (_remove("policy/model.safetensors"), "{folder}/policy: no weights in this model directory"),
        (_remove("policy/config.json"), "{folder}/policy: no config.json in this directory"),
        (
            _tokens_alone,
            "{folder}/policy: no tokenizer in this model directory (tokenizer.json is missing). Save it there.",
        ),
        (
            lambda d: d.paths.update(sft_policy=None),
            "sft_model_path names nothing. Set it in conf/local/globals.yml",
        ),
        (lambda d: d.paths.update(raw_prompts=None), "prompts_path names nothing. Set it in conf/local/globals.yml"),
        (_rows_without_prompt, "{folder}/prompts.jsonl: row 1, column `prompt`: expected text or a list of"),
        (
            lambda d: d.groups.update(ppo=PPOConfig(response_length=4, stop_token_id=99)),
            "stop_token_id=99 is not an id of the tokenizer (0 to 10).",
        ),
        (_few_rows, "{folder}/policy: the tokenizer has ids up to 10, the model's embedding has 8 rows"),
        (_empty, "{folder}/prompts.jsonl: this data file is empty."),
        (_damage_line, "{folder}/prompts.jsonl: line 2 is damaged, it is not valid JSON"),
        (
            _rename_column,
            "{folder}/prompts.jsonl: there is no column `prompt` (prompts.column); it has text, genre. Name the right "
            "one in prompts.column.",
        ),
        (
            _long_prompt,
            "{folder}/prompts.jsonl: 1 of 3 prompts (the first in row 2) are longer than 12 tokens, the model's "
            "context of 16 less ppo.response_length=4",
        ),
        (lambda d: d.write_prompts(["the film", "the film"]), "1 distinct prompt(s) cannot be split"),
        (lambda d: d.groups.update(ppo=PPOConfig(response_length=16)), "leaves no room for a prompt"),
        (
            lambda d: d.groups.update(reward=RewardConfig(components=[FUNCTION | {"function": "no_module:f"}])),
            "no_module:f: there is no module no_module in {folder}",
        ),
        (lambda d: d.write_rewards("    return [0.0]"), "returned 1 scores for 2 responses. Return one each."),
        (lambda d: d.write_rewards("    return [float('nan')] * len(completions)"), "returned nan for response 0"),
        (lambda d: d.write_rewards("    return 1 / 0"), "raised ZeroDivisionError: division by zero"),
        (
            lambda d: d.groups.update(evaluation=EvaluationConfig(judge="no_judge:f", prompts_path="prompts.jsonl")),
            "no_judge:f: there is no module no_judge in {folder}",
        ),
        (
            lambda d: d.groups.update(ppo=PPOConfig(response_length=4, value_model="reward_init")),
            "ppo.value_model=reward_init starts the critic as the reward model, but no entry of reward.components is "
            "of type model. Set ppo.value_model=separate.",
        ),
    ],
    ids=[
        "no prompts file",
        "no evaluation prompts file",
        "no model",
        "no weights",
        "no config",
        "no tokenizer",
        "model path is null",
        "prompts path is null",
        "a row without a prompt",
        "no such stop token",
        "tokenizer of another model",
        "empty file",
        "damaged line",
        "missing column",
        "overlong prompt",
        "one prompt",
        "no room for prompts",
        "no reward module",
        "wrong count",
        "NaN",
        "reward fails",
        "no judge module",
        "critic from a reward model that is not used",
    ],
)
def test_each_mistake_is_one_line_that_names_it(desk: Desk, spoil: Callable[[Desk], object], expected: str):
    spoil(desk)
    (problem,) = desk.problems()
    assert "\n" not in problem
    assert expected.format(folder=desk.folder) in problem


@pytest.mark.parametrize("name", ["sft_model_path", "reward_model_path"])
def test_a_model_path_among_the_settings_of_ppo_is_refused_with_where_it_belongs(desk: Desk, name: str):
    desk.groups["ppo"] = PPOConfig(response_length=4, **{name: "models/mine"})
    assert desk.problems() == [
        f"ppo.{name} is not a parameter of this group: set it in conf/local/globals.yml or with --params {name}=…"
    ]


def test_several_mistakes_are_all_found(desk: Desk):
    desk.paths.update(raw_prompts="/nowhere/p.jsonl", sft_policy="/nowhere/model")
    desk.groups["reward"] = RewardConfig(components=[FUNCTION | {"function": "no_module:f"}])
    assert [problem.split(":")[0] for problem in desk.problems()] == ["/nowhere/p.jsonl", "/nowhere/model", "no_module"]


def test_a_reward_model_is_looked_at_only_if_the_reward_is_made_of_it(desk: Desk):
    desk.paths["reward_model"] = "/nowhere/reward"
    assert desk.problems() == []
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    (problem,) = desk.problems()
    assert problem.startswith("/nowhere/reward: there is no such model directory.")


def test_a_model_of_the_other_kind_is_refused(desk: Desk, models: Path):
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    desk.paths["reward_model"] = str(models / "policy")
    (problem,) = desk.problems()
    assert problem.startswith(f"{models}/policy: a reward model has one output (num_labels 1), this one has 2.")
    ours = CausalLMRewardModel.from_causal_lm(PretrainedHandle(str(models / "policy")).causal_lm())
    ours.save_pretrained(desk.folder / "ours")
    PretrainedHandle(str(models / "policy")).tokenizer().save_pretrained(desk.folder / "ours")
    desk.paths |= {"reward_model": str(desk.folder / "ours"), "sft_policy": str(desk.folder / "ours")}
    (problem,) = desk.problems()
    assert problem == f"{desk.folder}/ours: this is a reward model, it cannot generate. Give a causal language model."


def test_a_critic_from_a_reward_model_with_other_words_is_refused(desk: Desk, models: Path):
    desk.groups |= {
        "ppo": PPOConfig(response_length=4, value_model="reward_init"),
        "reward": RewardConfig(components=[MODEL]),
    }
    assert desk.problems() == []
    desk.paths["reward_model"] = str(models / "other_words")
    (problem,) = desk.problems()
    assert "reads another vocabulary" in problem
    assert problem.endswith("Set ppo.value_model=separate.")


def test_prompts_whose_responses_the_reward_model_could_not_read_are_refused(desk: Desk):
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    assert desk.problems() == []
    config = json.loads((desk.folder / "reward" / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 6
    (desk.folder / "reward" / "config.json").write_text(json.dumps(config))
    (problem,) = desk.problems()
    assert "with a response of 4 it would have 7, the reward model reads 6." in problem


def test_what_the_run_makes_itself_need_not_be_there(desk: Desk):
    desk.paths |= {"sft_policy": "data/06_models/sft_policy", "reward_model": "data/06_models/reward_model"}
    desk.made = ["sft_policy", "reward_model"]
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    assert desk.problems() == []


@pytest.mark.parametrize(
    ("name", "setting", "stage", "advice"),
    [
        (
            "sft_policy",
            "sft_model_path",
            "supervised_finetuning",
            ", or leave sft_model_path out and set base_model_path to fine-tune from it.",
        ),
        ("reward_model", "reward_model_path", "reward_modelling", ", or leave reward_model_path out to train one."),
    ],
)
def test_a_model_of_ones_own_is_never_written(desk: Desk, name: str, setting: str, stage: str, advice: str):
    desk.made = [name]
    (problem,) = desk.problems()
    assert problem.startswith(f"{setting}={desk.paths[name]} is outside data/06_models, and {stage}")
    assert "Run `--pipelines align`" in problem
    assert problem.endswith(advice)


def test_layers_that_are_moved_without_the_models_are_told_what_to_set_too(desk: Desk):
    desk.paths["sft_policy"] = "data/06_models/sft_policy"
    desk.made, desk.data_root = ["sft_policy"], "bigdisk"
    assert desk.problems()[0] == (
        "data_root=bigdisk moves what the project writes, and sft_model_path still is data/06_models/sft_policy: set "
        "sft_model_path=bigdisk/06_models/sft_policy, too."
    )


def test_a_link_out_of_the_projects_models_is_outside(desk: Desk):
    (desk.folder / "data" / "06_models").mkdir(parents=True)
    (desk.folder / "data" / "06_models" / "sft_policy").symlink_to(desk.folder / "policy")
    desk.paths["sft_policy"] = "data/06_models/sft_policy"
    desk.made = ["sft_policy"]
    assert "is outside data/06_models" in desk.problems()[0]


def test_a_model_that_the_project_has_not_trained_yet_is_named_with_the_stage_that_does(desk: Desk):
    desk.paths["sft_policy"] = str(desk.folder / "data" / "06_models" / "sft_policy")
    (problem,) = desk.problems()
    assert problem == (
        f"{desk.paths['sft_policy']}: nothing is there yet. Run supervised_finetuning first, or set sft_model_path."
    )


def test_prompts_beyond_the_length_up_to_which_rope_is_steady_are_refused_and_shorter_ones_are_not(desk: Desk):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(
        **shape, vocab_size=len(WORDS), rope_parameters={**rope, "original_max_position_embeddings": 16}
    )
    LlamaForCausalLM(config).save_pretrained(desk.paths["sft_policy"])  # its context has 2048 tokens
    assert desk.problems() == []
    _long_prompt(desk)
    (problem,) = desk.problems()
    assert "longer than 12 tokens, the model's context of 16 less ppo.response_length=4" in problem
    assert problem.rstrip(".").endswith(
        "Of sequences beyond 16 tokens this model's RoPE changes the frequencies for their whole batch, so that "
        "log-probabilities in PPO would depend on the batch"
    )


def test_prompts_that_are_dropped_or_cut_when_too_long_are_no_problem(desk: Desk):
    _long_prompt(desk)
    for overlong in ("drop", "truncate_left"):
        desk.groups["ppo"] = PPOConfig(response_length=4, overlong_prompts=overlong)
        assert desk.problems() == []


@pytest.mark.parametrize("own_file", [False, True], ids=["held out here", "of a file"])
@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_a_part_of_which_all_prompts_would_be_dropped_is_refused(desk: Desk, part: str, own_file: bool):
    desk.groups["ppo"] = PPOConfig(response_length=4, overlong_prompts="drop")
    short, long = ["the film", "a film"], [" ".join(["the"] * 13), " ".join(["a"] * 13)]
    trained, held_out = (short, long) if part == "evaluation" else (long, short)
    desk.write_prompts(trained + held_out)
    expected = f"{part} prompts"
    if own_file:
        desk.write_prompts(trained)
        desk.paths["raw_evaluation_prompts"] = str(desk.folder / "evaluation.jsonl")
        rows = [json.dumps({"prompt": prompt, "genre": "drama"}) for prompt in held_out]
        (desk.folder / "evaluation.jsonl").write_text("\n".join(rows) + "\n")
        expected = str(desk.folder / ("prompts.jsonl" if part == "training" else "evaluation.jsonl"))
    else:
        settings = (PromptsConfig(held_out_share=0.5, seed=seed) for seed in range(100))
        table = pd.DataFrame({"prompt": trained + held_out})
        desk.groups["prompts"] = next(
            each
            for each in settings
            if split_held_out(table, None, 0.5, 512, each.seed)[1]["prompt"].tolist() == held_out
        )
    (problem,) = desk.problems()
    assert problem.startswith(
        f"{expected}: none of 2 has at most 12 tokens, the model's context of 16 less ppo.response_length=4, and "
        "ppo.overlong_prompts=drop leaves longer ones out. Set it to truncate_left,"
    )


def test_of_an_evaluation_file_only_the_prompts_that_are_used_must_fit(desk: Desk):
    desk.groups["ppo"] = PPOConfig(response_length=4, overlong_prompts="drop")
    desk.paths["raw_evaluation_prompts"] = str(desk.folder / "evaluation.jsonl")
    rows = [json.dumps({"prompt": prompt, "genre": "drama"}) for prompt in (" ".join(["the"] * 13), "the film")]
    (desk.folder / "evaluation.jsonl").write_text("\n".join(rows) + "\n")
    assert desk.problems() == []
    desk.groups["prompts"] = PromptsConfig(max_held_out=1)
    (problem,) = desk.problems()
    assert problem.startswith("evaluation prompts: none of 1 has at most 12 tokens")


@pytest.fixture
def chain(desk: Desk) -> Desk:
    """The whole chain on a person's own data, fine-tuning their model."""
    (desk.folder / "texts.jsonl").write_text('{"text": "the film was a story"}\n{"text": "a story"}\n')
    pairs = [{"prompt": prompt, "chosen": " was a story", "rejected": " was"} for prompt in ("the film", "a story")]
    (desk.folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    desk.made = ["sft_policy", "reward_model"]
    desk.paths |= {
        "base_model": desk.paths["sft_policy"],
        "sft_policy": "data/06_models/sft_policy",
        "reward_model": "data/06_models/reward_model",
        "raw_demonstrations": str(desk.folder / "texts.jsonl"),
        "raw_preferences": str(desk.folder / "pairs.jsonl"),
    }
    desk.groups |= {
        "data_preparation": DataPreparationConfig(),
        "supervised_finetuning": SupervisedFinetuningConfig(max_position_embeddings=16),
        "reward_modelling": RewardModellingConfig(),
    }
    return desk


def test_a_chain_with_everything_right_has_no_problems(chain: Desk):
    assert chain.problems() == []
    chain.paths["base_model"] = None  # a model from scratch
    assert chain.problems() == []


def _pairs_of_one_prompt(desk: Desk) -> None:
    pair = {"prompt": "the film", "chosen": " was a story", "rejected": " was"}
    (desk.folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 3)


def _chats(desk: Desk) -> None:
    chats = [{"messages": [{"role": "user", "content": prompt}]} for prompt in ("the film", "a story")]
    (desk.folder / "texts.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))


def _chats_from_scratch(desk: Desk) -> None:
    _chats(desk)
    desk.paths["base_model"] = None


def _long_prompt_from_scratch(desk: Desk) -> None:
    _long_prompt(desk)
    desk.paths["base_model"] = None


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda d: d.groups.update(data_preparation=DataPreparationConfig(text_column="body")), "needed is `body`, or"),
        (
            lambda d: d.groups.update(reward_modelling=RewardModellingConfig(chosen_column="better")),
            "preferences: no column `better`",
        ),
        (_pairs_of_one_prompt, "preferences: pairs of one prompt cannot be split into training and evaluation."),
        (_chats, "need a tokenizer with a chat template"),
        (_chats_from_scratch, "chats need a model with a chat template. Set base_model_path."),
        (_long_prompt, "1 of 3 prompts (the first in row 2) are longer than 12 tokens"),
        (_long_prompt_from_scratch, "1 of 3 prompts (the first in row 2) are longer than 12 tokens"),
        (lambda d: d.paths.update(base_model="/nowhere/base"), "/nowhere/base: there is no such model directory."),
    ],
    ids=[
        "demonstrations without the column",
        "preferences without the column",
        "preferences of one prompt",
        "chats for a model without template",
        "chats from scratch",
        "prompts too long for the base model",
        "prompts too long for the model from scratch",
        "no base model",
    ],
)
def test_each_mistake_in_a_chain_is_one_line_that_names_it(chain: Desk, spoil: Callable[[Desk], object], expected: str):
    spoil(chain)
    (problem,) = chain.problems()
    assert expected in problem


def _demonstrations(desk: Desk, prompts: list[str]) -> None:
    rows = [json.dumps({"prompt": prompt, "completion": " was"}) for prompt in prompts]
    (desk.folder / "texts.jsonl").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_part_of_the_demonstrations_with_nothing_to_learn_at_their_length_is_refused(
    chain: Desk, from_scratch: bool, caplog: pytest.LogCaptureFixture
):
    if from_scratch:
        chain.paths["base_model"] = None
    prompts = ["the", "the film was a story of"]  # of two one is held out
    for rows in (prompts, prompts[::-1]):
        _demonstrations(chain, rows)
        _, held_out = split_demonstrations(
            pd.read_json(chain.folder / "texts.jsonl", lines=True), chain.groups["data_preparation"]
        )
        part = "training" if held_out["prompt"].tolist() == ["the"] else "held-out"
        chain.groups["supervised_finetuning"] = SupervisedFinetuningConfig(max_position_embeddings=16, max_length=4)
        (problem,) = chain.problems()
        assert problem.startswith(f"{part} demonstrations: none of 1 has a token to learn within 4 tokens")
    assert caplog.messages == []  # the run tells what it cuts
    chain.groups["supervised_finetuning"] = SupervisedFinetuningConfig(max_position_embeddings=16, max_length=8)
    assert chain.problems() == []


def test_a_demonstration_that_fits_behind_many_that_do_not_is_found(chain: Desk, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.preflight.tables.FIRST_MEASURED_ROWS", 1)
    _demonstrations(chain, [*(f"the film was a story {word}" for word in WORDS[2:]), "a", "the"])
    chain.groups["data_preparation"] = DataPreparationConfig(max_held_out=1)
    chain.groups["supervised_finetuning"] = SupervisedFinetuningConfig(max_length=4)
    (problem,) = chain.problems()  # one of the two short ones, at least, is trained on
    assert problem.startswith("held-out demonstrations: none of 1")


def test_of_large_parts_it_is_left_to_the_run_whether_any_demonstration_fits(chain: Desk, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.preflight.tables.MEASURED_ROWS", 2)
    _demonstrations(chain, [f"the film was a story {word}" for word in WORDS[2:]])
    chain.groups["supervised_finetuning"] = SupervisedFinetuningConfig(max_length=4)
    (problem,) = chain.problems()
    assert problem.startswith("held-out demonstrations: none of 1 has a token to learn within 4 tokens")


def test_preferences_that_nobody_makes_are_missed(chain: Desk):
    chain.paths["raw_preferences"] = None
    (problem,) = chain.problems()
    assert problem.startswith("There are no preferences, and nobody to label any. Set preferences_path, or")


def test_the_demos_judge_labels_nothing_but_answers_to_the_demos_prompts(chain: Desk):
    chain.paths["raw_preferences"] = None
    demo = "data/01_raw/prompts.jsonl"
    chain.groups["reward_modelling"] = RewardModellingConfig(labeller=DEMO_JUDGE)
    (problem,) = chain.problems()
    assert f"the demo's judge cannot label answers to {chain.paths['raw_prompts']}" in problem
    (chain.folder / "data" / "01_raw").mkdir(parents=True)
    chain.paths["raw_prompts"] = shutil.move(chain.folder / "prompts.jsonl", chain.folder / demo)
    assert chain.problems() == []


def test_a_labeller_is_called_like_a_reward(chain: Desk):
    chain.paths["raw_preferences"] = None
    chain.groups["reward_modelling"] = RewardModellingConfig(labeller="no_labeller:f")
    (problem,) = chain.problems()
    assert problem.startswith("no_labeller:f: there is no module no_labeller")


def test_a_labeller_is_not_called_with_evaluation_prompts(chain: Desk):
    chain.paths |= {"raw_preferences": None, "raw_evaluation_prompts": str(chain.folder / "evaluation.jsonl")}
    (chain.folder / "evaluation.jsonl").write_text('{"prompt": "a film"}\n')
    (chain.folder / "labeller_of_genres.py").write_text(
        "def label(prompts, completions, **columns):\n    return [float(len(text)) for text in columns['genre']]\n"
    )
    chain.groups["reward_modelling"] = RewardModellingConfig(labeller="labeller_of_genres:label")
    assert chain.problems() == []


def test_a_slice_that_starts_from_what_only_memory_holds_is_refused():
    catalog = DataCatalog({"rollouts": MemoryDataset(), "given": MemoryDataset(3)})
    pipeline = Pipeline([Node(lambda *_: 0, ["rollouts", "scores", "given"], "x", name="late")])
    (problem,) = find_problems(pipeline, catalog, Path("/project"))
    assert problem.startswith("This run starts from rollouts, scores, which no file holds: start from the nodes")


def test_a_slice_that_starts_from_a_file_that_nobody_wrote_yet_is_refused(tmp_path: Path):
    catalog = DataCatalog(
        {
            "pairs": TableDataset(filepath=str(tmp_path / "pairs.parquet")),
            "ppo_policy": PretrainedModelDataset(str(tmp_path / "ppo_policy")),
        }
    )
    pipeline = Pipeline([Node(lambda *_: 0, ["pairs", "ppo_policy"], "x", name="late")])
    assert find_problems(pipeline, catalog, tmp_path) == [
        f"{tmp_path}/pairs.parquet: nothing is there yet. Run the node that makes pairs first.",
        f"{tmp_path}/ppo_policy: nothing is there yet. Run ppo first.",
    ]


# --- settings that ask something of the model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"use_peft": True},
        {"use_peft": True, "lora_target_modules": "c_attn, c_fc"},
        {"use_peft": True, "lora_target_modules": "all-linear+head"},
        {"use_peft": True, "lora_target_modules": "lm_head", "value_model": "shared"},
        {"gradient_checkpointing": True, "value_model": "shared"},
    ],
    ids=str,
)
def test_settings_that_the_model_can_serve_are_no_problem(desk: Desk, settings: dict[str, Any]):
    desk.groups["ppo"] = PPOConfig(response_length=4, **settings)
    assert desk.problems() == []


def test_an_adapter_on_layers_that_the_model_does_not_have_is_refused_before_the_run(desk: Desk):
    desk.groups["ppo"] = PPOConfig(response_length=4, use_peft=True, lora_target_modules="q_proj")
    assert desk.problems() == [
        "ppo.lora_target_modules=q_proj does not fit GPT2LMHeadModel, which has the linear layers c_attn, c_fc, "
        "c_proj, lm_head. Name some of these"
    ]


def test_an_adapter_on_the_head_alone_is_refused_before_the_run_where_the_critic_has_no_head(desk: Desk):
    desk.groups["ppo"] = PPOConfig(response_length=4, use_peft=True, lora_target_modules="lm_head")
    assert desk.problems() == [
        "ppo.lora_target_modules=lm_head does not fit GPT2Model, which has the linear layers c_attn, c_fc, c_proj. "
        "Name some of these"
    ]


def test_layers_that_the_model_does_not_name_cannot_be_compiled_and_are_refused_before_the_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ppo_rlhf.ppo.build.check_compiler", lambda _: None)
    desk.groups["ppo"] = PPOConfig(response_length=4, compile=True)
    assert desk.problems() == []
    monkeypatch.setattr(GPT2Model, "_no_split_modules", None)
    assert desk.problems() == [
        "ppo.compile=true: GPT2Model does not say which of its modules are layers (_no_split_modules); set it to false"
    ]


def test_a_machine_on_which_torch_cannot_compile_is_refused_before_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def refuse(device: torch.device) -> None:
        asked.append(device.type)
        raise ConfigError("ppo.compile=true: no compiler")

    monkeypatch.setattr("ppo_rlhf.ppo.build.check_compiler", refuse)
    desk.groups["ppo"] = PPOConfig(response_length=4, device="cpu")
    assert desk.problems() == []
    desk.groups["ppo"] = PPOConfig(response_length=4, device="cpu", compile=True)
    assert desk.problems() == ["ppo.compile=true: no compiler"]
    assert asked == ["cpu"]


def test_checkpointed_gradients_that_the_architecture_lacks_are_refused_before_the_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    desk.groups["ppo"] = PPOConfig(response_length=4, gradient_checkpointing=True)
    assert desk.problems() == ["ppo.gradient_checkpointing=true: GPT2LMHeadModel does not support it; set it to false"]


@pytest.mark.parametrize("name", ["offload_reference_policy", "offload_reward_model"])
def test_models_that_are_to_wait_where_there_is_no_gpu_are_refused_before_the_run(
    desk: Desk, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    desk.groups["ppo"] = PPOConfig(response_length=4, **{name: True})
    first, *others = desk.problems()
    assert first == (
        f"ppo.{name}=true has no meaning on the CPU (ppo.device=auto): all models lie in the host's memory anyway; "
        "leave it out, or run on a GPU"
    )
    assert others == ([NOTHING_TO_OFFLOAD] if name == "offload_reward_model" else [])  # its reward is a function


def test_captured_graphs_where_there_is_no_gpu_are_refused_before_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    desk.groups["ppo"] = PPOConfig(response_length=4, cuda_graphs=True)
    assert desk.problems() == [
        "ppo.cuda_graphs=true needs CUDA, and the run computes on cpu (ppo.device=auto): leave it out, or run on a GPU"
    ]


@pytest.mark.parametrize(
    ("width", "value_model", "is_refused"), [(8, "shared", 0), (6, "shared", 1), (6, "reward_init", 0)]
)
def test_a_value_head_of_another_width_is_refused_before_the_run_where_it_would_be_used(
    desk: Desk, width: int, value_model: str, is_refused: int
):
    file = Path(str(desk.paths["sft_policy"])) / "model.safetensors"
    head = {"v_head.summary.weight": torch.zeros(1, width), "v_head.summary.bias": torch.zeros(1)}
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    desk.groups["reward"] = RewardConfig(components=[MODEL])
    desk.groups["ppo"] = PPOConfig(response_length=4, value_model=value_model)
    assert (
        desk.problems()
        == [
            "The value head (v_head.summary) reads states of width 6, the policy's have 8: they do not belong together"
        ][:is_refused]
    )
