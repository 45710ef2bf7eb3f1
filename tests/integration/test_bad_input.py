"""Bad input ends `kedro run` before anything happens: one clear line a mistake, exit code 1, nothing written.

The project is the real one, with a user's own model, reward and data. Each kind of mistake is tried once; rules
are tested where they are written (`test_preflight.py`, `config`, `datasets`, `models`, `rewards`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from tests.tiny_models import save, tiny_model

Kedro = Callable[..., Result]

CHAIN, ALIGN = ["run"], ["run", "--pipelines", "align"]
MODULE = "own_reward"
PROMPTS = ["a b c", "b c d", "c d e", "d e f", "e f g"]


class OwnProject:
    """A project in which a user's own model, reward and data are right, until a test spoils something."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.globals: dict[str, Any] = {
            "prompts_path": "data/prompts.jsonl",
            "demonstrations_path": "data/demonstrations.jsonl",
            "preferences_path": "data/preferences.jsonl",
        }
        self.parameters: dict[str, Any] = {
            "ppo": {
                "response_length": 4,
                "per_device_train_batch_size": 4,
                "total_episodes": 4,
                "value_model": "separate",
                "missing_eos_penalty": None,
            },
            "reward": {"components": [{"type": "function", "function": f"{MODULE}:score"}]},
        }
        save(project / "models" / "mine", tiny_model())
        self.write_rows("prompts", *({"prompt": prompt, "genre": "drama"} for prompt in PROMPTS))
        self.write_rows("demonstrations", *({"text": f"{prompt} ."} for prompt in PROMPTS))
        self.write_rows("preferences", *({"prompt": p, "chosen": " a .", "rejected": " b"} for p in PROMPTS))
        self.write_reward("[float(len(text)) for text in completions]")

    def write_rows(self, name: str, *rows: dict[str, Any]) -> None:
        (self.project / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def write_reward(self, result: str) -> None:
        function = f"def score(prompts, completions, **columns):\n    return {result}\n"
        (self.project / f"{MODULE}.py").write_text(function)

    def start_from(self, model: str, command: list[str]) -> None:
        self.globals["base_model_path" if command == CHAIN else "sft_model_path"] = model
        if command == CHAIN:  # which trains a reward model
            self.parameters["reward"]["components"] = [{"type": "model"}]

    def write_settings(self) -> None:
        for name, values in {"globals": self.globals, "parameters": self.parameters}.items():
            (self.project / "conf" / "local" / f"{name}.yml").write_text(yaml.safe_dump(values))

    def snapshot(self) -> dict[str, str]:
        """Return every path of the project with the hash of its content; without bytecode and the cache of tables."""
        return {
            str(path.relative_to(self.project)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in self.project.rglob("*")
            if not {"__pycache__", "02_intermediate"} & set(path.parts)
        }


@pytest.fixture
def own(project: Path) -> Iterator[OwnProject]:
    sys.modules.pop(MODULE, None)  # Python imports a name once
    yield OwnProject(project)
    sys.modules.pop(MODULE, None)


Spoil = Callable[[OwnProject], object]


def set_global(name: str, value: Any) -> Spoil:
    return lambda own: own.globals.update({name: value})


def set_ppo(**settings: Any) -> Spoil:
    return lambda own: own.parameters["ppo"].update(settings)


def rows(name: str, *values: dict[str, Any]) -> Spoil:
    return lambda own: own.write_rows(name, *values)


def no_weights(own: OwnProject) -> None:
    (own.project / "models" / "mine" / "model.safetensors").unlink()


def three_mistakes(own: OwnProject) -> None:
    no_weights(own)
    own.write_rows("prompts")
    (own.project / f"{MODULE}.py").unlink()


MISTAKES = {
    "misspelt parameter": (ALIGN, set_ppo(kl_coeff=0.1), ["ppo.kl_coeff"]),
    "batch size that does not divide": (ALIGN, set_ppo(num_mini_batches=3), ["ppo.num_mini_batches"]),
    "unknown global": (CHAIN, set_global("promts_path", "data/prompts.jsonl"), ["promts_path"]),
    "no prompts file": (ALIGN, set_global("prompts_path", "data/no.jsonl"), ["data/no.jsonl"]),
    "demonstrations without their column": (CHAIN, rows("demonstrations", {"body": "a"}), ["text_column"]),
    "no model": (CHAIN, lambda own: own.start_from("models/no", CHAIN), ["models/no"]),
    "prompts longer than the context": (CHAIN, rows("prompts", {"prompt": "a"}, {"prompt": "a " * 40}), ["row 1"]),
    "reward of the wrong count": (ALIGN, lambda own: own.write_reward("[1.0]"), [f"{MODULE}:score"]),
    "typed for another pipeline": (
        [*ALIGN, "--params", "demonstrations_path=x,evaluation.prompts_path=y,reward_model_path=z,critic_path=z"],
        lambda own: None,
        ["critic_path", "demonstrations_path", "reward_model_path", "evaluation_prompts_path"],
    ),
    "several mistakes": (ALIGN, three_mistakes, ["prompts.jsonl", "model.safetensors", MODULE]),
}


BY_DEFAULT = ("misspelt parameter", "several mistakes")


@pytest.mark.parametrize(
    "mistake", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in MISTAKES]
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(kedro: Kedro, own: OwnProject, mistake: str):
    command, spoil, named = MISTAKES[mistake]
    own.start_from("models/mine", command)
    spoil(own)
    own.write_settings()
    (own.project / "mlflow.db").unlink()
    before = own.snapshot()
    result = kedro(own.project, *command)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    lines = result.stderr.splitlines()
    assert len(lines) == len(named)
    assert all(line.startswith("Error: ") and name in line for line, name in zip(lines, named, strict=True))
    assert own.snapshot() == before


@pytest.mark.slow
def test_what_a_run_says_once_each_run_of_a_process_says(kedro: Kedro, own: OwnProject, caplog):
    own.start_from("models/mine", ALIGN)
    own.write_rows("prompts", *({"prompt": prompt, "images": "x"} for prompt in PROMPTS))
    own.write_reward("[1.0]")  # it is refused for that, after its prompts were read
    own.write_settings()
    for _ in range(2):
        assert kedro(own.project, *ALIGN).exit_code == 1
    assert sum(line.startswith("prompts: the policy is not shown `images`.") for line in caplog.messages) == 2


@pytest.mark.slow
def test_an_input_without_mistakes_runs(kedro: Kedro, own: OwnProject):
    """Without a mistake the project is accepted, so each refusal above is due to its mistake."""
    own.start_from("models/mine", ALIGN)
    own.write_settings()
    result = kedro(own.project, *ALIGN)
    assert result.exit_code == 0, result.output
    assert (own.project / "data" / "08_reporting" / "report.html").is_file()
