"""The random walks: the committed files equal the script's output, and the reward follows the task's formula."""

import json
from itertools import product
from pathlib import Path

import pytest
from scripts.write_random_walks import main, write_files

from ppo_rlhf.recipes.random_walks import optimality

RAW = Path(__file__).parents[2] / "data" / "01_raw"
NAMES = "random_walks.jsonl", "random_walk_prompts.jsonl"
WALKS, PROMPTS = ([json.loads(line) for line in (RAW / name).read_text().splitlines()] for name in NAMES)
EDGES = "ba cb dc da ed"


def score(start: str, rest: str, shortest: int = 2) -> float:
    [found] = optimality([start], [rest], [EDGES], [shortest])
    return found


def test_the_committed_files_are_what_the_script_writes_byte_for_byte(tmp_path: Path) -> None:
    main(["--output", str(tmp_path)])
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (RAW / name).read_bytes(), f"{name} is out of date"


def test_a_graph_with_a_start_too_far_from_the_goal_is_refused(tmp_path: Path) -> None:
    """With seed 3 only two start nodes have a walk to the goal."""
    with pytest.raises(ValueError, match="seed 3: from some node"):
        write_files(tmp_path, seed=3)


def test_the_walks_and_the_graph_are_trlxs() -> None:
    """The first walks, the edges and the mean optimality of trlX's generate_random_walks(seed=1002), run once."""
    walks = [row["prompt"] + row["completion"].replace(" ", "") for row in WALKS]
    assert walks[:4] == ["oseotba", "qka", "jrmhnba", "cua"]
    assert len(walks) == 1000
    edges = set(PROMPTS[0]["edges"].split())
    assert len(edges) == 42
    columns = {row["prompt"]: row for row in PROMPTS}
    given = [[columns[walk[0]][name] for walk in walks] for name in ("edges", "shortest")]
    scores = optimality([walk[0] for walk in walks], [row["completion"] for row in WALKS], *given)
    assert sum(scores) / 1000 == pytest.approx(0.790179761904762)


def test_every_start_is_a_prompt_and_its_shortest_walk_is_that_of_floyd_and_warshall() -> None:
    assert [row["prompt"] for row in PROMPTS] == list("bcdefghijklmnopqrstu")
    nodes = "abcdefghijklmnopqrstu"
    steps = {(x, y): 0 if x == y else 1 if x + y in PROMPTS[0]["edges"].split() else 99 for x in nodes for y in nodes}
    for via, x, y in product(nodes, repeat=3):
        steps[x, y] = min(steps[x, y], steps[x, via] + steps[via, y])
    assert [row["shortest"] for row in PROMPTS] == [steps[row["prompt"], "a"] + 1 for row in PROMPTS]


def test_a_walk_is_worth_the_nodes_that_it_saves_and_one_with_an_impossible_step_nothing() -> None:
    """By hand: the walk d a has 2 nodes, d c b a has 4 nodes, and a walk of 10 nodes gets 0."""
    assert score("d", "a") == 1.0
    assert score("d", "c b a") == pytest.approx(6 / 8)
    assert score("e", "d a", 3) == 1.0
    assert score("d", "a b a") == 1.0  # nodes after the goal do not count
    assert score("d", "b a") == 0.0  # no edge leads from d to b
    assert score("d", "c b") == score("d", "") == score("d", "c <unk> a") == 0.0  # the walk does not reach the goal
    loop = "ab bb ba"
    assert optimality(["b"] * 3, ["b " * n + "a" for n in (7, 8, 9)], [loop] * 3, [2] * 3) == [1 / 8, 0.0, 0.0]
