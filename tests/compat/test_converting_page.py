"""docs/converting.md has a row for every setting, with the reason that the command prints, and the true constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ppo_rlhf.compat import Conversion, deepspeed_options, from_deepspeed_chat, from_trl, trl_last, trl_legacy
from ppo_rlhf.compat.trl_models import MODEL_SETTINGS
from tests.compat.deepspeed_source import DEEPSPEED_CHAT, DEEPSPEED_CHAT_SWITCHES
from tests.compat.trl_source import TRL_LAST, TRL_LEGACY, TRL_MODEL

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text(encoding="utf-8")
GENERATION = {*trl_legacy._GENERATION, *trl_legacy._GENERATION_REASONS, "generation_kwargs", "eos_token_id"}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """The right-hand cell of each setting."""
    cells = re.findall(r"^\| (.*) \| (.*) \|$", section(title), flags=re.MULTILINE)
    return {name: right for left, right in cells for name in re.findall(r"`(\w+)`", left)}


SECTIONS = {
    "TRL's legacy PPOConfig": (
        trl_legacy.SETTINGS | GENERATION,
        from_trl({**TRL_LEGACY, "use_score_norm": True, "use_score_scaling": True, "early_stopping": True}),
    ),
    "TRL's last PPOConfig": (
        trl_last.SETTINGS | MODEL_SETTINGS,
        from_trl({**TRL_LAST, **TRL_MODEL, "use_peft": True, "total_episodes": 99, "use_cpu": True}),
    ),
    "DeepSpeed-Chat's step 3": (
        deepspeed_options.OPTIONS,
        from_deepspeed_chat(
            [f"--{name}={value}" for name, value in DEEPSPEED_CHAT.items() if isinstance(value, str | int | float)]
            + [f"--{name}" for name in DEEPSPEED_CHAT_SWITCHES],
            num_prompts=100_000,
        ),
    ),
}
each_section = pytest.mark.parametrize(("title", "known", "conversion"), [(k, *v) for k, v in SECTIONS.items()])


@each_section
def test_the_table_has_the_settings_that_are_known_and_no_others(title: str, known: set[str], conversion: Conversion):
    named = set(rows(title)) - {"main"}  # of `main.py`
    assert named == set(known)


@each_section
def test_a_row_names_the_places_that_its_setting_goes_to(title: str, known: set[str], conversion: Conversion):
    table = rows(title)
    assert len(conversion.carried) > 15
    for setting, targets in conversion.carried.items():
        places = set(re.findall(r"`((?:ppo\.)?\w+)", table[setting]))
        same_name = re.search(r"the same name", table[setting]) and {setting, f"ppo.{setting}"} & set(targets)
        assert same_name or places & set(targets), f"{setting}: {targets}"


@each_section
def test_a_row_gives_the_reason_that_is_printed(title: str, known: set[str], conversion: Conversion):
    table = rows(title)
    printed = {setting: reason for setting, reason in conversion.not_carried if table[setting] == reason}
    assert len(printed) > 15
    # for the others it depends on values whether they are carried: their rows say where to, or that they are not
    others = {setting: table[setting] for setting, _ in conversion.not_carried if setting not in printed}
    assert all(re.search(r"`(ppo\.|prompts_path)|not carried", cell) for cell in others.values()), others


@each_section
def test_what_is_always_written_is_what_the_page_says(title: str, known: set[str], conversion: Conversion):
    text = section(title).split("Always written")[1].split("\n\n")[0]
    constants = yaml.safe_load("\n".join(re.findall(r"`ppo\.(\w+: [^`]+)`", text)))
    values = conversion.parameters["ppo"]
    assert len(constants) >= 5
    assert {name: values[name] for name in constants} == constants
