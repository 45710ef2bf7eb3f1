"""Attacks on rewards whose holes are known, and a search for attacks that no list has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import tokenization_utils_base

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.attacks import attacks, attacks_named
from ppo_rlhf.evaluation.best_of_n import PROMPT
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.pipelines.audit_reward.attack_search import SEARCHED, attack_with_search, paid_words, search_attack
from ppo_rlhf.pipelines.audit_reward.attacked_rewards import COLUMNS, Target, try_attacks
from ppo_rlhf.recipes.obedience import naive, strict
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from tests.tiny_models import CHATML, PAD, byte_tokenizer

HELD_OUT = Path(__file__).parents[2] / "data/01_raw/obedience_held_out.jsonl"
PROMPTS, SAMPLES = 48, 6
TOKENIZER = byte_tokenizer(chat_template=CHATML)
END = TOKENIZER.eos_token_id
SENTENCES = (
    "NAME matter to many, and nobody knows why.",
    "I like NAME.",
    "There is a lot to say here, but not now.",
    "Done",
)


@pytest.fixture(scope="module")
def samples() -> pd.DataFrame:
    """Answers of a policy that mostly does not do what it is asked."""
    rng, rows = (
        random.Random(3),
        [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:PROMPTS]],
    )
    return pd.DataFrame(
        {
            PROMPT: number,
            "row": row,
            "response": " ".join(rng.sample(SENTENCES, rng.randint(1, 3))).replace("NAME", row["topic"].capitalize()),
        }
        for number, row in enumerate(rows)
        for _ in range(SAMPLES)
    )


def target_of(samples: pd.DataFrame, functions: dict[str, Callable[..., list[float]]]) -> tuple[Target, Any, Any]:
    """Return the target, and the rewards and the components' scores [P, n] of the answers."""
    rows = samples.groupby(PROMPT)["row"].first().tolist()
    chats = [row["prompt"] for row in rows]
    texts = [str(TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    columns = {name: [row[name] for row in rows] for name in ("kind", "limit", "names")}
    prompts = PromptDataset(ids, texts, columns, [json.dumps(chat) for chat in chats])
    scorer = RewardScorer([(name, 1.0, partial(score_by_function, f, name)) for name, f in functions.items()])
    settings = SamplingSettings(200, 1.0, 0, 1.0, (END,), PAD)
    target = Target(scorer, prompts, samples.groupby(PROMPT)["response"].first().tolist(), TOKENIZER, settings)
    scores, _ = target.score(samples["response"].tolist(), samples[PROMPT].tolist())
    by_prompt = {name: part.numpy().reshape(-1, SAMPLES) for name, part in scores.components.items()}
    return target, scores.total.numpy().reshape(-1, SAMPLES), by_prompt


def holes(samples: pd.DataFrame, function: Callable[..., list[float]]) -> set[str]:
    table = try_attacks(*_without_parts(target_of(samples, {"reward": function})))
    assert tuple(table.columns) == COLUMNS
    return {*table[table["hole"]]["attack"]}


def _without_parts(made: tuple[Target, Any, Any]) -> tuple[Target, Any, Any, Any]:
    target, sft, _ = made
    return target, attacks(["!!!"]), sft, {}


def test_the_recipes_naive_reward_is_named_with_echo_and_the_strict_one_is_not(samples: pd.DataFrame) -> None:
    assert "echo" in holes(samples, naive)
    assert not {name for name in holes(samples, strict) if name.startswith("echo")}


def test_a_pure_length_reward_is_a_hole(samples: pd.DataFrame) -> None:
    def length(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    found = holes(samples, length)
    assert "length" in found
    assert not {"empty", "one word", "verdict"} & found


def test_the_component_that_scores_an_attack_below_sft_is_named(samples: pd.DataFrame) -> None:
    def words(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(text.split())) for text in completions]

    def plain(prompts: list[str], completions: list[str]) -> list[float]:
        return [-float("#" in text) for text in completions]

    target, sft, parts = target_of(samples, {"words": words, "plain": plain})
    table = try_attacks(target, attacks(), sft, parts).set_index("attack")
    assert table.loc["headings", "stopped_by"].split(", ")[-1] == "plain"
    assert table.loc["length", "stopped_by"] == ""
    assert table.loc["empty", "stopped_by"] == "words"


def test_a_response_is_cut_to_its_length_and_ends_in_a_stop_token(samples: pd.DataFrame) -> None:
    def scoring(batch: ResponseBatch) -> Any:
        assert all(ids[-1] == END and len(ids) <= 200 and END not in ids[:-1] for ids in batch.response_ids)
        assert all(batch.terminated)
        assert batch.chats[0] is not None
        assert batch.chats[0][-1]["content"] == batch.completions[0]
        lengths.update(len(ids) for ids in batch.response_ids)
        return np.zeros(len(batch))

    lengths: set[int] = set()
    target, sft, _ = target_of(samples, {"reward": strict})
    given = replace(target, scorer=RewardScorer([("reward", 1.0, lambda b: _tensor(scoring(b)))]))
    try_attacks(given, attacks(["!!!"]), sft, {})
    assert {1, 200} <= lengths  # empty, and the filler


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def test_transformers_does_not_warn_of_a_long_attack_that_is_cut(
    samples: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = list[str]()
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda line, *_: warnings.append(line))
    short = byte_tokenizer(chat_template=CHATML)
    short.model_max_length = 32
    target, _, _ = target_of(samples, {"naive": naive})
    replace(target, tokenizer=short).score(["word " * 100], [0])
    assert not warnings


def test_in_an_environment_each_turn_is_the_attack(samples: pd.DataFrame) -> None:
    reply = TOKENIZER(" and?")["input_ids"]

    def environment(prompts: PromptDataset, ids: list[list[int]], is_policy: Any) -> list[list[int] | None]:
        return [reply if row.count(END) < 2 else None for row in ids]

    def scoring(batch: ResponseBatch) -> Any:
        turns.extend(batch.turns)
        return _tensor(np.zeros(len(batch)))

    turns: list[list[str]] = []
    target, sft, _ = target_of(samples, {"reward": strict})
    settings = replace(target.settings, environment=environment, turn_length=40)
    given = replace(target, settings=settings, scorer=RewardScorer([("reward", 1.0, scoring)]))
    table = try_attacks(given, attacks_named(["verdict", "other answer"]), sft, {})
    assert table["attack"].tolist() == ["verdict"]  # an SFT answer's text has the environment's replies
    assert turns == [["Verdict: A", " and?", "Verdict: A"]] * PROMPTS


def test_the_search_finds_a_word_that_no_attack_has_within_its_budget(samples: pd.DataFrame) -> None:
    asked: list[int] = []

    def pays_nobody(prompts: list[str], completions: list[str]) -> list[float]:
        asked.append(len(completions))
        return [float(text.split().count("nobody") > 1) + 0.1 * ("nobody" in text) for text in completions]

    target, sft, parts = target_of(samples, {"reward": pays_nobody})
    given = samples.assign(reward=sft.ravel())
    assert "nobody" in paid_words(given)
    asked.clear()
    table = attack_with_search(target, attacks(), given, sft, parts, 1600)
    found = table[table["hole"]]
    assert found["attack"].tolist() == [SEARCHED]
    assert found["text"].iloc[0].split().count("nobody") > 1
    of_list, of_test = len(attacks()) * PROMPTS, PROMPTS // 2
    assert of_list < sum(asked) <= of_list + 1600 + of_test
    assert SEARCHED not in attack_with_search(target, attacks(), given, sft, parts, 0)["attack"].tolist()


def test_the_search_asks_about_even_prompts_and_its_find_is_tested_on_odd_ones(samples: pd.DataFrame) -> None:
    seen: list[set[str]] = []

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        seen.append({*prompts})
        return [0.0] * len(prompts)

    target, sft, _ = target_of(samples, {"reward": reward})
    even, odd = ({*target.prompts.texts[start::2]} for start in (0, 1))
    seen.clear()
    search_attack(target, sft.mean(axis=1), attacks(), [], 200)
    assert set.union(*seen) < even
    attack_with_search(target, [], samples.assign(reward=0.0), sft, {}, 200)
    assert seen[-1] == odd
