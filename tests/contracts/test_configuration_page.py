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


@pytest.mark.parametrize(
    ("setting", "row"),
    [
        (
            "dual_clip",
            "float > 1, `null` | Upper bound c on the probability ratio of a token whose advantage A is negative:",
        ),
        (
            "kl_controller",
            "`fixed`, `adaptive` | fixed: beta stays `kl_coef`. adaptive: beta changes so that KL approaches",
        ),
        (
            "whiten_advantages",
            "`true` | Shift and scale advantages to mean 0 and variance 1 over the response tokens of",
        ),
        ("save_interval_minutes", "float > 0 or null, `10.0` | Minutes after which an iteration is saved as well,"),
    ],
)
def test_a_row_has_the_type_the_default_and_the_first_sentence_of_the_field(
    written: str, setting: str, row: str
) -> None:
    assert f"| `{setting}` | {row}" in written


def test_of_a_docstring_the_page_has_the_first_sentence_and_what_each_choice_and_null_mean() -> None:
    first = runpy.run_path(str(ROOT / "scripts" / "write_configuration.py"))["_first_sentence"]
    meaning = "Where it comes from (Coste et al. 2023). k3+: there. Its price is high. With None nowhere. k3 is free."
    assert first(meaning, ["k3+"]) == "Where it comes from. k3+: there. With null nowhere."


def test_a_setting_that_two_groups_share_stands_once_with_each_groups_default(written: str) -> None:
    assert written.count("| `weight_decay` |") == 1
    assert written.count("| `num_train_epochs` |") == 1
    assert "| `num_train_epochs` | float > 0, `3.0` (reward_modelling: `1.0`) |" in written


def test_the_settings_of_a_mapping_stand_below_it(written: str) -> None:
    assert "`from_scratch` | mapping, `null`" in written
    assert "`from_scratch.hidden_size` | int ≥ 1, required" in written
