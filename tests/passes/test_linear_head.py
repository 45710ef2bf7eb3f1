"""Chunks of a linear head's logits, against all logits at once in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.core.logprobs import token_entropy, token_kl, token_logprobs
from ppo_rlhf.passes.linear_head import LinearHead

R, H, V, T = 19, 5, 23, 0.7


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGETS, REFERENCE = torch.arange(R) % V, drawn(3, R, V)


def compute(logits: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, ...]:
    z, tokens, q = logits[None], targets[None], reference[None]
    return tuple(each[0] for each in (token_logprobs(z, tokens, T), token_entropy(z, T), token_kl(z, q, T)))


def in_plain_torch(states: Tensor, head: nn.Linear) -> tuple[Tensor, ...]:
    log_p, log_q = torch.log_softmax(head(states) / T, -1), torch.log_softmax(REFERENCE / T, -1)
    p = log_p.exp()
    return log_p[torch.arange(R), TARGETS], -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)


def a_head(learns: str, bias: bool = True) -> tuple[Tensor, nn.Linear]:
    """Return states and a head, of which the named ones learn."""
    states, head = drawn(1, R, H), nn.Linear(H, V, bias=bias, dtype=torch.float64)
    head.weight.data, states.requires_grad = drawn(2, V, H), "states" in learns
    head.weight.requires_grad_("weight" in learns)
    if head.bias is not None:
        head.bias.data = drawn(4, V)
        head.bias.requires_grad_("bias" in learns)
    return states, head


@pytest.mark.parametrize("size", [1, 4, R, 64])
@pytest.mark.parametrize("learns", ["states", "states weight", "states weight bias", "states bias", "weight"])
def test_values_and_gradients_are_those_of_all_logits_at_once(size: int, learns: str):
    """The log-probabilities of the last three positions get no gradient, the other statistics of the first two none."""
    found = []
    for in_chunks in (True, False):
        states, head = a_head(learns)
        values = (
            LinearHead.apply(compute, size, states, head.weight, head.bias, TARGETS, REFERENCE)
            if in_chunks
            else in_plain_torch(states, head)
        )
        loss = values[0][:-3].square().sum() + 2 * values[1][2:].sum() + 3 * values[2][2:].sum()
        loss.backward()
        found.append([*values, *(each.grad for each in (states, head.weight, head.bias))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("learns", ["states", "states weight"])
def test_a_position_without_an_incoming_gradient_sends_none_even_if_its_numbers_are_not_finite(learns: str):
    states, head = a_head(learns, bias=False)
    reference = REFERENCE.clone()
    reference[5] = torch.nan
    values = LinearHead.apply(compute, 4, states, head.weight, None, TARGETS, reference)
    assert values[2][5].isnan()
    (values[0].sum() + torch.where(torch.arange(R) == 5, 0.0, values[2]).sum()).backward()
    assert states.grad.isfinite().all()
    expected = torch.autograd.grad(in_plain_torch(states, head)[0][5], states)[0][5]
    assert_close(states.grad[5], expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("learns", ["states", "states weight"])
def test_in_16_bits_values_are_the_modules_own_and_gradients_close(learns: str):
    found = []
    for in_chunks in (True, False):
        states, head = a_head(learns)
        head.float()
        inputs = states.detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if in_chunks:
                chunks = (inputs, head.weight, head.bias, TARGETS, REFERENCE.float())
                values = LinearHead.apply(compute, 4, *chunks)
            else:
                parts = zip(inputs.split(4), TARGETS.split(4), REFERENCE.float().split(4), strict=True)
                columns = zip(*(compute(head(part), *others) for part, *others in parts), strict=True)
                values = tuple(torch.cat(column) for column in columns)
        sum(each.sum() for each in values).backward()
        found.append((values, [inputs.grad, head.weight.grad]))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert all(map(torch.equal, ours, theirs))
    for a, b in zip(our_gradients, their_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            assert_close(a, b, rtol=0.0, atol=0.02 * float(b.abs().max()))


class Made(TorchDispatchMode):
    """Records the shape of each tensor that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(result, Tensor) and result.data_ptr() not in given:
            self.shapes.append(tuple(result.shape))
        return result


def test_one_gradient_of_the_weight_is_made_and_a_frozen_heads_logits_are_computed_once():
    counts = []
    for learns in ("states weight", "states"):
        states, head = a_head(learns, bias=False)
        with Made() as forward:
            values = LinearHead.apply(compute, 4, states, head.weight, None, TARGETS, REFERENCE)
        with Made() as backward:
            values[0].sum().backward()
        counts.append((len(backward.shapes), backward.shapes.count((V, H)), forward.shapes.count((V, H))))
        assert (4, V) in forward.shapes
        assert ((4, V) in backward.shapes) == (learns != "states")
    (_, made, in_forward), (_, when_frozen, _) = counts
    assert (made, in_forward, when_frozen) == (1, 0, 0)
