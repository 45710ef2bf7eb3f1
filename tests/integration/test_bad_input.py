"""Bad input ends `kedro run` before anything happens: one clear line a mistake, no traceback, nothing written.

Each mistake is made at a desk where everything else is right, and tried with the whole chain in a project that has a
tracking database, and with `--pipelines align` in one that has none, as far as the command reads what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer

Kedro = Callable[..., Result]

COMMANDS = {"chain": ["run"], "align": ["run", "--pipelines", "align"]}
CONTEXT = 32  # tokens that the tiny model reads
MODULE = "desk_reward"
BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
PROMPTS = ["a b c", "b c d", "c d e", "d e f", "e f g"]


class Desk:
    """A project in which a person's own model, reward and data are right, until a test spoils something."""

    def __init__(self, project: Path, command: str) -> None:
        self.project = project
        self.arguments: list[str] = []
        own = {"prompts_path": "data/prompts.jsonl"}
        if command == "chain":
            own |= {
                "base_model_path": "models/mine",
                "demonstrations_path": "data/demonstrations.jsonl",
                "preferences_path": "data/preferences.jsonl",
            }
        else:
            own |= {"sft_model_path": "models/mine"}
        self.globals: dict[str, Any] = own
        self.parameters: dict[str, Any] = {
            "ppo": {
                "response_length": 4,
                "per_device_train_batch_size": 4,
                "total_episodes": 4,
                "value_model": "separate",
                "missing_eos_penalty": None,
            },
            "reward": {"components": [{"type": "function", "function": f"{MODULE}:score"}]},
            "evaluation": {"bootstrap_samples": 100},
            "supervised_finetuning": {"num_train_epochs": 1},
            "reward_modelling": {"num_train_epochs": 1, "minimum_accuracy": 0.0},
        }
        self.write_rows("prompts", [{"prompt": prompt, "genre": "drama"} for prompt in PROMPTS])
        self.write_rows("demonstrations", [{"text": f"{prompt} ."} for prompt in PROMPTS])
        self.write_rows("preferences", [{"prompt": p, "chosen": " a .", "rejected": " b"} for p in PROMPTS])
        self.write_reward("return [float(len(text)) for text in completions]")

    @property
    def model(self) -> Path:
        return self.project / "models" / "mine"

    def file(self, name: str) -> Path:
        return self.project / "data" / f"{name}.jsonl"

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.file(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def write_reward(self, line: str) -> None:
        (self.project / f"{MODULE}.py").write_text(f"def score(prompts, completions, **columns):\n    {line}\n")

    def write_settings(self) -> None:
        for name, values in {"globals": self.globals, "parameters": self.parameters}.items():
            (self.project / "conf" / "local" / f"{name}.yml").write_text(yaml.safe_dump(values))

    def snapshot(self) -> dict[str, str]:
        """Return every path of the project, with the hash of what is in it."""
        return {
            str(path.relative_to(self.project)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in self.project.rglob("*")
        }


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("own_model")
    save(folder, tiny_model())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def make_desk(project: Path, own_model: dict[str, bytes]) -> Iterator[Callable[[str], Desk]]:
    def make(command: str) -> Desk:
        (project / "models" / "mine").mkdir(parents=True)
        for name, content in own_model.items():
            (project / "models" / "mine" / name).write_bytes(content)
        return Desk(project, command)

    sys.modules.pop(MODULE, None)  # Python imports a name once
    yield make
    sys.modules.pop(MODULE, None)


# --- mistakes: what is spoilt, which commands notice, and the lines they show ({P}: the project) ----------------------

Spoil = Callable[[Desk], object]
BOTH, CHAIN, ALIGN = ("chain", "align"), ("chain",), ("align",)


def params(text: str) -> Spoil:
    return lambda desk: desk.arguments.extend(["--params", text])


def set_global(name: str, value: Any) -> Spoil:
    return lambda desk: desk.globals.update({name: value})


def set_parameter(group: str, name: str, value: Any) -> Spoil:
    return lambda desk: desk.parameters.setdefault(group, {}).update({name: value})


def set_group(group: str, value: Any) -> Spoil:
    return lambda desk: desk.parameters.update({group: value})


def rows(name: str, *values: dict[str, Any]) -> Spoil:
    return lambda desk: desk.write_rows(name, list(values))


def text(name: str, content: str) -> Spoil:
    return lambda desk: desk.file(name).write_text(content)


def reward(line: str) -> Spoil:
    return lambda desk: desk.write_reward(line)


def reward_module(content: str) -> Spoil:
    return lambda desk: (desk.project / f"{MODULE}.py").write_text(content)


def no_reward_module(desk: Desk) -> None:
    (desk.project / f"{MODULE}.py").unlink()


def model_elsewhere(path: str) -> Spoil:
    def spoil(desk: Desk) -> None:
        desk.globals |= {name: path for name in desk.globals if name in ("base_model_path", "sft_model_path")}

    return spoil


def no_model_file(pattern: str) -> Spoil:
    return lambda desk: [path.unlink() for path in desk.model.glob(pattern)]


def cut_weights(desk: Desk) -> None:
    weights = desk.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def larger_tokenizer(desk: Desk) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(5)])
    tokenizer.save_pretrained(desk.model)


def refusing_template(desk: Desk) -> None:
    word_tokenizer(chat_template="{{ raise_exception('the user speaks first') }}").save_pretrained(desk.model)
    desk.write_rows("prompts", [{"prompt": [{"role": "assistant", "content": word}]} for word in "abcd"])


def chats_without_role(desk: Desk) -> None:
    word_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(desk.model)
    desk.write_rows("prompts", [{"prompt": [{"content": word}]} for word in "abcd"])


def header_alone(desk: Desk) -> None:
    (desk.project / "data" / "prompts.csv").write_text("prompt,genre\n")
    desk.globals["prompts_path"] = "data/prompts.csv"


def several(*spoils: Spoil) -> Spoil:
    return lambda desk: [spoil(desk) for spoil in spoils]


DAMAGED = "is damaged, it is not valid JSON (Unterminated string starting at)."
EMPTY = "this data file is empty. It needs at least one row."
MISSING_FILE = "this data file does not exist. Give one of .jsonl, .json, .csv, .parquet, .txt."
NO_PROMPT = 'expected text or a list of {"role": …, "content": …}, got'
REWARD = f"reward function {MODULE}:score"

MISTAKES: dict[str, tuple[tuple[str, ...], Spoil, list[str]]] = {
    # parameters
    "misspelt parameter": (
        BOTH,
        params("ppo.kl_coeff=0.1"),
        ["ppo.kl_coeff is not a parameter of this group. Did you mean `kl_coef`?"],
    ),
    "misspelt parameters in a file": (
        BOTH,
        several(set_parameter("prompts", "columm", "text"), set_parameter("evaluation", "jugde", "a:b")),
        [
            "prompts.columm is not a parameter of this group. Did you mean `column`?",
            "evaluation.jugde is not a parameter of this group. Did you mean `judge`?",
        ],
    ),
    "misspelt key of a reward": (
        BOTH,
        set_group("reward", {"components": [{"type": "function", "fuction": f"{MODULE}:score"}]}),
        ["reward.components.0.fuction is not a parameter of this group. Did you mean `function`?"],
    ),
    "parameter of a stage": (
        CHAIN,
        params("supervised_finetuning.learning_rte=0.1"),
        ["supervised_finetuning.learning_rte is not a parameter of this group. Did you mean `learning_rate`?"],
    ),
    "unknown top-level parameter": (
        BOTH,
        params("promts_path=x"),
        ["--params promts_path: nothing is called so. Did you mean `prompts_path`?"],
    ),
    "setting given without its group": (
        BOTH,
        params("kl_coef=0.1"),
        ["--params kl_coef: nothing is called so. Did you mean `ppo.kl_coef`?"],
    ),
    "unknown group in a file": (
        BOTH,
        set_group("rewards", {"components": []}),
        ["conf/local/parameters.yml: nothing reads rewards here. Did you mean `reward`?"],
    ),
    "unknown global in a file": (
        BOTH,
        set_global("promts_path", "data/prompts.jsonl"),
        ["conf/local/globals.yml: nothing reads promts_path here. Did you mean `prompts_path`?"],
    ),
    "wrong type": (
        BOTH,
        set_parameter("ppo", "kl_coef", "high"),
        ["ppo.kl_coef='high': input should be a valid number, unable to parse string as a number"],
    ),
    "mapping in place of a list": (
        BOTH,
        set_group("reward", {"components": {"type": "function", "function": f"{MODULE}:score"}}),
        [
            "conf/local/parameters.yml: reward.components is a mapping, but a list in conf/base. Write `- ` before "
            "each entry."
        ],
    ),
    "batch size that does not divide": (
        BOTH,
        params("ppo.num_mini_batches=3"),
        [
            "ppo.batch_size=4 (per_device_train_batch_size 4 x gradient_accumulation_steps 1) is not a multiple of "
            "ppo.num_mini_batches=3; nearest sizes that are: 3, 6"
        ],
    ),
    # paths
    "no prompts file": (BOTH, set_global("prompts_path", "data/no.jsonl"), [f"{{P}}/data/no.jsonl: {MISSING_FILE}"]),
    "no evaluation prompts file": (
        BOTH,
        set_global("evaluation_prompts_path", "data/no.csv"),
        [f"{{P}}/data/no.csv: {MISSING_FILE}"],
    ),
    "no demonstrations file": (
        CHAIN,
        set_global("demonstrations_path", "data/no.jsonl"),
        [f"{{P}}/data/no.jsonl: {MISSING_FILE}"],
    ),
    "no preferences file": (
        CHAIN,
        set_global("preferences_path", "data/no.jsonl"),
        [f"{{P}}/data/no.jsonl: {MISSING_FILE}"],
    ),
    "no model": (
        BOTH,
        model_elsewhere("./models/no"),
        ["{P}/models/no: there is no such model directory. Give a directory with config.json, or a hub id."],
    ),
    "path set to null": (
        ALIGN,
        set_global("sft_model_path", None),
        ["sft_model_path names nothing. Set it in conf/local/globals.yml or with --params sft_model_path=…"],
    ),
    "no reward model": (
        ALIGN,
        several(
            set_group("reward", {"components": [{"type": "model"}]}), set_global("reward_model_path", "models/no/rm")
        ),
        ["{P}/models/no/rm: there is no such model directory. Give a directory with config.json, or a hub id."],
    ),
    "language model as reward model": (
        ALIGN,
        several(
            set_group("reward", {"components": [{"type": "model"}]}), set_global("reward_model_path", "models/mine")
        ),
        [
            "{P}/models/mine: a reward model has one output (num_labels 1), this one has 2. Give a "
            "sequence-classification model trained with num_labels=1, or train one (reward_modelling)."
        ],
    ),
    "model that the run would write": (
        CHAIN,
        set_global("sft_model_path", "models/mine"),
        [
            "sft_model_path={P}/models/mine is outside data/06_models, and supervised_finetuning, a part of this run, "
            "would write it; models of your own are never written. Run `--pipelines align` to use it as it is, or "
            "leave sft_model_path out and set base_model_path to fine-tune from it."
        ],
    ),
    # model directories
    "model without weights": (
        BOTH,
        no_model_file("*.safetensors"),
        ["{P}/models/mine: no weights in this model directory (model.safetensors is missing)."],
    ),
    "weights cut short": (
        BOTH,
        cut_weights,
        [
            "{P}/models/mine: the weights file model.safetensors is damaged or incomplete (Error while deserializing "
            "header: incomplete metadata, file not fully covered). Copy the model again."
        ],
    ),
    "model without configuration": (
        BOTH,
        no_model_file("config.json"),
        ["{P}/models/mine: no config.json in this directory, so it is not a Hugging Face model."],
    ),
    "model without tokenizer": (
        BOTH,
        no_model_file("tokenizer*"),
        ["{P}/models/mine: no tokenizer in this model directory (tokenizer.json is missing). Save it there."],
    ),
    "tokenizer of another model": (
        BOTH,
        larger_tokenizer,
        [
            "{P}/models/mine: the tokenizer has ids up to 29, the model's embedding has 25 rows (ids 0 to 24). They do "
            "not belong together: use the tokenizer that the model was trained with."
        ],
    ),
    "stop token that there is not": (
        BOTH,
        params("ppo.stop_token_id=99"),
        ["stop_token_id=99 is not an id of the tokenizer (0 to 24)."],
    ),
    # data
    "empty prompts": (BOTH, text("prompts", ""), [f"{{P}}/data/prompts.jsonl: {EMPTY}"]),
    "blank prompts": (
        BOTH,
        text("prompts", "\n \n"),
        ["{P}/data/prompts.jsonl: this data file has no rows. It needs at least one."],
    ),
    "header without rows": (
        BOTH,
        header_alone,
        ["{P}/data/prompts.csv: this data file has no rows. It needs at least one."],
    ),
    "empty demonstrations": (CHAIN, text("demonstrations", ""), [f"{{P}}/data/demonstrations.jsonl: {EMPTY}"]),
    "empty preferences": (CHAIN, text("preferences", ""), [f"{{P}}/data/preferences.jsonl: {EMPTY}"]),
    "prompts without their column": (
        BOTH,
        rows("prompts", {"text": "a b"}, {"text": "c d"}),
        [
            "{P}/data/prompts.jsonl: there is no column `prompt` (prompts.column); it has text. Name the right one in "
            "prompts.column."
        ],
    ),
    "demonstrations without their column": (
        CHAIN,
        rows("demonstrations", {"body": "a b"}, {"body": "c d"}),
        [
            "demonstrations: the columns are body; needed is `text`, or `prompt` and `completion`, or `messages`. Name "
            "yours in data_preparation.text_column and its siblings."
        ],
    ),
    "preferences without their column": (
        CHAIN,
        rows("preferences", {"chosen": "a"}, {"chosen": "b"}),
        [
            "preferences: no column `rejected`; the columns are chosen. Name yours in reward_modelling.chosen_column "
            "and reward_modelling.rejected_column."
        ],
    ),
    "damaged prompt": (
        BOTH,
        text("prompts", '{"prompt": "a"}\n{"prompt": "b\n{"prompt": "c"}\n'),
        [f"{{P}}/data/prompts.jsonl: line 2 {DAMAGED}"],
    ),
    "damaged demonstration": (
        CHAIN,
        text("demonstrations", '{"text": "a"}\n\n{"text": "b\n'),
        [f"{{P}}/data/demonstrations.jsonl: line 3 {DAMAGED}"],
    ),
    "damaged preference": (
        CHAIN,
        text("preferences", '{"chosen": "a", "rejected": "b\n'),
        [f"{{P}}/data/preferences.jsonl: line 1 {DAMAGED}"],
    ),
    "row without prompt": (
        BOTH,
        rows("prompts", {"prompt": "a"}, {"text": "b"}),
        [f"{{P}}/data/prompts.jsonl: row 1, column `prompt`: {NO_PROMPT} 'None'"],
    ),
    "message without role": (
        BOTH,
        chats_without_role,
        [f"{{P}}/data/prompts.jsonl: row 0, column `prompt`: {NO_PROMPT} \"[{{'content': 'a'}}]\""],
    ),
    "messages that the template refuses": (
        BOTH,
        refusing_template,
        [
            "{P}/data/prompts.jsonl: row 0, column `prompt`: the chat template refuses these messages: the user speaks "
            "first"
        ],
    ),
    "preferences of one prompt": (
        CHAIN,
        rows("preferences", *[{"prompt": "a", "chosen": " b", "rejected": " c"}] * 4),
        ["preferences: pairs of one prompt cannot be split into training and evaluation. Give more."],
    ),
    "prompts longer than the context": (
        BOTH,
        rows("prompts", {"prompt": "a"}, {"prompt": " ".join("a" * 29)}, {"prompt": " ".join("b" * 40)}),
        [
            "{P}/data/prompts.jsonl: 2 of 3 prompts (the first in row 1) are longer than 28 tokens, the model's "
            "context of 32 less ppo.response_length=4; the longest has 40. Set ppo.overlong_prompts to drop or "
            "truncate_left, or shorten the responses"
        ],
    ),
    "responses longer than the context": (
        BOTH,
        params(f"ppo.response_length={CONTEXT}"),
        [
            "ppo.response_length=32 leaves no room for a prompt in the model's context of 32 tokens; set it to at most "
            "31"
        ],
    ),
    # rewards
    "no reward module": (
        BOTH,
        no_reward_module,
        [
            f"{MODULE}:score: there is no module {MODULE} in {{P}}, {{P}}/src or on the Python path. Put {MODULE}.py "
            "into the project's directory."
        ],
    ),
    "no reward function": (
        BOTH,
        reward_module("def scores(prompts, completions):\n    return []\n"),
        [f"{MODULE}:score: score does not exist there ({{P}}/{MODULE}.py)."],
    ),
    "reward with a syntax error": (
        BOTH,
        reward("return ["),
        [f"{MODULE}:score: importing {MODULE} fails: SyntaxError: '[' was never closed ({MODULE}.py, line 2)"],
    ),
    "reward that imports what is not there": (
        BOTH,
        reward_module("import no_such_library\n"),
        [f"{MODULE}:score: importing {MODULE} fails: No module named 'no_such_library'."],
    ),
    "reward of the wrong count": (
        BOTH,
        reward("return [1.0]"),
        [f"{REWARD} returned 1 scores for 2 responses. Return one each."],
    ),
    "reward that is NaN": (
        BOTH,
        reward("return [1.0, float('nan')][: len(completions)]"),
        [f"{REWARD} returned nan for response 1 ('b c d'). Return finite numbers."],
    ),
    "reward that is no list": (
        BOTH,
        reward("return None"),
        [f"{REWARD} returned a NoneType. Return a list of numbers."],
    ),
    "reward that raises": (
        BOTH,
        reward("return [columns['aspect']]"),
        [f"{REWARD} raised KeyError: 'aspect' ({MODULE}.py, line 2)"],
    ),
    "reward that ends the process": (
        BOTH,
        reward("raise SystemExit(0)"),
        [f"{REWARD} raised SystemExit: 0 ({MODULE}.py, line 2)"],
    ),
    "judge that is not there": (
        BOTH,
        params("evaluation.judge=no_judge:score"),
        [
            "no_judge:score: there is no module no_judge in {P}, {P}/src or on the Python path. Put no_judge.py into "
            "the project's directory."
        ],
    ),
    # several at once: all are told
    "several mistakes": (
        BOTH,
        several(no_model_file("*.safetensors"), text("prompts", ""), no_reward_module),
        [
            f"{{P}}/data/prompts.jsonl: {EMPTY}",
            "{P}/models/mine: no weights in this model directory (model.safetensors is missing).",
            f"{MODULE}:score: there is no module {MODULE} in {{P}}, {{P}}/src or on the Python path. Put {MODULE}.py "
            "into the project's directory.",
        ],
    ),
}


@pytest.mark.parametrize(
    ("mistake", "command"),
    [(mistake, command) for mistake, (commands, _, _) in MISTAKES.items() for command in commands],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(
    kedro: Kedro, make_desk: Callable[[str], Desk], mistake: str, command: str
):
    desk = make_desk(command)
    _, spoil, lines = MISTAKES[mistake]
    spoil(desk)
    desk.write_settings()
    if command == "align":
        (desk.project / "mlflow.db").unlink()
    before = desk.snapshot()
    result = kedro(desk.project, *COMMANDS[command], *desk.arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [f"Error: {line}".replace("{P}", str(desk.project)) for line in lines]
    assert "Traceback" not in result.output
    assert desk.snapshot() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_desk_without_mistakes_runs(kedro: Kedro, make_desk: Callable[[str], Desk], command: str):
    """So each refusal above is due to its mistake."""
    desk = make_desk(command)
    desk.write_settings()
    result = kedro(desk.project, *COMMANDS[command])
    assert result.exit_code == 0, result.output
    assert (desk.project / "data" / "08_reporting" / "report.html").is_file()


@pytest.mark.parametrize("program", [["-m", "kedro"], ["-m", "ppo_rlhf"]], ids=["kedro", "ppo_rlhf"])
def test_a_process_of_its_own_leaves_nothing_either(make_desk: Callable[[str], Desk], program: list[str]):
    """Bytecode of a person's reward, which is imported and called, and whatever a process leaves when it ends."""
    desk = make_desk("align")
    desk.write_reward("return [1.0]")
    desk.write_rows("prompts", [{"prompt": "a"}, {"prompt": " ".join("a" * 40)}])
    desk.write_settings()
    (desk.project / "mlflow.db").unlink()
    before = desk.snapshot()
    done = subprocess.run(
        [sys.executable, *program, *COMMANDS["align"]],
        cwd=desk.project,
        env={name: value for name, value in os.environ.items() if name not in BYTECODE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    longest, count = done.stderr.splitlines()
    assert longest.startswith(f"Error: {desk.file('prompts')}: 1 of 2 prompts (the first in row 1) are longer than 28")
    assert count == f"Error: {REWARD} returned 1 scores for 2 responses. Return one each."
    assert "Traceback" not in done.stdout
    assert desk.snapshot() == before
