"""Write the data of the random walks: `python scripts/write_random_walks.py --output data/01_raw --seed 1002`.

The task is that of Chen et al. 2021, arXiv:2106.01345, section 3, in trlX's form: a directed graph of 21 nodes, each
edge with probability 0.1, and walks of at most 10 nodes that end at the goal, `a`. Graph and walks are those of trlX's
`generate_random_walks` with the same seed. Two JSON Lines files, the same bytes for the same seed:

- `random_walks.jsonl`: 1,000 random walks, each as its start (`prompt`) and the rest (`completion`);
- `random_walk_prompts.jsonl`: each start once, with the edges of the graph and the nodes of its shortest walk.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

NODES, EDGE_PROBABILITY, WALKS, LONGEST, GOAL = 21, 0.1, 1000, 10, 0
SEED = 1002
"""Value of trlX's default."""


def write_files(output: Path, seed: int = SEED) -> tuple[Path, Path]:
    """Write both files into the existing folder `output` and return their paths. `seed` fixes graph and walks.

    Raises:
        ValueError: The graph of this seed has a start that is more than 9 nodes from the goal: its optimum is not 1.
    """
    random = np.random.RandomState(seed)  # gives the same numbers in every release of numpy
    graph = _graph(random)
    shortest = _shortest(graph)
    if len(shortest) < NODES or max(shortest.values()) >= LONGEST:
        raise ValueError(f"seed {seed}: from some node of this graph no walk of at most {LONGEST - 1} nodes ends at a")
    walks = [_walk(random, graph) for _ in range(WALKS)]
    starts = [node for node in range(NODES) if node != GOAL]
    edges = " ".join(_letters([node, after]) for node in starts for after in graph[node])
    written = [_letters(walk) for walk in walks]
    demonstrations = [{"prompt": walk[0], "completion": " " + " ".join(walk[1:])} for walk in written]
    prompts = [{"prompt": _letters([node]), "edges": edges, "shortest": shortest[node]} for node in starts]
    paths = output / "random_walks.jsonl", output / "random_walk_prompts.jsonl"
    for path, rows in zip(paths, (demonstrations, prompts), strict=True):
        path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))
    return paths


def _graph(random: np.random.RandomState) -> list[list[int]]:
    """Draw graphs until each node has a successor; return the successors of each node."""
    while True:
        leads = random.rand(NODES, NODES) > 1 - EDGE_PROBABILITY
        np.fill_diagonal(leads, False)
        if leads.any(axis=1).all():
            return [np.nonzero(row)[0].tolist() for row in leads]


def _shortest(graph: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the nodes of the shortest walk to the goal, including start and goal, for each node that reaches it."""
    found, nodes = {GOAL: 1}, 1
    while reached := [n for n in range(NODES) if n not in found and any(found.get(m) == nodes for m in graph[n])]:
        nodes += 1
        found.update(dict.fromkeys(reached, nodes))
    return found


def _walk(random: np.random.RandomState, graph: Sequence[Sequence[int]]) -> list[int]:
    walk = [GOAL]
    while walk == [GOAL]:
        walk = [random.randint(NODES)]
    while walk[-1] != GOAL and len(walk) < LONGEST:
        walk.append(random.choice(graph[walk[-1]]))
    return walk


def _letters(nodes: Sequence[int]) -> str:
    return "".join(chr(ord("a") + node) for node in nodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description="Write the data of the random walks.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    for path in write_files(options.output, options.seed):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
