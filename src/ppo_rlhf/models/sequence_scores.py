"""Scores of whole sequences by a reward model, without padding where that gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.asking import are_close, asking, some_ids
from ppo_rlhf.models.passes.token_rows import TokenRows, right_padded
from ppo_rlhf.models.passes.trunks import backbone_of, packs, states_at

_without_padding: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Return a reward model's scores `[B]`: without padding where that gives the same.

    Args:
        model: Of class `CausalLMRewardModel`, or any classifier of transformers with one label.
        sequences: B sequences of token ids.
        pad_id: Fills up the padded form, unless the model's configuration names its own: transformers' classifiers
            take the last id that is not that one.
    """
    own = model.config.get_text_config().pad_token_id
    rows = right_padded(sequences, pad_id if own is None else own).to(model.device)
    if model not in _without_padding:
        _without_padding[model] = _scores_without_padding(model)
    return _packed_scores(model, rows) if _without_padding[model] else _padded_scores(model, rows)


def _scores_without_padding(model: PreTrainedModel) -> bool:
    """Ask the model: are its scores those of its linear head on packed states?"""
    if not isinstance(getattr(model, "score", None), nn.Linear) or not packs(backbone_of(model)):
        return False
    pad_id = model.config.get_text_config().pad_token_id or 0  # what transformers' classifiers take for the end
    rows = right_padded([some_ids(model, 5).tolist(), some_ids(model, 3).tolist()], pad_id).to(model.device)
    with asking(model):
        return are_close(_packed_scores(model, rows), _padded_scores(model, rows))


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
    scores: Tensor = model.score(states_at(backbone_of(model), rows, last))  # type: ignore[operator]
    return scores[:, 0]


def _padded_scores(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    logits: Tensor = model(
        input_ids=rows.input_ids, attention_mask=rows.attention_mask, position_ids=rows.position_ids
    ).logits
    return logits[:, 0]
