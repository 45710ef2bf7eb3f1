import json
import logging
import re
from datetime import date

import numpy as np
import pandas as pd
import pytest
from tokenizers.processors import TemplateProcessing

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.data.chats import read_chat
from ppo_rlhf.data.tables import frame_of
from ppo_rlhf.datasets import RecordsDataset, TableDataset
from ppo_rlhf.runtime.log_lines import said
from ppo_rlhf.supervised.demonstrations import (
    IGNORED,
    DataPreparationConfig,
    corpus_texts,
    describe_learnt,
    split_demonstrations,
    tokenise_demonstrations,
    training_template,
)
from tests.tiny_models import BEGIN, CHAT_TEMPLATE, END, UNKNOWN, VOCABULARY, word_tokenizer

A, B, C, D = (VOCABULARY.index(word) for word in "abcd")
CHAT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]


def texts(count: int) -> pd.DataFrame:
    return pd.DataFrame({"text": [f"text {i}" for i in range(count)], "label": range(count)})


def test_at_most_so_many_are_held_out_and_used_in_the_tables_order_and_those_used_are_counted(caplog):
    caplog.set_level(logging.INFO)
    trained, held_out = split_demonstrations(texts(40), DataPreparationConfig(max_held_out=3, held_out_share=0.5))
    assert (len(trained), len(held_out)) == (37, 3)
    trained, held_out = split_demonstrations(texts(40), DataPreparationConfig(max_demonstrations=8))
    assert (len(trained), len(held_out)) == (7, 1)
    assert caplog.messages[1:] == ["8 of 40 demonstrations are used (data_preparation.max_demonstrations)."]
    numbers = [int(text.split()[1]) for text in trained["text"]]
    assert numbers == sorted(numbers) != list(range(7))


@pytest.mark.parametrize(
    "columns",
    [
        {"text": [f"text {i % 20}" for i in range(60)]},
        {"prompt": [f"prompt {i % 4}" for i in range(60)], "completion": [f"completion {i % 5}" for i in range(60)]},
        {"messages": [[{**CHAT[0], "content": str(i % 20)}] for i in range(60)]},
    ],
    ids=["texts", "prompts", "chats"],
)
def test_copies_of_a_demonstration_never_stand_on_both_sides_and_are_held_out_once(columns):
    parts = split_demonstrations(pd.DataFrame(columns), DataPreparationConfig(held_out_share=0.25, seed=1))
    trained, held_out = (list(part.itertuples(index=False, name=None)) for part in parts)
    assert set(trained).isdisjoint(held_out)
    assert (len(trained), len(held_out), len(set(held_out))) == (45, 5, 5)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "a", "prompt": "b", "completion": "c"}, ["prompt", "completion"]),
        ({"text": "a", "prompt": "b"}, ["text"]),
        ({"messages": CHAT, "text": "a"}, ["messages"]),
    ],
)
def test_the_format_is_the_first_whose_columns_are_there(row, columns):
    other = {name: value * 2 for name, value in row.items()}
    assert list(split_demonstrations(pd.DataFrame([row, other]), DataPreparationConfig())[0].columns) == columns


def test_columns_of_other_names_become_the_standard_ones():
    config = DataPreparationConfig(prompt_column="question", completion_column="answer")
    frame = pd.DataFrame({"question": ["a", "b"], "answer": ["c", "d"]})
    assert list(split_demonstrations(frame, config)[0].columns) == ["prompt", "completion"]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"body": ["a", "b"]}, "body.* `text`"),
        ({"text": ["a", " "]}, "row 1, column `text`"),
        ({"text": ["a", None]}, "row 1, column `text`"),
        ({"text": ["a", 3]}, "row 1, column `text`"),
        ({"messages": [CHAT, [CHAT[0], {"role": "user"}]]}, "row 1, column `messages`: message 1 .* {'role': 'user'}"),
        (
            {"messages": [CHAT, [{"role": "user", "content": [{"type": "image"}]}]]},
            "row 1, column `messages`: message 0 .*'image'",
        ),
        ({"messages": [CHAT, "a"]}, "row 1, column `messages`: expected a list"),
        ({"messages": ["a", "b"]}, "row 0, column `messages`: expected a list"),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused(frame, message):
    with pytest.raises(DataError, match=message):
        split_demonstrations(pd.DataFrame(frame), DataPreparationConfig())


def test_chats_that_a_table_of_text_holds_as_json_are_read_as_chats():
    """Chats as JSON, as in a CSV file, in OpenAI's and in ShareGPT's format."""
    sharegpt = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": text}] for text in "bc"]
    tables = (pd.DataFrame({"messages": chats}) for chats in (sharegpt, list(map(json.dumps, sharegpt))))
    (plain, _), (as_text, _) = (split_demonstrations(table, DataPreparationConfig()) for table in tables)
    pd.testing.assert_frame_equal(as_text, plain)


def test_texts_are_learnt_whole_and_end():
    rows = tokenise_demonstrations(pd.DataFrame({"text": ["a b", "c"]}), word_tokenizer(), None)
    assert rows.input_ids == [[A, B, END], [C, END]]
    assert rows.labels == rows.input_ids


def test_texts_that_begin_and_end_with_special_tokens_already_get_none_a_second_time():
    """Includes a tokenizer that appends the end-of-text token itself."""
    tokenizer = word_tokenizer(prepend_begin=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    for own in (tokenizer, word_tokenizer(prepend_begin=True)):
        rows = tokenise_demonstrations(
            pd.DataFrame({"text": ["<s> a b </s>", "<s> a b", "a b </s>", "a b"]}), own, None
        )
        assert rows.input_ids == [[BEGIN, A, B, END]] * 4
        frame = pd.DataFrame({"prompt": ["<s> a", "a"], "completion": [" b </s>", " b"]})
        rows = tokenise_demonstrations(frame, own, None)
        assert rows.input_ids == [[BEGIN, A, B, END]] * 2
        assert rows.labels == [[IGNORED, IGNORED, B, END]] * 2


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
    frame = pd.DataFrame({"messages": [json.dumps(CHAT)]})
    rows = tokenise_demonstrations(frame, word_tokenizer(chat_template=CHAT_TEMPLATE), None)
    user, assistant = VOCABULARY.index("u") if "u" in VOCABULARY else VOCABULARY.index("<unk>"), A
    assert rows.input_ids == [[user, B, BEGIN, assistant, C, BEGIN]]
    assert rows.labels == rows.input_ids


@pytest.mark.parametrize(
    ("template", "assistant_only", "line"),
    [
        ("marks", None, r"only the assistant's turns .*\(supervised_finetuning\.assistant_only_loss\)"),
        (None, False, r"whole chats .*\(supervised_finetuning\.assistant_only_loss=false\)"),
        (None, None, r"whole chats, .*user's turns.*\{% generation %\}.*TRL.*prompts and completions"),
    ],
)
def test_what_is_learnt_of_chats_is_said_with_the_reason_and_what_to_do(template, assistant_only, line):
    assert re.search(line, describe_learnt(template, assistant_only))


MARKED = (
    "{% for m in messages %}{{ m['role'][0] + ' ' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ ' <s> ' }}{% endfor %}"
)


@pytest.mark.parametrize(("template", "learnt"), [(MARKED, True), (CHAT_TEMPLATE, False)], ids=["marked", "not marked"])
@pytest.mark.parametrize("assistant_only", [None, True, False])
def test_of_chats_the_assistants_turns_are_learnt_where_the_template_marks_them(template, learnt, assistant_only):
    tokenizer = word_tokenizer(chat_template=template)
    if assistant_only and not learnt:
        with pytest.raises(ConfigError, match="assistant_only_loss=true: "):
            training_template(tokenizer, assistant_only)
        return
    marks = training_template(tokenizer, assistant_only)
    assert (marks is not None) is (learnt and assistant_only is not False)
    rows = tokenise_demonstrations(pd.DataFrame({"messages": [json.dumps(CHAT)]}), tokenizer, None, template=marks)
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert rows.input_ids == [whole]
    expected = [token if token == C else IGNORED for token in whole] if marks else whole
    assert rows.labels == [expected]


LEARNT_TURNS = (
    "{% for m in messages %}{{ m['role'][0] + ' ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' <s>' }}{% endgeneration %}{% else %}{{ m['content'] + ' <s>' }}{% endif %}"
    "{{ ' ' }}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def learnt_of(rows, template):
    trained, held_out = split_demonstrations(pd.DataFrame(rows), DataPreparationConfig())
    tokenizer = word_tokenizer(chat_template=template or LEARNT_TURNS)
    found = tokenise_demonstrations(pd.concat([trained, held_out]), tokenizer, None, template=template)
    return {" ".join(tokenizer.decode([label]) for label in labels if label != IGNORED) for labels in found.labels}


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"trainable": False}, {"loss_mask": 0}]
)
def test_an_answer_that_is_marked_as_not_learnt_is_not_learnt(mark):
    chats = [TURNS[0], TURNS[1] | mark, *TURNS[2:]], [*TURNS[:3], TURNS[3] | mark], TURNS
    (key,) = mark
    whole = [turn | {key: 1} for turn in TURNS[:2]]
    learnt = learnt_of({"messages": [*chats, whole]}, LEARNT_TURNS)
    assert learnt == {"d <s>", "b <s>", "b <s> d <s>"}


def test_marked_text_that_ends_in_a_space_without_a_token_marks_nothing_behind_it():
    """transformers' own mask then goes to the end of the chat, so that the user's next words were learnt."""
    template = LEARNT_TURNS.replace("' <s>' }}{% endgeneration", "' <s> ' }}{% endgeneration")
    assert learnt_of({"messages": [TURNS, TURNS[:2]]}, template) == {"b <s> d <s>", "b <s>"}


def test_an_answer_that_is_marked_as_not_learnt_is_refused_where_all_is_learnt():
    marked = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    with pytest.raises(DataError, match="value 0 or false, but SFT learns whole chats here"):
        learnt_of({"messages": [marked, TURNS]}, None)
    completions = [[TURNS[1] | {"weight": 0}, *TURNS[2:]], TURNS[1:]]
    with pytest.raises(DataError, match="value 0 or false, but SFT learns completions here"):
        learnt_of({"prompt": [TURNS[:1]] * 2, "completion": completions}, None)
    with pytest.raises(DataError, match="marks 0 parts for 2 turns of the assistant"):
        learnt_of({"messages": [marked, TURNS]}, CHAT_TEMPLATE)
    # A prompt's messages are not learnt in any case
    rows = {"prompt": [marked[:3], TURNS[:3]], "completion": [[TURNS[3]], [TURNS[1]]]}
    assert learnt_of(rows, None) == {"a d <s>", "a b <s>"}


def test_a_tool_call_of_sharegpt_keeps_the_mark_and_turns_that_differ_are_refused():
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "loss": False}
    rows = [{"from": "human", "value": "a"}, call]
    assert read_chat(rows, "row 0")[1]["loss"] is False
    with pytest.raises(DataError, match=r"message 2 and the message before it are one turn .* differ in `loss`"):
        read_chat([rows[0], {"from": "gpt", "value": "b"}, call], "row 0")


def test_marks_that_are_not_followed_are_named(caplog):
    said.clear()
    chat = [TURNS[0] | {"train": True}, TURNS[1] | {"weight": 0.5, "train_detail": []}]
    with caplog.at_level(logging.WARNING):
        split_demonstrations(pd.DataFrame({"messages": [chat, TURNS]}), DataPreparationConfig())
    for part in ("`weight` other than 0 and 1", "`train` of messages of the role `user`", "`train_detail` is not used"):
        assert part in caplog.text


def test_trls_training_template_marks_what_the_models_own_does_not():
    import trl.chat_template_utils as templates

    tokenizer = word_tokenizer(chat_template=templates.qwen2_5_chat_template)
    assert "generation %}" not in tokenizer.chat_template.replace("add_generation", "")
    assert training_template(tokenizer, None) == templates.qwen2_5_training_chat_template


def test_of_prompts_and_completions_that_are_chats_only_completions_are_learnt():
    frame = pd.DataFrame({"prompt": [CHAT[:1]] * 2, "completion": [CHAT[1:], [{"role": "assistant", "content": "b"}]]})
    trained, held_out = split_demonstrations(frame, DataPreparationConfig())
    table = pd.concat([trained, held_out])
    assert sorted(table.columns) == ["messages", "prompt"]
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    for ids, labels, chat in zip(
        *vars(tokenise_demonstrations(table, tokenizer, None)).values(), table["messages"], strict=True
    ):
        prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.apply_chat_template(json.loads(chat), return_dict=False)
        assert labels == [IGNORED] * len(prompt) + ids[len(prompt) :]


def test_conversations_are_read_as_sharegpt_writes_them():
    frame = pd.DataFrame(
        {"conversations": [[{"from": "human", "value": w}, {"from": "gpt", "value": "b"}] for w in "ac"]}
    )
    trained, held_out = split_demonstrations(frame, DataPreparationConfig())
    chats = [json.loads(chat) for chat in [*trained["messages"], *held_out["messages"]]]
    assert [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] in chats


def chat_about(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}]


def call(**arguments: object) -> dict[str, object]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    "chats",
    [
        [chat_about(word) for word in "abcd"],
        [[*chat_about("a"), call(city="b")], [*chat_about("c"), call(rows=[1, 2.5, None])], CHAT, chat_about("ä 你")],
    ],
    ids=["texts", "tool calls"],
)
def test_chats_reach_the_template_as_they_were_given(chats, tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    seen = []
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.apply_chat_template = lambda messages, **_: seen.append(json.dumps(messages)) or seen[-1]
    for part in split_demonstrations(
        frame_of(RecordsDataset(str(raw)).load()), DataPreparationConfig(held_out_share=0.5)
    ):
        table = TableDataset(filepath=str(tmp_path / "demonstrations.parquet"))
        table.save(part)
        tokenise_demonstrations(table.load(), tokenizer, None)
    asked = [chat for chat in seen if "qzmark" not in chat]  # other tests check what the template leaves out
    assert sorted(asked) == sorted(map(json.dumps, chats))


TOOLS = [{"type": "function", "function": {"name": "look"}}]
SKIPS_ROLES = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}{{ m.content + ' ' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*chat_about("b"), CHAT[1]]},
        {"messages": json.dumps([*chat_about("b"), CHAT[1]])},
        {"prompt": chat_about("b"), "completion": [CHAT[1]]},
        {"prompt": json.dumps(chat_about("b")), "completion": json.dumps([CHAT[1]])},
    ],
    ids=["whole", "whole as JSON", "apart", "apart as JSON"],
)
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["a list", "JSON"])
def test_chats_are_learnt_with_the_tools_and_the_system_text_of_their_row(row, tools):
    frame = pd.DataFrame([{**row, "tools": tools, "system": "a"}, {**row, "tools": None, "system": "d"}])
    tokenizer = word_tokenizer(chat_template=SKIPS_ROLES)
    trained, held_out = split_demonstrations(frame, DataPreparationConfig())
    ids = [*tokenise_demonstrations(trained, tokenizer, None).input_ids]
    ids += tokenise_demonstrations(held_out, tokenizer, None).input_ids
    assert sorted(ids) == sorted([[UNKNOWN, A, B, C], [D, B, C]])


def test_of_chats_with_tools_only_the_assistants_turns_are_learnt():
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + MARKED
    frame = pd.DataFrame([{"messages": CHAT, "tools": TOOLS}] * 2).map(json.dumps)
    tokenizer = word_tokenizer(chat_template=template)
    rows = tokenise_demonstrations(frame, tokenizer, None, template=template)
    plain = tokenise_demonstrations(frame[["messages"]], tokenizer, None, template=template)
    assert rows.input_ids == [[UNKNOWN, *ids] for ids in plain.input_ids]
    assert rows.labels == [[IGNORED, *labels] for labels in plain.labels]


@pytest.mark.parametrize("template", [None, SKIPS_ROLES], ids=["whole", "only the assistant's"])
def test_a_chat_of_which_the_template_leaves_a_message_out_is_refused_with_its_row(template):
    left_out = [{"role": "developer", "content": "d"}, *CHAT]
    frame = pd.DataFrame({"messages": [CHAT, CHAT, left_out]})
    tokenizer = word_tokenizer(chat_template=SKIPS_ROLES)
    found = "row 2: message 0 has the role `developer`, and the chat template"
    with pytest.raises(DataError, match=f"^demonstrations: {found}"):
        split_demonstrations(frame, DataPreparationConfig(), tokenizer)
    with pytest.raises(DataError, match=f"^held-out: {found}"):
        tokenise_demonstrations(frame.map(json.dumps), tokenizer, None, "held-out", template)


def test_answers_of_the_role_model_are_learnt():
    """Gemma and Google call the assistant `model`, a role that the template does not know."""
    frame = pd.DataFrame({"messages": [[*chat_about(word), {"role": "model", "content": "c"}] for word in "ab"]})
    trained, _ = split_demonstrations(frame, DataPreparationConfig())
    (ids,) = tokenise_demonstrations(trained, word_tokenizer(chat_template=SKIPS_ROLES), None).input_ids
    assert ids[-1] == C


def test_a_column_of_texts_that_holds_chats_is_refused_with_the_setting():
    frame = pd.DataFrame({"text": [json.dumps(CHAT), json.dumps(CHAT[:1])]})
    with pytest.raises(DataError, match=r"row 0, column `text`: .*data_preparation\.messages_column"):
        split_demonstrations(frame, DataPreparationConfig())


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        (
            {"messages": CHAT, "tools": TOOLS, "system": "a", "images": ["x.png"], "kto_tag": False},
            ["images", "kto_tag"],
        ),
        (
            {"prompt": "a b", "completion": "b", "input": "c", "history": [], "tools": TOOLS},
            ["input", "history", "tools"],
        ),
        ({"text": "a b"}, []),
    ],
    ids=["chats", "texts", "nothing"],
)
def test_one_line_names_the_columns_that_are_not_used(row, unused, caplog):
    said.clear()
    first, *_ = row
    frame = pd.DataFrame([row, {**row, first: row[first][:1]}])
    for _ in range(2):  # the checks before a run, and a node
        split_demonstrations(frame, DataPreparationConfig())
    lines = [record.getMessage() for record in caplog.records]
    assert [re.findall("`(.*?)`", line) for line in lines] == ([unused] if unused else [])


def test_of_what_json_does_not_have_arrays_become_lists_and_the_rest_text():
    odd = [{"role": "user", "content": "a", "words": np.array(["a", "b"]), "turn": np.int64(3), "on": date(2024, 5, 1)}]
    trained, held_out = split_demonstrations(pd.DataFrame({"messages": [odd, CHAT]}), DataPreparationConfig())
    chats = [json.loads(chat) for chat in [*trained["messages"], *held_out["messages"]]]
    assert [{"role": "user", "content": "a", "words": ["a", "b"], "turn": 3, "on": "2024-05-01"}] in chats


def test_what_is_too_long_is_cut_without_an_end_and_counted(caplog):
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        rows = tokenise_demonstrations(pd.DataFrame({"text": ["a b c d", "c"]}), word_tokenizer(), 3)
    assert rows.input_ids == [[A, B, C], [C, END]]
    assert re.search("1 of 2 demonstrations .* 3 tokens", caplog.text)


def test_rows_with_nothing_to_learn_within_the_length_are_left_out(caplog):
    frame = pd.DataFrame({"prompt": ["a b c", "a"], "completion": [" d", " d"]})
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        rows = tokenise_demonstrations(frame, word_tokenizer(), 3)
    assert rows.input_ids == [[A, D, END]]
    assert "1 demonstrations have no token to learn" in caplog.text


def test_a_tokenizer_is_trained_on_texts_or_prompts_with_their_completions():
    assert list(corpus_texts(pd.DataFrame({"text": ["a", "b"]}))) == ["a", "b"]
    assert list(corpus_texts(pd.DataFrame({"prompt": ["a"], "completion": [" b"]}))) == ["a b"]
    with pytest.raises(DataError, match="base_model_path"):
        list(corpus_texts(pd.DataFrame({"messages": [CHAT]})))
