"""The tables of docs/converting.md name every setting that is converted, beside the parameter that it becomes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.compat import trl

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()


def rows_of(heading: str) -> dict[str, str]:
    """Return the second cell by each name in the first, of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?`.+?) \| (.+) \|$", section, re.MULTILINE)
    return {name: becomes for names, becomes in rows for name in re.findall(r"`([\w*]+)`", names)}


def stands_beside(becomes: str, name: str, place: str) -> bool:
    """Return whether a cell names the parameter `place`, which a setting becomes."""
    return f"`{place}`" in becomes or (place.endswith(name) and "the same name" in becomes)


@pytest.mark.parametrize(
    ("heading", "renamed", "if_given"),
    [
        ("TRL's legacy PPOConfig", trl.LEGACY, trl.LEGACY_IF_GIVEN),
        ("TRL's last PPOConfig", trl.LAST, trl.LAST_IF_GIVEN | trl.arguments.IF_GIVEN),
    ],
)
def test_each_setting_that_is_one_parameter_stands_beside_it(
    heading: str, renamed: Mapping[str, tuple[str, Any]], if_given: Mapping[str, str]
):
    rows = rows_of(heading)
    for name, place in ({name: target for name, (target, _) in renamed.items()} | if_given).items():
        cells = [cell for each, cell in rows.items() if fnmatchcase(name, each)]
        assert any(stands_beside(cell, name, place) for cell in cells), name


@pytest.mark.parametrize(
    ("heading", "names"),
    [("TRL's legacy PPOConfig", trl.LEGACY_DERIVED), ("TRL's last PPOConfig", trl.LAST_DERIVED | trl.MODEL_CONFIG)],
)
def test_each_setting_that_is_computed_with_stands_in_the_table(heading: str, names: Collection[str]):
    assert set(names) <= set(rows_of(heading))
