import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
from tokenizers import AddedToken

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.passes.sampling import SamplingSettings, responses_of
from ppo_rlhf.rewards.rendering import Rendering
from ppo_rlhf.rewards.scoring import ResponseBatch
from ppo_rlhf.runtime.log_lines import said
from ppo_rlhf.supervised.preferences import (
    COLUMNS,
    check_preferences,
    noisy_preference,
    sample_preferences,
    tokenise_preferences,
    try_template,
)
from tests.tiny_models import BEGIN, CHAT_TEMPLATE, END, PAD, UNKNOWN, VOCABULARY, tiny_model, word_tokenizer

A, B, C, D = (VOCABULARY.index(word) for word in "abcd")
SAMPLING = SamplingSettings(
    response_length=6, temperature=1.0, top_k=0, top_p=1.0, stop_token_ids=(END,), pad_token_id=PAD
)
CONFIG = PPOConfig(dtype="float32")
NAMES = ("prompt", "chosen", "rejected")


CHAT = [{"role": "user", "content": "a"}]


def prompts(count: int = 8) -> PromptDataset:
    ids = [[4 + row, 5 + row, 6][: 1 + row % 3] for row in range(count)]
    return PromptDataset(ids, word_tokenizer().batch_decode(ids), {"number": list(range(count))})


def length(prompts, completions, **columns):
    return [float(len(completion.split())) for completion in completions]


def sample(labeller=length, sampling=SAMPLING, config=CONFIG, **options) -> pd.DataFrame:
    """A policy that samples the stop token for about every fourth token."""
    policy = tiny_model()
    with torch.no_grad():
        policy.lm_head.weight[END] *= 3
    settings = {"pairs": 24, "beta": math.inf, "seed": 3, **options}
    return sample_preferences(
        policy.double(), word_tokenizer(), prompts(), sampling, config, ("labeller", labeller), **settings
    )


def responses(frame: pd.DataFrame, side: str) -> list[list[int]]:
    """Return the tokens of the response in each row."""
    texts = word_tokenizer()(frame["prompt"].tolist())["input_ids"]
    return [list(ids)[len(text) :] for ids, text in zip(frame[f"{side}_ids"], texts, strict=True)]


def test_with_certain_labels_the_labellers_favourite_is_chosen_and_equal_pairs_are_counted(caplog):
    frame = sample()
    equal = 24 - len(frame)
    assert caplog.messages == [f"preferences: {equal} of 24 sampled pairs have equal responses and are left out."]
    assert list(frame.columns) == list(COLUMNS)
    assert 12 < len(frame) <= 24
    scores = [length(None, frame[side]) for side in ("chosen", "rejected")]
    assert all(chosen >= rejected for chosen, rejected in zip(*scores, strict=True))
    assert sum(chosen > rejected for chosen, rejected in zip(*scores, strict=True)) > len(frame) / 2


def test_tokens_are_the_sampled_ones_and_end_if_and_only_if_the_response_stopped():
    frame = sample()
    stopped = 0
    for side in ("chosen", "rejected"):
        for text, tokens in zip(frame[side], responses(frame, side), strict=True):
            assert f" {word_tokenizer().decode(tokens, skip_special_tokens=True)}".rstrip() == text
            assert END not in tokens[:-1]
            assert tokens[-1] == END or len(tokens) == SAMPLING.response_length
            stopped += tokens[-1] == END
    assert 0 < stopped < 2 * len(frame)


def test_every_prompt_is_used_before_any_is_used_again():
    frame = sample(pairs=20)
    counts = frame["prompt"].value_counts()
    assert set(counts) <= {1, 2, 3}  # 20 pairs of 8 prompts, less those whose two responses were equal


def test_a_response_belongs_to_its_prompt():
    """A policy that repeats the last word with probability 0.9 or more; prompts go to it sorted by length."""
    policy = tiny_model(num_hidden_layers=0)
    with torch.no_grad():
        rows = torch.eye(len(VOCABULARY), 16).roll(1, 0)  # orthogonal for the 16 words that the prompts end in
        policy.model.embed_tokens.weight.copy_(rows)
        policy.lm_head.weight.copy_(1.5 * rows)  # the norm makes states 4 long: 6 against 0
    prompts = PromptDataset([[4] * (1 + row % 4) + [4 + row] for row in range(8)], [str(row) for row in range(8)], {})
    frame = sample_preferences(
        policy, word_tokenizer(), prompts, SAMPLING, CONFIG, ("labeller", length), pairs=80, beta=0.0, seed=0
    )
    firsts = [
        ids[len(prompts.prompt_ids[int(prompt)])] == 4 + int(prompt)
        for side in ("chosen_ids", "rejected_ids")
        for prompt, ids in zip(frame["prompt"], frame[side], strict=True)
    ]
    assert sum(firsts) > 0.8 * len(firsts)


def test_pairs_depend_on_the_seed_and_not_on_the_batches():
    frame = sample()
    pd.testing.assert_frame_equal(frame, sample(batch_size=5))
    assert not frame.equals(sample(seed=4))


def test_an_engine_of_its_own_samples_the_pairs_too():
    """The engine of PPO's rollouts, such as vLLM, samples both responses of the pairs."""
    asked = []

    def engine(policy, prompt_ids, settings):
        asked.append(prompt_ids)
        ids = torch.tensor([[A if len(asked) == 1 else B, END, *[PAD] * 4]] * len(prompt_ids))
        return responses_of(ids, torch.zeros(ids.shape), settings)

    frame = sample(sampling=replace(SAMPLING, engine=engine), pairs=4)
    assert [len(ids) for ids in asked] == [4, 4]
    assert {*frame["chosen"], *frame["rejected"]} == {" a", " b"}


def test_pairs_are_sampled_in_the_precision_of_ppo():
    widths = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                widths.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Noted():
        sample_preferences(
            tiny_model(),
            word_tokenizer(),
            prompts(),
            SAMPLING,
            PPOConfig(dtype="bfloat16"),
            ("labeller", length),
            pairs=4,
            beta=1.0,
            seed=0,
        )
    assert torch.bfloat16 in widths


def test_with_beta_zero_labels_are_a_coin():
    """Binomial(n, 1/2) leaves n/2 ± 4 standard deviations once in 16,000 seeds."""
    frame = sample(pairs=300, beta=0.0)
    scores = zip(length(None, frame["chosen"]), length(None, frame["rejected"]), strict=True)
    differing = [chosen > rejected for chosen, rejected in scores if chosen != rejected]
    assert abs(sum(differing) - len(differing) / 2) < 2 * math.sqrt(len(differing))


def test_the_labeller_gets_the_columns_of_the_prompts_and_stays_out_of_the_table():
    seen = []

    def labeller(prompts, completions, **columns):
        seen.extend(zip(prompts, columns["number"], strict=True))
        return [float(n) for n in range(len(prompts))]

    frame = sample(labeller)
    assert dict(seen) == dict(zip(prompts().texts, range(8), strict=True))
    assert list(frame.columns) == list(COLUMNS)


def test_a_policy_that_always_says_the_same_gives_no_pairs():
    certain = SamplingSettings(6, 1.0, 1, 1.0, (END,), PAD)
    with pytest.raises(DataError, match="all 4 pairs"):
        sample_preferences(
            tiny_model(), word_tokenizer(), prompts(), certain, CONFIG, ("labeller", length), pairs=4, beta=1.0, seed=0
        )


def test_given_texts_are_closed_by_the_end():
    given = pd.DataFrame({"prompt": ["a ", "b "], "chosen": ["b", "c"], "rejected": ["d", "b"]})
    frame = check_preferences(given, *NAMES)
    pairs = tokenise_preferences(frame, word_tokenizer(prepend_begin=True))
    assert pairs["chosen_ids"].tolist() == [[BEGIN, A, B, END], [BEGIN, B, C, END]]
    assert pairs["rejected_ids"].tolist() == [[BEGIN, A, D, END], [BEGIN, B, B, END]]
    assert pairs["prompt"].tolist() == ["a ", "b "]


def test_whole_texts_need_no_prompt_column():
    frame = check_preferences(pd.DataFrame({"good": ["a b"], "bad": ["c"], "label": [1]}), "prompt", "good", "bad")
    assert frame.to_dict("records") == [{"prompt": "", "chosen": "a b", "rejected": "c"}]
    (pair,) = tokenise_preferences(frame, word_tokenizer()).to_dict("records")
    assert pair == {"prompt": "", "chosen": "a b", "rejected": "c", "chosen_ids": [A, B, END], "rejected_ids": [C, END]}


QUESTION, GOOD, BAD = ([{"role": role, "content": text}] for role, text in (("user", "a"), ("a", "b"), ("a", "c")))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
        {"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        {"prompt": QUESTION, "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        {"prompt": "a", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        {"prompt": "a", "chosen": GOOD, "rejected": BAD},
        {"prompt": json.dumps(QUESTION), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
        {"chosen": json.dumps(QUESTION + GOOD), "rejected": json.dumps(QUESTION + BAD)},
    ],
    ids=["apart", "inside", "both", "text beside", "text apart", "JSON apart", "JSON inside"],
)
def test_chats_are_written_by_the_tokenizers_template(row):
    frame = check_preferences(pd.DataFrame([row]), *NAMES)
    assert frame.to_dict("records") == [{"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}]
    pairs = tokenise_preferences(frame, word_tokenizer(chat_template=CHAT_TEMPLATE))
    assert pairs["chosen_ids"].tolist() == [[UNKNOWN, A, BEGIN, A, B, BEGIN]]
    assert pairs["rejected_ids"].tolist() == [[UNKNOWN, A, BEGIN, A, C, BEGIN]]
    assert pairs["chosen"][0].endswith("a: b")
    with pytest.raises(DataError, match="chat template"):
        tokenise_preferences(frame, word_tokenizer())


def test_a_prompt_that_is_text_is_the_users_message_after_the_system_message():
    system = {"role": "system", "content": "d"}
    row = {"prompt": "a", "chosen": [system, *GOOD], "rejected": [system, *BAD]}
    (pair,) = check_preferences(pd.DataFrame([row]), *NAMES).to_dict("records")
    assert pair == {"prompt": [system, *QUESTION], "chosen": GOOD, "rejected": BAD}


TOOLS = [{"type": "function", "function": {"name": "look"}}]
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["a list", "JSON"])
def test_pairs_are_read_with_the_tools_and_the_system_text_of_their_row(tools):
    row = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
    frame = pd.DataFrame([{**row, "tools": tools, "system": "d"}, {**row, "tools": None, "system": None}])
    pairs = tokenise_preferences(check_preferences(frame, *NAMES), word_tokenizer(chat_template=WITH_TOOLS))
    plain = [UNKNOWN, A, BEGIN, A, B, BEGIN]
    assert pairs["chosen_ids"].tolist() == [[UNKNOWN, VOCABULARY.index("s"), D, BEGIN, *plain], plain]
    assert list(pairs.columns) == list(COLUMNS)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_of_which_the_template_leaves_a_message_out_is_refused_with_its_row(side):
    template = CHAT_TEMPLATE.replace("in messages", "in messages if m['role'] != 'critic'")
    row = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
    frame = pd.DataFrame([row, {**row, side: [{"role": "critic", "content": "d"}]}])
    tokenizer = word_tokenizer(chat_template=template)
    found = "^preferences: row 1: message 1 has the role `critic`, and the chat template"
    with pytest.raises(DataError, match=found):
        try_template(check_preferences(frame, *NAMES), tokenizer)
    with pytest.raises(DataError, match=found):
        tokenise_preferences(check_preferences(frame, *NAMES), tokenizer)


def test_pairs_of_equal_responses_are_left_out_and_counted(caplog):
    """The index keeps the table's row numbers; chats with equal tokens are equal, because a template may trim."""
    said.clear()
    texts = pd.DataFrame({"chosen": ["a", "b", "c"], "rejected": ["b", "b", "a"]})
    pairs = tokenise_preferences(check_preferences(texts, *NAMES), word_tokenizer())
    assert pairs["chosen"].to_dict() == {0: "a", 2: "c"}
    rows = [(GOOD, BAD), (GOOD, [{"role": "a", "content": " b "}])]
    chats = pd.DataFrame([{"prompt": QUESTION, "chosen": good, "rejected": bad} for good, bad in rows])
    pairs = tokenise_preferences(check_preferences(chats, *NAMES), word_tokenizer(chat_template=CHAT_TEMPLATE))
    assert pairs["chosen"].tolist() == ["a: b"]
    counts = [[int(number) for number in re.findall(r"\d+", record.getMessage())] for record in caplog.records]
    assert counts == [[1, 3], [1, 2]]


def test_a_margin_and_other_columns_are_named_as_not_used(caplog):
    said.clear()
    row = {"prompt": "a ", "chosen": "b", "rejected": "c", "margin": 1.0, "tools": TOOLS, "score_chosen": 3.0}
    check_preferences(pd.DataFrame([row]), *NAMES)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.findall("`(.*?)`", line) == ["margin", "tools", "score_chosen"]


def test_content_in_parts_is_joined_and_a_call_of_a_tool_has_none():
    template = CHAT_TEMPLATE.replace("m['content']", "(m['content'] or m['tool_calls'][0]['function']['name'])")
    call = {"type": "function", "function": {"name": "d", "arguments": {}}}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "a", "tool_calls": [call]}]
    row = {"prompt": prompt, "chosen": [{"role": "a", "content": "b"}], "rejected": [{"role": "a", "content": "c"}]}
    frame = check_preferences(pd.DataFrame([row]), *NAMES)
    (pair,) = tokenise_preferences(frame, word_tokenizer(chat_template=template)).to_dict("records")
    assert pair["chosen_ids"] == [UNKNOWN, A, BEGIN, A, D, BEGIN, A, B, BEGIN]
    assert pair["prompt"] == "user: a\na: "


def test_an_answer_continues_the_assistants_message_that_ends_the_prompt():
    """As in PPO, a response continues an assistant's message at the end of the prompt."""
    user, begun = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}
    good, bad = ([{"role": "assistant", "content": text}] for text in "cd")
    frame = check_preferences(pd.DataFrame([{"prompt": [user, begun], "chosen": good, "rejected": bad}]), *NAMES)
    (pair,) = tokenise_preferences(frame, word_tokenizer(chat_template=CHAT_TEMPLATE)).to_dict("records")
    assert pair["chosen_ids"] == [UNKNOWN, A, BEGIN, A, B, C, BEGIN]
    assert pair["rejected_ids"] == [UNKNOWN, A, BEGIN, A, B, D, BEGIN]


@pytest.mark.parametrize("tail", ["", " d"], ids=["no tail", "a tail"])
@pytest.mark.parametrize("closes", ["<s>", "</s>", "<|end|>"])
def test_chats_end_as_the_template_ends_them_in_training_and_in_scoring(closes, tail):
    """A turn may end in the end-of-text token, a named special token, or a token that is only marked as special."""
    template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' CLOSES' }}TAIL{{ ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    )
    tokenizer = word_tokenizer(chat_template=template.replace("CLOSES", closes).replace("TAIL", tail))
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    question, answer = [{"role": "user", "content": "a"}], [{"role": "a", "content": "b"}]
    other = [{"role": "a", "content": "c"}]
    frame = check_preferences(pd.DataFrame([{"prompt": question, "chosen": answer, "rejected": other}]), *NAMES)
    (trained,) = tokenise_preferences(frame, tokenizer)["chosen_ids"]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    batch = ResponseBatch(
        prompts=[prompt],
        completions=["b"],
        columns={},
        prompt_ids=[tokenizer(prompt, add_special_tokens=False)["input_ids"]],
        response_ids=[[B, tokenizer.convert_tokens_to_ids(closes)]],
        terminated=[True],
        chats=[question + answer],
    )
    (scored,) = Rendering(tokenizer, tokenizer).sequences(batch)
    assert list(trained) == scored == tokenizer.apply_chat_template(question + answer)["input_ids"]
    assert scored[-1] == (D if tail else tokenizer.convert_tokens_to_ids(closes))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"chosen": ["a"]}, "`rejected`.*reward_modelling.rejected_column"),
        ({"chosen": ["a", ""], "rejected": ["b", "c"]}, "row 1, column `chosen`"),
        ({"chosen": ["a"], "rejected": [None]}, "row 0, column `rejected`"),
        ({"prompt": [3], "chosen": ["a"], "rejected": ["b"]}, "row 0, column `prompt`"),
        (
            {"chosen": [CHAT, [CHAT[0], {"role": "a", "content": 3}]], "rejected": [CHAT, CHAT]},
            "row 1, column `chosen`: message 1 .*3",
        ),
        ({"prompt": [CHAT], "chosen": ["a"], "rejected": [CHAT]}, "row 0 has both"),
        (
            {"prompt": ["b"], "chosen": [[*CHAT, *CHAT]], "rejected": [[*CHAT, {"role": "a", "content": "c"}]]},
            "row 0: the prompt 'b' .*reward_modelling.prompt_column",
        ),
        ({"chosen": ["a", "b"], "rejected": ["a", "b"]}, "equal in all 2 pairs"),
    ],
)
def test_a_table_that_holds_no_preferences_is_refused(frame, message):
    with pytest.raises(DataError, match=message):
        check_preferences(pd.DataFrame(frame), *NAMES)


def test_preferences_follow_the_bradley_terry_probability():
    """P = 1 / (1 + e^-1.2) = 0.7685 for beta 6 and a gap of 0.2; 20,000 draws have sd 0.003, so 4 sd is 0.012."""
    labels = noisy_preference([0.5] * 20_000, [0.3] * 20_000, beta=6.0, seed=1)
    assert sum(labels) / len(labels) == pytest.approx(0.76852, abs=0.012)


def test_preferences_at_the_extremes_of_beta_and_scores():
    assert noisy_preference([1.0, 0.0], [0.0, 1.0], beta=float("inf"), seed=0) == [True, False]
    assert noisy_preference([1e9, -1e9], [-1e9, 1e9], beta=6.0, seed=0) == [True, False]
    for first, second, beta in ((1.0, -1.0, 0.0), (0.4, 0.4, float("inf"))):
        coin = noisy_preference([first] * 4000, [second] * 4000, beta=beta, seed=2)
        assert sum(coin) / len(coin) == pytest.approx(0.5, abs=0.04)


def test_preferences_are_a_function_of_their_seed_and_each_of_its_place():
    scores = [i / 100 for i in range(100)], [0.5] * 100
    labels = noisy_preference(*scores, beta=2.0, seed=4)
    assert labels == noisy_preference(*scores, beta=2.0, seed=4)
    assert labels != noisy_preference(*scores, beta=2.0, seed=5)
    assert labels[:40] == noisy_preference(scores[0][:40], scores[1][:40], beta=2.0, seed=4)
    with pytest.raises(ValueError, match="zip"):
        noisy_preference([1.0], [], beta=1.0, seed=0)
