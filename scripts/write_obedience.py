"""Write the prompts of the recipe `obedience`: `python scripts/write_obedience.py --output data/01_raw --seed 0`.

A prompt is a chat of one message: a request about a topic, and one instruction that a rule can check. Two JSON Lines
files, the same bytes for the same seed:

- `obedience_prompts.jsonl`: 512 prompts on 64 topics with four kinds of instruction, for training;
- `obedience_held_out.jsonl`: 512 prompts on 16 other topics: 448 with the kinds of instruction that are trained, then
  64 with a kind that is never trained, `one_sentence`.

The columns are `prompt`, `kind`, `limit` (the most words that the instruction allows; 0 for other kinds), `topic` and
`names` (the words that name the topic). `ppo_rlhf.recipes.obedience` reads them.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TOPICS = (
    "the sea/seas, winter/winters, dogs/dog, cats/cat, trains/train, the moon/moons, bread/breads, "
    "coffee/coffees, rivers/river, bicycles/bicycle, gardens/garden, music, chess, mountains/mountain, "
    "rain/rains, libraries/library, the sun/suns, birds/bird, football/footballs, cooking, robots/robot, "
    "computers/computer, schools/school, bridges/bridge, forests/forest, horses/horse, "
    "painting/paintings, the ocean/oceans, tea/teas, sleep, photography, airplanes/airplane, "
    "clocks/clock, deserts/desert, volcanoes/volcano/volcanos, honey, islands/island, "
    "newspapers/newspaper, shoes/shoe, the heart/hearts, spiders/spider, elephants/elephant, "
    "cheese/cheeses, dancing, swimming, history, mathematics/math, money, friendship/friendships, "
    "doctors/doctor, teachers/teacher, farmers/farmer, ships/ship, castles/castle, the internet, "
    "telephones/telephone, glass, paper/papers, gold, salt, wheat, apples/apple, oranges/orange, "
    "whales/whale, wolves/wolf, bees/bee, butterflies/butterfly, snow, wind/winds, fire/fires, "
    "stars/star, planets/planet, poetry, theatre/theatres/theater/theaters, cinema/cinemas, "
    "museums/museum, markets/market, rice, soup/soups, running"
)
"""Each topic as a request names it, and its other names."""
HELD_OUT_TOPICS = 16
REQUESTS = (
    "Tell me something about {}.",
    "Write about {}.",
    "Why do people like {}?",
    "Describe {}.",
    "What is interesting about {}?",
)
INSTRUCTIONS: dict[str, tuple[tuple[str, int], ...]] = {
    "lowercase": (
        ("Answer in lowercase letters only.", 0),
        ("Use no capital letters.", 0),
        ("Your entire answer must be in lowercase.", 0),
    ),
    "short": (("Answer in fewer than 20 words.", 19), ("Use at most 20 words.", 20), ("Keep it under 20 words.", 19)),
    "no_comma": (
        ("Do not use any commas.", 0),
        ("Your answer must not contain a comma.", 0),
        ("Avoid commas.", 0),
    ),
    "end": (
        ('End your answer with the word "done".', 0),
        ('The last word of your answer must be "done".', 0),
        ('Finish with the word "done".', 0),
    ),
}
"""Instructions that are trained, by kind, each with the most words that it allows; 0 stands for any number."""
UNTRAINED = {
    "one_sentence": (
        ("Answer in exactly one sentence.", 0),
        ("Your answer must be a single sentence.", 0),
        ("Write one sentence only.", 0),
    )
}
TRAINED, HELD_OUT, HELD_OUT_UNTRAINED = 512, 448, 64
"""Numbers of prompts."""


def write_files(output: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write both files into the existing folder `output` and return their paths. `seed` fixes topics and prompts."""
    drawn = random.Random(seed)
    topics = _TOPICS.split(", ")
    drawn.shuffle(topics)
    held_out, trained = topics[:HELD_OUT_TOPICS], topics[HELD_OUT_TOPICS:]
    training = _prompts(drawn, trained, INSTRUCTIONS, TRAINED)
    evaluation = _prompts(drawn, held_out, INSTRUCTIONS, HELD_OUT)
    evaluation += _prompts(drawn, held_out, UNTRAINED, HELD_OUT_UNTRAINED)
    paths = output / "obedience_prompts.jsonl", output / "obedience_held_out.jsonl"
    for path, rows in zip(paths, (training, evaluation), strict=True):
        path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))
    return paths


def _prompts(
    drawn: random.Random, topics: Sequence[str], kinds: dict[str, tuple[tuple[str, int], ...]], count: int
) -> list[dict[str, Any]]:
    """Return `count` different prompts, the kinds of instruction in turn."""
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        kind = list(kinds)[len(rows) % len(kinds)]
        topic, *others = drawn.choice(topics).split("/")
        instruction, limit = drawn.choice(kinds[kind])
        text = f"{drawn.choice(REQUESTS).format(topic)} {instruction}"
        names = [topic.removeprefix("the "), *others]
        chat = [{"role": "user", "content": text}]
        rows.setdefault(text, {"prompt": chat, "kind": kind, "limit": limit, "topic": topic, "names": names})
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description="Write the prompts of the recipe obedience.")
    parser.add_argument("--output", type=Path, default=Path("data/01_raw"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for path in write_files(options.output, options.seed):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
