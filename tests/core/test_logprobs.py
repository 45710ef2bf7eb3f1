import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core import logprobs as module
from ppo_rlhf.core.errors import ConfigError, ShapeError
from ppo_rlhf.core.logprobs import token_entropy, token_kl, token_logprobs

from .support import NAN, prefix_mask

INF = math.inf


def random_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_tokens(seed: int, *shape: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def test_log_probabilities_of_hand_made_odds():
    """Logits log 1, log 2, log 5 are probabilities 1/8, 2/8, 5/8; at temperature ½ the odds are squared: 1, 4, 25."""
    logits = torch.tensor([[[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]], dtype=torch.float64).log()
    tokens = torch.tensor([[1, 2]])
    expected = torch.tensor([[2 / 8, 5 / 8]], dtype=torch.float64).log()
    assert_close(token_logprobs(logits, tokens), expected, rtol=0.0, atol=1e-12)
    squared = torch.tensor([[4 / 30, 25 / 30]], dtype=torch.float64).log()
    assert_close(token_logprobs(logits, tokens, 0.5), squared, rtol=0.0, atol=1e-12)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert token_logprobs(logits, torch.tensor([[1]]), 0.5).item() == pytest.approx(-4e4)
    assert token_entropy(logits, 0.5).item() == 0.0


def test_entropy_of_a_uniform_distribution_is_log_of_its_support():
    logits = torch.tensor([[[3.0] * 8, [3.0] * 4 + [-INF] * 4, [-INF] * 7 + [1.0]]], dtype=torch.float64)
    expected = torch.tensor([[math.log(8), math.log(4), 0.0]], dtype=torch.float64)
    for temperature in (1.0, 0.3):
        assert_close(token_entropy(logits, temperature), expected, rtol=0.0, atol=1e-12)


def test_entropy_of_hand_made_odds():
    """p = (1/4, 3/4): H = ¼ log 4 + ¾ log(4/3)."""
    logits = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64).log()
    assert token_entropy(logits).item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-12)


def test_kl_of_hand_made_odds():
    """p = (1/4, 3/4), q = (1/2, 1/2): KL = ¼ log ½ + ¾ log 3/2. At temperature ½ p = (1/10, 9/10), and q stays."""
    logits = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64).log()
    reference = torch.full((1, 1, 2), 7.0, dtype=torch.float64)
    assert token_kl(logits, reference).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-12)
    expected = 0.1 * math.log(0.2) + 0.9 * math.log(1.8)
    assert token_kl(logits, reference, 0.5).item() == pytest.approx(expected, abs=1e-12)
    assert token_kl(logits, logits + 3.0).item() == pytest.approx(0.0, abs=1e-12)


def test_kl_skips_ruled_out_tokens_and_is_infinite_where_only_the_reference_rules_one_out():
    logits = torch.tensor([[[0.0, -INF, 1.0]]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[[0.0, 5.0, -1.0], [0.0, -INF, -1.0]]], dtype=torch.float64)
    kl = token_kl(logits.expand(1, 2, 3), reference)
    p = torch.softmax(torch.tensor([0.0, 1.0]).double(), dim=0)
    q = torch.log_softmax(reference[0, 0], dim=0)[[0, 2]]
    assert kl[0, 0].item() == pytest.approx(float((p * (p.log() - q)).sum()), abs=1e-12)
    kl.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 1] == 0.0
    assert token_kl(torch.zeros(1, 1, 2), torch.tensor([[[0.0, -INF]]])).item() == INF


def test_a_ruled_out_token_has_probability_zero_and_a_zero_gradient():
    logits = torch.tensor([[[0.0, -INF, 1.0]]], dtype=torch.float64, requires_grad=True)
    logp = token_logprobs(logits.expand(1, 2, 3), torch.tensor([[0, 1]]))
    assert logp[0, 1].item() == -INF
    logp[0, 0].backward()
    p = 1 / (1 + math.e)
    expected = torch.tensor([[[1 - p, 0.0, -(1 - p)]]], dtype=torch.float64)
    assert_close(logits.grad, expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_gradients_agree_with_finite_differences(temperature: float):
    logits, tokens = random_logits(6, 2, 3, 5).requires_grad_(), random_tokens(6, 2, 3, vocabulary=5)
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, tokens, temperature), logits)
    assert torch.autograd.gradcheck(lambda z: token_entropy(z, temperature), logits)
    assert torch.autograd.gradcheck(lambda z: token_kl(z, random_logits(16, 2, 3, 5), temperature), logits)


def test_entropy_gradient_is_finite_where_logits_are_minus_infinity():
    finite = random_logits(7, 1, 2, 4).requires_grad_()
    padded = torch.cat([finite, torch.full((1, 2, 3), -INF, dtype=torch.float64)], dim=-1).detach().requires_grad_()
    token_entropy(finite, 0.8).sum().backward()
    token_entropy(padded, 0.8).sum().backward()
    assert_close(padded.grad[..., :4], finite.grad, rtol=1e-12, atol=1e-14)
    assert (padded.grad[..., 4:] == 0).all()


@pytest.mark.parametrize("block_elements", [1, 7, 40, 10**9])
def test_results_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch, block_elements: int):
    """Results are equal to the bit for blocks of one token, part of a row, several rows, and all rows."""
    logits, tokens = random_logits(8, 5, 4, 3), random_tokens(8, 5, 4, vocabulary=3)
    reference = random_logits(18, 5, 4, 3)
    results = []
    for budget in (2**20, block_elements):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", budget)
        z = logits.clone().requires_grad_()
        logp, entropy = token_logprobs(z, tokens, 0.7), token_entropy(z, 0.7)
        kl = token_kl(z, reference, 0.7)
        (logp.sum() + 2 * entropy.sum() + 3 * kl.sum()).backward()
        results.append((logp.detach(), entropy.detach(), kl.detach(), z.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_nan_logits_in_padding_stay_where_they_are_and_send_no_gradient():
    mask = prefix_mask([3, 1], 3)
    clean, tokens = random_logits(9, 2, 3, 4), random_tokens(9, 2, 3, vocabulary=4)
    reference = random_logits(19, 2, 3, 4)
    gradients = []
    for fill in (0.0, NAN, INF):
        logits = clean.masked_fill(~mask[..., None], fill).requires_grad_()
        logp, entropy = token_logprobs(logits, tokens, 0.7), token_entropy(logits, 0.7)
        kl = token_kl(logits, reference.masked_fill(~mask[..., None], fill), 0.7)
        assert_close(logp[mask], token_logprobs(clean, tokens, 0.7)[mask], rtol=0.0, atol=0.0)
        sum(torch.where(mask, found, 0.0).sum() for found in (logp, entropy, kl)).backward()
        assert (logits.grad[~mask] == 0).all()
        gradients.append(logits.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_nan_logits_on_a_real_token_are_not_hidden():
    logits = torch.tensor([[[0.0, NAN, 1.0]]], requires_grad=True)
    logp = token_logprobs(logits, torch.tensor([[0]]))
    assert logp.isnan().all()
    logp.sum().backward()
    assert logits.grad.isnan().any()
    assert token_entropy(logits).isnan().all()
    assert token_kl(logits, torch.zeros(1, 1, 3)).isnan().all()
    assert token_kl(torch.zeros(1, 1, 3), logits).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_to_float32_and_their_gradient_is_not(dtype: torch.dtype):
    logits = random_logits(10, 2, 3, 50).to(dtype).requires_grad_()
    tokens = random_tokens(10, 2, 3, vocabulary=50)
    logp = token_logprobs(logits, tokens, 0.7)
    assert logp.dtype == token_entropy(logits, 0.7).dtype == torch.float32
    reference = random_logits(20, 2, 3, 50).to(dtype)
    kl, p = token_kl(logits, reference, 0.7), torch.softmax(logits.detach().double() / 0.7, dim=-1)
    wanted = (p * (p.log() - torch.log_softmax(reference.double() / 0.7, dim=-1))).sum(-1)
    assert kl.dtype == torch.float32
    assert_close(kl.double(), wanted, rtol=0.0, atol=5e-6)
    exact = torch.log_softmax(logits.detach().double() / 0.7, dim=-1).gather(-1, tokens[..., None])[..., 0]
    assert_close(logp.double(), exact, rtol=0.0, atol=5e-6)
    logp.sum().backward()
    assert logits.grad.dtype == dtype


def test_no_probability_matrix_is_kept_for_the_backward_pass():
    """Autograd keeps the inputs, and no other tensor of the size of the logits."""
    logits, tokens = random_logits(14, 2, 3, 5).requires_grad_(), random_tokens(14, 2, 3, vocabulary=5)
    reference, kept = random_logits(15, 2, 3, 5), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, tokens, 0.7)
        token_entropy(logits, 0.7)
        token_kl(logits, reference, 0.7)
    given = {logits.data_ptr(), reference.data_ptr()}
    assert all(t.numel() <= tokens.numel() or t.data_ptr() in given for t in kept)


def test_wrong_shapes_and_temperatures_are_refused():
    logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"token_logprobs: logits.*\[3, 5\].*\[B, T, V\]"):
        token_logprobs(logits[0], tokens[0])
    with pytest.raises(ShapeError, match=r"logits_without_vocabulary \[2, 3\], tokens \[2, 2\]"):
        token_logprobs(logits, tokens[:, :2])
    for temperature in (0.0, -1.0, NAN, INF):
        with pytest.raises(ConfigError, match=r"token_logprobs: temperature=.*> 0"):
            token_logprobs(logits, tokens, temperature)
        with pytest.raises(ConfigError, match="token_entropy: temperature="):
            token_entropy(logits, temperature)
        with pytest.raises(ConfigError, match="token_kl: temperature="):
            token_kl(logits, logits, temperature)
    with pytest.raises(ShapeError, match=r"logits \[2, 3, 5\], reference_logits \[2, 3, 4\]"):
        token_kl(logits, logits[..., :4])
