"""The modules that PPO's loop imports are few, and none of them assembles a run."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import grimp

import ppo_rlhf

MOST_MODULES, MOST_LINES = 74, 7_100
"""The limits, in modules and lines of code, with room for settings. Raise one only for a feature of the loop itself."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def lines_of_code(file: Path) -> int:
    """Return the number of lines with code: neither comments, nor docstrings, nor empty lines."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NEWLINE:
            if any(each.type != tokenize.STRING for each in statement):  # a lone string is a docstring
                lines.update(line for each in statement for line in range(each.start[0], each.end[0] + 1))
            statement = []
        elif token.type not in NO_CODE:
            statement.append(token)
    return len(lines)


def test_comments_docstrings_and_empty_lines_are_no_code(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text('"""One.\n\nTwo."""\n\nX = (  # why\n    1,\n)\n"""What X is."""\n# no code\n')
    assert lines_of_code(file) == 3


def test_the_loop_imports_few_modules_and_none_that_loads_models_or_reads_tables():
    graph = grimp.build_graph("ppo_rlhf", exclude_type_checking_imports=True, cache_dir=None)
    modules = {"ppo_rlhf.ppo.loop", *graph.find_upstream_modules("ppo_rlhf.ppo.loop")}
    root = Path(ppo_rlhf.__file__).parents[1]
    files = [file for module in modules if (file := (root / module.replace(".", "/")).with_suffix(".py")).exists()]
    assert 30 < len(files) <= MOST_MODULES, sorted(modules)
    assert sum(map(lines_of_code, files)) <= MOST_LINES
    assembling = {f"ppo_rlhf.{name}" for name in ("models.loading", "models.adapters", "ppo.build", "data.prompts")}
    assert all((root / f"{name.replace('.', '/')}.py").exists() for name in assembling)
    assert not modules & assembling
