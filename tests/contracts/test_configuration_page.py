"""docs/configuration.md is what its script writes from the settings groups."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
    assert meaning.endswith("null turns dual clipping off. ")
    assert usual == " 1.5 to 10 (arXiv:1912.09729: 3) "
