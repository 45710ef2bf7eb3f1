import json

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.data.readable_prompts import readable_prompt, readable_prompts
from ppo_rlhf.data.sources import table_of
from tests.tiny_models import CHATML, word_tokenizer


def test_a_chat_is_shown_as_turns_without_the_templates_tokens():
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\nc"}]
    reader = PromptReader(word_tokenizer(chat_template=CHATML), None, 4, "error")
    table = PromptDataset.of_table(reader.tokenise(table_of({"prompt": [chat]}), "prompt", "prompts"))
    assert table.texts[0].startswith("<|im_start|>system\n")
    assert readable_prompts(table) == ["System: a\n\nUser: b\nc\n\nAssistant: "]


def test_a_begun_answer_is_the_end_of_its_prompt():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]
    assert readable_prompt("rendered", json.dumps(chat)) == "User: a\n\nAssistant: The"


def test_tools_and_their_calls_are_turns_too():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = readable_prompt("rendered", json.dumps(chat), [{"name": "add"}])
    names = [part.split(": ")[0] for part in text.split("\n\n")]
    assert names == ["Tools", "User", "Assistant", "Tool", "Assistant"]
    assert '"name": "add"' in text.split("\n\n")[0]
    assert text.split("\n\n")[2].startswith("Assistant: tool_calls: [")


def test_plain_prompts_are_shown_as_they_are():
    assert readable_prompts(PromptDataset([[4], [5]], ["a", "<b>"], {})) == ["a", "<b>"]
    mixed = PromptDataset([[4], [5]], ["a", "<x>b"], {}, [None, '[{"role": "user", "content": "b"}]'])
    assert readable_prompts(mixed) == ["a", "User: b\n\nAssistant: "]
