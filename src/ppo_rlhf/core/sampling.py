"""Samples tokens from logits by inverse CDF: with the same uniforms, a row gets the same token in any batch."""

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
    """Return, for each row, the token at which the cumulated probability first exceeds the row's uniform.

    Temperature is applied first, then top-k, then top-p on the tokens that top-k kept. Prefix sums are float64, and the
    uniform is scaled by the last prefix sum. The result is at most the last token of non-zero probability, even if
    rounding lifts a uniform just below 1 to the end. Each row depends on its own logits and uniform only.

    Args:
        logits: [B, V]; −inf rules a token out.
        uniforms: [B] in [0, 1), float64: float32 noise is too coarse for rare tokens.
        temperature: Divides the logits exactly; > 0.
        top_k: Keep the k most probable tokens, and all tokens that tie with the k-th; 0: keep all.
        top_p: Keep the most probable tokens until their mass reaches this share of the mass that top-k kept. The token
            that reaches the share, and all tokens of the same probability, are kept. > 0; 1.0: keep all.

    Returns:
        `tokens` [B] int64 in 0..V−1. `logprobs` [B], nats, float32 (float64 for float64 logits), without gradient,
        under the tempered distribution BEFORE top-k and top-p. `token_logprobs` computes the same quantity, so a
        difference between `logprobs` and the result of `token_logprobs` measures only the numerical difference between
        the sampler's forward pass and the trained forward pass. `logprobs` is NaN for a row whose logits hold NaN or
        +inf, or only −inf; if `logprobs` of a row is NaN, the row's token is arbitrary but in 0..V−1.

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

    # The sampled token is the first column whose prefix sum of weights exceeds u · sum.
    # If rounding makes u · sum equal the sum, take the last token of non-zero weight; in a row of NaN, take V − 1.
    last_B1 = prefix_BV[:, -1:].contiguous()
    threshold_B1 = uniforms.to(torch.float64)[:, None] * last_B1
    drawn_B1 = torch.searchsorted(prefix_BV, threshold_B1, right=True)
    last_token_B1 = torch.searchsorted(prefix_BV, last_B1).clamp(max=vocabulary - 1)
    tokens_B1 = torch.minimum(drawn_B1, last_token_B1)
    logprobs_B = (z_BV.gather(1, tokens_B1) - highest_B1).squeeze(1) - total_B.log().to(z_BV.dtype)
    return tokens_B1.squeeze(1), logprobs_B


def _smallest_kept_logit(z_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the smallest tempered logit [B, 1] that top-k and then top-p keep; tokens with an equal logit are kept."""
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
    # Keep a token while the more probable tokens have less than top_p of the mass; always keep the most probable token.
    kept_B1 = (mass_before_BK < top_p * mass_B1).sum(dim=1, keepdim=True).clamp(min=1)
    return candidates_BK.gather(1, kept_B1 - 1)


def _weights(z: Tensor, candidates: Tensor) -> Tensor:
    """Return exp(z − highest candidate) in float64; `candidates` are in descending order."""
    return (z - candidates[:, :1]).to(torch.float64).exp_()
