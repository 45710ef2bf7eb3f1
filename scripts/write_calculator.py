"""Write the calculator example's data: `python scripts/write_calculator.py --output data/01_raw --seed 0`.

Two JSON Lines files, the same bytes for the same arguments:

- `calculator_demonstrations.jsonl`: half of them call the calculator and repeat its result, half guess;
- `calculator_prompts.jsonl`: other questions, with their answers.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

LARGEST, DEMONSTRATIONS, PROMPTS = 19, 3000, 160


def write_files(
    output: Path,
    seed: int = 0,
    largest: int = LARGEST,
    demonstrations: int = DEMONSTRATIONS,
    prompts: int = PROMPTS,
) -> tuple[Path, Path]:
    """Write both files into the folder `output` and return their paths.

    Args:
        output: An existing folder.
        seed: Fixes both.
        largest: Number in a question.
        demonstrations: How many.
        prompts: How many of the (largest + 1)² questions; the demonstrations have the others.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    rng.shuffle(pairs)
    asked, shown = pairs[:prompts], pairs[prompts:]
    written = []
    for number in range(demonstrations):
        a, b = shown[number % len(shown)]
        called = f" call {a} plus {b} </s> result {a + b} answer {a + b}"
        completion = called if rng.random() < 0.5 else f" answer {int(rng.random() * (2 * largest + 1))}"
        written.append({"prompt": _question(a, b), "completion": completion})
    questions = [{"prompt": _question(a, b), "answer": a + b} for a, b in asked]
    paths = output / "calculator_demonstrations.jsonl", output / "calculator_prompts.jsonl"
    _write_lines(paths[0], written)
    _write_lines(paths[1], questions)
    return paths


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))


def _question(a: int, b: int) -> str:
    return f"what is {a} plus {b} ?"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description="Write the example's data.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for path in write_files(options.output, options.seed):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
