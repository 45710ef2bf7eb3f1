"""Write the shipped corpus: `python -m ppo_rlhf.demo.corpus --output data/01_raw --seed 0`.

Two JSON Lines files, the same bytes for the same arguments:

- `demonstrations.jsonl`: `{"text": review}`, no review twice;
- `prompts.jsonl`: `{"prompt": header and the first one to five words of a body, "aspect": word}`, no prompt twice.

The prompts come from other reviews, about titles that no demonstration has: a model trained on the demonstrations knows
all their words, but cannot have learnt their continuations by heart. The files hold nothing of the judge.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from ppo_rlhf.demo.grammar import END, Review, all_titles, write_review

DEMONSTRATIONS = 14_000
PROMPTS = 6_000
PROMPT_TITLES = 0.25  # share of the titles that only prompts have
MAX_OPENING = 5  # words of the body in a prompt


def split_titles(rng: random.Random) -> tuple[list[str], list[str]]:
    """Part the titles into those of the demonstrations and those of the prompts."""
    titles = all_titles()
    order = sorted(range(len(titles)), key=[rng.random() for _ in titles].__getitem__)
    cut = int(PROMPT_TITLES * len(titles))
    return [titles[i] for i in sorted(order[cut:])], [titles[i] for i in sorted(order[:cut])]


def write_prompt(review: Review, rng: random.Random) -> str:
    """The header and one to five words of the body; never its first full stop, so there is always a sentence to end."""
    longest = min(MAX_OPENING, review.body.index(END))
    return " ".join((*review.header, *review.body[: 1 + int(rng.random() * longest)]))


def make_demonstrations(count: int, rng: random.Random, titles: Sequence[str]) -> list[dict[str, str]]:
    """`count` different reviews, as rows `{"text": ...}`."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[write_review(rng, titles).text] = None
    return [{"text": text} for text in texts]


def make_prompts(count: int, rng: random.Random, titles: Sequence[str]) -> list[dict[str, str]]:
    """`count` different prompts, as rows `{"prompt": ..., "aspect": ...}`."""
    aspects: dict[str, str] = {}
    while len(aspects) < count:
        review = write_review(rng, titles)
        aspects[write_prompt(review, rng)] = review.aspect
    return [{"prompt": prompt, "aspect": aspect} for prompt, aspect in aspects.items()]


def _write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))


def write_corpus(
    output: Path, seed: int = 0, demonstrations: int = DEMONSTRATIONS, prompts: int = PROMPTS
) -> tuple[Path, Path]:
    """Write both files into the folder `output` (made if missing) and return their paths."""
    rng = random.Random(seed)
    demonstration_titles, prompt_titles = split_titles(rng)
    output.mkdir(parents=True, exist_ok=True)
    paths = (output / "demonstrations.jsonl", output / "prompts.jsonl")
    _write_lines(paths[0], make_demonstrations(demonstrations, rng, demonstration_titles))
    _write_lines(paths[1], make_prompts(prompts, rng, prompt_titles))
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(prog="python -m ppo_rlhf.demo.corpus", description="Write the demo corpus.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="how many reviews")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="how many prompts")
    options = parser.parse_args(arguments)
    for path in write_corpus(options.output, options.seed, options.demonstrations, options.prompts):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
