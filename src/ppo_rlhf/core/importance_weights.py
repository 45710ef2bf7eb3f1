"""Weighs tokens whose sampler gave them another probability than the trained forward does."""

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_range, check_shape, compute_dtype, select
from ppo_rlhf.core.kl import LOG_RATIO_LIMIT


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Compute truncated importance weights min(exp(clamp(old logp − sampler logp, ±20)), cap).

    The weights correct for a sampler whose log-probabilities differ slightly from the log-probabilities of the trained
    forward. Multiply the advantages by the weights: a positive factor on the advantage scales the clipped surrogate by
    the same factor.

    `old_logprobs` come from the trained forward before the update. `sampler_logprobs` come from the sampler that drew
    the tokens. `cap` is > 0. The weights have no gradient. A weight is 0 where `mask` is False, and exactly 1 (or
    `cap`, if `cap` < 1) where the two log-probabilities are equal.

    Source: Ionides (2008), "Truncated Importance Sampling".
    """
    where = "importance_weights"
    check_shape(where, "BT", old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    check_range(where, above=0.0, cap=cap)
    counts_BT = as_bool(mask)
    dtype = compute_dtype(old_logprobs, sampler_logprobs)
    with torch.no_grad():
        log_ratio_BT = select(old_logprobs.to(dtype) - sampler_logprobs.to(dtype), counts_BT, dtype)
        weights_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
        return select(weights_BT, counts_BT, dtype)
