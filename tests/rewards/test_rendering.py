"""The input of reward models: each score equals that of a plain transformers script for the same conversation."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.core.errors import DataError, ModelError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.pipelines.audit_reward import reward_audit
from ppo_rlhf.ppo.batch_sampling import response_batch
from ppo_rlhf.ppo.environments import reply_by_function
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.rendering import ENVIRONMENT, Rendering
from ppo_rlhf.rewards.scorers import build_reward_scorer
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runtime import log_lines
from ppo_rlhf.supervised.preferences import check_preferences, tokenise_preferences
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from tests.tiny_models import save, spaced_tokenizer, tiny_model, word_tokenizer

NEWLINE = "NL"  # a word, because the tokenizers of the tests have no white space
QWEN = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> NL {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
LLAMA = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|hdr|> {{ m['role'] }} <|/hdr|> {{ m['content'] }} <|eot|> {% endfor %}"
    "{% if add_generation_prompt %}<|hdr|> assistant <|/hdr|> {% endif %}"
)
NAMELESS = f"{{% if messages[0]['name'] is defined %}}{{{{ raise_exception('no names') }}}}{{% endif %}}{LLAMA}"
WITH_SYSTEM = LLAMA.replace("('user', 'assistant')", "('user', 'assistant', 'system', 'tool')").replace(
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}",
    "",
)
MARKS = ("<|im_start|>", "<|im_end|>", "<|hdr|>", "<|/hdr|>", "<|eot|>")
USER = {"role": "user", "content": "a b"}
SYSTEM = {"role": "system", "content": "c"}
ANSWER = {"role": "assistant", "content": "d e"}


def chat_tokenizer(template: str | None, *, other: bool = False, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A word tokenizer with the marks of both templates; with `other` every word has another id."""
    tokenizer = word_tokenizer(chat_template=template)
    words = [NEWLINE, "user", "assistant", "system", "tool"]
    added = [*(AddedToken(mark, special=True) for mark in MARKS), *words]
    tokenizer.add_tokens(added[::-1] if other else added)
    tokenizer.eos_token = eos
    return tokenizer


@pytest.fixture
def reward_model(tmp_path: Path, request: pytest.FixtureRequest) -> PretrainedHandle:
    return saved(tmp_path, chat_tokenizer(LLAMA, other=True))


def saved(folder: Path, tokenizer: PreTrainedTokenizerBase, **shape: Any) -> PretrainedHandle:
    shape = {"num_labels": 1, "pad_token_id": 0, "n_positions": 64, "vocab_size": len(tokenizer), **shape}
    return PretrainedHandle(save(folder / "reward", tiny_model("gpt2", reward=True, **shape), tokenizer))


def scorer_of(handle: PretrainedHandle, policy: PreTrainedTokenizerBase) -> RewardScorer:
    return build_reward_scorer(RewardConfig(components=[RewardComponentConfig(type="model")]), handle, policy)


def plainly(handle: PretrainedHandle, chat: list[dict[str, str]], **options: Any) -> float:
    """Score the way a model card shows it."""
    tokenizer = AutoTokenizer.from_pretrained(handle.source)
    model = AutoModelForSequenceClassification.from_pretrained(handle.source)
    inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, **options)
    with torch.no_grad():
        return float(model(**inputs).logits[0, 0])


def answers(
    policy: PreTrainedTokenizerBase,
    chats: list[Any],
    replies: list[str],
    stopped: list[bool],
    masks: list[list[bool]] | None = None,
):
    """Responses as PPO samples them: the policy's template renders the prompts, and responses include stop tokens."""
    texts = [
        policy.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=chat[-1]["role"] != "assistant",
            continue_final_message=chat[-1]["role"] == "assistant",
        )
        for chat in chats
    ]
    ids = [policy(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompts = PromptDataset(ids, texts, {}, [json.dumps(chat) for chat in chats])
    tokens = [torch.tensor(policy(text, add_special_tokens=False)["input_ids"]) for text in replies]
    lengths = torch.tensor([len(row) for row in tokens])
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = None
    if masks is not None:
        mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in masks], batch_first=True)
    return response_batch(prompts, Responses(padded, lengths, torch.tensor(stopped), mask), policy)


def test_another_vocabulary_reads_the_conversation_by_its_own_template(reward_model):
    policy = chat_tokenizer(QWEN)
    two = [USER, ANSWER, {"role": "user", "content": "f"}]
    batch = answers(policy, [[USER], two], ["d e <|im_end|>", "g <|im_end|>"], [True, True])
    found = scorer_of(reward_model, policy).score(batch).total.tolist()
    expected = [plainly(reward_model, [USER, ANSWER]), plainly(reward_model, [*two, {**ANSWER, "content": "g"}])]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_reply_that_was_cut_off_leaves_its_turn_open(reward_model):
    policy = chat_tokenizer(QWEN)
    begun = [USER, {"role": "assistant", "content": "d"}]
    batch = answers(policy, [[USER], begun, [USER]], ["d e", "e", "<|im_start|>"], [False] * 3)
    found = scorer_of(reward_model, policy).score(batch).total.tolist()
    is_open = plainly(reward_model, [USER, ANSWER], continue_final_message=True)
    nothing = plainly(reward_model, [USER], add_generation_prompt=True)
    assert found == pytest.approx([is_open, is_open, nothing], abs=1e-6)
    assert is_open != pytest.approx(plainly(reward_model, [USER, ANSWER]), abs=1e-4)


@pytest.mark.parametrize("stop", ["<|im_end|>", "</s>"], ids=["the end of the turn", "the end of the text"])
@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_with_the_policys_template_the_ids_stay_and_its_end_is_added(tmp_path, eos, stop):
    """Qwen's template writes a newline after a turn; Gemma's and Phi-3's end-of-turn token is not their EOS."""
    policy = chat_tokenizer(QWEN, eos=eos)
    handle = saved(tmp_path, policy)
    chats = [[SYSTEM, USER], [USER]]
    batch = answers(policy, chats, [f"d e {stop}", "d e"], [True, False])
    found = scorer_of(handle, policy).score(batch).total.tolist()
    expected = [
        plainly(handle, [SYSTEM, USER, ANSWER]),
        plainly(handle, [USER, ANSWER], continue_final_message=True),
    ]
    assert found == pytest.approx(expected, abs=1e-6)
    assert Rendering(policy, policy).sequences(batch)[0][-2:] == policy.convert_tokens_to_ids(["<|im_end|>", NEWLINE])


def test_sampled_ids_that_are_not_the_texts_stay(tmp_path):
    policy = chat_tokenizer(QWEN)
    batch = answers(policy, [[USER]], ["d <unk> e <|im_end|>"], [True])
    (ids,) = Rendering(policy, policy).sequences(batch)
    assert ids == [*batch.prompt_ids[0], *batch.response_ids[0], policy.convert_tokens_to_ids(NEWLINE)]


def test_the_same_vocabulary_with_another_template_reads_its_own(tmp_path):
    policy = chat_tokenizer(QWEN)
    handle = saved(tmp_path, chat_tokenizer(WITH_SYSTEM))
    batch = answers(policy, [[SYSTEM, USER]], ["d e <|im_end|>"], [True])
    assert scorer_of(handle, policy).score(batch).total.item() == pytest.approx(
        plainly(handle, [SYSTEM, USER, ANSWER]), abs=1e-6
    )


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        (LLAMA, [SYSTEM, USER], "only user and assistant"),
        (LLAMA, [USER, USER], "roles must alternate"),
        (NAMELESS, [{**USER, "name": "f"}], "no names"),
        (None, [USER], "need a tokenizer with a chat template"),
    ],
    ids=["no system role", "roles that do not alternate", "the same roles with another key", "no template"],
)
def test_a_chat_that_the_reward_models_template_does_not_take_is_found_before_the_run(template, chat, said):
    rendering = Rendering(chat_tokenizer(template, other=True), chat_tokenizer(QWEN))
    chats = [None, json.dumps([USER] if template else chat), json.dumps(chat)]
    with pytest.raises(DataError, match=f"prompts: row {2 if template else 1}, .*reward model.*{said}"):
        rendering.check(chats, "prompts")
    if template:
        rendering.check(chats[:2], "prompts")


TOOLS = [{"type": "function", "function": {"name": "f", "description": "g"}}]
SHOWS_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.description }} {% endfor %}"


def with_tools(batch, tools):
    return dataclasses.replace(batch, columns={"tools": tools})


def test_a_template_of_its_own_shows_a_reward_model_the_tools(tmp_path):
    policy = chat_tokenizer(SHOWS_TOOLS + QWEN)
    handle = saved(tmp_path, chat_tokenizer(SHOWS_TOOLS + LLAMA, other=True))
    batch = with_tools(answers(policy, [[USER]] * 2, ["d e <|im_end|>"] * 2, [True] * 2), [json.dumps(TOOLS), None])
    expected = [plainly(handle, [USER, ANSWER], tools=TOOLS), plainly(handle, [USER, ANSWER])]
    assert scorer_of(handle, policy).score(batch).total.tolist() == pytest.approx(expected, abs=1e-6)
    assert expected[0] != pytest.approx(expected[1], abs=1e-4)


def test_tools_of_a_table_reach_the_reward_model_through_stored_prompts():
    """As an evaluation stores tools: every row of the Arrow table has the keys of all tools."""
    policy, other = chat_tokenizer(SHOWS_TOOLS + QWEN), chat_tokenizer(SHOWS_TOOLS + LLAMA, other=True)
    more = [{"type": "function", "function": {"name": "e", "description": "d", "strict": True}}]
    table = table_of({"prompt": [[USER], [USER], [USER]], "tools": [TOOLS, more, None]})
    read = PromptReader(policy, None, 4, "error").read(table, "prompt", "prompts")
    prompts = PromptDataset.from_frame(read.to_frame())
    reply = torch.tensor([policy("d e <|im_end|>", add_special_tokens=False)["input_ids"]] * 3)
    batch = response_batch(prompts, Responses(reply, torch.tensor([3] * 3), torch.tensor([True] * 3), None), policy)
    expected = [other.apply_chat_template([USER, ANSWER], tools=own)["input_ids"] for own in (TOOLS, more, None)]
    assert Rendering(other, policy).sequences(batch) == expected
    assert prompts.texts[1].startswith("e d <|im_start|>")


def test_one_line_says_that_a_reward_model_reads_conversations_without_their_tools(tmp_path, caplog):
    log_lines.said.clear()
    policy, other = chat_tokenizer(SHOWS_TOOLS + QWEN), chat_tokenizer(LLAMA, other=True)
    shown = Rendering(other, policy)
    shown.check([json.dumps([USER])] * 2, "prompts", [TOOLS, TOOLS])
    batch = with_tools(answers(policy, [[USER]], ["d e <|im_end|>"], [True]), [TOOLS])
    assert shown.sequences(batch) == [other.apply_chat_template([USER, ANSWER])["input_ids"]]
    (line,) = caplog.messages
    assert "reward model's chat template" in line
    assert "tools" in line


def test_a_template_that_takes_only_tools_that_it_knows_shows_them(caplog):
    """The template refuses the marks of `find_hidden`, so the parts themselves are searched in the text."""
    log_lines.said.clear()
    knows = "{% for tool in tools or [] if tool.function.name != 'f' %}{{ raise_exception('!') }}{% endfor %}"
    policy, other = chat_tokenizer(SHOWS_TOOLS + QWEN), chat_tokenizer(knows + SHOWS_TOOLS + LLAMA, other=True)
    batch = with_tools(answers(policy, [[USER]], ["d e <|im_end|>"], [True]), [TOOLS])
    expected = other.apply_chat_template([USER, ANSWER], tools=TOOLS)["input_ids"]
    assert Rendering(other, policy).sequences(batch) == [expected]
    assert not caplog.messages


def test_a_turn_that_the_reward_models_template_leaves_out_is_refused(tmp_path):
    """A prompt is checked before the run, a reply of an environment when it is first scored."""
    skips = WITH_SYSTEM.replace("in messages", "in messages if m['role'] != 'tool'")
    policy, other = chat_tokenizer(QWEN), chat_tokenizer(skips, other=True)
    reply = {"role": "tool", "content": "f g"}
    with pytest.raises(DataError, match=r"prompts: row 1, .*reward model.*message 2 .*`tool`"):
        Rendering(other, policy).check([json.dumps(chat) for chat in ([USER], [USER, ANSWER, reply])], "prompts")
    turn = f"{NEWLINE} <|im_start|> tool f g <|im_end|> {NEWLINE} <|im_start|> assistant"
    mask = [[True] * 3 + [False] * 9 + [True] * 2]
    batch = answers(policy, [[USER]], [f"d e <|im_end|> {turn} h <|im_end|>"], [True], mask)
    assert batch.chats[0][2] == reply
    with pytest.raises(DataError, match=r"reward model: response 0: message 2 .*`tool`"):
        Rendering(other, policy).sequences(batch)


def test_a_sampled_tool_call_that_the_reward_models_template_cannot_show_is_read_as_text(caplog):
    """Sampled text must not end the training; a tool call that the template can render is rendered."""
    log_lines.said.clear()
    policy = chat_tokenizer(QWEN)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    read = {"d": {"content": "", "tool_calls": [call]}, "h": {"content": "h"}}
    policy.response_template = {"fields": {}}
    policy.parse_response = lambda ids, prefix: dict(read[policy.decode(ids[0])])
    turn = f"{NEWLINE} <|im_start|> user f g <|im_end|> {NEWLINE} <|im_start|> assistant"
    mask = [[True] * 3 + [False] * 9 + [True] * 2, [True] * 2]
    replies = [f"d e <|im_end|> {turn} h <|im_end|>", "h <|im_end|>"]
    batch = answers(policy, [[USER]] * 2, replies, [True, True], mask)
    assert batch.chats[0][1]["tool_calls"] == [call]
    other = chat_tokenizer(LLAMA, other=True)
    whole = [USER, ANSWER, {"role": "user", "content": "f g"}, {"role": "assistant", "content": "h"}]
    expected = [other.apply_chat_template(chat)["input_ids"] for chat in (whole, [USER, whole[3]])]
    assert Rendering(other, policy).sequences(batch) == expected
    (line,) = caplog.messages
    assert "response_template" in line
    assert "text" in line
    (alone,) = Rendering(other, policy).sequences(answers(policy, [[USER]], ["d e <|im_end|>"], [True]))
    assert alone == other.apply_chat_template([USER, ANSWER])["input_ids"]
    shows = chat_tokenizer(LLAMA.replace("m['content'] }}", "m['content'] or m.tool_calls[0].function.name }}"))
    (ids,) = Rendering(shows, policy).sequences(answers(policy, [[USER]], ["d e <|im_end|>"], [True]))
    assert ids == shows.apply_chat_template([USER, {**ANSWER, "content": "f"}])["input_ids"]


def test_a_reply_has_no_role_that_the_policys_template_leaves_out():
    policy = chat_tokenizer(QWEN.replace("in messages", "in messages if m['role'] != 'tool'"))
    turn = f"{NEWLINE} <|im_start|> tool f g <|im_end|> {NEWLINE} <|im_start|> assistant"
    mask = [[True] * 3 + [False] * 9 + [True] * 2]
    batch = answers(policy, [[USER]], [f"d e <|im_end|> {turn} h <|im_end|>"], [True], mask)
    assert batch.chats[0][2]["role"] == ENVIRONMENT


def test_with_the_policys_template_a_reply_of_the_environment_that_is_no_turn_is_read_as_it_was_sampled():
    """Includes a template that leaves out unknown roles, like Qwen's, and a template with strict turns."""
    mask = [[True, True, False, False, True, True]]
    for template, end in (
        (QWEN.replace("in messages", "in messages if m['role'] in ('user', 'assistant')"), ["<|im_end|>", NEWLINE]),
        (LLAMA, ["<|eot|>"]),
    ):
        policy = chat_tokenizer(template)
        batch = answers(policy, [[USER]], ["d <|im_end|> f g h <|im_end|>"], [True], mask)
        assert batch.chats[0][2]["role"] == ENVIRONMENT
        sampled = [*batch.prompt_ids[0], *policy.convert_tokens_to_ids(["d", "<|im_end|>", "f", "g", "h"])]
        assert Rendering(policy, policy).sequences(batch) == [[*sampled, *policy.convert_tokens_to_ids(end)]]


def test_an_episode_is_read_turn_by_turn(tmp_path):
    policy = chat_tokenizer(QWEN)
    own, other = saved(tmp_path / "own", policy), saved(tmp_path / "other", chat_tokenizer(WITH_SYSTEM, other=True))
    turn = f"{NEWLINE} <|im_start|> tool f g <|im_end|> {NEWLINE} <|im_start|> assistant"
    masks = [[True] * 3 + [False] * 9 + [True] * 2, [True] * 3 + [False] * 9 + [True], [True] * 3]
    episodes = [f"d e <|im_end|> {turn} h <|im_end|>", f"d e <|im_end|> {turn} h", "d e <|im_end|>"]
    batch = answers(policy, [[USER]] * 3, episodes, [True, False, False], masks)
    whole = [USER, ANSWER, {"role": "tool", "content": "f g"}, {"role": "assistant", "content": "h"}]
    assert batch.chats == [whole, whole, [USER, ANSWER]]
    for handle in (own, other):
        expected = [
            plainly(handle, whole),
            plainly(handle, whole, continue_final_message=True),
            plainly(handle, [USER, ANSWER], continue_final_message=True),
        ]
        assert scorer_of(handle, policy).score(batch).total.tolist() == pytest.approx(expected, abs=1e-6)
    plain = answers(
        policy, [[USER]], ["d <|im_end|> f g h <|im_end|>"], [True], [[True, True, False, False, True, True]]
    )
    assert plain.chats[0][2]["role"] == ENVIRONMENT
    scorer_of(own, policy).score(plain)
    with pytest.raises(DataError, match=r"response 0: .*ppo\.environment"):
        scorer_of(other, policy).score(plain)


def test_reward_training_reads_what_scoring_reads():
    tokenizer = chat_tokenizer(QWEN)
    row = {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "f"}]}
    frame = check_preferences(pd.DataFrame([row]), "prompt", "chosen", "rejected")
    (trained,) = tokenise_preferences(frame, tokenizer)["chosen_ids"]
    batch = answers(tokenizer, [[SYSTEM, USER]], ["d e <|im_end|>"], [True])
    (scored,) = Rendering(tokenizer, tokenizer).sequences(batch)
    assert trained == scored == tokenizer.apply_chat_template([SYSTEM, USER, ANSWER])["input_ids"]


@pytest.mark.parametrize("other", [False, True])
def test_the_audit_scores_held_out_chats_as_the_model_card_does(tmp_path, other):
    policy = chat_tokenizer(QWEN)
    handle = saved(tmp_path, chat_tokenizer(LLAMA, other=True) if other else policy)
    table = pd.DataFrame(
        [
            {"prompt": [{"role": "user", "content": q}], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "f"}]}
            for q in "abcd"
        ]
    )
    held_out = reward_audit.held_out_pairs(table, policy, RewardModellingConfig(), None)
    scorer, seen = scorer_of(handle, policy), []
    score = scorer.score

    def watched(batch):
        seen.append((batch, score(batch)))
        return seen[-1][1]

    scorer.score = watched  # type: ignore[method-assign]
    reward_audit.score_pairs(scorer, held_out)
    for (batch, scored), text in zip(seen, ("d e", "f"), strict=True):
        assert batch.completions == [text] * len(batch)
        expected = [plainly(handle, chat) for chat in batch.chats]
        assert scored.total.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_audit_leaves_equal_pairs_out_and_keeps_each_rows_columns():
    replies = [("d e", "f"), ("f", "f"), ("d", "e"), ("e", "d")]
    rows = [
        {"prompt": [USER], "number": number}
        | {side: [{**ANSWER, "content": text}] for side, text in zip(("chosen", "rejected"), pair, strict=True)}
        for number, pair in enumerate(replies)
    ]
    for row, word in zip(rows, "abcd", strict=True):
        row["prompt"] = [{**USER, "content": word}]
    config = RewardModellingConfig(held_out_share=0.9)
    held_out = reward_audit.held_out_pairs(pd.DataFrame(rows), chat_tokenizer(QWEN), config, None)
    assert len(held_out) == 2
    assert 1 not in held_out["number"].tolist()
    for row in held_out.to_dict("records"):
        assert row["chosen_chat"][-1]["content"] == replies[row["number"]][0]
        assert row["rejected_chat"][-1]["content"] == replies[row["number"]][1]


def test_functions_get_texts_that_go_on_where_the_prompt_ends():
    """Checked for each turn and for the environment's reply; a message has no leading space."""
    policy = spaced_tokenizer(chat_template="{{ messages[0].content }}")
    prompts, ids = PromptDataset([policy("a b")["input_ids"]], ["a b"], {}, ["null"]), policy("c d e")["input_ids"]
    mask = torch.tensor([[True, False, True]])
    for policy_mask, turns in ((None, []), (mask, [[" c", " d", " e"]])):
        responses = Responses(torch.tensor([ids]), torch.tensor([3]), torch.tensor([False]), policy_mask)
        batch = response_batch(prompts, responses, policy)
        assert (list(batch.completions), batch.turns) == ([" c d e"], turns)
        assert batch.prompts[0] + batch.completions[0] == policy.decode(policy("a b c d e")["input_ids"])
    seen: list[Any] = []

    def answer(completions, turns):
        seen.append((completions, turns))
        return [None]

    reply_by_function(answer, "answer", policy, prompts, [ids], mask.tolist())
    assert seen == [([" c d e"], [[" c", " d", " e"]])]
    chat = PromptDataset(prompts.prompt_ids, prompts.texts, {}, [json.dumps([USER])])
    assert response_batch(chat, responses, policy).chats[0][1]["content"] == "c"


def test_a_function_that_names_messages_gets_the_whole_conversation():
    from ppo_rlhf.rewards.functions import call_reward_function

    seen: list[Any] = []

    def by_name(completions, messages):
        seen.append(messages)
        return [0.0] * len(completions)

    def by_columns(completions, **columns):
        seen.append(sorted(columns))
        return [0.0] * len(completions)

    batch = answers(chat_tokenizer(QWEN), [[SYSTEM, USER]], ["d e <|im_end|>"], [True])
    for function in (by_name, by_columns):
        call_reward_function(function, "f", batch.prompts, batch.completions, batch.all_columns)
    assert seen == [[[SYSTEM, USER, ANSWER]], ["prompts"]]


def test_a_reward_model_without_a_pad_token_reads_its_last_token(tmp_path):
    """This model pools at the last token, even if that is an end-of-text token that also serves as the pad token."""
    policy = chat_tokenizer(QWEN)
    own = chat_tokenizer(LLAMA, other=True, eos="<|eot|>")
    own.pad_token, own.unk_token = None, None
    handle = saved(tmp_path, own, pad_token_id=None, vocab_size=len(own))
    batch = answers(policy, [[USER], [USER]], ["d e <|im_end|>", "d e d <|im_end|>"], [True, True])
    found = scorer_of(handle, policy).score(batch).total.tolist()
    assert found == pytest.approx([plainly(handle, chat) for chat in batch.chats], abs=1e-6)


def test_a_reward_model_of_several_labels_is_refused_in_one_line(tmp_path):
    handle = saved(tmp_path, chat_tokenizer(LLAMA), num_labels=2)
    with pytest.raises(ModelError, match="num_labels=1, this model has 2"):
        scorer_of(handle, chat_tokenizer(QWEN))


def test_one_line_says_that_a_bias_of_the_head_is_left_out(tmp_path, caplog):
    """transformers' classifiers have no score bias, so the model card's script ignores the bias as well."""
    from safetensors.torch import load_file, save_file

    handle = saved(tmp_path, chat_tokenizer(LLAMA))
    weights = Path(handle.source) / "model.safetensors"
    save_file({**load_file(weights), "score.bias": torch.ones(1)}, weights, metadata={"format": "pt"})
    policy = chat_tokenizer(QWEN)
    batch = answers(policy, [[USER]], ["d e <|im_end|>"], [True])
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        found = scorer_of(handle, policy).score(batch).total.item()
    assert any("are ignored: score.bias" in line for line in caplog.messages)
    assert found == pytest.approx(plainly(handle, [USER, ANSWER]), abs=1e-6)


def test_the_trainer_refuses_prompts_that_the_reward_models_template_does_not_take(tmp_path):
    from ppo_rlhf import PPOConfig, PPOTrainer

    policy = chat_tokenizer(QWEN)
    handle = saved(tmp_path, chat_tokenizer(LLAMA, other=True))
    sft = save(tmp_path / "sft", tiny_model(vocab_size=len(policy)), policy)
    config = PPOConfig(sft_model_path=sft, response_length=4)
    with pytest.raises(DataError, match=r"prompts: row 1, .*reward model.*only user and assistant"):
        PPOTrainer(config, reward=handle.source, prompts=[[USER], [SYSTEM, USER]])
