"""Samples hold the update's own numbers, and the view shows hostile texts as texts."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.tokenizers import token_texts
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.reporting.token_view import render_page, render_view, sample_tokens
from ppo_rlhf.reporting.token_view.page import QUANTITIES
from ppo_rlhf.rewards.scoring import Scores
from tests.ppo_runs import build_rollouts, build_tokenizer, with_responses

HOSTILE = "</script><img src=x onerror=alert(1)>\" ' {{ 7 * 7 }}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: each byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def hand_made_experience(lengths: list[int], width: int) -> Experience:
    """Distinct numbers on tokens, NaN in padding."""
    generator = torch.Generator().manual_seed(0)
    rows = len(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]

    def drawn(columns: int = width) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        numbers[:, :width] = torch.where(mask, numbers[:, :width], torch.nan)
        return numbers

    rollouts = build_rollouts(lengths, [True] * rows, width)
    rollouts = replace(rollouts, old_logprobs=drawn(), reference_logprobs=drawn(), entropy=drawn())
    rollouts = replace(rollouts, values=drawn(width + 1))
    scores = Scores(torch.arange(rows).double(), {})
    return Experience(rollouts, scores, drawn(), drawn(), drawn(), rollouts.mask, PPOConfig())


class Page(HTMLParser):
    """The tags of a page, and the text of its tokens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.tokens: list[str] = []
        self._is_token = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._is_token = ("class", "token") in attrs

    def handle_endtag(self, tag):
        self._is_token = False

    def handle_data(self, data):
        if self._is_token:
            self.tokens.append(data)


def shown_as(tokens: list[str], prompt: str = "the film") -> dict:
    numbers = {quantity.name: [0.5] * len(tokens) for quantity in QUANTITIES}
    sample = {
        "prompt": prompt,
        "tokens": tokens,
        "is_policy": [True] * len(tokens),
        "score": 1.0,
        "terminated": True,
        "numbers": numbers,
    }
    return {"iteration": 3, "responses": 8, "samples": [sample]}


def test_tokens_of_bytes_add_a_character_with_its_last_byte_and_join_to_the_text():
    tokenizer = byte_tokenizer()
    context, text = tokenizer.encode("é "), "a€\n🎬 b"
    texts = token_texts(tokenizer, context, tokenizer.encode(text))
    assert texts == ["a", "", "", "€", "\n", "", "", "", "🎬", " ", "b"]
    cut_off = token_texts(tokenizer, context, tokenizer.encode("a€")[:-1])
    assert cut_off == ["a", "", "�"]


def test_words_keep_the_space_before_them_and_special_tokens_are_written_out():
    tokenizer = build_tokenizer()
    assert token_texts(tokenizer, tokenizer.encode("a b"), tokenizer.encode("c d </s>")) == [" c", " d", " </s>"]
    assert token_texts(tokenizer, [], tokenizer.encode("c d")) == ["c", " d"]


def test_the_numbers_are_those_of_the_tensors_and_never_of_padding():
    experience = hand_made_experience([3, 1, 4, 2, 4], width=4)
    shown = sample_tokens(experience, build_tokenizer(), limit=3)
    rollouts = experience.rollouts
    tensors = {
        "reward": experience.rewards,
        "kl": rollouts.old_logprobs - rollouts.reference_logprobs,
        "value": rollouts.values,
        "advantage": experience.advantages,
        "return": experience.returns,
        "entropy": rollouts.entropy,
        "logprob": rollouts.old_logprobs,
        "reference_logprob": rollouts.reference_logprobs,
    }
    assert (shown["iteration"], shown["responses"]) == (1, 5)
    for row, sample in zip([4, 2, 0], json.loads(json.dumps(shown))["samples"], strict=True):  # by score
        assert sample["score"] == row
        assert len(sample["tokens"]) == rollouts.responses.lengths[row]
        assert sample["numbers"] == {
            name: tensor[row, : rollouts.responses.lengths[row]].tolist() for name, tensor in tensors.items()
        }
        assert all(math.isfinite(number) for numbers in sample["numbers"].values() for number in numbers)


def test_tokens_of_an_environment_are_read_without_numbers():
    experience = hand_made_experience([3], width=3)
    policy_mask = torch.tensor([[True, False, True]])
    rollouts = with_responses(experience.rollouts, policy_mask=policy_mask)
    shown = sample_tokens(replace(experience, rollouts=rollouts), build_tokenizer())
    assert shown["samples"][0]["is_policy"] == [True, False, True]
    page = Page(
        render_view(
            [
                shown_as(["call", "result", "answer"])
                | {
                    "samples": [
                        shown_as(["call", "result", "answer"])["samples"][0] | {"is_policy": [True, False, True]}
                    ]
                }
            ]
        )
    )
    assert page.tokens == ["call", "answer"]
    assert page.attributes.count("data-numbers") == 2


def test_a_chat_prompt_is_shown_as_its_turns():
    rollouts = hand_made_experience([3], width=3).rollouts
    chat = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    prompts = replace(rollouts.prompts, chats=[chat], texts=["<|im_start|>system\nBe brief."])
    experience = replace(hand_made_experience([3], width=3), rollouts=replace(rollouts, prompts=prompts))
    (sample,) = sample_tokens(experience, build_tokenizer())["samples"]
    assert sample["prompt"] == "System: Be brief.\n\nUser: Hi\n\nAssistant: "


def test_texts_cannot_become_markup_and_nothing_is_fetched():
    harmless = Page(render_page([shown_as(["x"])]))
    page = Page(render_page([shown_as([HOSTILE], prompt=HOSTILE)]))
    assert page.tokens == [HOSTILE]
    assert page.tags == harmless.tags
    assert not {"src", "href", "srcset", "onerror"} & set(page.attributes)
    assert "img" not in page.tags


@pytest.mark.parametrize(
    ("text", "shown"), [("\n\n", "⏎⏎"), (" ", "␣"), (" a\tb", " a⇥\tb"), ("\x00\r", "␀␍"), ("", "◌"), ("日", "日")]
)
def test_what_cannot_be_seen_has_a_sign(text, shown):
    assert Page(render_view([shown_as([text])])).tokens == [shown]


def test_iterations_share_one_scale_and_the_newest_comes_first():
    early, late = shown_as(["early"]), shown_as(["late"]) | {"iteration": 9}
    late["samples"][0]["numbers"]["advantage"] = [-2.5]
    late["samples"][0]["numbers"]["kl"] = [math.nan]  # is shown, and spoils no scale
    view = render_view([early, late])
    assert Page(view).tokens == ["late", "early"]
    assert 'data-most="2.5"' in view
    assert 'data-most="nan"' not in view
