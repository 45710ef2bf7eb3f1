"""Scoring by a reward model."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import processes
from ppo_rlhf.core.errors import ModelError, RewardError
from ppo_rlhf.models.loading import context_length
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.models.sequence_scores import reads_end, sequence_scores
from ppo_rlhf.models.tokenizers import append_end, encode_texts, same_vocabulary, special_ids
from ppo_rlhf.rewards.scoring import ResponseBatch

_warn_once = cache(logging.getLogger(__name__).warning)


class ModelScorer:
    """Scores prompt + response by a reward model, built as in reward training: end of text iff the response stopped."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        device: torch.device | None = None,
    ) -> None:
        """Take the reward model with its tokenizer, and the tokenizer of the responses.

        It scores on `device`, wherever the model is between its calls; None: where the model is.
        """
        self.model = model
        self._tokenizer = tokenizer
        self._policy_tokenizer = policy_tokenizer
        self.reads_policy_ids = same_vocabulary(tokenizer, policy_tokenizer)
        self.special_ids = special_ids(policy_tokenizer)
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
            ModelError: A sequence is longer than the model's context.
            RewardError: A score is NaN or infinite.
        """
        sequences = self._token_sequences(batch) if self.reads_policy_ids else self._text_sequences(batch)
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

    def _token_sequences(self, batch: ResponseBatch) -> list[list[int]]:
        rows = zip(batch.prompt_ids, batch.response_ids, batch.terminated, strict=True)
        eos, has_turns = self._tokenizer.eos_token_id, bool(batch.turns)
        return [
            prompt + close_response(response, stopped, eos, self.special_ids, has_turns=has_turns)
            for prompt, response, stopped in rows
        ]

    def _text_sequences(self, batch: ResponseBatch) -> list[list[int]]:
        # decoded together: the policy's tokenizer knows whether there is a space between prompt and response
        rows = [prompt + response for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True)]
        texts = self._policy_tokenizer.batch_decode(rows, skip_special_tokens=True)
        eos = self._tokenizer.eos_token_id
        return [
            append_end(ids, eos) if stopped else ids
            for ids, stopped in zip(encode_texts(texts, self._tokenizer), batch.terminated, strict=True)
        ]


def close_response(
    response: list[int], stopped: bool, eos: int | None, special_ids: frozenset[int], *, has_turns: bool = False
) -> list[int]:
    """Return the response as reward training shows it: the reward model's end of text iff the response stopped.

    A special stop token is replaced by `eos`; a stop token that is text, such as a full stop, stays before it. With
    turns, an episode can be cut off after the stop token of a turn, which then does not end the text.
    """
    if not stopped:
        return response[:-1] if has_turns and response and response[-1] in special_ids else response
    text = response[:-1] if response and response[-1] in special_ids else response
    return append_end(text, eos)


@torch.no_grad()
def score_sequences(model: PreTrainedModel, sequences: list[list[int]], pad_id: int, batch_size: int) -> Tensor:
    """Return the reward model's scores [N] of token sequences on the CPU, float32 or wider.

    Each process scores its share and gets all scores. Sequences of similar length make a batch, which is not padded if
    the architecture does not need it.
    """
    own = processes.own_share(len(sequences))
    by_length = sorted(own, key=lambda row: len(sequences[row]))
    scores = torch.zeros(len(own), dtype=torch.promote_types(model.dtype, torch.float32))
    for start in range(0, len(by_length), batch_size):
        rows = by_length[start : start + batch_size]
        found = sequence_scores(model, [sequences[row] for row in rows], pad_id)
        scores[[row - own.start for row in rows]] = found.to(scores)
    return processes.gather_rows(scores)
