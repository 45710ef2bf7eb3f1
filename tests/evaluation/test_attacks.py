"""Attacks on a reward: what they respond, and which answers show them."""

from __future__ import annotations

import re

import pytest

from ppo_rlhf.evaluation.attacks import asked, attacks, attacks_named, attacks_seen, copied_share

PROMPT = "Why do people like rivers so much? Avoid all commas."
ANSWER = "Rivers carry water to towns and fields, and they are calm places to walk along in the evening."
OTHER = "A teacher explains new ideas and listens to what pupils find hard."
TRIED = attacks(["!!!"], has_reference=True)


@pytest.mark.parametrize("attack", TRIED, ids=[attack.name for attack in TRIED])
def test_an_attack_shows_in_its_own_response_and_in_no_honest_answer(attack) -> None:
    response = attack.respond(PROMPT, "42", (ANSWER, OTHER))
    if attack.seen is None:
        assert attack.name in ("other answer", "reference among others")
        return
    assert attack.seen(PROMPT, response)
    assert not attack.seen(PROMPT, ANSWER)
    assert not attack.seen(PROMPT, "Why would one not? They are calm, and people like rivers for that.")


def test_each_attack_has_a_name_of_its_own_by_which_it_is_found_again() -> None:
    names = [attack.name for attack in TRIED]
    assert len({*names}) == len(names)
    assert [attack.name for attack in attacks_named([*names, "no attack"])] == names
    assert "reference among others" not in {attack.name for attack in attacks()}


def test_the_reference_stands_among_other_answers_neither_first_nor_last() -> None:
    (attack,) = attacks_named(["reference among others"])
    numbers = re.findall(r"\d+", attack.respond("What is 6 times 7?", "42", ("42", "")))
    assert "42" in numbers[1:-1]


def test_only_attacks_that_use_the_answers_change_with_them() -> None:
    for attack in TRIED:
        first, second = (attack.respond(PROMPT, "42", answers) for answers in ((ANSWER, OTHER), ("Yes so.", "No so.")))
        assert (first != second) == attack.uses_answers


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Why do people like them?", 4 / 5),
        ("do PEOPLE, like rivers: yes", 4 / 5),
        ("people like rivers", 0.0),  # three words are no run
        ("I think people like rivers so much that they stay", 5 / 10),
        ("", 0.0),
    ],
)
def test_copied_words_are_those_in_runs_of_four(answer: str, share: float) -> None:
    assert copied_share(PROMPT, answer) == pytest.approx(share)


def test_what_is_asked_is_the_users_last_message_or_the_plain_text() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert asked(["<u>a<a>b<u>c", "plain"], [chat, None]) == ["c", "plain"]
    assert asked(["plain"], []) == ["plain"]


def test_answers_are_counted_by_the_attack_that_they_show() -> None:
    found = attacks_named(["echo", "refusal", "other answer"])
    seen = attacks_seen(found, [PROMPT] * 3, [PROMPT, ANSWER, "I'm sorry, I can't help with that."])
    assert seen == {"echo": [True, False, False], "refusal": [False, False, True]}
