"""Chat templates that do not end."""

import time

import pytest

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.data.chats import render_chat
from ppo_rlhf.models.tokenizers import stop_token_ids
from tests.tiny_models import word_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "run_template", [lambda t: render_chat(CHAT, t, "prompts: row 1"), lambda t: stop_token_ids(t, None)]
)
def test_an_endless_chat_template_ends_in_one_line_that_names_the_limit(run_template, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.models.tokenizers.TEMPLATE_S", 0.5)
    tokenizer, began = word_tokenizer(chat_template=ENDLESS), time.monotonic()
    with pytest.raises(ModelError) as given:
        run_template(tokenizer)
    assert time.monotonic() - began < 30.0
    line = "tokenizer: the chat template has not ended after 0.5 s and may loop for ever. Correct it."
    assert str(given.value) == line
