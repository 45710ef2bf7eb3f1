"""`kedro generate`: equal policies answer equally; prompts come from arguments, files or stdin; errors are one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from kedro.framework.cli.cli import KedroCLI
from transformers import AutoModelForCausalLM

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from tests.cli.support import refusal
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer

Kedro = Callable[..., Result]


@pytest.fixture
def own(project: Path) -> Path:
    """A project whose SFT policy and exported PPO policy are equal."""
    for name in ("sft_policy", "ppo_policy"):
        save(project / "data" / "06_models" / name / "2026-01-01T00.00.00.000Z", tiny_model())
    (project / "my_reward.py").write_text(
        "def words(prompts, completions, bonus=None, **columns):\n"
        "    return [100.0 * len(c.split()) + sum(bonus or [0]) for c in completions]\n"
    )
    (project / "conf" / "local" / "parameters.yml").write_text(
        "ppo: {response_length: 6, temperature: 1.0, value_model: separate}\n"
        "reward: {components: [{type: function, function: 'my_reward:words'}]}\n"
    )
    return project


def said(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    result = kedro(project, "generate", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refused(kedro: Kedro, project: Path, *arguments: str) -> str:
    return refusal(kedro, project, "generate", *arguments)


def answers(lines: list[str]) -> dict[str, list[str]]:
    """The answers of each policy, with the line of facts below each."""
    starts = {
        name: [row for row, line in enumerate(lines) if line.startswith(f"  {name}   ")] for name in ("SFT", "PPO")
    }
    return {name: [lines[row][8:] + lines[row + 1] for row in rows] for name, rows in starts.items()}


@pytest.mark.slow
def test_equal_policies_answer_equally_and_others_do_not(kedro: Kedro, own: Path, tmp_path: Path):
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts)
    lines = said(kedro, own, "a b c", "--samples", "3", "--seed", "5")
    assert lines[:3] == ["At most 6 tokens, temperature 1, seed 5", "", "a b c"]
    same = answers(lines)
    assert len(set(same["SFT"])) > 1, "each sample has its own noise"
    assert same["SFT"] == same["PPO"]
    other = save(tmp_path / "other", tiny_model(seed=1))
    different = answers(said(kedro, own, "a b c", "--samples", "3", "--seed", "5", "--policy", other))
    assert different["SFT"] == same["SFT"]
    assert different["PPO"] != same["PPO"]
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_greedy_answers_are_the_most_probable_tokens(kedro: Kedro, own: Path):
    [answer] = answers(said(kedro, own, "a b c", "--temperature", "0", "--seed", "9"))["PPO"]
    tokenizer = word_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(own / "data/06_models/ppo_policy/2026-01-01T00.00.00.000Z")
    ids = tokenizer("a b c", return_tensors="pt")["input_ids"]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    assert answer.startswith(tokenizer.decode(ids[0, 3:], skip_special_tokens=True))


@pytest.mark.slow
def test_prompts_of_a_file_are_answered_and_scored_with_their_columns(kedro: Kedro, own: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b", "bonus": 1}\n{"prompt": "c", "bonus": 2}\n')
    lines = said(kedro, own, "--prompts", str(file), "--reward")
    assert "a b" in lines
    assert "c" in lines
    for answer in answers(lines)["PPO"]:
        text, _, facts = answer.partition(" " * 8)
        assert facts.startswith(f"reward {100.0 * len(text.split()) + 3:.2f}, ")


def test_without_a_prompt_lines_are_read_until_an_empty_one(own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(own)
    too_long = " ".join("a" * 40)
    result = CliRunner().invoke(KedroCLI(own), ["generate"], input=f"a b\n{too_long}\na b\n\nc d\n")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    first, second = answers(lines)["SFT"]
    assert first != second, "each turn has noise of its own"
    assert next(line for line in lines if line.startswith("Error:")).startswith("Error: prompt: 1 of 1 prompts")
    assert "c d" not in lines


@pytest.mark.slow
def test_several_prompts_are_answered_in_turn_as_lines_are_and_one_that_is_refused_is_named(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(own)
    read = CliRunner().invoke(KedroCLI(own), ["generate"], input="a b\nc\n")
    given = CliRunner().invoke(KedroCLI(own), ["generate", "a b", "c"])
    assert given.exit_code == 0, given.output
    assert given.stdout.splitlines()[1:3] == ["", "a b"]
    assert len(answers(given.stdout.splitlines())["PPO"]) == 2
    assert given.stdout == read.stdout
    with_long = CliRunner().invoke(KedroCLI(own), ["generate", "a b", " ".join("a" * 40)])
    assert with_long.exit_code == 1
    assert with_long.stderr.splitlines()[-1].startswith("Error: prompt 2: 1 of 1 prompts")


@pytest.mark.slow
def test_without_any_prompt_it_ends_in_one_line(own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(own)
    result = CliRunner().invoke(KedroCLI(own), ["generate"], input="\n")
    assert result.exit_code == 1
    assert re.search("Error: No prompt .* PROMPT .*--prompts FILE", result.stderr)


@pytest.mark.slow
def test_a_typed_prompt_is_a_chat_if_the_tokenizer_has_a_template(kedro: Kedro, own: Path):
    for name in ("sft_policy", "ppo_policy"):
        tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
        tokenizer.save_pretrained(own / "data/06_models" / name / "2026-01-01T00.00.00.000Z")
    chat, plain = said(kedro, own, "b c"), said(kedro, own, "b c", "--plain")
    assert chat[:3] == plain[:3]
    assert answers(chat) != answers(plain)
    assert answers(plain) == answers(said(kedro, own, "b c", "--plain"))


def test_prompts_are_read_with_the_values_of_the_chat_template_that_the_policy_was_trained_with(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(own)
    for name in ("sft_policy", "ppo_policy"):
        folder = own / "data/06_models" / name / "2026-01-01T00.00.00.000Z"
        word_tokenizer(chat_template="{{ tone }}" + CHAT_TEMPLATE).save_pretrained(folder)
    ppo = {"response_length": 6, "temperature": 1.0}
    record = {"processes": 1, "ppo": ppo, "chat_template_kwargs": {"tone": "b b b "}}
    (folder / "ppo_rlhf.json").write_text(json.dumps(record))
    read: list[str] = []
    tokenise = PromptReader.read

    def noted(self: PromptReader, *given: Any) -> PromptDataset:
        prompts = tokenise(self, *given)
        read.extend(prompts.texts)
        return prompts

    monkeypatch.setattr(PromptReader, "read", noted)
    result = CliRunner().invoke(KedroCLI(own), ["generate", "c"])
    assert result.exit_code == 0, result.output
    [text] = read
    assert text.startswith("b b b ")


@pytest.mark.slow
def test_settings_that_are_typed_and_not_read_are_refused(kedro: Kedro, own: Path):
    for typed in ("demonstrations_path=a", "reward.components=[]"):
        assert f"--params {typed.split('=')[0]}: nothing in" in refused(kedro, own, "a", "--params", typed)
    said(kedro, own, "a", "--params", "sft_model_path=data/06_models/ppo_policy,ppo.temperature=0.5")


@pytest.mark.slow
def test_a_policy_that_is_not_trained_yet_is_named_as_before_a_run(kedro: Kedro, own: Path, tmp_path: Path):
    (own / "data/06_models/ppo_policy").rename(tmp_path / "moved")
    assert refused(kedro, own, "a").startswith(
        "Error: data/06_models/ppo_policy: nothing is there yet. Run `kedro run --pipelines ppo` first"
    )


@pytest.mark.slow
def test_what_is_missing_is_one_line_that_names_the_command(kedro: Kedro, project: Path, own: Path, tmp_path: Path):
    assert "--prompts" in refused(kedro, own, "a", "--prompts", "b.txt")
    assert "nothing.txt" in refused(kedro, own, "--prompts", "nothing.txt")
    assert "prompt" in refused(kedro, own, " ")
    more_words = word_tokenizer()
    more_words.add_tokens(["more"])
    other = save(tmp_path / "other", tiny_model(vocab_size=26), more_words)
    assert "different vocabularies" in refused(kedro, own, "a", "--policy", other)
    reward_model = '{"reward": {"components": [{"type": "model"}]}}'
    (own / "conf" / "local" / "parameters.yml").write_text(reward_model)
    assert "--pipelines reward_modelling" in refused(kedro, own, "a", "--reward")
    (own / "data/06_models/ppo_policy").rename(tmp_path / "moved")
    line = refused(kedro, own, "a")
    assert "data/06_models/ppo_policy" in line
    assert "`kedro run --pipelines ppo`" in line
