"""Computes the hidden states of chosen tokens of a language model, and the logits of chosen hidden states.

No code in `passes.forward` depends on the names of architectures. Forward passes of a few tokens probe once per model
whether the model needs padding and how its head computes logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.passes.capabilities import (
    PROBE_ERRORS,
    are_close,
    embedding_gradient,
    has_finite_gradients,
    hidden_states_alone,
    pad_id_of,
    probe_ids,
    probed_once,
    probing,
)
from ppo_rlhf.passes.packed_attention import packed_hidden_states, take_rows, use_packed_attention, use_padded_attention
from ppo_rlhf.passes.prefixes import LEAST_SHARED, Prefix
from ppo_rlhf.passes.token_rows import TokenRows, right_padded

log = logging.getLogger(__name__)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer below a model's head."""
    return cast("PreTrainedModel", model.base_model)


def width_of_states(config: PretrainedConfig) -> int:
    """Return the width of the hidden states that a head reads; raise `ModelError` if the configuration names none."""
    text = config.get_text_config()
    # Only OPT has word_embed_proj_dim: small OPT models project the hidden states to this width before the head.
    width = getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)
    if width is None:
        raise ModelError(f"{type(text).__name__}: this configuration has no hidden_size, so no value head fits it")
    return int(width)


def hidden_states(backbone: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return the last hidden states of all N real tokens, `[N, H]`, sequence by sequence.

    The forward pass computes no padding if the architecture can read packed sequences (`packs`).
    """
    if packs(backbone):
        return packed_hidden_states(backbone, rows.packed_ids, rows.packed_positions, rows.layout)
    return _padded_hidden_states(backbone, rows)


def hidden_states_at(backbone: PreTrainedModel, rows: TokenRows, tokens: Tensor) -> Tensor:
    """Return the last hidden states `[M, H]` of M of the N real tokens; `tokens` `[M]` long are indices in 0..N−1."""
    return take_rows(hidden_states(backbone, rows), tokens)


@probed_once
def packs(backbone: PreTrainedModel) -> bool:
    """Return whether packed sequences get the same hidden states as single sequences; probed at the first call.

    Raises:
        ModelError: The model needs padding, and padding changes the hidden states of real tokens.
    """
    if has_plain_attention(backbone) and _keeps_sequences_apart(backbone):
        return True
    _check_padding(backbone)
    _tell_of_padding(type(backbone).__name__, backbone.config.name_or_path)
    return False


@cache
def _tell_of_padding(architecture: str, path: str) -> None:
    """Log once per process that the model of a path needs padding: a run loads the model several times."""
    name = f"{path} ({architecture})" if path else architecture
    log.info("%s needs padding: its forward passes compute padding, too.", name)


def logits_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function from last hidden states `[n, H]` to logits `[n, V]`; probed at the first call.

    For most models the function is the output layer. For a model that scales or caps its logits, the function runs the
    model's forward with the hidden states in place of the backbone's output.

    Raises:
        ModelError: The output embeddings alone do not give the model's logits, and the model's forward does not either.
    """
    output_class = _find_head(model)
    if output_class is None:
        return model.get_output_embeddings()
    return lambda states: _logits_by_own_forward(model, states, output_class)


def has_plain_attention(backbone: PreTrainedModel) -> bool:
    """Return whether, by its configuration, each layer attends to all earlier tokens, without windows."""
    # For a model that also reads images, read the configuration of the language model within it
    config = backbone.config.get_text_config()
    if layer_types := getattr(config, "layer_types", None):
        return set(layer_types) == {"full_attention"}
    return all(getattr(config, name, None) is None for name in ("sliding_window", "attention_chunk_size"))


def _padded_hidden_states(backbone: PreTrainedModel, rows: TokenRows, *, with_positions: bool = True) -> Tensor:
    states = backbone(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        **({"position_ids": rows.position_ids} if with_positions else {}),
        use_cache=False,
    ).last_hidden_state
    return states.flatten(0, 1).index_select(0, rows.slots)


def _keeps_sequences_apart(backbone: PreTrainedModel) -> bool:
    """Probe packed attention, and leave it switched on if it gives the same hidden states as padded attention.

    Packed hidden states must be close to padded hidden states at the model's default positions, and the hidden states
    of a packed sequence must not depend on the sequence packed before it. Two of the sequences share a prefix. Packed
    and padded hidden states need not be equal to the bit: a mixture of experts multiplies matrices of different sizes
    in packed and padded passes.
    """
    ids = probe_ids(backbone, LEAST_SHARED + 3).tolist()
    sequences = [ids, [*ids[:LEAST_SHARED], ids[0]], ids[1:4]]
    rows = right_padded(sequences, 0, prefix=Prefix(LEAST_SHARED, [0, 1])).to(backbone.device)
    try:
        with probing(backbone):
            expected = _padded_hidden_states(backbone, rows, with_positions=False)
            use_packed_attention(backbone)
            packed = rows.packed_ids, rows.packed_positions, rows.layout
            states, second = packed_hidden_states(backbone, *packed), len(ids) - LEAST_SHARED
            leak = embedding_gradient(backbone, lambda: packed_hidden_states(backbone, *packed)[second:])[0, :second]
            if are_close(states, expected) and not leak.any():
                return True
    except PROBE_ERRORS:
        pass
    use_padded_attention(backbone)
    return False


def _check_padding(backbone: PreTrainedModel) -> None:
    """Probe whether a sequence gets the same hidden states with padding as without, and finite gradients.

    Hidden states are checked with padding on both sides. Gradients are checked with padding on the right only, where
    training pads; padding on the left, where sampling pads, spoils the gradients of more models. Hidden states differ
    if a model does not count positions from 0, or reads padding.

    Raises:
        ModelError: Hidden states with and without padding differ, or hidden states or gradients are not finite.
    """
    ids, mask = probe_ids(backbone, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    left = TokenRows.of(ids.expand(2, -1), mask, (mask.cumsum(-1) - 1).clamp(min=0)).to(backbone.device)
    pad_id = pad_id_of(backbone.config) or 0
    right = right_padded([ids.tolist(), ids[3:].tolist()], pad_id).to(backbone.device)
    with probing(backbone):
        both = torch.stack([_padded_hidden_states(backbone, rows) for rows in (left, right)])
        expected = torch.cat([hidden_states_alone(backbone, row) for row in (ids, ids[3:])])
        is_finite = has_finite_gradients(backbone, lambda: _padded_hidden_states(backbone, right))
    refusal = f"{type(backbone).__name__} needs padding, and"
    if backbone.dtype == torch.float64 and expected.isfinite().all() and not both.isfinite().all():
        # transformers' eager attention masks with the lowest float64 number, which its float32 softmax turns into -inf
        raise ModelError(f"{refusal} in float64 its hidden states beside padding are not finite. Set ppo.dtype=float32")
    if not all(are_close(states, expected) for states in both):
        raise ModelError(
            f"{refusal} padding changes its hidden states: it reads the padding, or counts positions in its own way. "
            "It cannot be trained"
        )
    if not is_finite:
        raise ModelError(f"{refusal} its gradients beside padding are not finite. It cannot be trained")


@probed_once
def _find_head(model: PreTrainedModel) -> type[ModelOutput] | None:
    """Return None if the output layer alone gives the logits, otherwise the class of the backbone's output."""
    ids = probe_ids(model, 4)[None].to(model.device)
    problem = f"{type(model).__name__}: its logits cannot be computed from its last hidden states"
    with probing(model):
        output = backbone_of(model)(input_ids=ids, use_cache=False)
        expected = model(input_ids=ids, use_cache=False).logits
        head = model.get_output_embeddings()
        # Mamba's head fails here: Mamba has float32 states and a 16-bit head, which only its own forward combines
        with suppress(RuntimeError):
            if head is not None and _same(head(output.last_hidden_state), expected):
                return None
        try:
            logits = _logits_by_own_forward(model, output.last_hidden_state[0], type(output))[None]
        except PROBE_ERRORS as error:
            raise ModelError(f"{problem}: {type(error).__name__}: {error}") from error
        if _same(logits, expected):
            return type(output)
    raise ModelError(problem)


def _same(logits: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of logits are equal to the bit: then no cap or scale follows the output layer."""
    return torch.equal(logits.nan_to_num(), expected.nan_to_num())


def _logits_by_own_forward(model: PreTrainedModel, states: Tensor, output_class: type[ModelOutput]) -> Tensor:
    """Run the model's forward with hidden states `[n, H]` in place of its backbone's output."""
    backbone, output = backbone_of(model), output_class(last_hidden_state=states[None])
    backbone.forward = lambda *_, **__: output
    try:
        return model(inputs_embeds=states[None], use_cache=False).logits[0]
    finally:
        del backbone.forward  # deleting the instance's attribute restores the forward of the class
