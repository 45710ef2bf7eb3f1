"""What a model can do: found by probes, forward passes of a few tokens, without knowing its architecture's name.

Each probe runs once for a model: `probed_once` keeps what it found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_rlhf.core.errors import ModelError, in_one_line

CLOSE = {2: 0.2, 4: 1e-2, 8: 1e-2}
"""By the bytes of a number: the largest norm of a difference, over the norm of the expected hidden states. It is ten
times the effect of rounding, so that a resumed run gets the same answer with other weights. A token at another position
differs by more."""
PROBE_ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, LookupError)
"""What models raise when they are asked for something that they do not know."""

Found = TypeVar("Found")
_found: WeakKeyDictionary[nn.Module, dict[Callable[..., Any], Any]] = WeakKeyDictionary()


def probed_once(probe: Callable[[PreTrainedModel], Found]) -> Callable[[PreTrainedModel], Found]:
    """Let a probe run at the first call with a model; later calls return what it found."""

    @wraps(probe)
    def found(model: PreTrainedModel) -> Found:
        known = _found.setdefault(model, {})
        if probe not in known:
            known[probe] = probe(model)
        return known[probe]

    return found


def copy_probe_results(model: nn.Module, copied: nn.Module) -> None:
    """Let a copy of a model be known by what probes found for the model."""
    if model in _found:
        _found[copied] = dict(_found[model])


@contextmanager
def probing(model: PreTrainedModel) -> Iterator[None]:
    """Compute in the precision of the model's weights and without gradients."""
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        yield


def probe_ids(model: PreTrainedModel, length: int) -> Tensor:
    """Return ids of the vocabulary, `[length]`, all different if it has that many."""
    return torch.arange(1, length + 1) * 7 % vocabulary_size(model)


def hidden_states_alone(backbone: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states `[n, H]` of one sequence `[n]`, at the positions that the model gives it."""
    return backbone(input_ids=ids[None].to(backbone.device), use_cache=False).last_hidden_state[0]


def embedding_gradient(backbone: PreTrainedModel, compute: Callable[[], Tensor]) -> Tensor:
    """Return the gradient of hidden states for the embeddings of the pass that computes them, in the embeddings' shape.

    It is exactly 0 unless the states read them. In a model with small weights the states themselves hardly show it.
    """
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    handle = backbone.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            states = compute()
            weights = torch.linspace(1.0, 2.0, states.numel(), device=states.device)  # a norm's plain sum is constant
            (gradient,) = torch.autograd.grad(states.flatten() @ weights.to(states.dtype), embedded)
    finally:
        handle.remove()
    return gradient


def check_causal(model: PreTrainedModel, where: str) -> None:
    """Raise `ModelError` if hidden states read tokens that come later; `where` says where the model comes from."""
    problem = "reads tokens that come later, which a policy has yet to write"
    try:
        if not gradient_of_later_tokens(model).any():
            return
    except PROBE_ERRORS as error:
        reason = in_one_line(error)
        problem = f"is an encoder-decoder, or its base model gives no hidden states from token ids only ({reason})"
    raise ModelError(f"{where}: {type(model).__name__} {problem}; give a language model that reads from left to right")


def gradient_of_later_tokens(model: PreTrainedModel) -> Tensor:
    """Return the gradient of the first hidden states for the embeddings of later tokens: 0 in a causal model."""
    backbone, ids = cast("PreTrainedModel", model.base_model), probe_ids(model, 5)
    with probing(model):
        gradient = embedding_gradient(backbone, lambda: hidden_states_alone(backbone, ids)[:2])
    return gradient.flatten(0, 1)[2:]  # XLNet's embeddings have the tokens in their first dimension


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of ids that a model embeds."""
    return int(cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)


def argument_of(model: PreTrainedModel, *names: str) -> str | None:
    """Return the name by which a model's `forward` takes an argument, one of `names`; None if it has no such argument.

    Versions of transformers name it differently, and a model with code of its own may keep an earlier name.

    Raises:
        ModelError: The model has none of the names, and this version's Llama neither, so that a model without the
            argument cannot be told from one that takes it by another name.
    """
    own = inspect.signature(type(model).forward).parameters
    found = next((name for name in names if name in own), None)
    if found is None and not inspect.signature(transformers.LlamaForCausalLM.forward).parameters.keys() & set(names):
        raise ModelError(
            f"transformers {transformers.__version__}: its models' forward has no argument {' or '.join(names)} any "
            "more; install the version that ppo_rlhf was tested with (constraints.txt)"
        )
    return found


def pad_id_of(config: PretrainedConfig) -> int | None:
    """Return the pad id that a model's configuration names; CodeGen's and RWKV's have no such field."""
    return getattr(config.get_text_config(), "pad_token_id", None)


def are_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether hidden states are equal up to rounding (`CLOSE`)."""
    close = CLOSE[expected.dtype.itemsize]
    found, expected = found.nan_to_num().double(), expected.nan_to_num().double()
    return bool((found - expected).norm() <= close * expected.norm())
