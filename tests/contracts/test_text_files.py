"""Files are read and written as UTF-8, whatever the locale says."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
TEXT = {"read_text", "write_text"}
BY_MODE = {"open": "r", "fdopen": "r", "NamedTemporaryFile": "w+b", "TemporaryFile": "w+b"}
"""Functions that open a file as text or as bytes, and the mode without one."""


def takes_the_locale(call: ast.Call) -> bool:
    """Whether a call opens a file, or reads a command's output, as text in an encoding that it does not name."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if ast.unparse(call.func) == "os.open":
        return False
    constants = [each.value for each in [*call.args, given.get("mode")] if isinstance(each, ast.Constant)]
    modes = [value for value in constants if isinstance(value, str) and set(value) <= set("rwxabt+")]
    by_mode = name in BY_MODE and "b" not in (modes[0] if modes else BY_MODE[name])
    return name in TEXT or by_mode or not given.keys().isdisjoint({"text", "universal_newlines"})


def test_every_text_file_names_its_encoding():
    """Ruff's PLW1514 finds only paths that are made in the same expression."""
    for code in ("path.read_text()", "open(p, 'w')", "run(c, text=True)", "NamedTemporaryFile('w')", "p.open()"):
        assert takes_the_locale(ast.parse(code, mode="eval").body)  # type: ignore[arg-type]
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and takes_the_locale(node)
    ]
    assert found == []
