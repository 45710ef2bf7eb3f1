"""Asking a model what it can do, by a pass of a few tokens: nothing here knows names of architectures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ppo_rlhf.models.annotations import PreTrainedModel

CLOSE = {2: 0.2, 4: 1e-2, 8: 1e-2}
"""By the bytes of a number: how far packed states may be from padded ones, by the norm of their difference over that
of the states. Ten times what rounding does, so that the answer is the same with other weights: a run that goes on from
a checkpoint must not find another one. A token at another position is off by more."""
WHATEVER_A_MODEL_RAISES = (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, LookupError)
"""When it is asked for something that it does not know."""


@contextmanager
def asking(model: PreTrainedModel) -> Iterator[None]:
    """Compute in the precision of the model's weights and without gradients."""
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        yield


def some_ids(model: PreTrainedModel, length: int) -> Tensor:
    """Return different ids of the vocabulary, as far as it has so many, `[length]`."""
    return torch.arange(1, length + 1) * 7 % vocabulary_size(model)


def states_alone(backbone: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states `[n, H]` of a sequence `[n]` by itself, at positions that the model gives it."""
    states: Tensor = backbone(input_ids=ids[None].to(backbone.device), use_cache=False).last_hidden_state
    return states[0]


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of ids that a model embeds."""
    return int(cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)


def are_close(found: Tensor, expected: Tensor) -> bool:
    """Whether what a model gives of packed sequences is what it gives of padded ones, but for rounding (`CLOSE`)."""
    close = CLOSE[expected.dtype.itemsize]
    found, expected = found.nan_to_num().double(), expected.nan_to_num().double()
    return bool((found - expected).norm() <= close * expected.norm())
