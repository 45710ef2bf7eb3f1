"""Write the shipped corpus: `python scripts/write_corpus.py --output data/01_raw --seed 0`.

Two JSON Lines files, the same bytes for the same arguments:

- `demonstrations.jsonl`: `{"text": review}`, no review twice;
- `prompts.jsonl`: `{"prompt": header and the first one to five words of a body, "aspect": word}`, no prompt twice.

The prompts come from other reviews, about titles that no demonstration has: a model trained on the demonstrations knows
all their words, but cannot have learnt their continuations by heart. The files hold nothing of the judge.
"""

import argparse
import json
import random
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ppo_rlhf.demo.grammar import END, PRODUCTIONS, is_terminal
from ppo_rlhf.demo.lexicon import WORDS

DEMONSTRATIONS = 14_000
PROMPTS = 6_000
PROMPT_TITLES = 0.25  # share of the titles that occur only in prompts
MAX_OPENING = 5  # largest number of words of the body in a prompt
ASPECTS = WORDS["ASPECT"]
MIN_BODY, MAX_BODY = 8, 32  # tokens, including punctuation
SENTENCE_COUNTS = (0.15, 0.50, 0.28, 0.07)  # probability of 1, 2, 3, 4 sentences
KEEP_POLARITY = 0.9  # probability that a sentence has the polarity of its review
KEEP_ASPECT = 0.4  # probability that "the ASPECT" is the aspect of the header

_CUMULATIVE = {head: list(accumulate(weight for weight, _ in options)) for head, options in PRODUCTIONS.items()}


@dataclass(frozen=True)
class Review:
    """One review; `text` is what a language model is trained on."""

    title: str
    aspect: str
    body: tuple[str, ...]  # tokens

    @property
    def header(self) -> tuple[str, ...]:
        """The tokens before the body."""
        return (*self.title.split(), "(", self.aspect, ")", ":")

    @property
    def text(self) -> str:
        """Header and body, separated by single spaces."""
        return " ".join((*self.header, *self.body))


def _choose(rng: random.Random, cumulative: Sequence[float]) -> int:
    # random.random() is the one method whose sequence Python promises to keep between versions.
    return bisect(cumulative, rng.random() * cumulative[-1], hi=len(cumulative) - 1)


def _expand(symbol: str, rng: random.Random, bound: Mapping[str, tuple[float, str]]) -> list[str]:
    """Expand `symbol` to words. A symbol in `bound` becomes the words given there with the probability given there."""
    if is_terminal(symbol):
        return [symbol]
    probability, words = bound.get(symbol, (0.0, ""))
    if probability and rng.random() < probability:
        return words.split()
    _, production = PRODUCTIONS[symbol][_choose(rng, _CUMULATIVE[symbol])]
    return [word for part in production for word in _expand(part, rng, bound)]


def all_titles() -> list[str]:
    """Every title of the grammar, in a fixed order."""
    return [f"{first} {second}" for first in WORDS["TITLE_FIRST"] for second in WORDS["TITLE_SECOND"]]


def write_review(rng: random.Random, titles: Sequence[str]) -> Review:
    """Draw one review about one of `titles`.

    Director, actor and (mostly) role stay the same within a review; each sentence keeps the review's polarity with
    probability `KEEP_POLARITY`.

    Args:
        rng: the only source of chance; it is advanced.
        titles: the titles to draw from, two words each.
    """
    title = titles[int(rng.random() * len(titles))]
    aspect = ASPECTS[int(rng.random() * len(ASPECTS))]
    polarity = "+" if rng.random() < 0.5 else "-"
    bound = {
        "TITLE": (1.0, title),
        "ASPECT": (KEEP_ASPECT, aspect),
        "ACTOR": (1.0, " ".join(_expand("ACTOR", rng, {}))),
        "DIRECTOR": (1.0, " ".join(_expand("DIRECTOR", rng, {}))),
        "ROLE": (0.7, " ".join(_expand("ROLE", rng, {}))),
    }
    other = "-" if polarity == "+" else "+"
    while True:
        count = 1 + _choose(rng, list(accumulate(SENTENCE_COUNTS)))
        signs = [polarity if rng.random() < KEEP_POLARITY else other for _ in range(count)]
        body = [word for sign in signs for word in _expand(f"SENTENCE{sign}", rng, bound)]
        if MIN_BODY <= len(body) <= MAX_BODY:
            return Review(title, aspect, tuple(body))


def split_titles(rng: random.Random) -> tuple[list[str], list[str]]:
    """Split the titles into titles for demonstrations and titles for prompts."""
    titles = all_titles()
    order = sorted(range(len(titles)), key=[rng.random() for _ in titles].__getitem__)
    cut = int(PROMPT_TITLES * len(titles))
    return [titles[i] for i in sorted(order[cut:])], [titles[i] for i in sorted(order[:cut])]


def write_prompt(review: Review, rng: random.Random) -> str:
    """Return the header and one to five words of the body, without its first full stop: a sentence is always left to
    end.
    """
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
    parser = argparse.ArgumentParser(description="Write the demo corpus.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="how many reviews")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="how many prompts")
    options = parser.parse_args(arguments)
    for path in write_corpus(options.output, options.seed, options.demonstrations, options.prompts):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
