"""Prompts: accepted formats, treatment of overlong prompts, and no training on held-out prompts."""

import json
import logging

import datasets
import pandas as pd
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import Phi3Config, Phi3ForCausalLM

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig, find_evaluated, split_held_out
from ppo_rlhf.data.sources import load_table, table_of
from ppo_rlhf.models.tokenizers import set_template_defaults
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.ppo_runs import build_prompts, build_tokenizer
from tests.tiny_models import set_today

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}q {% endif %}"
)


def tokenise(
    values, tokenizer, *, column="prompt", length=4, context=10, overlong="error", name="prompts", why="", **columns
):
    table = table_of({column: values, **columns})
    prompts = PromptReader(tokenizer, context, length, overlong, why).read(table, column, name)
    return prompts.select(range(len(prompts)))


def with_specials(tokenizer, template: str):
    """Make the tokenizer add special tokens around every text, as some tokenizers do by default."""
    special = [("</s>", 2), ("<unk>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def message(function, *arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        function(*arguments, **options)
    return str(caught.value)


# --- the dataset -----------------------------------------------------------------------------------------------------


def test_selecting_rows_takes_ids_texts_and_columns_in_the_order_asked_for_and_repeats():
    prompts = build_prompts((1, 2, 3))
    chosen = prompts.select([2, 0, 2])
    assert len(chosen) == 3
    assert chosen.prompt_ids == [prompts.prompt_ids[i] for i in (2, 0, 2)]
    assert chosen.texts == [prompts.texts[i] for i in (2, 0, 2)]
    assert chosen.columns == {"wanted": [prompts.columns["wanted"][i] for i in (2, 0, 2)]}
    assert len(prompts) == 3


def test_lengths_and_texts_of_many_selected_rows_are_not_gathered_one_by_one(monkeypatch):
    table = table_of({"prompt": ["a", "a b c", "a b"]})
    tokenised = PromptReader(build_tokenizer(), 10, 4, "error").tokenise(table, "prompt", "prompts")
    monkeypatch.delattr(
        "datasets.table.IndexedTableMixin.fast_gather"
    )  # one slice per row would take seconds and 100 MB for 300,000 rows
    prompts = PromptDataset.of_table(tokenised.select([2, 0]))
    assert prompts.lengths == [2, 1]
    assert prompts.texts_frame()["prompt"].tolist() == ["a b", "a"]


def test_a_dataset_survives_a_parquet_file_with_every_kind_of_column(tmp_path):
    prompts = PromptDataset(
        [[3, 4], [5], [6, 7, 8]],
        ["a b", "c", "d e f"],
        {
            "messages": [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "c"}] * 2, []],
            "facts": [{"x": 1}, {"y": [1, {"z": None}]}, {}],
            "nested_or_not": [None, [1], {"a": "é"}],
            "mixed": ["1", 1, 1.5],
            "text": ["one", "two", '["looks", "like", "JSON"]'],
            "number": [1, 2, 3],
            "huge": [2**70, 1, -1],
            "share": [0.1, 0.2, 0.30000000000000004],
            "flag": [True, False, True],
        },
    )
    path = tmp_path / "prompts.parquet"
    prompts.to_frame().to_parquet(path)
    read = PromptDataset.from_frame(pd.read_parquet(path))
    assert read == prompts
    assert [type(value) for value in read.columns["number"]] == [int] * 3


# --- tokenising ------------------------------------------------------------------------------------------------------


def test_texts_become_ids_and_other_columns_are_kept():
    prompts = tokenise(["a b c", "d"], build_tokenizer(), topic=["x", "y"], weight=[1, 2])
    assert prompts.prompt_ids == [[3, 4, 5], [6]]
    assert prompts.texts == ["a b c", "d"]
    assert prompts.columns == {"topic": ["x", "y"], "weight": [1, 2]}


@pytest.mark.parametrize(("column", "taken"), [("question", "prompt"), ("prompt", "prompt_ids")])
def test_a_column_with_a_name_of_ours_is_refused(column, taken):
    assert f"`{taken}`" in message(tokenise, ["a b"], build_tokenizer(), column=column, **{taken: ["x"]})


def test_a_beginning_of_text_that_the_tokenizer_adds_is_kept():
    tokenizer = with_specials(build_tokenizer(bos_token="<unk>"), "<unk> $A")
    assert tokenise(["a b"], tokenizer).prompt_ids == [[1, 3, 4]]


def test_an_end_of_text_that_the_tokenizer_appends_is_taken_off_but_one_in_the_text_is_kept():
    tokenizer = with_specials(build_tokenizer(), "$A </s>")
    assert tokenise(["a b"], tokenizer).prompt_ids == [[3, 4]]
    assert tokenise(["a </s>"], build_tokenizer()).prompt_ids == [[3, 2]]


def test_chat_messages_go_through_the_template_with_the_generation_prompt_and_no_extra_special_tokens():
    tokenizer = with_specials(build_tokenizer(), "<unk> $A </s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    messages = [{"role": "s", "content": "a b"}, {"role": "i", "content": "c"}]
    prompts = tokenise([messages], tokenizer, column="messages", context=30)
    assert prompts.texts == ["s a b </s> i c </s> q "]
    assert prompts.prompt_ids == [[21, 3, 4, 2, 11, 5, 2, 19]]
    assert prompts.columns == {"messages": [messages]}


def test_a_text_that_begins_with_the_beginning_of_text_gets_no_second_one():
    """A text that a chat template has rendered already; the expected ids are those of the tokenizer's template."""
    tokenizer = with_specials(build_tokenizer(bos_token="<unk>"), "<unk> $A </s>")
    tokenizer.chat_template = "<unk> " + CHAT_TEMPLATE
    messages = [{"role": "s", "content": "a b"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert expected == [1, 21, 3, 4, 2, 19]
    assert tokenise([rendered, "a b", messages], tokenizer).prompt_ids == [expected, [1, 3, 4], expected]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_content_in_parts_of_text_is_content_of_their_joined_text():
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    rows = [[{"role": "s", "content": content}] for content in (parts("a ", "b"), "a b")]
    prompts = tokenise(rows, tokenizer)
    assert prompts.prompt_ids == [[21, 3, 4, 2, 19]] * 2
    assert prompts.texts == ["s a b </s> q "] * 2


USER, CALL = {"role": "i", "content": "a"}, {"tool_calls": [{"function": {"name": "w", "arguments": {"city": "b"}}}]}
ANSWER = {"role": "tool", "content": "c"}


@pytest.mark.parametrize("absent", [{}, {"content": None}], ids=["absent", "null"])
def test_a_message_without_content_has_the_content_null(absent):
    template = "{% for m in messages %}{{ m['content'] or 'd ' + m['tool_calls'][0]['function']['name'] }} {% endfor %}"
    tokenizer = build_tokenizer(chat_template=template)
    call = {"tool_calls": [{"function": {"name": "b", "arguments": {}}}]}
    chat = [USER, {"role": "assistant", "content": None, **call}, ANSWER]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == [3, 6, 4, 5]
    assert tokenise([[USER, {"role": "assistant", **call, **absent}, ANSWER]], tokenizer).prompt_ids == [[3, 6, 4, 5]]


def test_a_chat_of_a_table_of_arrow_is_rendered_as_it_was_before_the_table_filled_in_absent_keys(tmp_path):
    """An Arrow table gives every message the keys of all messages, and every call the arguments of all calls."""
    template = "{% for m in messages %}{{ m | tojson }} </s> {% endfor %}"
    tokenizer = build_tokenizer(chat_template=template)
    other_call = {"tool_calls": [{"function": {"name": "v", "arguments": {"day": "d"}}}]}
    chats = [
        [USER, {"role": "assistant", "content": None, **call}, {**ANSWER, "name": "w"}] for call in (CALL, other_call)
    ]
    datasets.Dataset.from_dict({"prompt": chats}).to_parquet(tmp_path / "chats.parquet")
    read = load_table(str(tmp_path / "chats.parquet"))["prompt"][:]
    assert read != chats
    options = {"context": None}
    assert tokenise(read, tokenizer, **options).texts == tokenise(chats, tokenizer, **options).texts
    as_arrays = pd.read_parquet(tmp_path / "chats.parquet")["prompt"].tolist()
    assert tokenise(as_arrays, tokenizer, **options).texts == tokenise(chats, tokenizer, **options).texts


@pytest.mark.parametrize(
    ("message_1", "reason"),
    [
        (
            {"role": "i", "content": [*parts("a"), {"type": "image", "text": None, "url": "x"}]},
            "a part of type 'image'",
        ),
        ({"role": "i", "content": {"text": "a"}}, "text"),
        ({"role": "i", "tool_calls": None}, "neither content nor"),
        ({"role": "i", "name": "b"}, "neither content nor"),
        ({"from": ["human"], "value": "b"}, "give the message a role"),
        ({"role": "i", "tool_calls": []}, "neither content nor"),
        ({"content": "a"}, "role"),
        ("a", "role"),
    ],
)
def test_a_message_that_cannot_be_read_is_shown_with_its_row_and_the_reason(message_1, reason):
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    found = message(tokenise, ["a", [USER, message_1, USER]], tokenizer)
    assert found.startswith("prompts: row 1, column `prompt`: message 1 ")
    assert reason in found
    assert f" is {message_1!s:.40}" in found


def test_a_chat_that_ends_with_the_assistant_is_continued():
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    begun = [{"role": "s", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    prompts = tokenise([begun, begun[:1]], tokenizer, context=30)
    expected = tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert expected == [21, 3, 4, 2, 3, 5, 6]
    assert prompts.prompt_ids == [expected, [21, 3, 4, 2, 19]]


def test_a_missing_column_is_named_with_those_there_are():
    frame = table_of({"text": ["a"], "label": [1]})
    there = "the columns are text, label"
    expected = f"my prompts: no column `prompt` (prompts.column); {there}"
    reader = PromptReader(build_tokenizer(), 10, 4, "error")
    assert message(reader.read, frame, "prompt", "my prompts") == expected


@pytest.mark.parametrize(
    "values",
    [
        ["a", ""],
        ["a", float("nan")],
        ["a", 7],
        ["a", []],
        ["a", [{"role": "user"}]],
        ["a", [{"role": "user", "content": "this tokenizer has no template"}]],
        ["a", "   "],
    ],
)
def test_a_row_that_is_no_prompt_is_refused_with_its_number(values):
    assert message(tokenise, values, build_tokenizer()).startswith("prompts: row 1, column `prompt`: ")


def test_messages_that_the_template_refuses_are_one_line():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate,\\n user first') }}"
    found = message(tokenise, [[{"role": "tool", "content": "a"}]], tokenizer)
    assert found.endswith("refuses these messages: roles must alternate, user first")


# --- overlong prompts: context 10, responses of 4, so 6 tokens of room -----------------------------------------------

SHORT, JUST, LONG, LONGER = "a b", "a b c d e f", "a b c d e f g", "a b c d e f g h i"


def test_overlong_prompts_are_an_error_that_counts_them_and_names_the_settings():
    found = message(tokenise, [SHORT, JUST, LONG, LONGER], build_tokenizer(), name="training prompts")
    for part in ("training prompts: 2 of 4", "row 2", "6 tokens", "ppo.response_length=4", "ppo.overlong_prompts"):
        assert part in found


def test_overlong_prompts_are_dropped_with_their_columns_and_counted(caplog):
    prompts = tokenise([LONG, SHORT, LONGER, JUST], build_tokenizer(), overlong="drop", n=[0, 1, 2, 3])
    assert prompts.texts == [SHORT, JUST]
    assert prompts.prompt_ids == [[3, 4], [3, 4, 5, 6, 7, 8]]
    assert prompts.columns == {"n": [1, 3]}
    (line,) = caplog.messages
    assert line.startswith("prompts: 2 of 4 are longer than 6 tokens, ")
    assert line.endswith("and are left out (ppo.overlong_prompts=drop).")


@pytest.fixture
def stretched() -> TrainedModel:
    """A Phi 3 whose RoPE changes beyond 10 tokens; its context is 64."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    lengths = {"original_max_position_embeddings": 10, "max_position_embeddings": 64}
    config = Phi3Config(**shape, **lengths, vocab_size=23, pad_token_id=0, rope_scaling=rope)
    return TrainedModel(Phi3ForCausalLM(config), build_tokenizer())


def no_reward(prompts, completions):
    return [0.0 for _ in completions]


def trainer_on(policy: TrainedModel, prompts) -> PPOTrainer:
    settings = PPOConfig(response_length=4, total_episodes=2, per_device_train_batch_size=2, device="cpu")
    return PPOTrainer(settings, policy.model, None, policy.tokenizer, reward=no_reward, prompts=prompts)


def test_the_trainer_refuses_prompts_beyond_the_length_up_to_which_rope_is_steady(stretched):
    for prompts in ([SHORT, LONG], PromptDataset([[3] * 7], [LONG], {})):
        assert "10 tokens this model's RoPE" in message(trainer_on, stretched, prompts)


def test_the_trainer_answers_queries_up_to_the_length_up_to_which_rope_is_steady_and_no_longer_ones(stretched):
    trainer = trainer_on(stretched, [SHORT, JUST])
    assert len(trainer.generate([torch.tensor([3] * 6)], return_prompt=False)) == 1
    assert "10 tokens this model's RoPE" in message(trainer.generate, [torch.tensor([3] * 7)])


def test_overlong_prompts_are_truncated_on_the_left_and_counted(caplog):
    prompts = tokenise([SHORT, LONGER], build_tokenizer(), overlong="truncate_left")
    assert prompts.prompt_ids == [[3, 4], [6, 7, 8, 9, 10, 11]]
    (line,) = caplog.messages
    assert line.startswith("prompts: 1 of 2 are longer than 6 tokens, ")


def test_a_truncated_prompt_keeps_its_bos():
    tokenizer = with_specials(build_tokenizer(bos_token="<unk>"), "<unk> $A")
    begin = tokenizer.bos_token_id
    prompts = tokenise([SHORT, LONGER], tokenizer, overlong="truncate_left")
    assert prompts.prompt_ids == [[begin, 3, 4], [begin, 7, 8, 9, 10, 11]]


# --- held-out prompts ------------------------------------------------------------------------------------------------


def numbered(count: int):
    return table_of({"prompt": [f"prompt {i}" for i in range(count)], "number": range(count)})


def test_chat_prompts_are_compared_by_content():
    chats = [[{"role": "user", "content": str(i % 10)}] for i in range(30)]
    rows = split_held_out(
        table_of({"messages": chats}), None, PromptsConfig(held_out_share=0.3, seed=1, column="messages")
    )
    contents = [{chats[row][0]["content"] for row in part} for part in rows]
    assert len(contents[1]) == len(rows[1]) == 3
    assert contents[0].isdisjoint(contents[1])
    assert len(contents[0] | contents[1]) == 10


def test_a_table_of_evaluation_prompts_replaces_the_split_and_is_cut_to_the_maximum():
    evaluation = table_of({"prompt": ["x", "y", "z"], "number": [7, 8, 9]})
    assert split_held_out(numbered(4), evaluation, PromptsConfig(max_held_out=2)) == ([0, 1, 2, 3], [0, 1])


def test_training_and_held_out_prompts_are_tokenised_rows_of_the_table():
    table = table_of({"prompt": ["a b", "c", "d e", "f"], "number": [0, 1, 2, 3]})
    settings = PromptsConfig(held_out_share=0.5)
    trained, held_out = split_held_out(table, None, settings)
    parts = PromptReader(build_tokenizer(), None, 4, "error").read_split(table, None, settings)
    assert [part.select(range(2)).columns["number"] for part in parts] == [trained, held_out]
    assert parts[0].select([0]).texts == [table["prompt"][trained[0]]]
    assert parts[1].texts == [table["prompt"][row] for row in held_out]


def test_a_prompt_that_is_too_long_is_named_by_its_row_in_the_users_table():
    table, settings = table_of({"prompt": ["a", "b", "c", "d e f"]}), PromptsConfig(held_out_share=0.5)
    with pytest.raises(DataError, match=r"^prompts: 1 of 4 prompts \(the first in row 3\)"):
        PromptReader(build_tokenizer(), 4, 2, "error").read_split(table, None, settings)


CHATS = [[{"role": "user", "content": text}] for text in "abc"]


@pytest.mark.parametrize("prompts", [["a", "b", "a", "c"], CHATS], ids=["text", "chats"])
def test_prompts_that_are_evaluated_are_not_trained_on_unless_that_is_meant(prompts):
    table, evaluation = table_of({"prompt": prompts}), table_of({"prompt": prompts[:2]})
    for maximum in (1, 2):  # all evaluation prompts given, not only those that are used
        trained, held_out = split_held_out(table, evaluation, PromptsConfig(max_held_out=maximum))
        assert trained == [len(prompts) - 1]
        assert len(held_out) == maximum
    every = split_held_out(table, evaluation, PromptsConfig(train_on_evaluation_prompts=True))
    assert every == (list(range(len(prompts))), [0, 1])


@pytest.mark.parametrize("column", ["system", "tools"])
def test_the_same_question_with_another_system_message_or_other_tools_is_another_prompt(column):
    cells = [f"Be {word}." if column == "system" else json.dumps([{"name": word}]) for word in "abcdef"]
    rows = [*cells, cells[0]]
    table = table_of({"prompt": [CHATS[0]] * 7, column: rows})
    trained, held_out = split_held_out(table, None, PromptsConfig(held_out_share=0.5))
    assert {rows[row] for row in trained}.isdisjoint(rows[row] for row in held_out)
    assert len(trained) + len(held_out) == 7
    assert find_evaluated(table, table_of({"prompt": CHATS[:1], column: cells[:1]}), "prompt") == [
        row in (0, 6) for row in range(7)
    ]
    assert not any(find_evaluated(table, table_of({"prompt": CHATS[:1]}), "prompt"))


def test_a_system_message_in_a_column_is_that_of_a_chat():
    inside = table_of({"prompt": [[{"role": "system", "content": "Be a."}, *CHATS[0]]]})
    assert find_evaluated(table_of({"prompt": CHATS[:1], "system": ["Be a."]}), inside, "prompt") == [True]


def test_conversations_that_differ_only_in_the_last_reply_are_one_prompt():
    replies = [[*CHATS[0], {"role": "assistant", "content": text}] for text in "xy"]
    assert find_evaluated(table_of({"messages": replies}), table_of({"prompt": CHATS[:1]}), "prompt") == [True, True]


def test_evaluation_prompts_that_leave_none_to_train_on_are_refused():
    every = numbered(3)
    assert "prompts.train_on_evaluation_prompts" in message(split_held_out, every, every, PromptsConfig(max_held_out=1))


# --- conversations and the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_of_a_whole_conversation_the_last_reply_is_dropped_and_a_line_says_so(caplog, column):
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    as_sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    begun = as_sharegpt if column == "conversations" else chat
    found = PromptReader(tokenizer, None, 4, "error").read(table_of({column: [begun, begun[:1]]}), "prompt", "prompts")
    assert found.texts[:] == ["u a </s> q "] * 2
    assert json.loads(found.chats[0]) == chat[:1]
    other = [{"role": "user", "content": "c"}]
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        reader = PromptReader(tokenizer, None, 4, "error")
        reader.read_split(table_of({column: [chat, other]}), None, PromptsConfig(held_out_share=0.5))
    (line,) = caplog.messages
    assert line == f"Of 2 conversations in the column {column}, those that end with a reply lose it."


def test_a_conversation_of_one_reply_is_refused():
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    alone = table_of({"messages": [[{"role": "assistant", "content": "a"}]]})
    reader = PromptReader(tokenizer, None, 4, "error")
    assert "row 0, column `messages`: the only message" in message(reader.read, alone, "prompt", "prompts")


def test_prompts_of_a_file_are_tokenised_once_and_again_only_by_another_tokenizer(tmp_path):
    (tmp_path / "prompts.txt").write_text("a b\nc\n")
    tokenised = set()
    for tokenizer in (build_tokenizer(), build_tokenizer(), with_specials(build_tokenizer(), "<unk> $A")):
        table = load_table(str(tmp_path / "prompts.txt"), text_column="prompt", cache=str(tmp_path / "cache"))
        reader = PromptReader(tokenizer, None, 4, "error")
        (file,) = {entry["filename"] for entry in reader.tokenise(table, "prompt", "prompts").cache_files}
        tokenised.add(file)
        assert file.startswith(str(tmp_path / "cache"))
    assert len(tokenised) == 2


@pytest.mark.parametrize(("dated", "files"), [(True, [1, 2, 2, 1]), (False, [1, 1, 1, 1])])
def test_tokens_that_are_kept_serve_only_the_day_that_the_template_prints(tmp_path, monkeypatch, dated, files):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n')
    template = "{{ strftime_now('%d') }} " + CHAT_TEMPLATE if dated else CHAT_TEMPLATE
    found: list[str] = []
    for day in (3, 4, 4, 3):
        set_today(monkeypatch, day)
        table = load_table(str(tmp_path / "prompts.jsonl"), cache=str(tmp_path / "cache"))
        tokenised = PromptReader(build_tokenizer(chat_template=template), None, 4, "error").tokenise(
            table, "prompt", "x"
        )
        found.append(tokenised.cache_files[0]["filename"])
        assert tokenised["prompt"][0].startswith(f"0{day} u a" if dated else "u a")
    assert [list(dict.fromkeys(found)).index(file) + 1 for file in found] == files


def test_other_values_for_the_chat_template_give_other_tokens_of_the_same_file(tmp_path):
    """The cache of tokenised prompts is reused only for the values that it was created with."""
    template = CHAT_TEMPLATE + "{% if add_generation_prompt and not thinks %} b{% endif %}"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n')
    found, files = [], []
    for thinks in (True, False, True):
        tokenizer = build_tokenizer(chat_template=template)
        set_template_defaults(tokenizer, {"thinks": thinks}, "x")
        table = load_table(str(tmp_path / "prompts.jsonl"), cache=str(tmp_path / "cache"))
        tokenised = PromptReader(tokenizer, None, 4, "error").tokenise(table, "prompt", "prompts")
        found.append((tokenised["prompt"][0], tokenizer.convert_ids_to_tokens(tokenised["prompt_ids"][0])[1:]))
        files.append(tokenised.cache_files)
    thinking, not_thinking = ("u a </s> q ", ["a", "</s>", "q"]), ("u a </s> q  b", ["a", "</s>", "q", "b"])
    assert found == [thinking, not_thinking, thinking]
    assert files[0] == files[2] != files[1]
