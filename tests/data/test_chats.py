"""Chats: reading them, and refusing a row if the chat template leaves a part of it out."""

import json
import re
from collections.abc import Hashable

import pandas as pd
import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data import chat_templates
from ppo_rlhf.data.chats import read_chat, read_text_or_chat, read_tools, render_chat, try_chats, with_system
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig, split_held_out
from ppo_rlhf.data.sources import load_table, table_of
from ppo_rlhf.models import stop_tokens, tokenizers
from ppo_rlhf.runtime.log_lines import said
from tests.tiny_models import word_tokenizer

TEMPLATE = (
    "{% if tools %}T {{ tools | tojson }} {% endif %}"
    "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}"
    "{{ m.role }}: {{ (m.content or '').strip() }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %} </s> "
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""It leaves out roles that it does not know, as the templates of Qwen 2.5 and 3 do."""
USER, ANSWER = {"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "Yes."}
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"place": "Oslo"}}}
CALLING, RESULT = {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "yes"}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "Whether it rains."}}]


def tokenizer(template=TEMPLATE):
    return word_tokenizer(chat_template=template)


def refused(call, *arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def prompts_of(table, template=TEMPLATE):
    return PromptReader(tokenizer(template), None, 4, "error").tokenise(table, "prompt", "prompts")


@pytest.fixture(autouse=True)
def says_again():
    said.clear()


# --- reading ---------------------------------------------------------------------------------------------------------


def test_tool_turns_of_sharegpt_become_those_of_openai():
    call = json.dumps({"name": "rain", "arguments": {"place": "Oslo"}})
    turns = [("human", "Is it raining?"), ("function_call", call), ("observation", "yes"), ("gpt", "Yes.")]
    chat = [{"from": name, "value": text} for name, text in turns]
    assert read_chat(chat, "row 0") == [USER, CALLING, RESULT, ANSWER]
    as_text = json.dumps({"name": "rain", "arguments": json.dumps({"place": "Oslo"})})
    assert read_chat([{"role": "function_call", "content": as_text}], "row 0") == [CALLING]


def test_tool_turns_of_ms_swift_are_one_message_with_what_is_said_before():
    call = json.dumps({"name": "rain", "arguments": {"place": "Oslo"}})
    chat = [
        USER,
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool_call", "content": call},
        {"role": "tool_call", "content": call},
        {"role": "tool_response", "content": "yes"},
    ]
    both = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    assert read_chat(chat, "row 0") == [USER, both, RESULT]


@pytest.mark.parametrize("content", ["rain in Oslo", '"rain"', "[3]", '{"arguments": {}}', None])
def test_a_tool_turn_that_is_no_call_is_refused(content):
    chat = [USER, {"role": "function_call", "content": content, "tool_calls": [CALL]}]
    assert re.match(f"row 3: message 1 .*tool call.*{re.escape(repr(str(content)))}", refused(read_chat, chat, "row 3"))


@pytest.mark.parametrize(
    "calls",
    [
        json.dumps([CALL]),
        json.dumps(CALL["function"]),
        [{**CALL, "function": {"name": "rain", "arguments": '{"place": "Oslo"}'}}],
        json.dumps([{"name": "rain", "parameters": {"place": "Oslo"}}]),
    ],
    ids=["all as JSON", "one without the frame", "arguments as OpenAI's server writes them", "as Llama names them"],
)
def test_tool_calls_held_as_json_are_those_that_templates_expect(calls):
    chat = read_chat([USER, {"role": "assistant", "tool_calls": calls}, RESULT], "row 0")
    assert chat == [USER, CALLING, RESULT]
    assert 'call rain {"place": "Oslo"} </s>' in render_chat(chat, tokenizer(), "row 0")


def test_a_call_has_no_arguments_if_their_text_is_blank_and_the_old_key_is_read_alike():
    call = {"name": "rain", "arguments": " "}
    (read,) = read_chat([{"role": "assistant", "function_call": call}], "row 0")
    assert read["function_call"] == {"name": "rain", "arguments": {}}


@pytest.mark.parametrize("calls", ["rain", [3], [{"type": "custom"}], [{"name": "rain", "arguments": "Oslo"}]])
def test_tool_calls_that_cannot_be_read_are_refused(calls):
    found = refused(read_chat, [USER, {"role": "assistant", "content": "x", "tool_calls": calls}], "row 2")
    assert re.match("row 2: message 1 .*tool call", found)


def test_the_role_model_is_the_assistant():
    assert read_chat([USER, {"role": "model", "content": "Yes."}], "row 0") == [USER, ANSWER]


def test_text_that_is_json_of_messages_is_a_chat_and_other_text_stays_text():
    assert read_text_or_chat(f" {json.dumps([USER, ANSWER])}\n", "row 0") == [USER, ANSWER]
    assert read_text_or_chat('[{"from": "human", "value": "Is it raining?"}]', "row 0") == [USER]
    for text in ('[{"city": "Oslo"}]', "[1, 2]", "[]", "[sic] [", '{"role": "user"}', '[{"role": "user"}] Go on.'):
        assert read_text_or_chat(text, "row 0") == text


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "Ann", "role": "CEO"}]',
        '[{"from": "Paris", "to": "Rome"}, {"from": "Rome", "to": "Bari", "value": 3}]',
        "[{'role': 'CEO', 'name': 'Ann'}]",
        '[{"value": 3, "unit": "m"}, {]',
    ],
)
def test_a_list_of_other_objects_with_a_key_of_messages_is_text(text):
    assert read_text_or_chat(text, "row 0") == text


def test_a_chat_held_as_json_with_a_message_without_content_is_refused():
    assert "message 1 is" in refused(read_text_or_chat, json.dumps([USER, {"role": "assistant"}]), "row 0")


def test_a_chat_as_python_prints_it_is_refused_with_the_way_to_write_it():
    found = refused(read_text_or_chat, str([USER]), "row 2, column `prompt`")
    assert found.startswith("row 2, column `prompt`: ")
    assert "json.dumps" in found


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS), [TOOLS[0]["function"]], TOOLS[0]])
def test_tools_are_a_list_or_json_and_functions_alone_are_wrapped(given):
    assert read_tools(given, "row 0") == TOOLS


@pytest.mark.parametrize("given", [None, float("nan"), pd.NA, pd.NaT, "", "  ", "[]", []])
def test_a_row_may_have_no_tools(given):
    assert read_tools(given, "row 0") is None


@pytest.mark.parametrize("given", ["rain", ["rain"], [{"type": "function"}], {"rain": 1}, 3])
def test_what_describes_no_tool_is_refused_with_its_row(given):
    assert refused(read_tools, given, "row 4").startswith("row 4, column `tools`: expected ")


def test_a_system_text_beside_a_chat_is_its_first_message_unless_the_chat_has_another():
    system = {"role": "system", "content": "Be brief."}
    assert with_system([USER], "Be brief.", "row 0") == [system, USER]
    assert with_system([system, USER], "Be brief.", "row 0") == [system, USER]
    assert with_system([USER], None, "row 0") == [USER]
    assert "row 1: the column `system`" in refused(with_system, [system, USER], "Be long.", "row 1")


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["developer", "function", "critic"])
def test_a_message_that_the_template_leaves_out_is_refused_with_its_role(role):
    chat = [USER, {"role": role, "content": "Is"}]  # the word also occurs in the other message
    found = refused(render_chat, chat, tokenizer(), "row 5")
    assert found.startswith(f"row 5: message 1 has the role `{role}`, and the chat template ")


def test_a_template_that_runs_out_of_memory_is_refused_with_that_reason(monkeypatch):
    held = tokenizer()

    def out_of_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(type(held), "apply_chat_template", out_of_memory)
    line = "row 0: the chat template refuses these messages: MemoryError"
    assert refused(render_chat, [USER], held, "row 0") == line


def test_a_template_that_does_not_end_is_named_at_its_first_chat(monkeypatch, caplog):
    monkeypatch.setattr(tokenizers, "SLOW_TEMPLATE_S", 0.01)
    held = tokenizer("{% for i in range(3000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}" + TEMPLATE)
    held.name_or_path = "mine"
    for call in (lambda: stop_tokens.end_of_turn_id(held), *[lambda: render_chat([USER], held, "row 0")] * 2):
        call()
    assert caplog.messages == ["The chat template of mine has not answered for 0 s. It may have no end."] * 2


def test_a_tool_call_and_tools_that_the_template_leaves_out_are_refused():
    without_calls = TEMPLATE.replace("m.tool_calls or []", "[]")
    found = refused(render_chat, [USER, {**CALLING, "content": "rain"}, RESULT], tokenizer(without_calls), "row 0")
    assert (
        "message 1 has the role `assistant`, and the chat template leaves its tool call out. Give the tokenizer a"
        in found
    )
    assert "write the call into the content" in found
    without_tools = TEMPLATE.replace("{% if tools %}", "{% if false %}")
    assert "column `tools`" in refused(render_chat, [USER], tokenizer(without_tools), "row 0", tools=TOOLS)


@pytest.mark.parametrize("strict", [False, True], ids=["with marks", "by the text"])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_the_template_leaves_out_is_named_and_alone_it_is_refused(caplog, key, strict):
    template = TEMPLATE + "{% for m in messages if 'qz' in (m.content or '') %}{{ raise_exception('!') }}{% endfor %}"
    own = tokenizer(template if strict else TEMPLATE)
    thinking = {**ANSWER, key: "Clouds."}
    for _ in range(2):
        render_chat([USER, thinking], own, "row 0")
    (line,) = caplog.messages
    assert f"leaves `{key}` out of some messages" in line
    found = refused(render_chat, [USER, {**thinking, "content": ""}], own, "row 1")
    assert found.startswith(
        "row 1: message 1 has the role `assistant`, and the chat template leaves its reasoning out."
    )
    shows = tokenizer(own.chat_template.replace("(m.content or '')", f"((m.{key} or '') + ' ' + (m.content or ''))", 1))
    said.clear()
    assert "Clouds. Yes." in render_chat([USER, thinking], shows, "row 0")
    assert "Clouds." in render_chat([USER, {**thinking, "content": ""}], shows, "row 0")
    assert len(caplog.messages) == 1


def test_a_template_that_changes_what_it_shows_is_no_refusal():
    """DeepSeek's template drops earlier reasoning, Llama's the content beside a call; Gemma's has no system role."""
    template = (
        "{% set start = messages[0].content + ' ' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }} "
        "{% else %}{{ (start if loop.first else '') + m.content.split('</think>')[-1] | trim | upper }} {% endif %}"
        "{% endfor %}"
    )
    thought = {"role": "assistant", "content": "<think>Hm.</think> Yes."}
    chat = [{"role": "system", "content": " brief "}, USER, thought, {**CALLING, "content": "Let me see."}]
    assert render_chat(chat, tokenizer(template), "row 0") == " brief  IS IT RAINING? YES. rain "


def test_one_object_may_be_several_messages_and_calls():
    chat = [USER, ANSWER, USER, {**CALLING, "tool_calls": [CALL, CALL]}]
    assert render_chat(chat, tokenizer(), "row 0").count("rain") == 4
    assert chat[0] == {"role": "user", "content": "Is it raining?"}
    assert CALL["function"]["name"] == "rain"


def test_of_a_template_that_takes_no_marks_the_text_is_looked_at():
    strict = "{% for m in messages %}{% if 'qz' in m.content %}{{ raise_exception('!') }}{% endif %}SHOWN{% endfor %}"
    shown = tokenizer(strict.replace("SHOWN", "{{ m.content }}"))
    assert render_chat([USER], shown, "row 0") == USER["content"]
    assert "message 0 has the role `user`" in refused(render_chat, [USER], tokenizer(strict), "row 0")


def test_only_one_chat_of_each_kind_is_rendered_with_marks(monkeypatch):
    own, asked = tokenizer(), []
    apply = own.apply_chat_template
    monkeypatch.setattr(own, "apply_chat_template", lambda chat, **o: asked.append(str(chat)) or apply(chat, **o))
    for word in "abcd":
        render_chat([{"role": "user", "content": word}], own, "row 0")
    assert ["qzmark" in chat for chat in asked].count(True) == 1
    assert len(asked) == 5
    own.chat_template = "x"
    assert "message 0 has the role `user`" in refused(render_chat, [USER], own, "row 0")


def test_chats_are_tried_by_kind_and_the_first_that_is_left_out_is_named():
    chats = [("row 0", [USER], None), ("row 1", [USER, ANSWER], None), ("row 2", [{**USER, "role": "x"}], None)]
    assert refused(try_chats, chats, tokenizer()).startswith("row 2: message 0 has the role `x`")


def test_of_very_many_kinds_of_chats_not_all_are_kept(monkeypatch):
    monkeypatch.setattr(chat_templates, "_MOST_KINDS", 3)
    own, chats = tokenizer(), [[USER] * count for count in range(1, 6)]
    for chat in chats:
        render_chat(chat, own, "row 0")
    assert len(chat_templates._hidden_parts[own]) <= 3
    tried: set[Hashable] = set()
    assert [chat_templates.is_new(kind, tried) for kind in "aabcdd"] == [True, False, True, True, True, False]
    assert tried == {"d"}


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_of_which_the_template_leaves_a_message_out_is_refused_with_its_row():
    table = table_of({"prompt": [[USER], [{"role": "developer", "content": "In Danish."}, USER]]})
    found = refused(prompts_of, table)
    assert found.startswith("prompts: row 1, column `prompt`: message 0 has the role `developer`")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_prompts_are_rendered_with_their_tools_and_system_from_every_kind_of_file(tmp_path, kind):
    other = [{"type": "function", "function": {"name": "snow", "parameters": {"type": "object"}}}]
    rows = [
        {"prompt": [USER], "tools": TOOLS, "system": "Be brief."},
        {"prompt": [USER, CALLING, RESULT], "tools": other, "system": None},
        {"prompt": [USER], "tools": None, "system": None},
    ]
    as_json = [{k: v if isinstance(v, str | None) else json.dumps(v) for k, v in row.items()} for row in rows]
    file = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "csv":
        pd.DataFrame(as_json).to_csv(file, index=False)
    else:
        pd.DataFrame(as_json).to_parquet(file)
    system = {"role": "system", "content": "Be brief."}
    chats = [([system, USER], TOOLS), ([USER, CALLING, RESULT], other), ([USER], None)]
    own = tokenizer()
    expected = [own.apply_chat_template(c, tools=t, tokenize=False, add_generation_prompt=True) for c, t in chats]
    found = prompts_of(load_table(str(file), cache=str(tmp_path / "cache")))
    assert found["prompt"][:] == expected
    assert [json.loads(chat) for chat in found["prompt_chat"]] == [chat for chat, _ in chats]


def test_one_line_names_the_columns_that_only_reward_functions_get(caplog):
    """Texts show no other column. A column without a meaning in other libraries goes to reward functions silently."""
    for _ in range(2):
        prompts_of(table_of({"prompt": ["a"], "tools": [TOOLS], "images": [["x.png"]], "answer": ["b"]}))
        prompts_of(table_of({"prompt": [[USER]], "tools": [TOOLS], "answer": ["b"]}))
    (line,) = [line for line in caplog.messages if "is not shown" in line]
    assert re.match("prompts: .*`images`; nor `tools`, which only chats", line)
    assert "answer" not in line


def test_a_chat_held_as_json_is_a_copy_of_the_same_chat():
    table = table_of({"prompt": [json.dumps([USER]), json.dumps([{**USER, "content": "b"}])]})
    evaluation = table_of({"prompt": [[USER]]})
    assert split_held_out(table, evaluation, PromptsConfig()) == ([1], [0])
