"""Attention of one sequence after the other, against each token's own, worked out in float64, and the padded one."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from ppo_rlhf.models.passes import attention_by_sequence, packed_attention
from ppo_rlhf.models.passes.attention_by_sequence import FEWEST_PAIRS, Run, runs_of, spares_enough
from ppo_rlhf.models.passes.packed_attention import PackedLayout
from tests.models.passes.worked_attention import inputs, worked_out

LAYOUTS = {
    "of several lengths": PackedLayout.of([3, 7, 1]),
    "equal neighbours": PackedLayout.of([4, 4, 2, 4, 1, 1, 1]),
    "filled up": PackedLayout.of([3, 17, 1], fill=True),
    "longer than the kernel's blocks": PackedLayout.of([70, 40]),
}


@pytest.fixture
def asked(monkeypatch):
    """Which of the two ways are gone: the shorter sequences of these tests spare little."""
    asked = []
    for name in ("attend_by_sequence", "causal_attention"):
        attend = getattr(packed_attention, name)
        monkeypatch.setattr(
            packed_attention, name, lambda *x, name=name, attend=attend, **o: asked.append(name) or attend(*x, **o)
        )
    monkeypatch.setattr(attention_by_sequence, "FEWEST_PAIRS", 1)
    return asked


@pytest.mark.parametrize("scaling", [0.5, None])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_and_its_gradient_are_those_worked_out_token_by_token(asked, name, kv_heads, scaling):
    layout = LAYOUTS[name]
    *given, weight = inputs(layout, (4, kv_heads, kv_heads, 4), torch.float64)
    n = len(layout.slots)
    found_in, expected_in = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    found = layout.attend(*found_in, scaling)
    found.backward(weight)
    assert asked == ["attend_by_sequence"]
    expected = worked_out(*(x[:n] for x in expected_in), layout.lengths, 8**-0.5 if scaling is None else scaling)
    expected.backward(weight[:n])
    assert_close(found[:n], expected, rtol=1e-12, atol=1e-12)
    assert found[n:].tolist() == torch.zeros(layout.more, 4, 8).tolist()
    for one, other in zip(found_in, expected_in, strict=True):
        assert_close(one.grad[:n], other.grad[:n], rtol=1e-11, atol=1e-12)
        assert one.grad[n:].tolist() == torch.zeros_like(one[n:]).tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_float32_it_is_the_padded_one_also_where_states_lie_between_others(asked, name, monkeypatch):
    layout = LAYOUTS[name]
    query, key, value, weight = inputs(layout, (4, 4, 4, 4), torch.float32)
    joined = torch.cat([query, key, value], dim=2)  # a projection to all three: each a view of its result

    def attended():
        joined.grad = None
        found = layout.attend(*joined.requires_grad_().split(8, dim=2), None)[: len(layout.slots)]
        (found * weight[: len(layout.slots)]).sum().backward()
        return found.detach(), joined.grad

    found = attended()
    monkeypatch.setattr(packed_attention, "spares_enough", lambda *_: False)
    expected = attended()
    assert asked == ["attend_by_sequence", "causal_attention"]
    for one, other in zip(found, expected, strict=True):
        assert_close(one[: len(layout.slots)], other[: len(layout.slots)], rtol=1e-5, atol=1e-5)


def test_a_gradient_without_strides_and_one_out_of_order_are_read_as_they_are(asked):
    layout = LAYOUTS["of several lengths"]
    given, one = (
        [x.requires_grad_() for x in inputs(layout, (4, 4, 4), torch.float64)],
        torch.ones((), dtype=torch.float64),
    )
    for gradient in (one.expand(11, 4, 8), torch.randn(8, 4, 11, dtype=one.dtype).permute(2, 1, 0)):
        found, expected = (
            torch.autograd.grad(layout.attend(*given, None), given, weight)
            for weight in (gradient, gradient.contiguous())
        )
        assert all(map(torch.equal, found, expected))


def test_no_sequence_sees_another(asked):
    layout = LAYOUTS["equal neighbours"]
    query, key, value = inputs(layout, (2, 2, 2), torch.float32)
    expected = layout.attend(query, key, value, None)
    for x in (query, key, value):
        x[4:8] = torch.nan  # of the second sequence, which is computed together with the first
    found = layout.attend(query, key, value, None)
    assert asked == ["attend_by_sequence"] * 2
    assert found[4:8].isnan().all()
    assert torch.equal(found[:4], expected[:4])
    assert torch.equal(found[8:], expected[8:])


def test_a_sequence_has_the_same_bits_whatever_lies_beside_it(asked):
    alone, beside = PackedLayout.of([40, 5]), PackedLayout.of([9, 40, 70])
    given = inputs(beside, (4, 4, 4), torch.float32)
    of_all = beside.attend(*given, None)[9:49]
    assert torch.equal(alone.attend(*(x[9:54] for x in given), None)[:40], of_all)


def test_runs_are_neighbours_of_one_length():
    assert runs_of([3, 3, 5, 3]) == (Run(0, 2, 3), Run(6, 1, 5), Run(11, 1, 3))
    assert runs_of([2]) == (Run(0, 1, 2),)


def test_it_is_taken_where_each_call_spares_enough_pairs_of_positions():
    runs = runs_of([64, 1])  # two calls; the padded one has 4095 pairs a head too many
    heads = -(-2 * FEWEST_PAIRS // 4095)
    assert spares_enough(runs, 64, heads)
    assert not spares_enough(runs, 64, heads - 1)
    assert not spares_enough(runs_of([64, 64]), 64, 10**6)  # there is no padding


def test_values_of_another_width_are_padded_as_before(asked):
    layout = LAYOUTS["of several lengths"]
    *given, _ = inputs(layout, (4, 4, 4, 4), torch.float64, value_width=6)
    found = layout.attend(*given, None)
    assert asked == ["causal_attention"]
    assert_close(found, worked_out(*given, layout.lengths, 8**-0.5), rtol=1e-12, atol=1e-12)


def test_where_torch_is_told_to_take_no_fused_kernel_none_is_taken(asked):
    layout = LAYOUTS["of several lengths"]
    given = inputs(layout, (4, 4, 4), torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        found = layout.attend(*given, None)
    assert asked == ["causal_attention"]
    assert_close(found, worked_out(*given, layout.lengths, 8**-0.5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_without_instructions_are_attended_to_in_float32(asked, monkeypatch, dtype):
    monkeypatch.setattr(packed_attention, "lacks_fast_instructions", lambda _: True)
    layout = LAYOUTS["of several lengths"]
    given = [x.to(dtype) for x in inputs(layout, (4, 2, 2), torch.float32)]
    found = layout.attend(*given, None)
    assert asked == ["attend_by_sequence"]
    assert found.dtype == dtype
    assert torch.equal(found, layout.attend(*(x.float() for x in given), None).to(dtype))
