"""A run's name in MLflow begins with its pipelines and fits into a table."""

import re

import pytest

from ppo_rlhf.hooks.run_name import MOST, run_name

WHEN = r" · \d\d-\d\d \d\d:\d\d"


@pytest.mark.parametrize(
    ("settings", "pipelines", "model", "expected"),
    [
        ("kl_coef=0.1 seed=2", ["align"], "models/my-sft", "align · kl_coef=0.1 seed=2 · my-sft"),
        ("", ["__default__"], None, "all · scratch"),
        ("", ["reward_modelling", "align"], "org/name", "reward_modelling+al… · name"),
        ("seed=1", ["align"], "SmolLM2-135M-Instruct.Q4_1.gguf", "align · seed=1 · SmolLM2-135M-Instru…"),
        (
            "a=1",
            ["reward_modelling", "align"],
            "org/a-name-that-is-too-long",
            "reward_modelling+al… · a-name-that-is-too-…",
        ),
        ("a=1 " * 30, ["align"], "my-sft", "align · a=1 a=1 a=1 a=1 a=1 a=1 a=1 … · my-sft"),
    ],
)
def test_a_name_begins_with_the_pipelines_and_has_at_most_sixty_characters(settings, pipelines, model, expected):
    found = run_name(settings, pipelines, model)
    assert re.fullmatch(re.escape(expected) + WHEN, found), found
    assert len(found) <= MOST
