"""Scores of whole sequences by a reward model: each sequence gets the score that it has by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.models.capabilities import PROBE_ERRORS, are_close, own_pad_id, probe_ids, probed_once, probing
from ppo_rlhf.models.forward import backbone_of, hidden_states_at, packs
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.token_rows import TokenRows, few_shapes_are_faster, right_padded

log = logging.getLogger(__name__)


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Return the scores `[B]` of B sequences of token ids.

    Our reward models score packed sequences where their backbone can. Classifiers of transformers with one label run
    their own forward on a padded batch, or on one sequence at a time if padding changes their scores or they have no
    pad id. `pad_id` fills up the batch unless the model's configuration names its own, by which transformers'
    classifiers find the last token.
    """
    own_pad = own_pad_id(model.config)
    ours = model if isinstance(model, CausalLMRewardModel) and packs(backbone_of(model)) else None
    fill = ours is not None and few_shapes_are_faster(model.device, model.dtype)
    rows = right_padded(sequences, pad_id if own_pad is None else own_pad, fill=fill).to(model.device)
    if ours is not None:
        last = rows.attention_mask.sum(-1).cumsum(0) - 1
        return ours.score(hidden_states_at(backbone_of(model), rows, last))[:, 0]
    has_pad = own_pad is not None or isinstance(model, CausalLMRewardModel)
    return _padded_scores(model, rows) if has_pad and _ignores_padding(model) else _scores_one_by_one(model, rows)


@torch.no_grad()
def reads_end(model: PreTrainedModel, eos: int | None) -> bool:
    """Return whether an end of text after a sequence changes its score: classifiers of transformers skip their pad."""
    if eos is None or own_pad_id(model.config) != eos:
        return True
    ids = [index for index in probe_ids(model, 4).tolist() if index != eos]
    return not are_close(*sequence_scores(model, [ids, [*ids, eos]], eos))


@probed_once
def _ignores_padding(model: PreTrainedModel) -> bool:
    """Return whether a model gives a padded batch the scores that its sequences have one by one."""
    try:
        with probing(model):
            pad_id = own_pad_id(model.config) or 0
            rows = right_padded([probe_ids(model, 5).tolist(), probe_ids(model, 3).tolist()], pad_id).to(model.device)
            same = are_close(_padded_scores(model, rows), _scores_one_by_one(model, rows))
    except PROBE_ERRORS:  # an encoder-decoder wants an end of text, which these sequences do not have
        return True
    if not same:
        log.info("%s: padding changes its scores, so it scores one sequence at a time.", type(model).__name__)
    return same


def _padded_scores(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    # without position_ids: not all models count from 0, and the padding stands on the right
    return model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, 0]


def _scores_one_by_one(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    sequences = rows.packed_ids[0].split(rows.attention_mask.sum(-1).tolist())
    return torch.cat([model(input_ids=ids[None]).logits[:, 0] for ids in sequences])
