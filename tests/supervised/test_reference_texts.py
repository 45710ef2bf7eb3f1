"""Which table the reference texts are, and which of their tokens count."""

import json

import pandas as pd
import pytest

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.supervised.demonstrations import IGNORED, DataPreparationConfig
from ppo_rlhf.supervised.reference_texts import choose_reference_texts, tokenise_reference_texts
from tests.tiny_models import CHAT_TEMPLATE, word_tokenizer

COLUMNS = DataPreparationConfig()
MARKING = (
    "{% for m in messages %}{{ m['role'][0] }} {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} ."
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
)
CHAT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]


def counted(table, tokenizer, max_length=None):
    """The words that count, by row."""
    rows = tokenise_reference_texts(table, tokenizer, max_length)
    return [
        tokenizer.decode([token for token, label in zip(*row, strict=True) if label != IGNORED])
        for row in zip(rows.input_ids, rows.labels, strict=True)
    ]


def given(**columns):
    table = choose_reference_texts("texts.jsonl", table_of(columns), None, COLUMNS)
    assert table is not None
    return table


def test_of_a_text_all_tokens_count_of_a_prompt_and_completion_the_completions():
    tokenizer = word_tokenizer()
    assert counted(given(text=["a b", "c"]), tokenizer) == ["a b </s>", "c </s>"]
    assert counted(given(prompt=["a b"], completion=[" c d"]), tokenizer) == ["c d </s>"]


def test_of_a_chat_the_assistants_turns_count_if_the_template_marks_them_else_the_whole_chat():
    chats = given(messages=[CHAT])
    assert counted(chats, word_tokenizer(chat_template=MARKING)) == ["c d ."]
    (whole,) = counted(chats, word_tokenizer(chat_template=CHAT_TEMPLATE))
    assert "b" in whole.split()
    completions = given(prompt=[CHAT[:1]], completion=[CHAT[1:]])
    (answer,) = counted(completions, word_tokenizer(chat_template=CHAT_TEMPLATE))
    assert "b" not in answer.split()


def test_a_long_text_is_cut_to_the_context_and_one_line_says_how_many(caplog):
    rows = tokenise_reference_texts(given(text=["a b c d", "a b", "b c d e"]), word_tokenizer(), 4)
    assert [len(ids) for ids in rows.input_ids] == [4, 3, 4]
    assert caplog.messages == ["2 of 3 reference texts are truncated to 4 tokens"]


def test_a_text_without_a_token_that_counts_is_refused_in_one_line():
    table = given(prompt=["a", "a b c d"], completion=[" b", " c"])
    with pytest.raises(DataError, match=r"^reference texts: row 1 has no token .* context of 4 tokens\. Remove"):
        tokenise_reference_texts(table, word_tokenizer(), 4)
    alone = word_tokenizer(eos_token=None)
    with pytest.raises(DataError, match=r"^reference texts: row 0 has no token .* measured, nor have 1 others\."):
        tokenise_reference_texts(given(text=["a", "b", "a b"]), alone, None)


def test_held_out_demonstrations_that_sft_leaves_out_are_left_out(caplog):
    table = given(prompt=["a", "a b c d"], completion=[" b", " c"])
    rows = tokenise_reference_texts(table, word_tokenizer(), 4, leaves_out=True)
    assert len(rows.input_ids) == 1
    assert "1 reference texts have no token to learn and are left out" in caplog.text


def test_a_table_without_a_column_of_texts_is_refused_under_its_own_name():
    with pytest.raises(DataError, match=r"^reference texts: the columns are words; needed is `text`"):
        given(words=["a"])
    with pytest.raises(DataError, match=r"^reference texts: row 1, column `text`"):
        given(text=["a", None])


def test_held_out_demonstrations_are_taken_as_they_are():
    """Their chats with prompts are stored in two columns, which would be read as whole chats."""
    held_out = pd.DataFrame({"messages": [json.dumps(CHAT)], "prompt": [json.dumps(CHAT[:1])]})
    table = choose_reference_texts(HELD_OUT_DEMONSTRATIONS, None, held_out, COLUMNS)
    assert table is held_out
    (answer,) = counted(table, word_tokenizer(chat_template=CHAT_TEMPLATE))
    assert "b" not in answer.split()


def test_nothing_is_chosen_without_the_setting_and_a_setting_without_its_table_is_refused():
    assert choose_reference_texts(None, table_of({"text": ["a"]}), pd.DataFrame(), COLUMNS) is None
    with pytest.raises(ConfigError, match=r"^evaluation\.reference_texts=held_out_demonstrations: there are none\."):
        choose_reference_texts(HELD_OUT_DEMONSTRATIONS, None, None, COLUMNS)
    with pytest.raises(ConfigError, match=r"^evaluation\.reference_texts=a\.txt: set reference_texts_path"):
        choose_reference_texts("a.txt", None, None, COLUMNS)
