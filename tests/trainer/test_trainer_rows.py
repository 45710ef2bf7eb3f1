"""Padding, and responses that begin with their query, in the arguments of `generate` and `step`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import BEGIN, END, PAD, UNKNOWN, tiny_model, word_tokenizer
from tests.trainer.test_trainer import QUERIES, assert_same_bits, config, weights

RESPONSES = [torch.tensor(row) for row in ([6, 7, 8, 9], [6, END], [5], [9, 9, 4])]
SCORES = [0.0, 1.0, 2.0, 3.0]


def trainer_of(pad_token: str = "<pad>", **settings: Any) -> PPOTrainer:
    return PPOTrainer(config(**settings), tiny_model(), None, word_tokenizer(pad_token=pad_token))


def padded(rows: list[Tensor], pad: int, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_padding_of_queries_and_responses_changes_nothing(side: str):
    bare, trainer = trainer_of(), trainer_of()
    expected = bare.generate(QUERIES)
    actual = trainer.generate(padded(QUERIES, PAD, side))
    assert [row.tolist() for row in actual] == [row.tolist() for row in expected]
    stats = trainer.step(padded(QUERIES, PAD, side), padded(RESPONSES, PAD, side), SCORES)
    assert stats["response/length"] == (4 + 2 + 1 + 3) / 4
    bare.step(QUERIES, RESPONSES, SCORES)
    assert_same_bits(weights(trainer.policy), weights(bare.policy))


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_by_the_attention_mask_the_end_of_text_is_padding_or_text(side: str):
    queries = [torch.tensor([END, 4, 5, END]), torch.tensor([7]), torch.tensor([8, END])]
    mask = padded([torch.ones_like(query) for query in queries], 0, side)
    expected = [trainer_of("</s>").generate(query) for query in queries[:1]]
    trainer = trainer_of("</s>")
    actual = trainer.generate(padded(queries, END, side), attention_mask=mask, return_prompt=True)
    assert actual[0].tolist() == expected[0][0].tolist()
    assert [row.tolist()[: len(query)] for row, query in zip(actual, queries, strict=True)] == [
        query.tolist() for query in queries
    ]
    single = trainer_of("</s>").generate(padded(queries, END, side)[0], attention_mask=mask[0])
    assert single[0].tolist() == actual[0].tolist()
    with pytest.raises(DataError, match=r"attention_mask .* shape"):
        trainer.generate(queries, attention_mask=mask)


@pytest.mark.parametrize(("pad_token", "pad"), [("</s>", END), ("<s>", BEGIN), ("<unk>", UNKNOWN)])
@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_a_pad_token_that_has_another_meaning_is_refused_with_its_row(pad_token: str, pad: int, side: str):
    trainer = trainer_of(pad_token)
    with pytest.raises(DataError, match=rf"^query 1 .*'{pad_token}'.*attention_mask"):
        trainer.generate(padded(QUERIES, pad, side))
    with pytest.raises(DataError, match=rf"^response [12] .*'{pad_token}'"):
        trainer.step(QUERIES, padded(RESPONSES, pad, side), SCORES)
    with pytest.raises(DataError, match=rf"^query 0 .*'{pad_token}'"):
        trainer.generate(torch.tensor([pad, pad, 4, 5]))
    if pad != END:
        with pytest.raises(DataError, match=rf"^response 1 .*'{pad_token}'"):
            trainer.step(QUERIES, [torch.tensor(row) for row in ([6, 7], [6, pad], [5, 5], [9])], SCORES)


def test_a_pad_token_that_stands_in_a_text_is_refused_at_its_ends():
    trainer = trainer_of()
    with pytest.raises(DataError, match=r"^query 1 .*'<pad>'"):
        trainer.generate([torch.tensor([4, 5]), torch.tensor([4, PAD, 5, PAD, PAD])])
    trainer.generate([torch.tensor([4, PAD, 5])])


def test_a_pad_token_that_begins_all_texts_or_ends_a_response_is_text():
    """As in GPT-2, one token begins texts, ends texts and pads."""
    trainer = PPOTrainer(config(), tiny_model(), None, word_tokenizer(pad_token="</s>", bos_token="</s>"))
    queries = [torch.cat([torch.tensor([END]), query]) for query in QUERIES]
    actual = trainer.generate(queries)
    assert [row.tolist()[: len(query)] for row, query in zip(actual, queries, strict=True)] == [
        query.tolist() for query in queries
    ]
    stats = trainer.step(queries, [torch.tensor(row) for row in ([6, END], [6, 7], [6, 7, END], [END])], SCORES)
    assert stats["response/length"] == (2 + 2 + 3 + 1) / 4


def test_a_row_of_padding_alone_is_refused():
    with pytest.raises(DataError, match=r"^query 1: "):
        trainer_of().generate(torch.tensor([[4, 5], [PAD, PAD]]))


@pytest.mark.parametrize(
    "pad_token", [pytest.param("<pad>", marks=pytest.mark.slow), "</s>", pytest.param("<unk>", marks=pytest.mark.slow)]
)
def test_responses_of_generate_are_taken_as_they_are(pad_token: str):
    """The policy may sample any token, pad tokens included."""
    trainer = trainer_of(pad_token, per_device_train_batch_size=64, total_episodes=256, temperature=5.0)
    queries = [QUERIES[row % 4] for row in range(128)]
    responses = trainer.generate(queries, return_prompt=False)
    pad = trainer.tokenizer.pad_token_id
    assert any(row[0] == pad for row in responses)
    assert pad_token == "</s>" or any(row[-1] == pad for row in responses)
    stats = trainer.step(queries, responses, [0.0] * 128)
    assert stats["response/length"] == pytest.approx(sum(map(len, responses)) / 128)


def test_responses_that_begin_with_their_queries_are_refused():
    """`generate` returns them so by default, as TRL's does."""
    trainer = trainer_of()
    whole = trainer.generate(QUERIES, max_new_tokens=2)
    for responses in (whole, padded(whole, PAD)):
        with pytest.raises(DataError, match=r"^step: .*query.*return_prompt=False"):
            trainer.step(QUERIES, responses, SCORES)
    assert trainer.state.progress.iteration == 0


def test_a_response_may_repeat_its_query_where_others_do_not():
    trainer = trainer_of()
    trainer.step(QUERIES, [torch.cat([QUERIES[0], QUERIES[0]]), *RESPONSES[1:]], SCORES)
    assert trainer.state.progress.iteration == 1


def test_padding_of_prompts_that_are_token_ids_is_taken_off():
    rows = {"input_ids": [[PAD, PAD, 4], [4, 5, 6]]}
    assert prompt_ids(rows) == [[4], [4, 5, 6]]
    assert prompt_ids({**rows, "attention_mask": [[0, 1, 1], [1, 1, 1]]}) == [[PAD, 4], [4, 5, 6]]
    with pytest.raises(DataError, match=r"^prompt 0 .*'</s>'"):
        prompt_ids({"input_ids": [[END, 4], [4, 5]]}, pad_token="</s>")


def prompt_ids(prompts: Any, **tokenizer: Any) -> list[list[int]]:
    trainer = PPOTrainer(config(), tiny_model(), None, word_tokenizer(**tokenizer), prompts=prompts)
    return trainer._prompts.prompt_ids


def test_several_responses_to_a_query_stand_together_with_noise_of_their_own():
    actual = trainer_of().generate(QUERIES, return_prompt=False, num_return_sequences=2)
    repeated = [query for query in QUERIES for _ in range(2)]
    fresh = trainer_of()
    expected = fresh.generate(repeated, return_prompt=False)
    assert [row.tolist() for row in actual] == [row.tolist() for row in expected]
    assert len({tuple(row.tolist()) for row in actual}) > len(QUERIES)
    assert len(fresh.generate(QUERIES[0], num_return_sequences=3)) == 3


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_return_sequences": 0}, "1"),
        ({"num_return_sequences": 2, "do_sample": False}, "greedy.*do_sample=True"),
    ],
)
def test_a_number_of_responses_that_makes_no_sense_is_refused(given: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=f"generate: num_return_sequences=[02].*{line}"):
        trainer_of().generate(QUERIES, **given)
