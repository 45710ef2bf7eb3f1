"""The tables of symptoms on docs/tuning.md quote only what the code says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tuning.md").read_text()
TABLE = re.compile(r"^\| symptom \|.*\n\| ---.*\n((?:\|.*\n)+)", re.MULTILINE)
GAP = "\0"


@cache
def said() -> str:
    """Every text of the code in one: what a run fills in is a gap, and white space is a blank."""
    texts = []
    for module in sorted((ROOT / "src" / "ppo_rlhf").rglob("*.py")):
        tree = ast.parse(module.read_text())
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                texts.append(node.value)
    return "\n".join(" ".join(text.split(" ")) for text in texts)


def symptoms_of(text: str) -> list[str]:
    """The first cells of the tables of symptoms."""
    return [line.split(" | ")[0].removeprefix("| ") for table in TABLE.findall(text) for line in table.splitlines()]


def quotes(symptom: str) -> list[str]:
    """The words of each quoted message, without the gaps."""
    return [part.strip() for quote in re.findall(r"`([^`]+)`", symptom) for part in quote.split("…") if part.strip()]


def test_every_message_that_the_troubleshooting_page_quotes_is_one_of_the_code() -> None:
    symptoms = symptoms_of(PAGE)
    assert len(symptoms) > 10
    missing = [part for symptom in symptoms for part in quotes(symptom) if part not in said()]
    fields = (ROOT / "src" / "ppo_rlhf" / "config" / "ppo.py").read_text()
    assert [part for part in missing if f" {part.removeprefix('ppo.')}: " not in fields] == []


def test_every_refusal_on_the_troubleshooting_page_is_quoted() -> None:
    refusals = PAGE.partition("## The run is refused at the start")[2].partition("\n## ")[0]
    symptoms = symptoms_of(refusals)
    assert len(symptoms) > 4
    assert [symptom for symptom in symptoms if "`" not in symptom] == []
