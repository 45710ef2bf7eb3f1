import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.core.advantages import generalized_advantage_estimate, length_adaptive_lambda
from ppo_rlhf.core.errors import ConfigError, ShapeError

from .support import NAN, poison, prefix_mask

LENGTHS = [6, 1, 4, 3, 0]


def random_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(LENGTHS), 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, prefix_mask(LENGTHS, 6)


def gae_by_definition(rewards, values, lengths, gamma, lam, bootstrap=None):
    """A_t = Σ_{k=t}^{L} (γλ)^{k−t} (r_k + γ V_{k+1} − V_k) in plain Python: a double sum, no recursion, no mask."""
    advantages = torch.zeros_like(rewards)
    for b, length in enumerate(lengths):
        v = [*values[b, :length].tolist(), 0.0 if bootstrap is None else float(bootstrap[b])]
        for t in range(length):
            advantages[b, t] = sum(
                (gamma * lam) ** (k - t) * (float(rewards[b, k]) + gamma * v[k + 1] - v[k]) for k in range(t, length)
            )
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (1.0, 1.0), (0.0, 0.5)])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_equals_the_double_sum_of_its_definition(gamma: float, lam: float, bootstrapped: bool):
    rewards, values, mask = random_inputs(0)
    bootstrap = torch.tensor([0.7, 0.0, -1.2, 2.0, NAN], dtype=torch.float64) if bootstrapped else None
    advantages, returns = generalized_advantage_estimate(
        poison(rewards, mask), poison(values, mask), mask, gamma, lam, bootstrap_values=bootstrap
    )
    expected = gae_by_definition(rewards, values, LENGTHS, gamma, lam, bootstrap)
    assert_close(advantages, expected, rtol=0.0, atol=1e-12)
    assert_close(returns, (expected + values).masked_fill(~mask, 0.0), rtol=0.0, atol=1e-12)


def test_each_row_can_have_a_lambda_of_its_own():
    rewards, values, mask = random_inputs(1)
    lams = [0.0, 0.3, 0.9, 1.0, 0.5]
    advantages, returns = generalized_advantage_estimate(
        poison(rewards, mask), poison(values, mask), mask, 0.9, torch.tensor(lams)
    )
    rows = [
        gae_by_definition(rewards[b : b + 1], values[b : b + 1], [length], 0.9, lam)
        for b, (length, lam) in enumerate(zip(LENGTHS, torch.tensor(lams).tolist(), strict=True))
    ]
    assert_close(advantages, torch.cat(rows), rtol=0.0, atol=1e-12)
    assert_close(returns, (torch.cat(rows) + values).masked_fill(~mask, 0.0), rtol=0.0, atol=1e-12)


def test_lambda_by_length_by_hand_is_zero_up_to_one_by_alpha_tokens():
    """With alpha 1/20 (VAPO), λ = 1 − 20 / length, and the weights 1 + λ + λ² + … add up to length / 20."""
    lengths = torch.tensor([0, 1, 20, 25, 40, 100, 2000])
    found = length_adaptive_lambda(lengths, 0.05)
    assert_close(found, torch.tensor([0.0, 0.0, 0.0, 0.2, 0.5, 0.8, 0.99]).double(), rtol=0.0, atol=1e-7)
    assert_close(1 / (1 - found[3:]), lengths[3:].double() / 20, rtol=1e-9, atol=0.0)
    with pytest.raises(ConfigError, match=r"alpha=0\.0.*> 0"):
        length_adaptive_lambda(lengths, 0.0)
    with pytest.raises(ShapeError, match=r"lengths.*\[1, 7\]"):
        length_adaptive_lambda(lengths[None], 0.05)


def test_a_perfect_critic_has_no_advantage():
    """V_t = γ^(L−t) · final reward satisfies Bellman's equation: every δ is 0, and every return equals its value."""
    values = torch.tensor([[0.9**3 * 2, 0.9**2 * 2, 0.9 * 2, 2.0]], dtype=torch.float64)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    advantages, returns = generalized_advantage_estimate(rewards, values, prefix_mask([4], 4), 0.9, 0.95)
    assert_close(advantages, torch.zeros_like(values), rtol=0.0, atol=1e-12)
    assert_close(returns, values, rtol=0.0, atol=1e-12)


def test_empty_tensors_are_fine():
    for shape in ((0, 3), (2, 0)):
        x = torch.zeros(shape)
        bootstrap = torch.zeros(shape[0])
        for r in generalized_advantage_estimate(x, x, x.bool(), 1.0, 0.95, bootstrap_values=bootstrap):
            assert r.shape == shape


def test_wrong_shapes_and_options_are_refused():
    x, mask = torch.ones(2, 3), prefix_mask([3, 3], 3)
    with pytest.raises(ShapeError, match=r"rewards \[2, 3\], values \[2, 4\], mask \[2, 3\]"):
        generalized_advantage_estimate(x, torch.ones(2, 4), mask, 1.0, 0.95)
    with pytest.raises(ShapeError, match=r"bootstrap_values.*\[2, 1\].*\[2\]"):
        generalized_advantage_estimate(x, x, mask, 1.0, 0.95, bootstrap_values=torch.ones(2, 1))
    with pytest.raises(ShapeError, match=r"lam.*\[3\].*\[2\]"):
        generalized_advantage_estimate(x, x, mask, 1.0, torch.ones(3))
    with pytest.raises(ConfigError, match=r"gamma=1\.1.*>= 0.*<= 1"):
        generalized_advantage_estimate(x, x, mask, 1.1, 0.95)
