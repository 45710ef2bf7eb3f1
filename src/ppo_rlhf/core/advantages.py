"""Generalised advantage estimation over right-padded responses."""

import torch
from torch import Tensor, nn

from ppo_rlhf.core.checks import (
    as_bool,
    check_one_per_row,
    check_prefix_mask,
    check_range,
    check_shape,
    compute_dtype,
    select,
)
from ppo_rlhf.core.rewards import last_token_mask


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """λ of each response for the policy's advantages, [B] float64 in 0..1: max(0, 1 − 1 / (alpha · length)).

    With this λ and γ = 1, the weights λ^k of a long response's TD errors add up to alpha · length. `lengths` [B] are in
    tokens; a length of 0 counts as 1. `alpha` is > 0. Raises ShapeError if `lengths` is not [B], and ConfigError if
    `alpha` is not > 0.

    Source: Yue et al. (2025), "VAPO", arXiv:2504.05118, length-adaptive GAE.
    """
    check_shape("length_adaptive_lambda", "B", lengths=lengths)
    check_range("length_adaptive_lambda", above=0.0, alpha=alpha)
    return (1.0 - 1.0 / (alpha * lengths.to(torch.float64).clamp(min=1.0))).clamp(min=0.0)


def generalized_advantage_estimate(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    *,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the advantage and the return of each response token.

    With L the last real token of a row and V_{L+1} its bootstrap value:
        δ_t = r_t + gamma · V_{t+1} − V_t,   A_t = δ_t + gamma · lam · A_{t+1},   A_{L+1} = 0,   R_t = A_t + V_t.

    Args:
        rewards: r_t [B, T], received for emitting token t.
        values: V_t [B, T], the critic's value before token t is emitted.
        mask: [B, T], True on the response's real tokens, a prefix of each row.
        gamma: Discount per token, 0..1.
        lam: λ, 0 (one-step) .. 1 (Monte Carlo): one number for all rows, or a tensor [B] with one λ for each row. The
            range of a tensor `lam` is not checked.
        bootstrap_values: V_{L+1} [B], the value after the last real token of a cut-off response; 0 for a response that
            ended with a stop token. None: the bootstrap value is 0 for all rows, so that the last token is terminal.

    Returns:
        `advantages` and `returns`, each [B, T], 0 in padding. Advantages are not whitened.

    Raises ShapeError if shapes do not fit or the mask has holes, and ConfigError if `gamma` or `lam` is outside 0..1.

    Source: Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    eq. 16, summed to the end of the response.
    """
    where = "generalized_advantage_estimate"
    check_shape(where, "BT", rewards=rewards, values=values, mask=mask)
    check_range(where, at_least=0.0, at_most=1.0, gamma=gamma)
    dtype = compute_dtype(rewards, values)
    if isinstance(lam, Tensor):
        check_one_per_row(where, rewards.shape[0], lam=lam)
        lam = lam.to(dtype)
    else:
        check_range(where, at_least=0.0, at_most=1.0, lam=lam)
    is_response_BT = as_bool(mask)
    check_prefix_mask(where, is_response_BT)

    rewards_BT = select(rewards, is_response_BT, dtype)
    values_BT = select(values, is_response_BT, dtype)
    next_values_BT = nn.functional.pad(values_BT, (0, 1))[:, 1:]
    if bootstrap_values is not None:
        check_one_per_row(where, rewards.shape[0], bootstrap_values=bootstrap_values)
        after_end_BT = bootstrap_values.to(dtype)[:, None].expand_as(values_BT)
        next_values_BT = torch.where(last_token_mask(is_response_BT), after_end_BT, next_values_BT)

    # δ is 0 in padding, like rewards and values, so the recursion from the right reaches a row's last real token with 0
    deltas_BT = rewards_BT + gamma * next_values_BT - values_BT
    running_B = deltas_BT.new_zeros(deltas_BT.shape[0])
    reversed_columns = []
    for delta_B in reversed(deltas_BT.unbind(dim=1)):
        running_B = delta_B + gamma * lam * running_B
        reversed_columns.append(running_B)
    advantages_BT = torch.stack(reversed_columns[::-1], dim=1) if reversed_columns else deltas_BT
    return advantages_BT, advantages_BT + values_BT
