"""The reward of the random-walks task, whose optimum is 1; from Chen et al. 2021, arXiv:2106.01345, section 3.

`scripts/write_random_walks.py` makes the graph and the walks. The rows of the prompts file have the columns `edges` and
`shortest`, which the reward reads.
"""

from collections.abc import Sequence
from itertools import pairwise

GOAL = "a"
LONGEST = 10
"""A walk with at least `LONGEST` nodes gets the reward 0, even if the walk ends at the goal."""


def optimality(
    prompts: Sequence[str], completions: Sequence[str], edges: Sequence[str], shortest: Sequence[int]
) -> list[float]:
    """Return (10 - nodes) / (10 - nodes of the shortest walk) where a walk reaches the goal, else 0. A reward function.

    The prompt is the start node, one letter; the completion lists the next nodes with spaces between them. As in
    trlX's version of the task, a walk ends at its first visit to the goal. `edges` are all edges of the graph as pairs
    of letters, such as `"ba cd"`; a walk with a step along no edge gets 0. `shortest` is the number of nodes of the
    shortest walk from the start to the goal, both included: at most 9.
    """
    scores = []
    for start, rest, graph, best in zip(prompts, completions, edges, shortest, strict=True):
        walk = [*start.split(), *rest.split()]
        nodes = walk.index(GOAL) + 1 if GOAL in walk else LONGEST
        possible = {"".join(step) for step in pairwise(walk[:nodes])}.issubset(graph.split())
        scores.append(max(0, LONGEST - nodes) / (LONGEST - best) if possible else 0.0)
    return scores
