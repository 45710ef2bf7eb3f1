import re

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaTokenizer

from ppo_rlhf import PPOConfig, PPOTrainer
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.data.chats import render_chat
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.models import loading
from ppo_rlhf.models.tokenizers import (
    append_end,
    continuations,
    drops_first_space,
    encode_texts,
    ensure_pad_token,
    printed_dates,
    same_vocabulary,
    set_template_defaults,
    special_ids,
    template_defaults,
    templates_of,
    train_word_tokenizer,
    unused_ids,
    with_first_space,
    without_template_defaults,
)
from ppo_rlhf.rewards.rendering import Rendering
from tests.tiny_models import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    VOCABULARY,
    byte_tokenizer,
    save,
    set_today,
    spaced_tokenizer,
    tiny_model,
    word_tokenizer,
)


@pytest.mark.parametrize(
    ("options", "configured", "chosen"),
    [
        ({}, BEGIN, PAD),
        ({"pad_token": None}, BEGIN, BEGIN),
        ({"pad_token": None}, None, UNKNOWN),
        ({"pad_token": None}, 10_000, UNKNOWN),
        ({"pad_token": None, "unk_token": "</s>"}, None, END),
        ({"pad_token": None, "unk_token": None}, None, END),
    ],
)
def test_the_pad_token_is_the_first_there_is_of_own_configured_unknown_end(options, configured, chosen):
    tokenizer = word_tokenizer(**options)
    ensure_pad_token(tokenizer, LlamaConfig(vocab_size=30, pad_token_id=configured))
    assert tokenizer.pad_token_id == chosen
    assert len(tokenizer) == len(VOCABULARY)


def test_a_tokenizer_without_any_token_to_pad_with_is_refused():
    with pytest.raises(ModelError, match="pad_token"):
        ensure_pad_token(word_tokenizer(pad_token=None, unk_token=None, eos_token=None))


def test_a_trained_word_tokenizer_gives_every_text_back():
    texts = ["the plot ( again ) is n't bad .", "a , b : the c"]
    tokenizer = train_word_tokenizer(texts, context_length=12)
    assert tokenizer.get_vocab() == train_word_tokenizer(texts, context_length=12).get_vocab()
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("unseen") == ["<unk>"]
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<unk>", "</s>"]) == [0, 1, 2]
    assert tokenizer.model_max_length == 12


def test_vocabularies_are_the_same_only_if_every_id_is():
    assert same_vocabulary(word_tokenizer(), word_tokenizer(pad_token=None))
    assert not same_vocabulary(word_tokenizer(), train_word_tokenizer(["a b c"], 8))


def test_a_special_token_that_stands_in_a_text_keeps_its_one_id():
    tokenizer = train_word_tokenizer(["a </s> b </s> a <pad>"], 8)
    assert tokenizer("a </s> b")["input_ids"] == [3, 2, 4]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_end_of_text_is_put_once():
    assert append_end([5, 6], END) == [5, 6, END]
    assert append_end([5, END], END) == [5, END]
    assert append_end([5], None) == [5]


@pytest.mark.parametrize("template", ["<s> $A </s>", "<s> $A"])
def test_texts_are_encoded_with_one_beginning_and_with_no_end_but_their_own(template):
    tokenizer = word_tokenizer(prepend_begin=True)
    special = [("<s>", BEGIN), ("</s>", END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    a = VOCABULARY.index("a")
    texts = ["a", "<s> a", "a </s>", "<s> a </s>", "a"]
    expected = [[BEGIN, a], [BEGIN, a], [BEGIN, a, END], [BEGIN, a, END], [a]]
    assert encode_texts(texts, tokenizer, [False, False, False, False, True]) == expected
    assert encode_texts(texts[:4], tokenizer) == expected[:4]
    assert encode_texts([], tokenizer) == []


def test_special_ids_are_the_named_ones_and_those_that_are_marked():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True), AddedToken("text", special=False)])
    marked, text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "text"])
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id, marked} <= special_ids(tokenizer)
    assert text not in special_ids(tokenizer)


# --- values for a chat template --------------------------------------------------------------------------------------

THINKS = (
    "\n{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and enable_thinking is false %}"
    " <think></think>{% endif %}{% if name is defined %} {{ name }}{% endif %}{% endif %}"
)


def test_values_for_a_chat_template_hold_wherever_it_is_rendered_and_may_be_given_anew():
    def render(tokenizer, **more):
        chat = [{"role": "user", "content": "a"}]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)

    plain, given = (word_tokenizer(chat_template=THINKS) for _ in range(2))
    values = {"enable_thinking": False, "name": 'say "b" %'}
    set_template_defaults(given, values, "x")
    assert render(given) == render(plain, **values) == '\nuser: a\nassistant: <think></think> say "b" %'
    assert render(given, enable_thinking=True) == render(plain, **values | {"enable_thinking": True})
    assert without_template_defaults(given.chat_template) == THINKS
    written = given.chat_template
    set_template_defaults(given, {}, "x")
    assert given.chat_template == written
    set_template_defaults(given, {"enable_thinking": True}, "x")  # the newest values are the only ones
    assert render(given) == "\nuser: a\nassistant:"


@pytest.mark.parametrize(
    "value", [None, [None, True], {"of": {"x": None}, "n": [1, -2.5]}, 'it\'s \\n "é😀"\n{% endif +%}', ""], ids=repr
)
def test_a_value_is_given_to_the_template_as_a_caller_would_give_it(value):
    """A literal of JSON would not do: Jinja does not know `null`."""
    template = "{{ name is none }} {{ name is string }} {{ [name] }}"
    given, plain = (word_tokenizer(chat_template=template) for _ in range(2))
    set_template_defaults(given, {"name": value}, "x")
    chat = [{"role": "user", "content": "a"}]
    expected = f"{value is None} {isinstance(value, str)} {[value]}"
    assert given.apply_chat_template(chat, tokenize=False) == expected
    assert plain.apply_chat_template(chat, tokenize=False, name=value) == expected
    assert without_template_defaults(given.chat_template) == template


@pytest.mark.parametrize("values", [{"think": False}, {"a b": 1}])
@pytest.mark.parametrize("template", [THINKS, None])
def test_a_value_that_the_chat_template_does_not_read_is_refused(template, values):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs: .* {next(iter(values))}"):
        set_template_defaults(word_tokenizer(chat_template=template), values, "x")


@pytest.mark.parametrize(
    ("held", "what"),
    [
        (["{{ messages }}"], "['{{ messages }}']"),
        ({"rag": "x", "tool_use": "y"}, "rag, tool_use"),
        ({"default": None}, "default"),
        (7, "7"),
    ],
)
def test_what_is_neither_one_template_nor_named_ones_with_a_default_is_refused(tmp_path, monkeypatch, held, what):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = held
    expected = f"chat_template .*{re.escape(what)}.*`default`"
    with pytest.raises(ModelError, match=f"^x: {expected}"):
        templates_of(tokenizer, "x")
    with pytest.raises(ModelError, match=expected):
        set_template_defaults(tokenizer, {"name": 1}, "x")
    place = save(tmp_path / "model", tiny_model())
    with pytest.raises(ModelError, match=f"^PPOTrainer: tokenizer: {expected}"):
        PPOTrainer(PPOConfig(response_length=4), place, tokenizer=tokenizer)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    with pytest.raises(ModelError, match=f"model: {expected}"):
        PretrainedModelDataset(place).load().tokenizer()


def test_of_named_templates_the_default_is_the_one_and_each_gets_the_values_that_it_reads():
    named = {"default": THINKS, "tool_use": "{{ tools }}"}
    tokenizer = word_tokenizer(chat_template=dict(named))
    assert templates_of(tokenizer) == named
    set_template_defaults(tokenizer, {"enable_thinking": False}, "x")
    text = render_chat([{"role": "user", "content": "a"}], tokenizer, "x", to_answer=True)
    assert text.endswith("assistant: <think></think>")
    assert tokenizer.chat_template["tool_use"] == "{{ tools }}"
    assert template_defaults(tokenizer) == {"enable_thinking": False}
    with pytest.raises(ConfigError, match="name_of_nothing"):
        set_template_defaults(tokenizer, {"name_of_nothing": 1}, "x")
    one, other = (Rendering(tokenizer, word_tokenizer(chat_template=held)) for held in (named, named["default"]))
    assert (one.has_policy_template, other.has_policy_template) == (True, False)
    for nothing in (None, "", {}):
        tokenizer.chat_template = nothing
        assert templates_of(tokenizer) == {}


def test_the_dates_that_templates_print_are_todays(monkeypatch):
    """A format that is not a literal gives the time with microseconds, so that two calls never give the same time."""
    set_today(monkeypatch, 3)
    llama = '{% if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}'
    for template, dates in (
        (llama + "{{ strftime_now('%Y') }}" + llama, ["03 May 2031", "2031"]),
        ("{{ strftime_now(format) }}", ["2031-05-03 12:00:00.000000"]),
        ({"default": "x", "tool_use": llama}, ["03 May 2031"]),
        (THINKS, []),
        (None, []),
    ):
        assert printed_dates(word_tokenizer(chat_template=template)) == dates


def test_a_model_of_the_catalog_renders_chats_with_the_values_that_its_entry_gives(tmp_path):
    place = save(tmp_path / "model", tiny_model(), word_tokenizer(chat_template=THINKS))
    handle = PretrainedModelDataset(place, chat_template_kwargs={"enable_thinking": False}).load()
    text = render_chat([{"role": "user", "content": "a"}], handle.tokenizer(), "x", to_answer=True)
    assert text.endswith("assistant: <think></think>")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: .*'enable_thinking'"):
        PretrainedModelDataset(place, chat_template_kwargs="enable_thinking")


@pytest.mark.parametrize("made", [spaced_tokenizer, word_tokenizer], ids=["Llama's decoder", "words that are joined"])
def test_a_continuation_has_the_space_that_the_decoder_drops_at_the_start_of_a_text(made):
    tokenizer = made()
    prompt, response = tokenizer("a b")["input_ids"], tokenizer("c d </s>")["input_ids"]
    assert tokenizer.decode(response, skip_special_tokens=True) == "c d"
    assert continuations(tokenizer, [prompt, [BEGIN]], [response, response]) == [" c d", "c d"]
    assert continuations(tokenizer, [], []) == []
    assert drops_first_space(tokenizer)


def llama_tokenizer() -> LlamaTokenizer:
    """A tokenizer of a transformers class that rebuilds its decoder at each load."""
    words = {f"▁{word}": i for i, word in enumerate("abcdefghi", 4)}
    letters = {letter: i for i, letter in enumerate(("▁", *"abcdefghi"), 20)}
    made = LlamaTokenizer(
        vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **words, **letters}, merges=[("▁", x) for x in "abcdefghi"]
    )
    made.pad_token = "<pad>"
    return made


@pytest.mark.parametrize("made", [spaced_tokenizer, word_tokenizer, llama_tokenizer])
def test_a_tokenizer_that_keeps_the_first_space_gives_the_same_tokens_also_when_it_is_loaded(tmp_path, made):
    tokenizer = made(model_max_length=7) if made is not llama_tokenizer else made()
    kept = with_first_space(tokenizer)
    kept.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for each in (kept, loaded):
        assert each("a b c")["input_ids"] == tokenizer("a b c")["input_ids"]
        assert each.decode(tokenizer("b c", add_special_tokens=False)["input_ids"]) == " b c"
        assert (each.eos_token_id, each.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert each.model_max_length == tokenizer.model_max_length
    assert with_first_space(kept) is kept


def test_a_continuation_of_bytes_is_their_text_wherever_they_stand():
    """If the text before ends within a character, the whole character belongs to the continuation."""
    tokenizer = byte_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in (" c", "é!", " \n")]
    assert continuations(tokenizer, [tokenizer("a .")["input_ids"]] * 3, rows) == tokenizer.batch_decode(rows)
    first, second = tokenizer("é")["input_ids"]
    assert continuations(tokenizer, [[first]], [[second, *rows[0]]]) == ["é c"]
    assert not drops_first_space(tokenizer)


def test_ids_without_a_token_are_the_gaps_of_the_vocabulary_below_the_rows_of_the_embedding():
    tokenizer = word_tokenizer(vocabulary=VOCABULARY[:6])
    assert unused_ids(tokenizer, 6) == ()
    assert unused_ids(tokenizer, 4) == ()
    assert unused_ids(tokenizer, 9) == (range(6, 9),)
    assert unused_ids(tokenizer, 12, used=(7, 40)) == (range(6, 7), range(8, 12))
