import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError, ShapeError
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.sampling import sample_tokens

from .support import NAN

INF = math.inf
BELOW_ONE = math.nextafter(1.0, 0.0)


def probabilities(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The sampling distribution in plain Python, without ties: temperature, then top-k, then top-p."""
    weights = [math.exp(z / temperature) for z in logits]
    order = sorted(range(len(logits)), key=lambda v: -weights[v])
    kept = order[: top_k or len(order)]
    mass, nucleus = 0.0, []
    for v in kept:
        if mass >= top_p * sum(weights[v] for v in kept):
            break
        nucleus.append(v)
        mass += weights[v]
    return [weights[v] / mass if v in nucleus else 0.0 for v in range(len(logits))]


def sample_row(logits: list[float], uniforms: list[float], dtype: torch.dtype = torch.float64, **options) -> list[int]:
    rows = torch.tensor([logits] * len(uniforms), dtype=dtype)
    return sample_tokens(rows, torch.tensor(uniforms, dtype=torch.float64), **options)[0].tolist()


def test_the_token_is_the_first_whose_cumulated_probability_exceeds_the_uniform():
    """p = ¼, 0, ½, ¼: [0, ¼) → 0, [¼, ¾) → 2, [¾, 1) → 3."""
    logits = [0.0, -INF, math.log(2), 0.0]
    uniforms = [0.0, 0.2499999, 0.2500001, 0.7499999, 0.7500001, 0.9999999]
    assert sample_row(logits, uniforms) == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_next_to_one_gives_the_last_token_of_nonzero_probability(dtype: torch.dtype):
    for uniform in (BELOW_ONE, 1.0):
        assert sample_row([0.0, 1.0, 2.0, -INF, -INF], [uniform], dtype) == [2]
        assert sample_row([0.1] * 1000, [uniform], dtype) == [999]
        assert sample_row([0.0, 1.0, -2000.0], [uniform], dtype) == [1]
        assert sample_row([5.0, 4.0, 3.0, 2.0], [uniform], dtype, top_k=2) == [1]


def test_a_single_possible_token_is_always_taken():
    assert sample_row([-INF, 3.0, -INF], [0.0, 0.5, BELOW_ONE]) == [1, 1, 1]
    assert sample_row([1.0, 3.0, 2.0], [0.0, 0.5, BELOW_ONE], top_k=1) == [1, 1, 1]
    assert sample_row([1.0, 3.0, 2.0], [0.0, 0.5, BELOW_ONE], top_p=1e-9) == [1, 1, 1]


LOGITS = [0.3, -1.2, 2.0, 0.9, -0.4, 1.4, -2.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grid_of_uniforms_gives_each_token_its_share_to_one_count(dtype: torch.dtype):
    """Inverse CDF on u = (i + ½)/n: deterministic, so each count is within one of n·p, token by token."""
    n = 10_000
    for options in (
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.9},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.6},
    ):
        uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        tokens, _ = sample_tokens(torch.tensor(LOGITS, dtype=dtype).expand(n, -1), uniforms, **options)
        counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
        expected = n * torch.tensor(probabilities(LOGITS, **options), dtype=torch.float64)
        assert (counts - expected).abs().max() <= 1.0


def test_top_p_keeps_the_token_that_reaches_the_mass():
    """p = 0.5, 0.3, 0.2: the first token reaches a share of 0.5; more needs the second, more than 0.8 the third."""
    logits = [math.log(0.3), math.log(0.5), math.log(0.2)]
    grid = [(i + 0.5) / 200 for i in range(200)]
    for top_p, support in (
        (0.3, {1}),
        (0.499, {1}),
        (0.501, {0, 1}),
        (0.799, {0, 1}),
        (0.801, {0, 1, 2}),
        (1.0, {0, 1, 2}),
    ):
        assert set(sample_row(logits, grid, top_p=top_p)) == support


def test_ties_are_kept_together_so_that_the_order_of_the_vocabulary_does_not_choose():
    grid = [(i + 0.5) / 100 for i in range(100)]
    assert set(sample_row([1.0, 2.0, 1.0, 0.0], grid, top_k=2)) == {0, 1, 2}
    assert set(sample_row([1.0, 1.0, 1.0, 0.0], grid, top_p=0.1)) == {0, 1, 2}
    assert set(sample_row([1.0, 2.0, 1.0, 1.0], grid, top_k=2, top_p=0.999)) == {0, 1, 2, 3}


def random_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    logits = 3 * torch.randn(16, 40, generator=generator, dtype=dtype)
    return logits, torch.rand(16, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 7, "top_p": 0.5}], ids=str)
def test_log_probabilities_are_those_of_the_tempered_distribution_before_the_filters(options: dict[str, float]):
    """The sampler returns the same quantity as the trained forward, so that their gap is numerical only."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 3e-6)):
        logits, uniforms = random_batch()
        logits = logits.to(dtype)
        tokens, logp = sample_tokens(logits, uniforms, temperature=0.7, **options)
        wanted = token_logprobs(logits[:, None].double(), tokens[:, None], 0.7)[:, 0]
        assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(logp.double(), wanted, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}], ids=str)
def test_rows_do_not_see_each_other(dtype: torch.dtype, options: dict[str, float]):
    """The same row and uniform give the same token and bits in any sub-batch and order."""
    logits, uniforms = random_batch(dtype)
    tokens, logp = sample_tokens(logits, uniforms, temperature=0.7, **options)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(10))
    for rows in (order, order[:5], order[3:4], slice(8, None)):
        part_tokens, part_logp = sample_tokens(logits[rows], uniforms[rows], temperature=0.7, **options)
        assert torch.equal(part_tokens, tokens[rows])
        assert torch.equal(part_logp, logp[rows])


def test_tokens_too_rare_for_float32_sums_are_reached():
    """After a token of weight 1, tokens of weight exp(−20) = 2e-9 vanish in float32 prefix sums, but not in float64."""
    rare = math.exp(-20)
    uniforms = [(1 + (i + 0.5) * rare) / (1 + 5 * rare) for i in range(5)]
    assert sample_row([0.0] + [-20.0] * 5, uniforms, torch.float32) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}], ids=str)
def test_broken_logits_give_a_token_in_range_and_a_nan_log_probability_in_their_row_only(options: dict[str, float]):
    bad = [[0.0, NAN, 1.0], [NAN, NAN, NAN], [0.0, INF, 1.0], [-INF, -INF, -INF], [0.0, 1.0, 2.0]]
    logits, uniforms = torch.tensor(bad), torch.full((5,), 0.9, dtype=torch.float64)
    tokens, logp = sample_tokens(logits, uniforms, **options)
    assert ((tokens >= 0) & (tokens < 3)).all()
    assert logp.isnan().tolist() == [True, True, True, True, False]
    good_tokens, good_logp = sample_tokens(logits[4:], uniforms[4:], **options)
    assert (tokens[4], logp[4]) == (good_tokens[0], good_logp[0])


def test_wrong_shapes_and_options_are_refused():
    logits, uniforms = torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"sample_tokens: logits.*\[2, 1, 3\].*\[B, V\]"):
        sample_tokens(logits[:, None], uniforms)
    with pytest.raises(ShapeError, match=r"uniforms.*\[1\].*\[2\]"):
        sample_tokens(logits, uniforms[:1])
    for name, value in (("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5)):
        with pytest.raises(ConfigError, match=rf"sample_tokens: {name}={value}"):
            sample_tokens(logits, uniforms, **{name: value})
