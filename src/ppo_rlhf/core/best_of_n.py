"""Best-of-n: of n responses to a prompt the one with the highest reward is taken. Its expectations, and its KL."""

import math

import torch
from torch import Tensor

from ppo_rlhf.core.checks import check_range, check_shape


def best_of_n_mean(rewards: Tensor, values: Tensor, n: int) -> Tensor:
    """Return the expected value of the response that the reward picks among n, from N >= n samples a prompt, `[M]`.

    It is the mean over all subsets of n samples, so it has no bias. With the samples of a prompt in ascending order of
    reward, the i-th is the best of C(i - 1, n - 1) of the C(N, n) subsets. Samples of equal reward share their weight:
    one of them is taken at random.

    The rewards, `[M, N]`, pick. The values, `[M, N]`, are averaged: the rewards themselves, or a judge's scores. Raises
    ShapeError if the shapes differ, and ConfigError if n is not from 1 to N.

    Source: Nakano et al. (2021), arXiv:2112.09332; Gao et al. (2022), arXiv:2210.10760.
    """
    check_shape("best_of_n_mean", None, rewards=rewards, values=values)
    samples = rewards.shape[1]
    check_range("best_of_n_mean", at_least=1, n=n)
    check_range("best_of_n_mean", at_least=n, samples=samples)
    counts = torch.arange(samples + 1, dtype=torch.float64)
    k = counts.clamp(min=n)
    log_choose = torch.lgamma(k + 1) - torch.lgamma(k - n + 1) - math.lgamma(n + 1)  # of k samples n
    picked_below = torch.where(counts >= n, log_choose, -math.inf)
    share = (picked_below - picked_below[-1]).exp()  # [N + 1], of the subsets of the k lowest samples
    rewards = rewards.double().contiguous()
    ordered = rewards.sort(dim=1).values
    below = torch.searchsorted(ordered, rewards)
    up_to = torch.searchsorted(ordered, rewards, right=True)
    weights = (share[up_to] - share[below]) / (up_to - below)
    return (weights * values.double()).sum(dim=1)


def best_of_n_kl(n: int) -> float:
    """Return log n - (n - 1) / n, in nats a response: KL(best-of-n || the policy that sampled).

    An upper bound: exact if no response is likely and no two have equal rewards (Beirami et al. 2024,
    arXiv:2401.01879).

    Source: Stiennon et al. (2020), arXiv:2009.01325.
    """
    check_range("best_of_n_kl", at_least=1, n=n)
    return math.log(n) - (n - 1) / n
