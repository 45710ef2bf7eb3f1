"""Attention in 16 bits on a CPU, against each sequence's own, worked out token by token in float64."""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.models.passes import packed_attention
from ppo_rlhf.models.passes.packed_attention import PackedLayout
from tests.models.passes.worked_attention import inputs, worked_out

LAYOUTS = {
    "one token each": PackedLayout.of([1, 1]),
    "even": PackedLayout.of([5, 5]),
    "long": PackedLayout.of([64, 64]),
    "of several lengths": PackedLayout.of([3, 7, 1]),
    "filled up": PackedLayout.of([3, 17, 1], fill=True),
}


@pytest.fixture(autouse=True)
def _wherever_the_tests_run(monkeypatch):
    monkeypatch.setattr(packed_attention, "lacks_fast_instructions", lambda _: False)


@pytest.mark.parametrize(("kv_heads", "value_width"), [(4, 8), (2, 8), (4, 6), (2, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_attention_and_its_gradient_are_those_worked_out_in_float64(dtype, name, kv_heads, value_width):
    layout = LAYOUTS[name]
    *given, weight = inputs(layout, (4, kv_heads, kv_heads, 4), dtype, value_width)
    n = len(layout.slots)
    found_in = [x.clone().requires_grad_() for x in given]
    found = layout.attend(*found_in, 0.5)
    found.backward(weight)
    wide = [x[:n].double().requires_grad_() for x in given]
    expected = worked_out(*wide, layout.lengths, 0.5)
    expected.backward(weight[:n].double())
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(found_in, wide, strict=True))]
    for one, other in pairs:
        assert one.dtype == dtype
        assert (one[:n].double() - other).norm() <= 0.01 * other.norm() + 1e-12
        assert one[n:].tolist() == torch.zeros(layout.more, *one.shape[1:]).tolist()


def test_scores_are_scaled_before_they_could_overflow_and_by_the_heads_width_if_nothing_is_said():
    layout = PackedLayout.of([2])
    query, key, value = inputs(layout, (1, 1, 1), torch.float16)
    query, key = query * 0 + 120, key * 0 + 120  # 8 x 120 x 120 is more than float16 holds
    found = layout.attend(query, key, value, 0.01)
    assert_close(found[1], value.mean(0), rtol=1e-2, atol=1e-3)
    query, key = (x / 100 for x in (query, key))
    by_default = layout.attend(query, key, value, None)
    assert torch.equal(by_default, layout.attend(query, key, value, 8**-0.5))


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_chosen_for_sixteen_bits_and_lengths_up_to_its_longest(monkeypatch, name):
    """The one for all others, on the same numbers, is its oracle."""
    layout = LAYOUTS[name]
    query, key, value = inputs(layout, (4, 2, 2), torch.bfloat16)
    asked = []
    fused = packed_attention.causal_attention
    monkeypatch.setattr(packed_attention, "causal_attention", lambda *given: asked.append(1) or fused(*given))
    plain = layout.attend(query, key, value, None)
    assert not asked
    monkeypatch.setattr(packed_attention, "LONGEST_PLAIN_ATTENTION", 0)
    other = layout.attend(query, key, value, None)
    assert len(asked) == 1
    layout.attend(query.float(), key.float(), value.float(), None)
    assert len(asked) == 2
    assert_close(plain, other, rtol=0.02, atol=0.02)
