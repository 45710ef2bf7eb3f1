"""The tables of docs/converting.md name every setting of TRL's that changes its name, or is computed with."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.compat import trl

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()


def rows_of(heading: str) -> dict[str, str]:
    """Return the second cell by each name in the first, of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?`.+?) \| (.+) \|$", section, re.MULTILINE)
    return {name: becomes for names, becomes in rows for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize(
    ("heading", "renamed", "if_given"),
    [
        ("TRL's legacy PPOConfig", trl.LEGACY, trl.LEGACY_IF_GIVEN),
        ("TRL's last PPOConfig", trl.LAST, trl.LAST_IF_GIVEN | trl.arguments.IF_GIVEN),
    ],
)
def test_each_setting_that_gets_another_name_stands_beside_it(
    heading: str, renamed: Mapping[str, tuple[str, Any]], if_given: Mapping[str, str]
):
    rows, others = rows_of(heading), set[str]()
    for name, place in ({name: target for name, (target, _) in renamed.items()} | if_given).items():
        if place.rpartition(".")[2] != name:
            others.add(name)
            assert f"`{place}`" in rows[name], name
    assert len(others) > 3


@pytest.mark.parametrize(
    ("heading", "names"),
    [("TRL's legacy PPOConfig", trl.LEGACY_DERIVED), ("TRL's last PPOConfig", trl.LAST_DERIVED | trl.MODEL_CONFIG)],
)
def test_each_setting_that_is_computed_with_stands_in_the_table(heading: str, names: Collection[str]):
    assert set(names) <= set(rows_of(heading))
