"""A prompt that stands in a column of its own and again in the texts or chats beside it is read once."""

import pandas as pd
import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.repeated_prompts import split_chat, split_texts
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig, encode_demonstrations, read_demonstrations
from ppo_rlhf.supervised.preferences import check_preferences, tokenise_preferences
from tests.tiny_models import BEGIN, CHAT_TEMPLATE, END, UNKNOWN, VOCABULARY, word_tokenizer

A, B, C = (VOCABULARY.index(word) for word in "abc")
MARKED = "\n\nHuman: hi\n\nAssistant:"
CRLF = MARKED.replace("\n", "\r\n")


def said_of(role, *texts):
    return [{"role": role, "content": text} for text in texts]


SYSTEM, USER, ANSWER = said_of("system", "s"), said_of("user", "a"), said_of("assistant", "b")


@pytest.mark.parametrize(
    ("prompt", "texts", "expected"),
    [
        (MARKED, (MARKED + " yes", MARKED + " no"), [MARKED, " yes", " no"]),
        (MARKED, (MARKED[2:] + " yes", MARKED[2:] + " no"), [MARKED[2:], " yes", " no"]),
        (MARKED + "\n", (MARKED + " yes", MARKED + " no"), [MARKED, " yes", " no"]),
        (MARKED, (MARKED + " yes", MARKED), [MARKED, " yes", ""]),
        (MARKED, (MARKED + " yes",), [MARKED, " yes"]),
        (MARKED, (CRLF + " yes", CRLF + " no"), [CRLF, " yes", " no"]),
        (CRLF, (MARKED[2:] + "\r\nyes", MARKED[2:]), [MARKED[2:], "\r\nyes", ""]),
        ("caf\xe9", (" cafe\u0301 yes",), [" cafe\u0301", " yes"]),
        ("cafe\u0301 ", ("caf\xe9 yes",), ["caf\xe9", " yes"]),
        (MARKED, (MARKED + MARKED + " yes", MARKED + MARKED + " no"), [MARKED, " yes", " no"]),
    ],
    ids=[
        *("exact", "without the first spaces", "with another last space", "an empty answer", "one text"),
        *("other line ends", "without the first line ends", "decomposed", "composed", "twice"),
    ],
)
def test_a_prompt_that_begins_the_texts_of_all_rows_is_cut_off(prompt, texts, expected):
    rows = [(3, prompt, texts), (5, expected[0], tuple(text.replace(expected[1], " other") for text in texts))]
    others = [expected[0], *(text.replace(expected[1], " other") for text in expected[1:])]
    assert split_texts("t", "texts begin", rows, "") == {3: expected, 5: others}


def test_texts_that_do_not_repeat_the_prompt_stay(caplog):
    assert split_texts("t", "texts begin", [(0, MARKED, ("yes", "no")), (1, "", ("a", "b"))], "") == {}
    assert not caplog.messages


@pytest.mark.parametrize("texts", [("Hi there", "Hi!"), ("Hi there", "No")], ids=["both", "one of both"])
def test_texts_of_some_rows_that_begin_with_their_prompt_stay_and_are_counted(texts, caplog):
    rows = [(row, "Hi", texts if row == 1 else ("Yes", "No")) for row in range(4)]
    assert split_texts("t", "texts begin", rows, "") == {}
    (line,) = caplog.messages
    assert line.startswith("t: in 1 of 4 rows texts begin with the prompt (the first is row 1).")


def test_texts_of_some_rows_that_repeat_the_prompt_twice_are_counted(caplog):
    rows = [(row, MARKED, (MARKED * (1 + (row == 1)) + " yes",)) for row in range(4)]
    assert split_texts("t", "texts begin", rows, "")[1] == [MARKED, MARKED + " yes"]
    assert caplog.messages[-1].startswith("t: in 1 of 4 rows texts begin again with the prompt (the first is row 1).")


@pytest.mark.parametrize("texts", [("Yes", "No"), ("Hi there", "No")], ids=["neither", "one of both"])
def test_a_row_without_the_prompt_that_most_rows_repeat_is_refused(texts):
    rows = [(row, "Hi", texts if row == 2 else ("Hi there", "Hi!")) for row in range(4)]
    with pytest.raises(DataError, match=r"^t: in [34] of 4 rows texts begin with the prompt, but not all of row 2"):
        split_texts("t", "texts begin", rows, "")


@pytest.mark.parametrize("texts", [(MARKED + " yes", MARKED + " no"), (MARKED + " yes",)])
def test_a_prompt_without_the_marks_of_the_texts_is_named(texts, caplog):
    assert split_texts("t", "texts begin", [(0, "hi", texts)], "rename it") == {}
    (line,) = caplog.messages
    assert line.startswith("t: in 1 of 1 rows (the first is row 0) the prompt stands again within the text beside it")
    assert line.endswith("If these are whole texts, rename it.")


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (USER, ANSWER, (USER, ANSWER)),
        (USER, USER + ANSWER, (USER, ANSWER)),
        (SYSTEM + USER, USER + ANSWER, (SYSTEM + USER, ANSWER)),
        (USER, SYSTEM + USER + ANSWER, (SYSTEM + USER, ANSWER)),
        (SYSTEM + USER, SYSTEM + USER + ANSWER, (SYSTEM + USER, ANSWER)),
        (SYSTEM, USER + ANSWER, (SYSTEM, USER + ANSWER)),
        (USER, [{**USER[0], "content": " a\n", "weight": 0}, *ANSWER], (USER, ANSWER)),
        (USER + ANSWER + USER, USER + ANSWER, (USER + ANSWER + USER, ANSWER)),
        (USER + ANSWER, USER + said_of("assistant", "b c"), (USER + ANSWER, said_of("assistant", " c"))),
        (USER + ANSWER, said_of("user", "c") + ANSWER, (USER + ANSWER, said_of("user", "c") + ANSWER)),
        (said_of("user", "a\nb"), said_of("user", "a\r\nb") + ANSWER, (said_of("user", "a\nb"), ANSWER)),
        (
            USER + said_of("assistant", "caf\xe9"),
            USER + said_of("assistant", "cafe\u0301 c"),
            (USER + said_of("assistant", "caf\xe9"), said_of("assistant", " c")),
        ),
    ],
)
def test_what_an_answer_repeats_of_its_prompt_is_cut_off(prompt, answer, expected):
    assert split_chat(prompt, answer, "row 0") == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (SYSTEM + USER, said_of("system", "other") + USER + ANSWER, "the system messages of the prompt and of the"),
        (
            USER,
            said_of("user", "A?") + ANSWER,
            "the prompt ends with a user's message, and the answer begins with anot",
        ),
        (USER, USER + USER + ANSWER, "the prompt ends with a user's message, and the answer begins with another"),
        (USER, USER, "the answer has nothing behind the prompt"),
    ],
)
def test_an_answer_that_cannot_follow_its_prompt_is_refused(prompt, answer, message):
    with pytest.raises(DataError, match=f"^row 0: {message}"):
        split_chat(prompt, answer, "row 0")


def test_chosen_and_rejected_with_other_system_messages_are_refused():
    row = {"prompt": USER, "chosen": SYSTEM + USER + ANSWER, "rejected": USER + said_of("assistant", "c")}
    with pytest.raises(DataError, match="preferences: row 0: the system messages of chosen and rejected differ"):
        check_preferences(pd.DataFrame([row]), "prompt", "chosen", "rejected")


@pytest.mark.parametrize("begin", ["", "a "])
def test_pairs_of_texts_have_their_prompt_once(begin):
    frame = pd.DataFrame({"prompt": ["a "], "chosen": [begin + "b"], "rejected": [begin + "c"]})
    pairs = tokenise_preferences(check_preferences(frame, "prompt", "chosen", "rejected"), word_tokenizer())
    assert pairs[["prompt", "chosen", "chosen_ids", "rejected_ids"]].values.tolist() == [
        ["a ", "b", [A, B, END], [A, C, END]]
    ]


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        ({"prompt": "a ", "completion": "b"}, [A, B, END]),
        ({"prompt": "a ", "completion": "a b"}, [A, B, END]),
        ({"prompt": USER, "completion": USER + ANSWER}, [UNKNOWN, A, BEGIN, A, B, BEGIN]),
    ],
)
def test_of_completions_that_repeat_the_prompt_only_what_follows_is_learnt(rows, ids):
    table = read_demonstrations(pd.DataFrame([rows]), DataPreparationConfig())
    encoded = encode_demonstrations(table, word_tokenizer(chat_template=CHAT_TEMPLATE), None)
    assert encoded.input_ids == [ids]
    begin = ids.index(B)
    assert encoded.labels[0][begin:] == ids[begin:]
    assert {*encoded.labels[0][: ids.index(A) + 1]} == {-100}
