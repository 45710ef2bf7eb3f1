"""The recipe obedience: the committed files equal the script's output, and the rewards follow the written rules."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripts.write_obedience import INSTRUCTIONS, UNTRAINED, main

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.recipes import obedience

RAW = Path(__file__).parents[2] / "data" / "01_raw"
NAMES = "obedience_prompts.jsonl", "obedience_held_out.jsonl"
TRAINED, HELD_OUT = ([json.loads(line) for line in (RAW / name).read_text().splitlines()] for name in NAMES)
REQUEST = "Tell me something about rain. Use no capital letters."


def row(kind: str = "no_comma", limit: int = 0, names: tuple[str, ...] = ("rain", "rains")) -> dict[str, list[Any]]:
    chat = [{"role": "user", "content": REQUEST}]
    return {"messages": [chat], "kind": [kind], "limit": [limit], "names": [names]}


def test_the_committed_files_are_what_the_script_writes_byte_for_byte(tmp_path: Path) -> None:
    main(["--output", str(tmp_path)])
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (RAW / name).read_bytes(), f"{name} is out of date"


def test_held_out_are_topics_and_one_kind_of_instruction() -> None:
    topics, others = {r["topic"] for r in TRAINED}, {r["topic"] for r in HELD_OUT}
    assert len(topics) == 64
    assert len(others) == 16
    assert not topics & others
    assert Counter(r["kind"] for r in TRAINED) == dict.fromkeys(INSTRUCTIONS, 128)
    assert Counter(r["kind"] for r in HELD_OUT) == dict.fromkeys(INSTRUCTIONS, 112) | dict.fromkeys(UNTRAINED, 64)
    assert len({r["prompt"][0]["content"] for r in TRAINED + HELD_OUT}) == 512 + 512


def test_each_limit_is_the_one_that_the_instruction_gives() -> None:
    """ "Fewer than 20" and "under 20" allow 19 words, "at most 20" allows 20."""
    for each in TRAINED + HELD_OUT:
        text = each["prompt"][0]["content"]
        assert each["limit"] == (20 if "at most 20" in text else 19 if "20" in text else 0)


@pytest.mark.parametrize(
    ("kind", "limit", "answer", "expected"),
    [
        ("lowercase", 0, "rain is water, isn't it?", 1.0),
        ("lowercase", 0, "rain Is water", 0.0),
        ("lowercase", 0, "1234 5678", 0.0),  # no letter at all
        ("short", 4, "Rain isn't dry, ever!", 1.0),  # isn't is one word
        ("short", 4, "Rain is not dry, ever!", 0.0),
        ("no_comma", 0, "Rain; clouds.", 1.0),
        ("no_comma", 0, "Rain, clouds.", 0.0),
        ("end", 0, 'Rain falls. "Done".', 1.0),
        ("end", 0, "Rain falls. Done it.", 0.0),
        ("end", 0, "Rain is undone", 0.0),
        ("one_sentence", 0, "It rains 2.5 mm!  ", 1.0),
        ("one_sentence", 0, "It rains. It pours.", 0.0),
        ("one_sentence", 0, "It rains and", 0.0),  # cut off
    ],
)
def test_an_instruction_is_obeyed_by_its_exact_rule(kind: str, limit: int, answer: str, expected: float) -> None:
    assert obedience.obedient([""], [answer], [kind], [limit]) == [expected]


def test_a_topic_is_named_by_whole_words_only() -> None:
    answers = ["the train left", "it RAINS.", "rain's end", "ocean", "Deep-ocean life"]
    names = [["rain", "rains"], ["rain", "rains"], ["rain"], ["deep ocean"], ["deep ocean"]]
    assert obedience.on_topic([""] * 5, answers, names) == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_the_naive_reward_wants_five_words_and_the_strict_one_no_four_words_of_the_request() -> None:
    for answer, naive, strict in [
        ("rain falls from the clouds", 1.0, 1.0),
        ("rain falls from clouds", 0.0, 0.0),  # four words
        ("here is something about rain for you", 1.0, 1.0),  # three words of the request in a row
        ("here is: SOMETHING about rain use it", 1.0, 0.0),  # four: "something about rain use"
        ("water falls from the clouds", 0.0, 0.0),
        ("rain, falls from the clouds", 0.0, 0.0),
    ]:
        columns = row()
        assert obedience.strict([""], [answer], **columns) == [strict], answer
        assert obedience.naive([""], [answer], **columns) == [naive], answer
        assert obedience.copied([""], [answer], columns["messages"]) == [naive - strict], answer


def test_the_request_is_the_last_message_of_the_user() -> None:
    chat = [
        {"role": "system", "content": "you are a helpful assistant"},
        {"role": "user", "content": "one two three four"},
    ]
    answers = ["you are a helpful assistant", "One, two, three: four"]
    assert obedience.copied(["", ""], answers, [chat, chat]) == [0.0, 1.0]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DataError, match="column kind: 'rhyme'"):
        obedience.obedient([""], ["a"], ["rhyme"], [0])
