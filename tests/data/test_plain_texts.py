"""A model with a chat template that gets plain texts is named in one line, with a beginning that it misses."""

import pandas as pd
import pytest

from ppo_rlhf.data.plain_texts import name_plain_texts
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig, read_demonstrations
from ppo_rlhf.supervised.preferences import check_preferences, tokenise_preferences
from ppo_rlhf.supervised.reference_texts import tokenise_reference_texts
from tests.tiny_models import CHAT_TEMPLATE, word_tokenizer

BEGINS = "{{ bos_token }} " + CHAT_TEMPLATE
PLAIN = "are plain texts, which the model reads without its chat template"
FIX = " If the model is trained on chats, give messages in place of texts."


@pytest.mark.parametrize(
    ("template", "begins", "texts", "line"),
    [
        (CHAT_TEMPLATE, False, ["a b"], f"The prompts {PLAIN}.{FIX}"),
        (BEGINS, False, ["a b"], f"The prompts {PLAIN} and without <s>, which only the template writes.{FIX}"),
        (BEGINS, True, ["a b"], f"The prompts {PLAIN}.{FIX}"),
        (BEGINS, False, ["<s> u a", "a"], f"The prompts {PLAIN} and without <s>, which only the template writes.{FIX}"),
        (BEGINS, False, ["<s> u a"], None),
        ("{{ raise_exception('no') }}", False, ["a b"], f"The prompts {PLAIN}.{FIX}"),
        (None, False, ["a b"], None),
        (BEGINS, False, [], None),
    ],
)
def test_plain_texts_are_named_where_the_model_has_a_template(template, begins, texts, line, caplog):
    name_plain_texts("prompts", iter(texts), word_tokenizer(chat_template=template, prepend_begin=begins))
    assert caplog.messages == ([] if line is None else [line])


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BEGINS])
def test_reference_texts_are_named_only_for_a_beginning_that_they_miss(template, caplog):
    table = read_demonstrations(pd.DataFrame({"text": ["a b", "b c"]}), DataPreparationConfig())
    tokenise_reference_texts(table, word_tokenizer(chat_template=template), None)
    missing = f"The reference texts {PLAIN} and without <s>, which only the template writes."
    assert caplog.messages == ([missing] if template == BEGINS else [])


def test_prompts_and_pairs_of_plain_texts_are_named_and_chats_are_not(caplog):
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    reader = PromptReader(tokenizer, None, 4, "error")
    chat = [{"role": "user", "content": "a"}]
    pairs = {"chosen": ["a b"], "rejected": ["a c"]}
    reader.read(table_of({"prompt": [chat]}), "prompt", "prompts")
    assert caplog.messages == []
    reader.read(table_of({"prompt": ["a b", "b"]}), "prompt", "prompts")
    tokenise_preferences(check_preferences(pd.DataFrame(pairs), "prompt", "chosen", "rejected"), tokenizer)
    assert caplog.messages == [f"The {what} {PLAIN}.{FIX}" for what in ("prompts", "preferences")]
