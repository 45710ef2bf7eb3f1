"""Batches equal an oracle in plain Python, row by row and token by token."""

from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_rlhf.passes.packed_attention import PackedLayout, SharedLayout
from ppo_rlhf.passes.prefixes import Prefix, shared_prefix
from ppo_rlhf.passes.sequences import SequenceBatch, make_batch
from ppo_rlhf.passes.token_rows import TokenRows, filled_size, right_padded

PAD = 9
IDS = st.integers(0, 50_000)
PROMPTS = st.tuples(st.integers(0, 14), st.lists(IDS, min_size=1, max_size=40)).map(
    lambda pair: [*range(pair[0]), *pair[1]]  # half of the prompts share tokens enough to be computed once
)
ROWS = st.lists(st.tuples(PROMPTS, st.lists(IDS, min_size=1, max_size=30)), min_size=1)


def plain_layout(lengths: list[int]) -> PackedLayout:
    width = max(lengths)
    places = [(row, column) for row, length in enumerate(lengths) for column in range(length)]
    sources = [0] * (len(lengths) * width)
    for token, (row, column) in enumerate(places):
        sources[row * width + column] = token
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    return PackedLayout(
        (len(lengths), width),
        torch.tensor([row * width + column for row, column in places]),
        torch.tensor(sources),
        torch.tensor(starts, dtype=torch.int32),
    )


def plain_order(sequences: list[list[int]], prefix: Prefix | None) -> list[tuple[int, int]]:
    """Return row and column of each packed token: own tokens of rows that share, their prefix once, whole rows."""
    length, sharing = prefix or (0, [])
    whole = [row for row in range(len(sequences)) if row not in sharing]
    parts = [(row, length, len(sequences[row])) for row in sharing]
    parts += [(row, 0, length) for row in sharing[:1]] + [(row, 0, len(sequences[row])) for row in whole]
    return [(row, column) for row, start, end in parts for column in range(start, end)]


def plain_rows(sequences: list[list[int]], fill: bool, prefix: Prefix | None = None) -> TokenRows:
    width, order = max(map(len, sequences)), plain_order(sequences, prefix)
    length, sharing = prefix or (0, [])
    whole = [length] * bool(prefix) + [len(ids) for row, ids in enumerate(sequences) if row not in sharing]
    missing, longest = filled_size(len(order)) - len(order) if fill else 0, max(whole)
    fillers = [longest] * (missing // longest) + [missing % longest] * (missing % longest > 0)
    layout: PackedLayout | SharedLayout = plain_layout([*whole, *fillers])
    if prefix:
        keys = plain_layout([len(sequences[row]) for row in sharing])
        own = plain_layout([len(sequences[row]) - length for row in sharing])
        layout = SharedLayout(own, layout, length, keys.slots, keys.starts)
    return TokenRows(
        torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sequences]),
        torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences]),
        torch.tensor([list(range(width)) for _ in sequences]),
        torch.tensor([[sequences[row][column] for row, column in order] + [0] * missing]),
        torch.tensor([[column for _, column in order] + [place for length in fillers for place in range(length)]]),
        layout,
        torch.tensor([row * width + column for row, column in order]),
    )


def plain_filled(indices: list[int], available: int, fill: bool) -> list[int]:
    free = [index for index in range(available) if index not in set(indices)]
    return indices + (free[: filled_size(len(indices)) - len(indices)] if fill else [])


def plain_batch(pairs: list[tuple[list[int], list[int]]], fill: bool) -> SequenceBatch:
    width = max(len(response) for _, response in pairs)
    states, predicting, targets, response_slots, state_slots = [], [], [], [], []
    sequences, prefix = (
        [prompt + response for prompt, response in pairs],
        shared_prefix([prompt for prompt, _ in pairs]),
    )
    order = plain_order(sequences, prefix)
    tokens = {place: token for token, place in enumerate(order)}
    for row, (prompt, response) in enumerate(pairs):
        for step in range(len(response) + 1):
            if step < len(response):
                predicting.append(len(states))
                targets.append(response[step])
                response_slots.append(row * width + step)
            states.append(tokens[row, len(prompt) - 1 + step])
            state_slots.append(row * (width + 1) + step)
    states = plain_filled(states, len(order), fill)
    predicting = plain_filled(predicting, len(states), fill)
    targets += [0] * (len(predicting) - len(targets))
    numbers = [torch.tensor(actual) for actual in (states, predicting, targets, response_slots, state_slots)]
    rows = plain_rows(sequences, fill, prefix)
    return SequenceBatch(rows, (len(pairs), width), *numbers)


def check_equal(actual: object, expected: object) -> None:
    for field in fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
        elif isinstance(other, TokenRows | PackedLayout | SharedLayout):
            check_equal(one, other)
        else:
            assert one == other, field.name


@given(ROWS, st.booleans(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_a_batch_is_the_one_that_plain_loops_make(pairs, fill, more):
    """Columns after the responses, here filled with an id that no vocabulary has, are not read."""
    width = max(len(response) for _, response in pairs) + more
    response_ids = torch.tensor([response + [10**9] * (width - len(response)) for _, response in pairs])
    lengths = torch.tensor([len(response) for _, response in pairs])
    actual = make_batch([prompt for prompt, _ in pairs], response_ids, lengths, PAD, fill=fill)
    check_equal(actual, plain_batch(pairs, fill))


@given(st.lists(st.lists(IDS, min_size=1, max_size=30), min_size=1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_padded_rows_are_those_that_plain_loops_make(sequences, fill):
    check_equal(right_padded(sequences, PAD, fill=fill), plain_rows(sequences, fill))


@given(st.lists(PROMPTS, min_size=1))
@settings(max_examples=40, deadline=None)
def test_each_token_of_the_padded_form_has_its_place_in_the_packed_form(sequences):
    rows = right_padded(sequences, PAD, prefix=shared_prefix(sequences))
    places = rows.places()
    for row, ids in enumerate(sequences):
        assert rows.packed_ids[0, places[row, : len(ids)]].tolist() == ids
        assert rows.packed_positions[0, places[row, : len(ids)]].tolist() == [*range(len(ids))]
