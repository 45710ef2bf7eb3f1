"""Scoring by a reward model."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import processes
from ppo_rlhf.core.errors import ModelError, RewardError
from ppo_rlhf.models.context import context_length
from ppo_rlhf.models.free_memory import sequences_at_a_time
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.models.sequence_scores import reads_end, sequence_scores
from ppo_rlhf.rewards.rendering import Rendering
from ppo_rlhf.rewards.scoring import ResponseBatch

_warn_once = cache(logging.getLogger(__name__).warning)


class ModelScorer:
    """Scores prompts with their responses by a reward model, shown as in reward training (`Rendering`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        batch_size: int | None = 64,
        device: torch.device | None = None,
    ) -> None:
        """Take the reward model with its tokenizer, and the tokenizer of the responses.

        It scores on `device`, wherever the model is between its calls; None: where the model is. `batch_size`
        sequences go in one pass; None: what memory allows.
        """
        self.model = model
        self._tokenizer = tokenizer
        self.rendering = Rendering(tokenizer, policy_tokenizer)
        self._batch_size = batch_size
        self._device = device or model.device
        self.context = context_length(model.config)
        if not reads_end(model, tokenizer.eos_token_id):
            _warn_once(
                f"The reward model ({type(model).__name__}) never reads the end of a text: it scores at the last token "
                "that is not its pad token, which is also its end of text."
            )

    def __call__(self, batch: ResponseBatch) -> Tensor:
        """Return the scores [N], on the CPU.

        Raises:
            DataError: A prompt is a chat that the reward model's chat template does not take.
            ModelError: A sequence is longer than the model's context.
            RewardError: A score is NaN or infinite.
        """
        sequences = self.rendering.sequences(batch)
        longest = max((len(ids) for ids in sequences), default=0)
        if self.context is not None and longest > self.context:
            raise ModelError(
                f"a prompt with its response has {longest} tokens, the reward model reads {self.context}. "
                "Shorten the prompts or ppo.response_length, or use a reward model with a longer context."
            )
        with on_device(self.model, self._device):
            scores = score_sequences(self.model, sequences, self._tokenizer.pad_token_id, self._batch_size)
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            raise RewardError(
                f"the reward model gave response {row} the score {scores[row].item()}. Check its weights, or set "
                "ppo.dtype to bfloat16 or float32 if it overflows in float16."
            )
        return scores


@torch.no_grad()
def score_sequences(model: PreTrainedModel, sequences: list[list[int]], pad_id: int, batch_size: int | None) -> Tensor:
    """Return the reward model's scores [N] of token sequences on the CPU, float32 or wider.

    Each process scores its share and gets all scores. Sequences of similar length make a batch, which is not padded if
    the architecture does not need it.
    """
    lengths = [len(ids) for ids in sequences]
    hands = processes.dealt_rows(lengths)
    own = hands[processes.own_rank()]
    by_length = sorted(own, key=lambda row: lengths[row])
    scores = torch.zeros(len(sequences), dtype=torch.promote_types(model.dtype, torch.float32))
    size = batch_size or sequences_at_a_time(model, len(by_length), max(lengths, default=0))
    for start in range(0, len(by_length), size):
        rows = by_length[start : start + size]
        found = sequence_scores(model, [sequences[row] for row in rows], pad_id)
        scores[rows] = found.to(scores)
    return processes.gather_dealt(scores[own], hands)
