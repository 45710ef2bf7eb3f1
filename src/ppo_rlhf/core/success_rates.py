"""Pass@k: how often one of k responses to a prompt is right, from n of which some were."""

import math

import torch
from torch import Tensor

from ppo_rlhf.core.errors import ConfigError


def pass_at_k(right_N: Tensor, n: int, k: int) -> Tensor:
    """Probability [N], float64, that at least one of k responses drawn without replacement is right, unbiased.

    1 - C(n - c, k) / C(n, k) where c, `right_N`, of a prompt's n responses were right, ints from 0 to n (Chen et al.
    2021, arXiv:2107.03374, equation 1). Raises ConfigError if k is not from 1 to n.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@{k} of {n} responses to a prompt: k must be from 1 to {n}.")
    table = [1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return torch.tensor(table, dtype=torch.float64)[right_N]
