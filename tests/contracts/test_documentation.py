"""What the documents name is there: code, tests, settings, files; and each checker refuses a name that is not."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from kedro.framework.project import configure_project, pipelines

from ppo_rlhf.config import PPOConfig
from tests.contracts import checkers

ROOT = Path(__file__).parents[2]
ROOTS = (ROOT, ROOT / "src" / "ppo_rlhf", ROOT / "src", ROOT / "tests")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NOT_SETTINGS = {"not_default"}  # a tag of the MLflow run
THEIRS = "training/step3_rlhf_finetuning/main.py"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def known_settings() -> set[str]:
    """Fields of PPOConfig and what else is written with `ppo.` in front: the nodes of that pipeline."""
    configure_project("ppo_rlhf")
    nodes = {node.name.removeprefix("ppo.") for node in pipelines["ppo"].nodes}
    return {field.name for field in fields(PPOConfig)} | nodes | NOT_SETTINGS


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_code_that_a_page_names_exists(page: Path) -> None:
    assert checkers.missing_code(text_of(page), "ppo_rlhf") == []


@pages
def test_tests_that_a_page_names_exist(page: Path) -> None:
    assert checkers.missing_tests(text_of(page), ROOT / "tests") == []


@pages
def test_settings_that_a_page_names_exist(page: Path, known_settings: set[str]) -> None:
    assert checkers.unknown_settings(text_of(page), known_settings) == []


@pages
def test_files_that_a_page_names_or_links_to_are_there(page: Path) -> None:
    assert [file for file in checkers.missing_files(text_of(page), page, ROOTS) if file != THEIRS] == []


def test_every_setting_of_ppo_has_its_line_in_the_page_on_the_algorithm() -> None:
    explained = text_of(ROOT / "docs" / "algorithm.md")
    assert [f.name for f in fields(PPOConfig) if not re.search(rf"`(?:ppo\.)?{f.name}\b", explained)] == []


# Each checker refuses a case that breaks its rule.


def test_code_that_does_not_exist_is_noticed() -> None:
    page = "`core.kl.kl_estimate`, `core.kl.kl_guess`, `core.kk`, `training.rollout.Rollouts.mask`, `a.b`, `core`"
    assert checkers.missing_code(page, "ppo_rlhf") == ["core.kk", "core.kl.kl_guess"]


def test_a_test_that_does_not_exist_is_noticed() -> None:
    there = "contracts/test_documentation.py"
    page = f"`{there}`, `{there}::test_a_file_that_is_not_there_is_noticed`, `{there}::test_a_test`"
    page += ", `tests/contracts/test_nothing.py`"
    assert checkers.missing_tests(page, ROOT / "tests") == [
        "contracts/test_documentation.py::test_a_test",
        "contracts/test_nothing.py",
    ]


def test_a_setting_that_does_not_exist_is_noticed() -> None:
    assert checkers.unknown_settings("`ppo.kl_coef=0.1`, `ppo.kl_coeff`", {"kl_coef"}) == ["kl_coeff"]


def test_a_file_that_is_not_there_is_noticed() -> None:
    page = "[x](algorithm.md#a) [y](nothing.md) [z](https://example.org/a) `core/kl.py` `core/kk.py` `a*b/c.py`"
    assert checkers.missing_files(page, ROOT / "docs" / "x.md", ROOTS) == ["core/kk.py", "nothing.md"]
