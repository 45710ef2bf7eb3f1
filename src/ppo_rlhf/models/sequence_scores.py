"""Scores of whole sequences by a reward model, without padding where that gives the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forward import backbone_of, hidden_states_at, packs
from ppo_rlhf.models.probe import PROBE_ERRORS, are_close, probe_ids, probing
from ppo_rlhf.models.token_rows import TokenRows, right_padded

log = logging.getLogger(__name__)

Way = Callable[[PreTrainedModel, TokenRows], Tensor]
"""Computes scores `[B]` of B sequences, padded on the right."""


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Return a reward model's scores `[B]`: those that each sequence has alone.

    Without padding where that gives the same, else padded; one by one where padding is read, too.

    Args:
        model: Of class `CausalLMRewardModel`, or any classifier of transformers with one label.
        sequences: B sequences of token ids.
        pad_id: Fills up the padded form, unless the model's configuration names its own: transformers' classifiers
            take the last id that is not that one.
    """
    own = model.config.get_text_config().pad_token_id
    rows = right_padded(sequences, pad_id if own is None else own).to(model.device)
    if model not in _ways:
        _ways[model] = _find_way(model)
    return _ways[model](model, rows)


_ways: WeakKeyDictionary[nn.Module, Way] = WeakKeyDictionary()


def _find_way(model: PreTrainedModel) -> Way:
    """Ask the model for the quickest way to the scores that sequences have alone."""
    ways: list[Way] = [_packed_scores, _padded_scores] if _has_linear_head_on_packed_states(model) else [_padded_scores]
    try:
        with probing(model):
            pad_id = model.config.get_text_config().pad_token_id or 0  # what transformers' classifiers take for the end
            rows = right_padded([probe_ids(model, 5).tolist(), probe_ids(model, 3).tolist()], pad_id).to(model.device)
            expected = _scores_one_by_one(model, rows)
            for way in ways:
                if are_close(way(model, rows), expected):
                    return way
    except PROBE_ERRORS:  # an encoder-decoder reads its state at an end of text, which is not here
        return _padded_scores
    log.info("%s scores a sequence beside padding otherwise than alone: one by one.", type(model).__name__)
    return _scores_one_by_one


def _has_linear_head_on_packed_states(model: PreTrainedModel) -> bool:
    if not isinstance(getattr(model, "score", None), nn.Linear):
        return False
    try:
        return packs(backbone_of(model))
    except ModelError:  # padding on the left is not for it; here there is none
        return False


def _packed_scores(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    from ppo_rlhf.models.reward_config import MODEL_TYPE  # imports transformers' configurations

    lengths = rows.attention_mask.sum(-1)
    ends = lengths.cumsum(0)
    last = ends - 1
    pad_id = model.config.get_text_config().pad_token_id
    if model.config.model_type != MODEL_TYPE and pad_id is not None:
        # transformers' classifiers read the state of the last id that is not pad
        columns = torch.arange(rows.input_ids.shape[1], device=lengths.device)
        counted = torch.where((rows.input_ids != pad_id) & rows.attention_mask.bool(), columns, 0)
        last = ends - lengths + counted.amax(1)  # sequences are padded on the right: columns count from their start
    scores: Tensor = model.score(hidden_states_at(backbone_of(model), rows, last))  # type: ignore[operator]
    return scores[:, 0]


def _padded_scores(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    # without positions: padded on the right they are the model's own, and not all models count from 0
    logits: Tensor = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
    return logits[:, 0]


def _scores_one_by_one(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    sequences = rows.packed_ids[0].split(list(rows.layout.lengths))
    return torch.cat([model(input_ids=ids[None]).logits[:, 0] for ids in sequences])
