"""Perplexity of given texts under two policies: what the training costs where the reward does not look."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.win_rate import CONFIDENCE
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.ppo.rollouts import compute_logprobs

TOKENS, SFT, PPO = "tokens", "sft", "ppo"
"""Columns of the table of losses, with one row for each text: the number of tokens that count, and the sum of their
negative log-likelihoods under each policy, in nats."""


def text_losses(
    model: PreTrainedModel,
    input_ids: Sequence[Sequence[int]],
    counts: Sequence[Sequence[bool]],
    config: PPOConfig,
    *,
    device: torch.device,
    batch_size: int,
    pad_token_id: int,
) -> NDArray[np.float64]:
    """Return the negative log-likelihood `[N]` of each text, in nats, summed over the tokens that count.

    The logits are not tempered. Each process computes its shard of the texts.

    Args:
        model: A causal language model with dropout off.
        input_ids: N texts as token ids.
        counts: For each token of each text whether it counts. The first token of a text never does, because no token
            precedes it; of the others at least one must count.
        config: The precision of the forward passes.
        device: The device to compute on.
        batch_size: Texts in a forward pass.
        pad_token_id: Any token id, used for padding; no result depends on padding.
    """
    # What stands before the first token that counts is the prompt: no logits are computed for its tokens
    starts = [row.index(True, 1) for row in map(list, counts)]
    ends = [torch.tensor(ids[start:]) for ids, start in zip(input_ids, starts, strict=True)]
    responses = Responses(
        response_ids=pad_sequence(ends, batch_first=True, padding_value=pad_token_id),
        lengths=torch.tensor([len(ids) for ids in ends]),
        terminated=torch.ones(len(ends), dtype=torch.bool),
        policy_mask=pad_sequence(
            [torch.tensor(row[start:]) for row, start in zip(counts, starts, strict=True)], batch_first=True
        ),
    )
    logprobs = compute_logprobs(
        model,
        [list(ids[:start]) for ids, start in zip(input_ids, starts, strict=True)],
        responses,
        config,
        temperature=1.0,
        device=device,
        batch_size=batch_size,
        pad_token_id=pad_token_id,
        halving=Halving("the perplexity of reference texts", "evaluation.batch_size"),
    )
    return np.asarray(-logprobs.double().sum(dim=1).numpy())


def per_token(losses_N: NDArray[np.float64], tokens_N: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean per token R = Σ losses / Σ tokens over N texts, and its standard error.

    Tokens of one text are correlated, so texts are the observations, and R is a ratio of two means over texts. Its
    standard error is the jackknife's, which leaves out each text in turn: √((N − 1) / N · Σ (R_i − R)²) with
    R_i − R = (R · tokens_i − losses_i) / Σ_{j≠i} tokens_j (Cochran 1977, Sampling Techniques, section 6.17), and NaN
    for one text. A long text pulls R towards itself, which hides its own deviation; leaving it out does not. For texts
    of one length it is the standard error of a mean.
    """
    number, tokens = len(tokens_N), float(tokens_N.sum())
    mean = float(losses_N.sum() / tokens)
    if number < 2:
        return mean, math.nan
    moves_N = (mean * tokens_N - losses_N) / (tokens - tokens_N)
    return mean, math.sqrt((number - 1) / number * float(np.square(moves_N).sum()))


def degrees_of_freedom(tokens_N: NDArray[np.float64]) -> float:
    """Return the degrees of freedom of `per_token`'s standard error: (Σ tokens²)² / Σ tokens⁴ − 1, at least 0.2.

    The error is a sum over texts, and a text's part grows with its square of tokens: a few long texts decide it, as few
    texts would (Satterthwaite 1946, Biometrics Bulletin 2, 110-114). Texts of one length have N − 1. The bound keeps
    Student's quantile finite where one text has almost all tokens.
    """
    squares_N = np.square(tokens_N / tokens_N.max())
    return max(0.2, float(squares_N.sum() ** 2 / np.square(squares_N).sum()) - 1.0)


def compare_perplexity(losses: pd.DataFrame) -> dict[str, float]:
    """Return the metrics `eval/reference_*` of a table of losses; none for an empty table.

    The perplexity is exp(mean negative log-likelihood per token). `eval/reference_nll_change` is PPO's mean negative
    log-likelihood per token minus SFT's on the same texts: the logarithm of the ratio of the two perplexities. Its 95 %
    interval is `per_token` of the differences ± Student's t with `degrees_of_freedom` times the standard error; one
    text has no interval.
    """
    if losses.empty:
        return {}
    tokens_N, sft_N, ppo_N = _columns(losses)
    change, error = per_token(ppo_N - sft_N, tokens_N)
    metrics = {
        "eval/reference_perplexity": _perplexity(ppo_N, tokens_N)[0],
        "eval/reference_perplexity_sft": _perplexity(sft_N, tokens_N)[0],
        "eval/reference_nll_change": change,
    }
    if len(losses) > 1:
        half = float(stdtrit(degrees_of_freedom(tokens_N), 0.5 + CONFIDENCE / 2.0)) * error
        metrics |= {"eval/reference_nll_change_low": change - half, "eval/reference_nll_change_high": change + half}
    return metrics


def perplexity_row(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the row `reference_perplexity` for the table of `comparison.before_after`.

    The standard errors are those of `per_token` times the perplexity (the delta method).
    """
    tokens_N, sft_N, ppo_N = _columns(losses)
    (sft, sft_error), (ppo, ppo_error) = (_perplexity(side_N, tokens_N) for side_N in (sft_N, ppo_N))
    errors = {"sft_se": sft_error, "ppo_se": ppo_error, "change_se": per_token(ppo * ppo_N - sft * sft_N, tokens_N)[1]}
    return pd.DataFrame([{"measure": "reference_perplexity", "sft": sft, "ppo": ppo, **errors}])


def _columns(losses: pd.DataFrame) -> list[NDArray[np.float64]]:
    return [losses[name].to_numpy(dtype=np.float64) for name in (TOKENS, SFT, PPO)]


def _perplexity(losses_N: NDArray[np.float64], tokens_N: NDArray[np.float64]) -> tuple[float, float]:
    """Return the perplexity and its standard error."""
    mean, error = per_token(losses_N, tokens_N)
    with np.errstate(over="ignore"):  # beyond 709 nats per token the perplexity is infinite
        perplexity = float(np.exp(mean))
    return perplexity, perplexity * error
