"""Common beginnings of rows, against a search through all prefixes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_rlhf.passes.prefixes import LEAST_SHARED, AlikeRows, in_passes_alike, shared_prefix, tokens_in_memory

COMMON = [5, 5, 6, 5, 6, 6, 5, 5, 6, 6, 5, 6]
BEGINNINGS = st.lists(
    st.tuples(st.integers(0, len(COMMON)), st.lists(st.integers(5, 6), max_size=12)).map(
        lambda pair: [*COMMON[: pair[0]], *pair[1]]
    ),
    max_size=7,
)


def most_saved(beginnings: list[list[int]]) -> int:
    """Try each prefix of each row, without the row's last token."""
    best = 0
    for row in beginnings:
        for length in range(LEAST_SHARED, len(row)):
            sharing = [other for other in beginnings if len(other) > length and other[:length] == row[:length]]
            best = max(best, length * (len(sharing) - 1))
    return best


@given(BEGINNINGS)
@settings(max_examples=300, deadline=None)
def test_no_prefix_saves_more_tokens_than_the_one_found(beginnings):
    found = shared_prefix(beginnings)
    assert (found.saved if found else 0) == most_saved(beginnings)
    if found:
        assert found.length >= LEAST_SHARED
        assert found.rows == sorted(set(found.rows))
        assert len({tuple(beginnings[row][: found.length]) for row in found.rows}) == 1
        assert all(len(beginnings[row]) > found.length for row in found.rows)


@given(BEGINNINGS, st.data())
@settings(max_examples=100, deadline=None)
def test_the_prefix_of_neighbours_is_that_of_these_rows_alone(beginnings, data):
    alike = AlikeRows.of(range(len(beginnings)), beginnings)
    start = data.draw(st.integers(0, len(beginnings)))
    end = data.draw(st.integers(start, len(beginnings)))
    found = alike.prefix(start, end)
    assert (found.saved if found else 0) == most_saved([beginnings[row] for row in alike.rows[start:end]])
    assert not found or set(found.rows) <= set(alike.rows[start:end])


def test_rows_that_begin_alike_share_a_pass_and_other_rows_keep_their_order():
    one, other = [*range(3, 13)], [*range(4, 14)]
    rows = [[*one, 7], [*other, 7], [*one, 8], [*other, 8]]
    assert in_passes_alike([3, 0, 1, 2], rows, most=2) == [0, 2, 1, 3]
    assert in_passes_alike([3, 0, 1, 2], rows, most=4) == [3, 0, 1, 2]
    assert in_passes_alike([3, 0, 1, 2], [row[4:] for row in rows], most=2) == [3, 0, 1, 2]  # seven tokens are too few


def test_equal_prompts_share_all_but_the_last_token_in_the_order_given():
    prompt = [*range(10)]
    assert shared_prefix([prompt] * 4) == (9, [0, 1, 2, 3])
    assert AlikeRows.of([2, 0, 3], [prompt] * 4).rows == [2, 0, 3]
    assert shared_prefix([prompt]) is shared_prefix([]) is None


def test_an_eighth_of_the_saved_tokens_stays_in_memory_for_repeated_keys():
    assert tokens_in_memory(100, 0) == 100
    assert tokens_in_memory(100, 40) == 65
    assert tokens_in_memory(100, 41) == 65
