"""What README and docs point to exists: pages, headings, modules with their names, settings of PPO."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from ppo_rlhf.config import PPOConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"`((?:\w+/)+\w+\.py)(?:::(\w+)(?:\.\w+)*)?`")
NOT_ROOMS = {"config", "datasets", "docs", "reporting", "starter", "trainer"}
"""Folders whose names are also those of settings, libraries or objects."""
ROOMS = {each.name for each in (ROOT / "src" / "ppo_rlhf").iterdir() if each.is_dir()} - NOT_ROOMS
DOTTED = re.compile(rf"`((?:{'|'.join(sorted(ROOMS))})(?:\.\w+)+)(?<!\.py)`")
ELSEWHERE = ("training/", "torch/", "examples/", "src/my_align/")
"""Beginnings of paths in other projects, and in a user's."""
SETTINGS = ("reward.", "evaluation.", "data.raw_preferences.", "ppo.not_default")
"""Settings and tags of MLflow that look like modules."""


def headings(page: Path) -> set[str]:
    """The anchors of a page as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = [re.sub(r"[`*]", "", title) for title in re.findall(r"^#+ (.*)$", text, flags=re.M)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@cache
def names_of(module: Path) -> set[str]:
    """What a module defines or binds at its top level."""
    found = set[str]()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return found


def is_there(dotted: str) -> bool:
    """Whether `room.module.name` is a package, a module, or a name in one, below ppo_rlhf."""
    parts, place = dotted.split("."), ROOT / "src" / "ppo_rlhf"
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (module := place / f"{parts[0]}.py").is_file():
        place = module
        parts.pop(0)
    elif parts:
        place /= "__init__.py"
    return not parts or parts[0] in names_of(place) or f'"{parts[0]}"' in place.read_text(encoding="utf-8")


def test_every_link_leads_to_a_file_and_to_a_heading() -> None:
    broken = []
    for page in [*PAGES, *sorted((ROOT / "docs" / "decisions").glob("*.md"))]:
        for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert broken == []


def test_every_module_and_name_that_a_page_cites_exists() -> None:
    roots = (ROOT / "src" / "ppo_rlhf", ROOT, ROOT / "tests", ROOT / "src" / "ppo_rlhf" / "starter" / "project")
    missing, cited = [], 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path, name in CODE.findall(text):
            cited += 1
            places = [root / path for root in roots if (root / path).is_file()]
            if not path.startswith(ELSEWHERE) and not any(not name or name in names_of(place) for place in places):
                missing.append(f"{page.name}: {path}::{name}")
        for dotted in DOTTED.findall(text):
            setting = dotted.removeprefix("ppo.")
            is_setting = dotted.startswith("ppo.") and setting in (*PPOConfig.__dataclass_fields__, "yaml")  # a file
            cited += 1
            if not (is_setting or is_there(dotted) or dotted.startswith(SETTINGS)):
                missing.append(f"{page.name}: {dotted}")
    assert missing == []
    assert cited > 200, "the pages' names are not found any more"


def test_every_setting_of_ppo_that_a_page_names_exists() -> None:
    unknown = []
    for page in PAGES:
        text = re.sub(r"ppo\.(not_default|loop)\b", "", page.read_text(encoding="utf-8"))
        for name in re.findall(r"(?<![\w./])ppo\.(\w+)(?=[=:])", text):
            if name not in PPOConfig.__dataclass_fields__:
                unknown.append(f"{page.name}: ppo.{name}")
    assert unknown == []
