"""Log-probabilities of responses under a model, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.training.packing import PackedSequences, pack


def response_logits(model: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Return the logits that each response token was drawn from, `[B, T, V]`, float32 or wider."""
    width = packed.response_ids.shape[1]
    logits = model(
        input_ids=packed.input_ids,
        attention_mask=packed.attention_mask,
        position_ids=packed.position_ids,
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, -width - 1 : -1]
    return logits if logits.dtype == torch.float64 else logits.float()


def response_logprobs(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Tensor,
    lengths: Tensor,
    temperature: float,
    batch_size: int,
    *,
    pad_token_id: int = 0,
) -> Tensor:
    """Return the log-probability of each response token under the tempered model, `[N, T]` in nats, 0 in padding.

    Args:
        model: A causal language model with dropout off.
        prompt_ids: N prompts as token ids.
        response_ids: `[N, T]` long, right-padded.
        lengths: `[N]` long, tokens in each response.
        temperature: Divides the logits.
        batch_size: Rows in one forward pass.
        pad_token_id: Any id inside the vocabulary; its value has no effect.
    """
    rows = list(range(len(prompt_ids)))
    groups = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    result = torch.zeros(response_ids.shape, dtype=dtype)
    with torch.no_grad():
        for group in groups:
            packed = pack(
                [prompt_ids[i] for i in group], response_ids[group], lengths[group], pad_token_id, model.device
            )
            logprobs = token_logprobs(response_logits(model, packed), packed.response_ids, temperature)
            scatter_rows(result, group, torch.where(packed.is_response, logprobs, 0.0))
    return result


def scatter_rows(target: Tensor, rows: list[int], values: Tensor) -> None:
    """Write `values` `[b, t]` into the first t columns of `target`'s rows."""
    target[rows, : values.shape[1]] = values.to(target.device, target.dtype)
