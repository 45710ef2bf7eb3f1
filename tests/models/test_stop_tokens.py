"""The token ids that end a response."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.stop_tokens import end_of_turn_id, stop_token_ids
from tests.tiny_models import BEGIN, CHAT_TEMPLATE, END, VOCABULARY, word_tokenizer

PERIOD = VOCABULARY.index(".")


@pytest.mark.parametrize(
    ("configured", "ids"), [(None, (END,)), (END, (END,)), (BEGIN, (BEGIN, END)), ([BEGIN, 7], (BEGIN, END, 7))]
)
def test_every_end_of_text_of_generation_config_and_tokenizer_stops(configured, ids):
    assert stop_token_ids(word_tokenizer(), GenerationConfig(eos_token_id=configured)) == ids


@pytest.mark.parametrize("configured", ["abc", ["abc"], 3.5])
def test_an_end_of_text_that_is_no_id_is_refused(configured):
    with pytest.raises(ModelError, match=r"^generation_config\.json: eos_token_id="):
        stop_token_ids(word_tokenizer(), GenerationConfig(eos_token_id=configured))


def test_the_chat_templates_end_of_turn_stops_too():
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    assert end_of_turn_id(tokenizer) == BEGIN
    assert stop_token_ids(tokenizer, None) == (BEGIN, END)


def test_without_a_chat_template_or_with_one_that_refuses_there_is_no_end_of_turn():
    assert end_of_turn_id(word_tokenizer()) is None
    assert end_of_turn_id(word_tokenizer(chat_template="{{ raise_exception('a system message comes first') }}")) is None


def test_a_template_that_leaves_the_answer_out_says_nothing_about_the_end_of_a_turn():
    assert end_of_turn_id(word_tokenizer(chat_template="<s> {{ messages[0].content }}")) is None


def test_explicit_ids_period_and_none():
    assert stop_token_ids(word_tokenizer(), GenerationConfig(eos_token_id=END), stop_token_id=9) == (9,)
    assert stop_token_ids(word_tokenizer(), None, stop_token="period") == (PERIOD,)
    assert stop_token_ids(word_tokenizer(), None, stop_token="none") == ()


def test_stop_ids_beyond_the_models_vocabulary_are_left_out():
    assert stop_token_ids(word_tokenizer(), GenerationConfig(eos_token_id=[50256, END]), vocabulary=25) == (END,)


def test_a_stop_token_that_does_not_exist_is_refused():
    with pytest.raises(ModelError, match="stop_token=eos"):
        stop_token_ids(word_tokenizer(eos_token=None), None)
    with pytest.raises(ConfigError, match=r"stop_token_id=99.*24"):
        stop_token_ids(word_tokenizer(), None, stop_token_id=99)
