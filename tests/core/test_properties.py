"""Properties that every function of core keeps for any input, found by hypothesis: masks of any length, any numbers.

Batches are drawn as lengths and a seed, so that a failing example shrinks to few rows and tokens. Padding is NaN.
"""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.advantages import generalized_advantage_estimate
from ppo_rlhf.core.aggregation import aggregate_loss, aggregation_count
from ppo_rlhf.core.kl import KL_ESTIMATORS, kl_estimate
from ppo_rlhf.core.logprobs import token_entropy, token_logprobs
from ppo_rlhf.core.losses import clipped_policy_loss
from ppo_rlhf.core.option_names import LOSS_AGGREGATIONS
from ppo_rlhf.core.responses import length_mask, response_lengths
from ppo_rlhf.core.rewards import last_token_mask, shape_rewards
from ppo_rlhf.core.sampling import sample_tokens
from ppo_rlhf.core.statistics import (
    RunningMoments,
    masked_whiten,
)

from .support import NAN, prefix_mask

settings.register_profile("core", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("core")

finite = st.floats(-50.0, 50.0, allow_nan=False, width=32)
fraction = st.floats(0.0, 1.0, width=32)
seeds = st.integers(0, 2**31)
some_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
tokens = st.integers(0, 4)
aggregations = st.sampled_from(LOSS_AGGREGATIONS)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(lengths: list[int], seed: int, count: int, padding: int = 0) -> tuple[Tensor, ...]:
    """Return a mask of these lengths with `padding` more columns, and `count` tensors with NaN outside the mask."""
    width = max(lengths) + padding
    mask = prefix_mask(lengths, width)
    numbers = [torch.full((len(lengths), width), NAN, dtype=torch.float64) for _ in range(count)]
    for index, tensor in enumerate(numbers):
        tensor[:, : max(lengths)] = normal(seed + index, len(lengths), max(lengths))
        tensor[~mask] = NAN
    return mask, *numbers


# --- statistics ------------------------------------------------------------------------------------------------------


@given(some_lengths, seeds, finite, st.floats(0.1, 10.0))
def test_whitening_forgets_shift_and_scale_and_gives_mean_zero_and_variance_one(lengths, seed, shift, scale):
    assume(sum(lengths) >= 2)
    mask, x = batch(lengths, seed, 1)
    white = masked_whiten(x, mask)
    assert_close(masked_whiten(scale * x + shift, mask), white, rtol=1e-5, atol=1e-6)
    assert abs(float(white[mask].mean())) < 1e-9
    assert float(white[mask].var()) < 1.0 + 1e-9
    assert bool((white[~mask] == 0).all())


@given(st.lists(st.lists(finite, max_size=5), min_size=1, max_size=5))
def test_moments_in_parts_are_those_of_the_whole(parts):
    moments, whole = RunningMoments(), [x for part in parts for x in part]
    for part in parts:
        moments.update(torch.tensor(part, dtype=torch.float64))
    assert moments.count == len(whole)
    if whole:
        assert math.isclose(moments.mean, math.fsum(whole) / len(whole), rel_tol=1e-9, abs_tol=1e-9)
    if len(whole) > 1:
        expected = math.fsum((x - math.fsum(whole) / len(whole)) ** 2 for x in whole) / (len(whole) - 1)
        assert math.isclose(moments.variance, expected, rel_tol=1e-9, abs_tol=1e-9)
    assert moments.variance >= 0.0


# --- KL --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_all_vanish_without_a_difference(differences):
    d = torch.tensor(differences, dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert torch.equal(kl_estimate(d, zero, "k1"), d)
    for estimator in ("k2", "k3", "k3+"):
        assert bool((kl_estimate(d, zero, estimator) >= 0).all())
    for estimator in KL_ESTIMATORS:
        assert bool((kl_estimate(d, d, estimator) == 0).all())


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6), seeds)
def test_k1_and_k3_average_to_the_kl_of_any_two_distributions_and_k2_to_its_gradient(weights, seed):
    """Enumerated over the vocabulary: sum p k = KL(p || q); and sum p d(k2) = d(KL) for a softmax policy."""
    logits = torch.tensor(weights, dtype=torch.float64).log().requires_grad_()
    reference = torch.log_softmax(normal(seed, len(weights)), dim=0)
    log_p = torch.log_softmax(logits, dim=0)
    exact = (log_p.exp() * (log_p - reference)).sum()
    p = log_p.exp().detach()
    for estimator in ("k1", "k3", "k3+"):
        estimate = (p * kl_estimate(log_p.detach(), reference, estimator)).sum()
        assert_close(estimate, exact.detach(), rtol=1e-9, atol=1e-9)
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k2", "k3+"):
        (found,) = torch.autograd.grad((p * kl_estimate(log_p, reference, estimator)).sum(), logits, retain_graph=True)
        assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    (of_k1,) = torch.autograd.grad((p * kl_estimate(log_p, reference, "k1")).sum(), logits)
    assert_close(of_k1, torch.zeros_like(of_k1), rtol=0.0, atol=1e-9)  # why k1 is refused in the loss


# --- rewards and advantages ------------------------------------------------------------------------------------------


@given(some_lengths, seeds, st.floats(0.0, 2.0))
def test_a_row_of_rewards_sums_to_its_score_minus_its_kl_whatever_stands_in_padding(lengths, seed, kl_coef):
    mask, kl = batch(lengths, seed, 1, padding=2)
    scores = normal(seed + 9, len(lengths))
    rewards = shape_rewards(scores, kl, mask, kl_coef)
    has_tokens = mask.any(dim=1)
    expected = torch.where(has_tokens, scores, 0.0) - kl_coef * torch.nan_to_num(kl).sum(dim=1)
    assert_close(rewards.sum(dim=1), expected, rtol=1e-9, atol=1e-9)
    assert int(last_token_mask(mask).sum()) == int(has_tokens.sum())


@given(some_lengths, seeds, fraction, fraction)
def test_advantages_do_not_depend_on_padding_or_row_order_and_are_linear_in_the_rewards(lengths, seed, gamma, lam):
    mask, rewards, values, other = batch(lengths, seed, 3)
    advantages, returns = generalized_advantage_estimate(rewards, values, mask, gamma, lam)
    wider_mask, wide_rewards, wide_values = (
        torch.cat([x, torch.full((len(lengths), 3), fill).to(x.dtype)], dim=1)
        for x, fill in ((mask, 0.0), (rewards, NAN), (values, NAN))
    )
    wide, _ = generalized_advantage_estimate(wide_rewards, wide_values, wider_mask, gamma, lam)
    assert torch.equal(wide[:, : mask.shape[1]], advantages)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    shuffled, _ = generalized_advantage_estimate(rewards[order], values[order], mask[order], gamma, lam)
    assert torch.equal(shuffled, advantages[order])
    both, _ = generalized_advantage_estimate(rewards + other, values, mask, gamma, lam)
    only, _ = generalized_advantage_estimate(other, torch.zeros_like(values), mask, gamma, lam)
    assert_close(both, advantages + only, rtol=1e-9, atol=1e-9)
    assert_close(returns, advantages + torch.where(mask, values, 0.0), rtol=0.0, atol=0.0)


# --- log-probabilities and sampling ----------------------------------------------------------------------------------


@given(st.integers(1, 9), seeds, st.floats(0.2, 3.0), finite)
def test_probabilities_sum_to_one_ignore_a_shift_of_the_logits_and_entropy_is_bounded(vocabulary, seed, tau, shift):
    logits = normal(seed, 1, 3, vocabulary, scale=3.0)
    logp = torch.stack([token_logprobs(logits, torch.full((1, 3), v), tau) for v in range(vocabulary)], dim=-1)
    assert_close(logp.exp().sum(-1), torch.ones(1, 3).double(), rtol=1e-9, atol=0.0)
    assert_close(token_logprobs(logits + shift, torch.zeros(1, 3).long(), tau), logp[..., 0], rtol=1e-7, atol=1e-7)
    entropy = token_entropy(logits, tau)
    assert_close(entropy, -(logp.exp() * logp).sum(-1), rtol=1e-9, atol=1e-9)
    assert bool((entropy >= -1e-12).all())
    assert bool((entropy <= math.log(vocabulary) + 1e-9).all())


@given(st.integers(1, 12), seeds, st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 12), st.floats(0.05, 1.0))
def test_a_sampled_token_has_probability_and_its_log_probability_is_that_of_the_whole_distribution(
    vocabulary, seed, uniform, top_k, top_p
):
    logits = normal(seed, 1, vocabulary, scale=2.0)
    token, logprob = sample_tokens(logits, torch.tensor([uniform]).double(), top_k=top_k, top_p=top_p)
    assert 0 <= int(token) < vocabulary
    assert_close(logprob, token_logprobs(logits[None], token[None])[0], rtol=1e-9, atol=1e-9)
    ranks = int((logits[0] > logits[0, int(token)]).sum())
    assert top_k == 0 or ranks < top_k


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=4), st.sets(st.integers(0, 4))
)
def test_lengths_end_with_the_first_stop_token(rows, stops):
    lengths, terminated = response_lengths(torch.tensor(rows), sorted(stops))
    for row, length, ended in zip(rows, lengths.tolist(), terminated.tolist(), strict=True):
        assert ended == bool(stops & set(row))
        assert not stops & set(row[: length - 1])
        assert row[length - 1] in stops if ended else length == 6
    assert torch.equal(length_mask(lengths, 6).sum(dim=1), lengths)


# --- losses ----------------------------------------------------------------------------------------------------------


@given(some_lengths, seeds, aggregations, st.integers(1, 5))
def test_parts_of_a_minibatch_add_up_to_it_with_its_count(lengths, seed, aggregation, cut):
    mask, losses = batch(lengths, seed, 1)
    count = aggregation_count(mask, aggregation, fixed_length=7)
    whole = aggregate_loss(losses, mask, aggregation, count)
    rows = range(0, len(lengths), cut)
    parts = [aggregate_loss(losses[r : r + cut], mask[r : r + cut], aggregation, count) for r in rows]
    assert_close(torch.stack(parts).sum(), whole, rtol=1e-9, atol=1e-9)


@given(
    some_lengths,
    seeds,
    st.floats(0.05, 0.9),
    st.floats(0.05, 2.0),
    st.one_of(st.none(), st.floats(1.01, 5.0)),
    aggregations,
)
def test_the_policy_loss_ignores_padding_is_bounded_below_by_the_surrogate_and_has_a_finite_gradient(
    lengths, seed, low, high, dual_clip, aggregation
):
    mask, logp, old, advantages = batch(lengths, seed, 3, padding=1)
    logp.requires_grad_()
    options = {"cliprange": low, "cliprange_high": high, "loss_aggregation": aggregation}
    result = clipped_policy_loss(logp, old, advantages, mask, dual_clip=dual_clip, **options)
    result.loss.backward()
    assert bool(logp.grad.isfinite().all())
    assert bool((logp.grad[~mask] == 0).all())
    assert 0.0 <= float(result.clipfrac) <= 1.0
    assert float(result.approxkl) >= 0.0
    logp = logp.detach()
    surrogate = aggregate_loss(-advantages * (logp - old).exp(), mask, aggregation)
    plain = clipped_policy_loss(logp, old, advantages, mask, **options).loss
    assert float(plain) >= float(surrogate) - 1e-9  # clipping is pessimistic
    assert float(result.loss.detach()) <= float(plain) + 1e-9  # the dual clip only bounds
