"""Expected value and KL of best-of-n sampling, which keeps the response with the highest reward of n responses."""

import math

import torch
from torch import Tensor

from ppo_rlhf.core.checks import check_range, check_shape


def best_of_n_mean(rewards: Tensor, values: Tensor, n: int) -> Tensor:
    """Estimate the expected value of the best of n responses to each of M prompts, from N >= n samples per prompt.

    The estimate is the mean over all subsets of n samples, so it is unbiased. With the samples of a prompt in ascending
    order of reward, sample i is the best of C(i - 1, n - 1) of the C(N, n) subsets. Samples of equal reward share their
    weight, as if a random sample of equal reward were picked.

    `rewards` [M, N] decide which response is the best. `values` [M, N], such as the rewards or a judge's scores, are
    averaged. The result is [M], float64. Raises ShapeError if the shapes differ, and ConfigError if n is not from 1 to
    N.

    Source: Nakano et al. (2021), arXiv:2112.09332; Gao et al. (2022), arXiv:2210.10760.
    """
    check_shape("best_of_n_mean", None, rewards=rewards, values=values)
    samples = rewards.shape[1]
    check_range("best_of_n_mean", at_least=1, n=n)
    check_range("best_of_n_mean", at_least=n, samples=samples)
    counts = torch.arange(samples + 1, dtype=torch.float64)
    k = counts.clamp(min=n)
    # Log of the binomial coefficient C(k, n)
    log_choose = torch.lgamma(k + 1) - torch.lgamma(k - n + 1) - math.lgamma(n + 1)
    log_subsets = torch.where(counts >= n, log_choose, -math.inf)
    # [N + 1]: share of the subsets of size n that hold only the k lowest samples, for k = 0..N
    share = (log_subsets - log_subsets[-1]).exp()
    rewards = rewards.double().contiguous()
    ordered = rewards.sort(dim=1).values
    below = torch.searchsorted(ordered, rewards)
    up_to = torch.searchsorted(ordered, rewards, right=True)
    weights = (share[up_to] - share[below]) / (up_to - below)
    return (weights * values.double()).sum(dim=1)


def best_of_n_kl(n: int) -> float:
    """Return KL(best-of-n || the policy that sampled) = log n - (n - 1) / n, in nats per response.

    The formula for best-of-n is an upper bound of the KL. The upper bound is exact if every response is improbable and
    no two responses have equal rewards (Beirami et al. 2024, arXiv:2401.01879).

    Source: Stiennon et al. (2020), arXiv:2009.01325.
    """
    check_range("best_of_n_kl", at_least=1, n=n)
    return math.log(n) - (n - 1) / n
