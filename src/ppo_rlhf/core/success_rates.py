"""Pass@k: the probability that at least one of k responses to a prompt is right, estimated from n responses."""

import math

import torch
from torch import Tensor

from ppo_rlhf.core.errors import ConfigError


def pass_at_k(right_N: Tensor, n: int, k: int) -> Tensor:
    """Estimate for each of N prompts, without bias, the probability that at least one of k responses is right.

    The estimate is 1 - C(n - c, k) / C(n, k), where c of the prompt's n responses were right. `right_N` [N] holds the c
    of each prompt, integers from 0 to n. The result is [N], float64. Raises ConfigError if k is not from 1 to n.

    Source: Chen et al. (2021), arXiv:2107.03374, equation 1.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@{k} of {n} responses to a prompt: k must be from 1 to {n}.")
    table = [1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return torch.tensor(table, dtype=torch.float64)[right_N]
