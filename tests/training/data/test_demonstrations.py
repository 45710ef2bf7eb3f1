import logging

import pandas as pd
import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.training.data.demonstrations import (
    IGNORED,
    DataPreparationConfig,
    corpus_texts,
    split_demonstrations,
    tokenise_demonstrations,
)
from tests.tiny_models import BEGIN, CHAT_TEMPLATE, END, UNKNOWN, VOCABULARY, word_tokenizer

A, B, C, D = (VOCABULARY.index(word) for word in "abcd")
CHAT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]


def texts(count: int) -> pd.DataFrame:
    return pd.DataFrame({"text": [f"text {i}" for i in range(count)], "label": range(count)})


def test_the_split_is_seeded_complete_and_in_the_tables_order():
    config = DataPreparationConfig(held_out_share=0.25, seed=1)
    trained, held_out = split_demonstrations(texts(40), config)
    assert (len(trained), len(held_out)) == (30, 10)
    assert sorted([*trained["text"], *held_out["text"]]) == sorted(texts(40)["text"])
    assert [int(t.split()[1]) for t in trained["text"]] == sorted(int(t.split()[1]) for t in trained["text"])
    pd.testing.assert_frame_equal(held_out, split_demonstrations(texts(40), config)[1])
    other = split_demonstrations(texts(40), DataPreparationConfig(held_out_share=0.25, seed=2))[1]
    assert list(held_out["text"]) != list(other["text"])


def test_at_most_so_many_are_held_out_and_used():
    trained, held_out = split_demonstrations(texts(40), DataPreparationConfig(max_held_out=3, held_out_share=0.5))
    assert (len(trained), len(held_out)) == (37, 3)
    trained, held_out = split_demonstrations(texts(40), DataPreparationConfig(max_demonstrations=8))
    assert (len(trained), len(held_out)) == (7, 1)


def test_two_rows_are_enough_and_one_is_not():
    assert [len(part) for part in split_demonstrations(texts(2), DataPreparationConfig())] == [1, 1]
    with pytest.raises(DataError, match=r"1 row\(s\) cannot be split"):
        split_demonstrations(texts(1), DataPreparationConfig())


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "a", "prompt": "b", "completion": "c"}, ["prompt", "completion"]),
        ({"text": "a", "prompt": "b"}, ["text"]),
        ({"messages": CHAT, "text": "a"}, ["messages"]),
    ],
)
def test_the_format_is_the_first_whose_columns_are_there(row, columns):
    assert list(split_demonstrations(pd.DataFrame([row] * 2), DataPreparationConfig())[0].columns) == columns


def test_columns_of_other_names_become_the_standard_ones():
    config = DataPreparationConfig(prompt_column="question", completion_column="answer")
    frame = pd.DataFrame({"question": ["a", "b"], "answer": ["c", "d"]})
    assert list(split_demonstrations(frame, config)[0].columns) == ["prompt", "completion"]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"body": ["a", "b"]}, "the columns are body; needed is `text`, or `prompt` and `completion`, or `messages`"),
        ({"text": ["a", " "]}, "row 1, column `text`: expected text that is not empty, got ' '"),
        ({"text": ["a", None]}, "row 1, column `text`: expected text that is not empty, got nan"),
        ({"text": ["a", 3]}, "row 1, column `text`: expected text that is not empty, got 3"),
        ({"messages": [CHAT, "hi"]}, "row 1, column `messages`: expected a list of"),
        ({"messages": [CHAT, [{"role": "user"}]]}, "row 1, column `messages`: expected a list of"),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused(frame, message):
    with pytest.raises(DataError, match=message):
        split_demonstrations(pd.DataFrame(frame), DataPreparationConfig())


def test_texts_are_learnt_whole_and_end():
    rows = tokenise_demonstrations(pd.DataFrame({"text": ["a b", "c"]}), word_tokenizer(), None)
    assert rows.input_ids == [[A, B, END], [C, END]]
    assert rows.labels == rows.input_ids


def test_a_tokenizers_own_beginning_stays_and_its_end_is_not_doubled():
    rows = tokenise_demonstrations(pd.DataFrame({"text": ["a b", "c </s>"]}), word_tokenizer(prepend_begin=True), None)
    assert rows.input_ids == [[BEGIN, A, B, END], [BEGIN, C, END]]


def test_of_prompt_and_completion_only_the_completion_is_learnt():
    frame = pd.DataFrame({"prompt": ["a b", "a"], "completion": [" c", " d c"]})
    rows = tokenise_demonstrations(frame, word_tokenizer(), None)
    assert rows.input_ids == [[A, B, C, END], [A, D, C, END]]
    assert rows.labels == [[IGNORED, IGNORED, C, END], [IGNORED, D, C, END]]


def test_where_tokens_merge_across_the_boundary_learning_begins_at_the_difference():
    frame = pd.DataFrame({"prompt": ["a b"], "completion": ["b c"]})  # together "a bb c", where "bb" is unknown
    rows = tokenise_demonstrations(frame, word_tokenizer(), None)
    assert rows.input_ids == [[A, UNKNOWN, C, END]]
    assert rows.labels == [[IGNORED, UNKNOWN, C, END]]


def test_chats_are_written_by_the_tokenizers_template_and_learnt_whole():
    rows = tokenise_demonstrations(
        pd.DataFrame({"messages": [CHAT]}), word_tokenizer(chat_template=CHAT_TEMPLATE), None
    )
    user, assistant = VOCABULARY.index("u") if "u" in VOCABULARY else VOCABULARY.index("<unk>"), A
    assert rows.input_ids == [[user, B, BEGIN, assistant, C, BEGIN]]
    assert rows.labels == rows.input_ids


def test_chats_need_a_template():
    with pytest.raises(DataError, match="need a tokenizer with a chat template"):
        tokenise_demonstrations(pd.DataFrame({"messages": [CHAT]}), word_tokenizer(), None)
    with pytest.raises(DataError, match="Set base_model_path"):
        list(corpus_texts(pd.DataFrame({"messages": [CHAT]})))


def test_what_is_too_long_is_cut_without_an_end_and_counted(caplog):
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        rows = tokenise_demonstrations(pd.DataFrame({"text": ["a b c d", "c"]}), word_tokenizer(), 3)
    assert rows.input_ids == [[A, B, C], [C, END]]
    assert "1 of 2 demonstrations are cut at 3 tokens" in caplog.text


def test_rows_with_nothing_to_learn_within_the_length_are_left_out(caplog):
    frame = pd.DataFrame({"prompt": ["a b c", "a"], "completion": [" d", " d"]})
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        rows = tokenise_demonstrations(frame, word_tokenizer(), 3)
    assert rows.input_ids == [[A, D, END]]
    assert "1 demonstrations have nothing to learn" in caplog.text
    with pytest.raises(DataError, match="none of 1 has a token to learn within max_length=3"):
        tokenise_demonstrations(frame.head(1), word_tokenizer(), 3)


def test_a_tokenizer_is_trained_on_texts_or_prompts_with_their_completions():
    assert list(corpus_texts(pd.DataFrame({"text": ["a", "b"]}))) == ["a", "b"]
    assert list(corpus_texts(pd.DataFrame({"prompt": ["a"], "completion": [" b"]}))) == ["a b"]
