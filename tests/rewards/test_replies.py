"""The message of a policy's reply, for functions that take `messages` and reward models with another template."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.rewards.rendering import ReplyForm, conversation_ids, conversations
from tests.tiny_models import byte_tokenizer

MARKS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>")
USER = {"role": "user", "content": "Two plus two?"}
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
BEGINS_TO_THINK = PLAIN.replace("assistant\n{%", "assistant\n<think>\n{%")
THINKS_OR_NOT = (  # like Qwen 3.5: only the last answer has reasoning, empty reasoning if the content has none
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{{ '\n</think>\n\n' if quick }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
IN_CHANNELS = (
    "<|channel|>analysis<|message|>It is a sum.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
)
SCHEMA = {
    "start_anchor": "<|start|>assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
    },
}


def chat_tokenizer(template: str, name: str = "", **options: Any) -> PreTrainedTokenizerBase:
    made = byte_tokenizer(chat_template=template, additional_special_tokens=list(MARKS), eos_token="<|return|>")
    made.name_or_path = name
    for option, value in options.items():
        setattr(made, option, value)
    return made


def message_of(reply: str, policy: PreTrainedTokenizerBase, chat: list[Any], mask: Any = None, **options: Any) -> Any:
    """Return the whole conversation, and the text that a reward model with another template reads."""
    begun = chat[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not begun, "continue_final_message": begun, **options}
    text = policy.apply_chat_template(chat, tokenize=False, **how)
    prompt, ids = (policy(each, add_special_tokens=False)["input_ids"] for each in (text, reply))
    (found,) = conversations([chat], [prompt], [ids], mask, policy)
    other = chat_tokenizer("{% for m in messages %}[{{ m.role }}] {{ m.content or m.thinking }}{% endfor %}")
    return found, other.decode(conversation_ids(found, other, ""))


def test_a_reply_has_the_part_of_it_that_the_generation_prompt_writes():
    for template in (BEGINS_TO_THINK, THINKS_OR_NOT):
        reply = "It is a sum.\n</think>\n\nFour.<|end|>"
        chat, read = message_of(reply, chat_tokenizer(template), [USER])
        assert chat == [USER, {"role": "assistant", "content": "<think>\nIt is a sum.\n</think>\n\nFour."}]
        assert read == "[user] Two plus two?[assistant] <think>\nIt is a sum.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("template", "begun"),
    [
        (PLAIN, ""),
        (BEGINS_TO_THINK, "<think>\n"),
        (THINKS_OR_NOT, "<think>\n"),
        ("{% set quick = true %}" + THINKS_OR_NOT, ""),
        (CHANNELS, ""),
        (PLAIN.replace("{{ m.role }}\n", "{{ m.role }} "), ""),
        ("{{ raise_exception('no') if messages | length > 1 }}" + BEGINS_TO_THINK, ""),
    ],
    ids=[
        "nothing",
        "always",
        "only the last answer",
        "no reasoning: by the template itself",
        "channels",
        "other white space",
        "refused",
    ],
)
def test_what_the_generation_prompt_begins_is_found_from_the_template(template, begun):
    assert ReplyForm.of([USER], chat_tokenizer(template)).begun == begun


def test_a_chat_that_a_template_shows_otherwise_once_it_goes_on_has_the_same_form():
    """Qwen's templates render the reasoning of tool calls only until the next message of the user."""
    shown = "{% if m.thought and messages[-1].role != 'user' %}{{ m.thought }}{% endif %}{{ m.content }}"
    policy = chat_tokenizer(BEGINS_TO_THINK.replace("{{ m.content }}", shown))
    call = [{"role": "assistant", "content": "add 2 2", "thought": "Add."}, {"role": "tool", "content": "4"}]
    chat, _ = message_of("So.</think> 4<|end|>", policy, [USER, *call])
    assert chat[-1] == {"role": "assistant", "content": "<think>\nSo.</think> 4"}


def test_a_system_message_may_decide_the_form():
    by_system = "{% set quick = messages[0].role == 'system' and 'quick' in messages[0].content %}" + THINKS_OR_NOT
    policy = chat_tokenizer(by_system)
    for said, begun in (("Be quick.", ""), ("Think.", "<think>\n")):
        assert ReplyForm.of([{"role": "system", "content": said}, USER], policy).begun == begun


def test_a_prompt_that_begins_the_answer_itself_is_continued_as_it_is():
    begun = {"role": "assistant", "content": "<think>\nIt"}
    chat, _ = message_of(" is.</think> Four.<|end|>", chat_tokenizer(BEGINS_TO_THINK), [USER, begun])
    assert chat == [USER, {"role": "assistant", "content": "<think>\nIt is.</think> Four."}]


def test_each_turn_of_an_episode_has_what_its_generation_prompt_begins():
    import torch

    policy = chat_tokenizer(BEGINS_TO_THINK)
    parts = ("x</think> 4<|end|>", "\n<|start|>user\nSure?<|end|>\n<|start|>assistant\n<think>\n", "y</think> 5<|end|>")
    lengths = [len(policy(part, add_special_tokens=False)["input_ids"]) for part in parts]
    mask = torch.tensor([[place % 2 == 0 for place, length in enumerate(lengths) for _ in range(length)]])
    chat, _ = message_of("".join(parts), policy, [USER], mask)
    assert [message["content"] for message in chat] == [
        USER["content"],
        "<think>\nx</think> 4",
        "Sure?",
        "<think>\ny</think> 5",
    ]


def test_a_turn_for_which_an_environment_writes_another_beginning_has_only_what_is_there():
    import torch

    policy = chat_tokenizer(BEGINS_TO_THINK)
    parts = ("x</think> 4<|end|>", "\n<|start|>user\nSure?<|end|>\n<|start|>assistant\n", "Yes.<|end|>")
    lengths = [len(policy(part, add_special_tokens=False)["input_ids"]) for part in parts]
    mask = torch.tensor([[place % 2 == 0 for place, length in enumerate(lengths) for _ in range(length)]])
    prompt = policy.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    before, ids = (policy(text, add_special_tokens=False)["input_ids"] for text in (prompt, "".join(parts)))
    (chat,) = conversations([[USER]], [before], [ids], mask, policy)
    assert [message["content"] for message in chat[1::2]] == ["<think>\nx</think> 4", "Yes."]


def test_a_form_is_found_once_for_all_rows_with_the_same_system_message(monkeypatch):
    policy, calls = chat_tokenizer(BEGINS_TO_THINK), []
    apply = policy.apply_chat_template
    monkeypatch.setattr(policy, "apply_chat_template", lambda *a, **o: calls.append(a) or apply(*a, **o))
    for content in ("a", "b", "c"):
        ReplyForm.of([{"role": "user", "content": content}], policy)
    assert len(calls) == 3
    policy.chat_template = PLAIN
    assert ReplyForm.of([USER], policy).begun == ""


def test_of_channels_a_message_has_the_last_answer_and_one_line_says_so(caplog):
    policy = chat_tokenizer(CHANNELS, "channels")
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        for _ in range(2):
            chat, read = message_of(IN_CHANNELS, policy, [USER])
    assert chat == [USER, {"role": "assistant", "content": "Four."}]
    assert read == "[user] Two plus two?[assistant] Four."
    (line,) = caplog.messages
    assert "<|channel|> <|end|> <|message|> <|start|>" in line
    assert "the last <|channel|>final<|message|>" in line


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        ("<|channel|>analysis<|message|>It is a", ""),  # cut off before the answer
        ("Four.<|return|>", "Four."),  # a policy that does not write channels
        ("<|channel|>final<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", "4"),
    ],
)
def test_a_reply_without_the_channel_of_answers_has_none_unless_it_has_no_channel(reply, content):
    chat, _ = message_of(reply, chat_tokenizer(CHANNELS), [USER])
    assert chat[-1]["content"] == content


def test_a_tokenizer_with_a_response_template_parses_its_replies(caplog):
    policy = chat_tokenizer(CHANNELS, "parsed", response_template=SCHEMA)
    if not hasattr(policy, "get_response_parser"):
        pytest.skip("this version of transformers has no response templates")
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        chat, _ = message_of(IN_CHANNELS, policy, [USER])
    assert chat == [USER, {"role": "assistant", "thinking": "It is a sum.", "content": "Four."}]
    assert "the tokenizer's response_template" in caplog.text
    chat, _ = message_of("<|channel|>analysis<|message|>It is", policy, [USER])
    assert chat[-1] == {"role": "assistant", "content": "", "thinking": "It is"}
    policy.response_template = {"fields": {"content": {"content": "no such parser"}}}
    chat, _ = message_of(IN_CHANNELS, policy, [USER])
    assert chat[-1] == {"role": "assistant", "content": "Four."}


def test_special_tokens_that_a_few_replies_have_by_chance_are_not_told(caplog):
    policy = chat_tokenizer(PLAIN, "by chance")
    ids = [policy(text, add_special_tokens=False)["input_ids"] for text in ("a<|end|>", "b<|channel|>c<|end|>")]
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        conversations([[USER]] * 2, [[1]] * 2, ids, None, policy)
        assert not caplog.messages
        conversations([[USER]] * 2, [[1]] * 2, [ids[1]] * 2, None, policy)
    assert "(<|channel|>)" in caplog.text
