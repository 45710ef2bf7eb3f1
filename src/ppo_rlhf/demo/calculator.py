"""Arithmetic questions with a calculator: a worked example of an environment that answers between a policy's turns.

`python -m ppo_rlhf.demo.calculator --output data/01_raw --seed 0` writes its two files:

- `calculator_demonstrations.jsonl`: half of them call the calculator and repeat its result, half guess;
- `calculator_prompts.jsonl`: other questions, with their answers.

A policy that has learnt them calls the calculator for half of the questions. PPO with the reward `is_right` teaches it
to call it always.
"""

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

LARGEST, DEMONSTRATIONS, PROMPTS = 19, 3000, 160
_CALL = re.compile(r"call (\d+) plus (\d+)")
_ANSWER = re.compile(r"answer (\d+)")


def reply(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[str | None]:
    """Answer each turn that calls the calculator; None ends the episode. An environment of `ppo.environment`.

    Args:
        prompts: The questions.
        completions: Each episode so far, as one text.
        turns: The turns of each episode: the policy's, a reply, the policy's, ...
    """
    calls = [_CALL.fullmatch(texts[-1]) for texts in turns]
    return [None if call is None else f"result {int(call[1]) + int(call[2])}" for call in calls]


def is_right(prompts: list[str], completions: list[str], turns: list[list[str]], answer: list[int]) -> list[float]:
    """Return 1 where the last turn is the right answer, else 0. A reward function.

    It reads the policy's own last turn: a result that stands in a reply, or that the policy made up, earns nothing.
    """
    said = [_ANSWER.fullmatch(texts[-1]) for texts in turns]
    return [float(match is not None and int(match[1]) == right) for match, right in zip(said, answer, strict=True)]


def calls_calculator(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[float]:
    """Return 1 where the policy called the calculator, else 0. A function of `evaluation.rates`."""
    return [float(_CALL.fullmatch(texts[0]) is not None) for texts in turns]


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
    parser = argparse.ArgumentParser(prog="python -m ppo_rlhf.demo.calculator", description="Write the example's data.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for path in write_files(options.output, options.seed):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
