"""What PPOTrainer shares with the pipeline does not speak of Kedro: the pipeline's own layers say where to set what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "ppo_rlhf"
SHARED = (
    *("advice", "checkpoints", "config", "core", "data", "evaluation", "models", "ppo", "rewards", "supervised"),
    *("trainer", "training"),
)
KEDROS = re.compile(r"\bkedro (run|advise)|--params|--pipelines|\bconf/|globals\.yml|\bprompts\.column\b")
OF_THE_PIPELINE = {
    "advice/advise.py": "kedro advise",  # the caller chooses the command; PPOTrainer never shows this default
    "checkpoints/training_record.py": "--params",  # PPOTrainer does not read them
    "data/prompts.py": "` (prompts.column); the columns are",  # PPOTrainer looks for its columns itself
}


def texts_of(module: Path) -> Iterator[str]:
    """The texts of a module that a user can be shown: all but its docstrings."""
    tree = ast.parse(module.read_text())
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def test_no_text_of_shared_code_names_a_place_or_a_command_of_kedro():
    found = {}
    for module in (path for room in SHARED for path in sorted((SOURCE / room).rglob("*.py"))):
        name = str(module.relative_to(SOURCE))
        allowed = OF_THE_PIPELINE.get(name)
        texts = [text for text in texts_of(module) if KEDROS.search(text) and text.strip() != allowed]
        if texts:
            found[name] = texts
    assert found == {}
