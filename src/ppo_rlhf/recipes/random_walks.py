"""The reward of the random walks: a task whose optimum is 1, from Chen et al. 2021, arXiv:2106.01345, section 3.

`scripts/write_random_walks.py` makes the graph and the walks; the rows of the prompts' file have what is needed here.
"""

from collections.abc import Sequence
from itertools import pairwise

GOAL = "a"
LONGEST = 10
"""Nodes of a walk that is worth nothing, even if it ends at the goal."""


def optimality(
    prompts: Sequence[str], completions: Sequence[str], edges: Sequence[str], shortest: Sequence[int]
) -> list[float]:
    """Return (10 - nodes) / (10 - nodes of the shortest walk) where a walk reaches the goal, else 0. A reward function.

    A walk is its start, a letter (the prompt), and the nodes after it with spaces between them (the completion). It is
    counted up to the first time that it is at the goal, as in trlX's version of the task. `edges` are all edges of the
    graph as pairs of letters, `"ba cd"`: a walk with any other step is worth 0. `shortest` walks have both ends
    included, and at most 9 nodes.
    """
    scores = []
    for start, rest, graph, best in zip(prompts, completions, edges, shortest, strict=True):
        walk = [*start.split(), *rest.split()]
        nodes = walk.index(GOAL) + 1 if GOAL in walk else LONGEST
        possible = {"".join(step) for step in pairwise(walk[:nodes])}.issubset(graph.split())
        scores.append(max(0, LONGEST - nodes) / (LONGEST - best) if possible else 0.0)
    return scores
