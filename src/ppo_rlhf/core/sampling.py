"""Tokens from logits and given noise, by inverse CDF: the same uniforms give the same tokens in any batch."""

import torch
from torch import Tensor

from ppo_rlhf.core.checks import check_one_per_row, check_range, check_shape, compute_dtype
from ppo_rlhf.core.errors import ConfigError


@torch.no_grad()
def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The token at which the cumulated probability first exceeds the uniform.

    Temperature first, then top-k, then top-p on what is left. Prefix sums are float64 and the uniform is scaled by
    their last entry; the result is at most the last token of non-zero probability, so a uniform next to 1 never falls
    off the end. Each row depends on its own logits and uniform only.

    Args:
        logits: [B, V]; −inf rules a token out.
        uniforms: [B] in [0, 1), float64: float32 noise is too coarse for rare tokens.
        temperature: Divides the logits exactly; > 0.
        top_k: Keep the k most probable tokens, and any that tie with the last of them; 0: all.
        top_p: Keep the most probable tokens until their mass reaches this share of what top-k left, the token that
            reaches it and any that tie with it included; 1.0: all. > 0.

    Returns:
        `tokens` [B] int64 in 0..V−1. `logprobs` [B], nats, float32 (float64 for float64 logits), under the tempered
        distribution BEFORE top-k and top-p: the same quantity as `token_logprobs`, so that their distance measures
        numerical differences between the sampler's forward and the trained one, nothing else. No gradient. NaN where a
        row's logits hold NaN or +inf, or only −inf: the token is then arbitrary but in range.

    Raises ShapeError if `logits` is not [B, V] or `uniforms` not [B], and ConfigError if an option is out of range.
    """
    where = "sample_tokens"
    check_shape(where, "BV", logits=logits)
    check_one_per_row(where, logits.shape[0], uniforms=uniforms)
    check_range(where, above=0.0, temperature=temperature)
    check_range(where, above=0.0, at_most=1.0, top_p=top_p)
    if top_k < 0 or int(top_k) != top_k:
        raise ConfigError(f"{where}: top_k={top_k!r}; it must be a whole number >= 0. Use 0 to keep every token.")
    vocabulary = logits.shape[1]
    z_BV = logits.to(compute_dtype(logits))
    if temperature != 1.0:
        z_BV = z_BV / temperature
    highest_B1 = z_BV.amax(dim=1, keepdim=True)
    weights_BV = (z_BV - highest_B1).exp_()

    if 0 < top_k < vocabulary or top_p < 1.0:
        total_B = weights_BV.sum(dim=1, dtype=torch.float64)
        weights_BV.masked_fill_(z_BV < _smallest_kept_logit(z_BV, top_k, top_p), 0.0)
        prefix_BV = weights_BV.cumsum(dim=1, dtype=torch.float64)
    else:
        prefix_BV = weights_BV.cumsum(dim=1, dtype=torch.float64)
        total_B = prefix_BV[:, -1]

    # first column whose prefix sum exceeds u · sum; at most the first that reaches the sum, which is the last token of
    # non-zero weight; at most V − 1, for rows of NaN
    last_B1 = prefix_BV[:, -1:].contiguous()
    threshold_B1 = uniforms.to(torch.float64)[:, None] * last_B1
    found_B1 = torch.searchsorted(prefix_BV, threshold_B1, right=True)
    last_token_B1 = torch.searchsorted(prefix_BV, last_B1).clamp(max=vocabulary - 1)
    tokens_B1 = torch.minimum(found_B1, last_token_B1)
    logprobs_B = (z_BV.gather(1, tokens_B1) - highest_B1).squeeze(1) - total_B.log().to(z_BV.dtype)
    return tokens_B1.squeeze(1), logprobs_B


def _smallest_kept_logit(z_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """The smallest tempered logit [B, 1] that top-k, then top-p, keep; comparing logits keeps ties together."""
    if 0 < top_k < z_BV.shape[1]:
        candidates_BK = z_BV.topk(top_k, dim=1).values
        if top_p == 1.0:
            return candidates_BK[:, -1:]
        kept_BV = z_BV >= candidates_BK[:, -1:]
        mass_B1 = _weights(z_BV, candidates_BK).masked_fill_(~kept_BV, 0.0).sum(dim=1, keepdim=True)
    else:
        candidates_BK = z_BV.sort(dim=1, descending=True).values
        mass_B1 = _weights(candidates_BK, candidates_BK).sum(dim=1, keepdim=True)
    weights_BK = _weights(candidates_BK, candidates_BK)
    mass_before_BK = weights_BK.cumsum(dim=1) - weights_BK
    # a candidate stays while the mass of those before it is short of top_p; the first one always does
    kept_B1 = (mass_before_BK < top_p * mass_B1).sum(dim=1, keepdim=True).clamp(min=1)
    return candidates_BK.gather(1, kept_B1 - 1)


def _weights(z: Tensor, candidates: Tensor) -> Tensor:
    """exp(z − highest candidate) in float64; candidates are in descending order."""
    return (z - candidates[:, :1]).to(torch.float64).exp_()
