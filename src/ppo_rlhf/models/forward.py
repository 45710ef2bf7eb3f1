"""A language model as what PPO needs of it: the states of chosen tokens, and logits from chosen states.

How an architecture is best asked is found out once a model, by asking it: nothing here knows names of architectures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.compilation import compiled_layers, is_compiled
from ppo_rlhf.models.packed_attention import Attention, packed_attention, packed_states, take_rows
from ppo_rlhf.models.passes.behind_attention import ReadTokens, Tail, modules_behind_attention
from ppo_rlhf.models.probe import WHATEVER_A_MODEL_RAISES, are_close, asking, some_ids, states_alone
from ppo_rlhf.models.products.compiled_shapes import fills_rows, rounded_up
from ppo_rlhf.models.token_rows import TokenRows, right_padded

if TYPE_CHECKING:
    from transformers.utils import ModelOutput  # heavy

log = logging.getLogger(__name__)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer below a model's head."""
    return cast("PreTrainedModel", model.base_model)


def token_states(backbone: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return the last hidden states of all real tokens, `[N, H]`, sequence by sequence.

    Without padding where the architecture can do without (`packs`). With gradient checkpointing the backward pass must
    then run within `packing`.
    """
    states = _packed_states if packs(backbone) else _padded_states  # asked first: of the layers as they are
    with compiled_layers(backbone):
        return states(backbone, rows)


def states_at(backbone: PreTrainedModel, rows: TokenRows, places: Tensor) -> Tensor:
    """Return the last hidden states `[M, H]` of those of the N real tokens that are read; places are `[M]` long.

    What follows the last attention is computed for them alone, but not in layers that are compiled. For gradient
    checkpointing see `token_states`.
    """
    if _tail_of(backbone) is None:
        return take_rows(token_states(backbone, rows), places)
    fills = fills_rows(backbone)
    rows = rows.filled if fills else rows
    more = rounded_up(len(places)) - len(places) if fills and not rows.layout.is_even else 0
    return packed_states_at(backbone, rows.packed_ids, rows.packed_positions, rows.layout, places, more)


def packed_states_at(
    backbone: PreTrainedModel, ids: Tensor, positions: Tensor, attention: Attention, places: Tensor, more: int = 0
) -> Tensor:
    """Return the last hidden states `[M, H]` of some of the tokens of a row `[1, N]`; see `ReadTokens`."""
    tail = _tails.get(backbone)
    if tail is None:
        return take_rows(packed_states(backbone, ids, positions, attention), places)
    with tail.in_place():
        attention = tail.attention(attention, ReadTokens(places, ids.shape[1], more))
        return take_rows(packed_states(backbone, ids, positions, attention), places)


def computed_of_read_tokens(backbone: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the modules that `states_at` computes for the tokens that are read alone."""
    tail = _tail_of(backbone)
    return () if tail is None else tail.modules


@contextmanager
def packing(model: PreTrainedModel, *backbones: PreTrainedModel) -> Iterator[None]:
    """Return the context of forward and backward passes of a language model and other backbones.

    A model that checkpoints gradients computes again in its backward pass, as the forward pass did: it attends so, and
    leaves out the same tokens.
    """
    logits_of(model)  # asked now: within the context it could not be asked plainly
    can = [backbone for backbone in (backbone_of(model), *backbones) if packs(backbone)]
    with packed_attention(*can), ExitStack() as stack:
        for tail in map(_tail_of, can):
            if tail is not None:
                stack.enter_context(tail.in_place())
        yield


def packs(backbone: PreTrainedModel) -> bool:
    """Whether a model's states of packed sequences are those of each sequence alone; found out at the first call.

    Raises:
        ModelError: It needs padding, and its states beside padding are not those of the sequence alone.
    """
    if backbone not in _packs:
        can = has_plain_attention(backbone) and _keeps_sequences_apart(backbone)
        if can:
            _tails[backbone] = _find_tail(backbone)
        else:
            _check_padding(backbone)
            log.info("%s needs padding: its passes compute that, too.", type(backbone).__name__)
        _packs[backbone] = can
    return _packs[backbone]


def logits_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the function that gives the logits `[n, V]` of last hidden states `[n, H]`.

    It is the output layer alone, or, where the model does more behind its trunk (it scales or caps its logits), the
    model's own forward with the states in the place of the trunk's.

    Raises:
        ModelError: Neither gives the model's logits.
    """
    if model not in _heads:
        _heads[model] = _find_head(model)
    output_class = _heads[model]
    if output_class is None:
        head: nn.Module = model.get_output_embeddings()
        return head
    return lambda states: _behind_the_trunk(model, states, output_class)


_packs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_tails: WeakKeyDictionary[nn.Module, Tail] = WeakKeyDictionary()
_heads: WeakKeyDictionary[nn.Module, type[ModelOutput] | None] = WeakKeyDictionary()


def _tail_of(backbone: PreTrainedModel) -> Tail | None:
    """Return what can be computed for the tokens that are read alone; None where all tokens are."""
    return _tails.get(backbone) if packs(backbone) and not is_compiled(backbone) else None


def _packed_states(backbone: PreTrainedModel, rows: TokenRows) -> Tensor:
    rows = rows.filled if fills_rows(backbone) else rows
    attention: Attention = rows.layout
    if backbone in _tails:  # not while the model is asked whether it packs
        attention = _tails[backbone].attention(attention, None)
    return packed_states(backbone, rows.packed_ids, rows.packed_positions, attention)[: len(rows.slots)]


def _padded_states(backbone: PreTrainedModel, rows: TokenRows, *, at_given_positions: bool = True) -> Tensor:
    states = backbone(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        **({"position_ids": rows.position_ids} if at_given_positions else {}),
        use_cache=False,
    ).last_hidden_state
    taken: Tensor = states.flatten(0, 1).index_select(0, rows.slots)
    return taken


def has_plain_attention(backbone: PreTrainedModel) -> bool:
    """Whether a configuration says that each layer attends to all that came before: no windows, no other kinds."""
    config = backbone.config.get_text_config()  # within that of a model that reads images, too
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    is_windowed = getattr(config, "layer_types", None) is None and any(window is not None for window in windows)
    return layer_types == {"full_attention"} and not is_windowed


def _keeps_sequences_apart(backbone: PreTrainedModel) -> bool:
    """Ask the model: packed states are close to padded ones at the positions that it gives, and read no other sequence.

    Not to the last bit: what experts get of other sequences changes how many rows their products have.
    """
    first, second = some_ids(backbone, 5), some_ids(backbone, 3)
    rows = _side_by_side(first, second).to(backbone.device)
    try:
        with asking(backbone):
            found = _packed_states(backbone, rows)
            expected = _padded_states(backbone, rows, at_given_positions=False)
            return are_close(found, expected) and not _second_reads_first(backbone, rows)
    except WHATEVER_A_MODEL_RAISES:
        return False


def _second_reads_first(backbone: PreTrainedModel, rows: TokenRows) -> bool:
    """Whether the second packed sequence's states have a gradient for the first one's embeddings.

    It is exactly 0 unless they do, whereas they themselves hardly change in a model that has not learnt to read yet.
    """
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    first = rows.layout.lengths[0]
    handle = backbone.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad(), packed_attention(backbone):  # layers that checkpoint attend in the backward pass, too
            states = _packed_states(backbone, rows)[first:]
            weights = torch.linspace(1.0, 2.0, states.numel(), device=states.device)  # a norm's plain sum is constant
            (gradient,) = torch.autograd.grad(states.flatten() @ weights.to(states.dtype), embedded)
    finally:
        handle.remove()
    return bool(gradient[0, :first].any())


def _check_padding(backbone: PreTrainedModel) -> None:
    """Ask a model for the states of a sequence behind padding: they are to be those that it has alone.

    They are not where positions do not count from 0, or where padding is read. In float64 they are NaN, which would
    look like a run that diverged, where a model masks by that type's smallest number of its own accord, and not through
    transformers' masks (`finite_masks`); narrower types have no such number.

    Raises:
        ModelError: They are not finite, or others.
    """
    ids, mask = some_ids(backbone, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    rows = TokenRows.of(ids.expand(2, -1), mask, (mask.cumsum(-1) - 1).clamp(min=0)).to(backbone.device)
    with asking(backbone):
        found = _padded_states(backbone, rows)
        expected = torch.cat([states_alone(backbone, row) for row in (ids, ids[3:])])
    refusal = f"{type(backbone).__name__} cannot do without padding, and"
    if backbone.dtype == torch.float64 and expected.isfinite().all() and not found.isfinite().all():
        raise ModelError(f"{refusal} in float64 its states beside padding are not finite. Set ppo.dtype=float32")
    if not are_close(found, expected):
        raise ModelError(
            f"{refusal} its states behind padding are not those of the sequence alone: it reads the padding, or counts "
            "positions in its own way. It cannot be trained"
        )


def _find_tail(backbone: PreTrainedModel) -> Tail:
    """Watch a pass of a model that packs for what follows its attention; nothing, if that needs all tokens."""
    rows = _side_by_side(some_ids(backbone, 5), some_ids(backbone, 3)).to(backbone.device)
    ids, positions, layout = rows.packed_ids, rows.packed_positions, rows.layout
    read = ReadTokens(torch.tensor([1, 4, 6], device=backbone.device), len(rows.slots))

    def states(attention: Attention) -> Tensor:
        return packed_states(backbone, ids, positions, attention)

    with asking(backbone):
        expected = states(layout)
        tail = Tail(modules_behind_attention(backbone, states, layout))
        try:
            with tail.in_place():
                found = states(tail.attention(layout, read))
        except WHATEVER_A_MODEL_RAISES:
            return Tail([])
    return tail if are_close(take_rows(found, read.places), take_rows(expected, read.places)) else Tail([])


def _find_head(model: PreTrainedModel) -> type[ModelOutput] | None:
    """Return None where the output layer alone gives the logits, else the class of what the trunk returns."""
    ids = some_ids(model, 4)[None].to(model.device)
    problem = f"{type(model).__name__}: its logits cannot be computed from its last hidden states"
    with asking(model):
        output = backbone_of(model)(input_ids=ids, use_cache=False)
        expected = model(input_ids=ids, use_cache=False).logits
        head = model.get_output_embeddings()
        if head is not None and _same(head(output.last_hidden_state), expected):
            return None
        try:
            found = _behind_the_trunk(model, output.last_hidden_state[0], type(output))[None]
        except WHATEVER_A_MODEL_RAISES as error:
            raise ModelError(f"{problem}: {type(error).__name__}: {error}") from error
        if _same(found, expected):
            return type(output)
    raise ModelError(problem)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal to the last bit: the same products, and no cap or scale behind them."""
    return torch.equal(found.nan_to_num(), expected.nan_to_num())


def _behind_the_trunk(model: PreTrainedModel, states: Tensor, output_class: type[ModelOutput]) -> Tensor:
    """Run the model's forward with these states `[n, H]`, and nothing else, in the place of what its trunk returns."""
    trunk, output = backbone_of(model), output_class(last_hidden_state=states[None])
    before = vars(trunk).get("forward")
    trunk.forward = lambda *_, **__: output
    try:
        logits: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
    finally:
        del trunk.forward
        if before is not None:
            trunk.forward = before
    return logits


def _side_by_side(first: Tensor, second: Tensor) -> TokenRows:
    return right_padded([first.tolist(), second.tolist()], 0)
