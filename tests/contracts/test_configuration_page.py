"""docs/configuration.md is what its script writes from the settings groups."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ppo_rlhf.config import PPOConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> str:
    page: str = runpy.run_path(str(ROOT / "scripts" / "write_configuration.py"))["page"]()
    return page


def test_the_page_is_not_stale(written: str) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == written, "run: python scripts/write_configuration.py"


def test_a_row_has_the_type_default_meaning_and_typical_range_of_the_field(written: str) -> None:
    (row,) = [line for line in written.splitlines() if line.startswith("| `dual_clip` |")]
    _, name, kind, default, meaning, usual, _ = row.split("|")
    assert (name, kind, default) == (" `dual_clip` ", " float > 1 or null ", " `null` ")
    assert meaning.endswith("null is off. ")
    assert usual == " 1.5 to 10 (arXiv:1912.09729: 3) "


def test_every_setting_has_a_row_with_a_meaning(written: str) -> None:
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert len(rows) > len(PPOConfig.__dataclass_fields__) + 50
    assert [row[0] for row in rows if len(row[2 if len(row) < 5 else 3]) < 10] == []
