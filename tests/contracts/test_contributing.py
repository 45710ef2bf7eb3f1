"""CONTRIBUTING.md says which tests a change of each room needs, and where tests lie."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = {
    path.stem
    for path in (ROOT / "src" / "ppo_rlhf").iterdir()
    if path.stem != "__init__" and not path.is_symlink() and (path.suffix == ".py" or any(path.rglob("*.py")))
}
ROW = re.compile(r"^\| (?P<rooms>`[^|]*`) \| `pytest (?P<paths>[^`|]*)` \| (?P<seconds>\d+) \|$", re.MULTILINE)


def rows() -> list[tuple[list[str], list[str], int]]:
    section = PAGE.partition("### Changed X? Run Y\n")[2].partition("\n#")[0]
    found = [
        (re.findall(r"`(\w+)`", row["rooms"]), row["paths"].split(), int(row["seconds"]))
        for row in ROW.finditer(section)
    ]
    assert len(found) == section.count("\n|") - 2, "a row of the table is not of the form that this test reads"
    return found


def test_each_room_of_src_has_one_row_that_says_what_to_run():
    named = [room for rooms, _, _ in rows() for room in rooms]
    assert sorted(named) == sorted(ROOMS)


def test_each_row_names_tests_that_exist_and_is_quick():
    for rooms, paths, seconds in rows():
        assert [path for path in paths if not (ROOT / path).exists()] == [], rooms
        assert seconds <= 30, rooms


def test_each_folder_of_tests_mirrors_a_room_or_the_page_names_it():
    [bullet] = re.findall(r"^- `tests/` mirrors .*?(?=^- )", PAGE, re.MULTILINE | re.DOTALL)
    elsewhere = bullet.partition("Elsewhere are ")[2].partition(". No tests")[0]
    tests = ROOT / "tests"
    files = {
        path.name for path in tests.glob("test_*.py") if not any(path.name.startswith(f"test_{room}") for room in ROOMS)
    }
    folders = {path.name for path in tests.iterdir() if any(path.glob("test_*.py"))} - ROOMS
    assert set(re.findall(r"`(?:tests/)?(\w+(?:\.py)?)/?`", elsewhere)) == folders | files
    assert [name for name in re.findall(r"`tests/([\w/]+)`", bullet) if not (tests / name).exists()] == []
    assert set(re.findall(r"`(\w+)`", bullet)) <= ROOMS
