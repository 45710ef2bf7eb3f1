"""Probes what a model can do with forward passes of a few tokens, without knowing the name of its architecture.

Each probe runs once per model: `probed_once` caches the probe's result.
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
"""Tolerance of `are_close` by the bytes of a number: the largest norm of the difference between hidden states, relative
to the norm of the expected hidden states. The tolerance is ten times the effect of rounding, so that a probe gives the
same result after training has changed the weights. Hidden states of a token at a wrong position differ by more than the
tolerance."""
PROBE_ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, LookupError)
"""Errors that models raise for arguments that they do not support."""

Result = TypeVar("Result")
_results: WeakKeyDictionary[nn.Module, dict[Callable[..., Any], Any]] = WeakKeyDictionary()


def probed_once(probe: Callable[[PreTrainedModel], Result]) -> Callable[[PreTrainedModel], Result]:
    """Cache the result of a probe per model: the probe runs at the first call with a model."""

    @wraps(probe)
    def cached(model: PreTrainedModel) -> Result:
        results = _results.setdefault(model, {})
        if probe not in results:
            results[probe] = probe(model)
        return results[probe]

    return cached


def copy_probe_results(model: nn.Module, copied: nn.Module) -> None:
    """Copy the cached probe results of a model to a copy of the model."""
    if model in _results:
        _results[copied] = dict(_results[model])


@contextmanager
def probing(model: PreTrainedModel) -> Iterator[None]:
    """Switch off autocast and gradients within the block, for a probe in the precision of the model's weights."""
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        yield


def probe_ids(model: PreTrainedModel, length: int) -> Tensor:
    """Return token ids `[length]` for a probe, all different if the vocabulary is large enough."""
    return torch.arange(1, length + 1) * 7 % vocabulary_size(model)


def hidden_states_alone(backbone: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states `[n, H]` of one sequence of ids `[n]`, with the model's default positions."""
    return backbone(input_ids=ids[None].to(backbone.device), use_cache=False).last_hidden_state[0]


def embedding_gradient(backbone: PreTrainedModel, compute: Callable[[], Tensor]) -> Tensor:
    """Return the gradient of the hidden states that `compute` returns with respect to the token embeddings.

    The gradient has the embeddings' shape. The gradient is exactly 0 for tokens that the hidden states do not depend
    on. A gradient shows a dependence more reliably than a changed token: in a model with small weights, a changed token
    hardly changes the hidden states.
    """
    with _embedded(backbone) as embedded, torch.enable_grad():
        states = compute()
        # Weight the outputs unequally: the plain sum of a layer norm's outputs is constant and has no gradient.
        weights = torch.linspace(1.0, 2.0, states.numel(), device=states.device)
        (gradient,) = torch.autograd.grad(states.flatten() @ weights.to(states.dtype), embedded)
    return gradient


def has_finite_gradients(backbone: PreTrainedModel, compute: Callable[[], Tensor]) -> bool:
    """Return whether all weights that train get finite gradients from the sum of what `compute` returns.

    Only one weight's gradient is in memory at a time, and none of the embedding: the gradient of its output counts.
    """
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    are_finite: list[Tensor] = []

    def check(tensor: Tensor) -> None:
        # The norm needs no further tensor of the gradient's size
        are_finite.append(torch.linalg.vector_norm(cast(Tensor, tensor.grad), torch.inf).isfinite())
        tensor.grad = None

    handles = [weight.register_post_accumulate_grad_hook(check) for weight in trained]
    try:
        with _embedded(backbone, lets_padding_go=True) as embedded, torch.enable_grad():
            total = compute().sum()
            if any(weight.requires_grad for weight in backbone.get_input_embeddings().parameters()):
                handles += [each.register_post_accumulate_grad_hook(check) for each in embedded]
            if trained:
                total.backward()
    finally:
        for handle in handles:
            handle.remove()
    return all(map(bool, are_finite))


@contextmanager
def _embedded(backbone: PreTrainedModel, *, lets_padding_go: bool = False) -> Iterator[list[Tensor]]:
    """Cut the graph behind the embedding within the block, and list its outputs, as leaves that get gradients.

    With `lets_padding_go` the gradient of the padding token's embedding is 0, as torch makes that of its weight
    (`padding_idx`).
    """
    embedded: list[Tensor] = []
    embedding = backbone.get_input_embeddings()
    padding = getattr(embedding, "padding_idx", None) if lets_padding_go else None

    def keep(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        if padding is None:
            return embedded[-1].clone()  # return a clone, because some models scale their embeddings in place
        return torch.where((args[0] == padding)[..., None], output.detach(), embedded[-1])

    handle = embedding.register_forward_hook(keep)
    try:
        yield embedded
    finally:
        handle.remove()


def check_causal(model: PreTrainedModel, where: str) -> None:
    """Raise `ModelError` if a hidden state depends on later tokens; `where` says where the model comes from."""
    problem = "reads tokens that come later, which a policy has yet to write"
    try:
        if not gradient_of_later_tokens(model).any():
            return
    except PROBE_ERRORS as error:
        reason = in_one_line(error)
        problem = f"is an encoder-decoder, or its base model gives no hidden states from token ids only ({reason})"
    raise ModelError(f"{where}: {type(model).__name__} {problem}; give a language model that reads from left to right")


def gradient_of_later_tokens(model: PreTrainedModel) -> Tensor:
    """Return the gradient of the first 2 hidden states with respect to the later embeddings: 0 in a causal model."""
    backbone, ids = cast("PreTrainedModel", model.base_model), probe_ids(model, 5)
    with probing(model):
        gradient = embedding_gradient(backbone, lambda: hidden_states_alone(backbone, ids)[:2])
    # Flatten batch and token dimensions, because XLNet's embeddings are [tokens, batch, width]
    return gradient.flatten(0, 1)[2:]


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding."""
    return int(cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)


def argument_of(model: PreTrainedModel, *names: str) -> str | None:
    """Return which of `names` is an argument of a model's `forward`; None if no name in `names` is an argument.

    Versions of transformers name the same argument differently, and a model with remote code may keep an old name.

    Raises:
        ModelError: No name in `names` is an argument of the model or of transformers' Llama. The argument may then have
            a name that this function does not know.
    """
    parameters = inspect.signature(type(model).forward).parameters
    argument = next((name for name in names if name in parameters), None)
    if argument is None and not inspect.signature(transformers.LlamaForCausalLM.forward).parameters.keys() & set(names):
        raise ModelError(
            f"transformers {transformers.__version__}: its models' forward no longer has the argument "
            f"{' or '.join(names)}; install the version that ppo_rlhf was tested with (constraints.txt)"
        )
    return argument


def pad_id_of(config: PretrainedConfig) -> int | None:
    """Return the pad id of a model's configuration; None if the field is empty or missing (CodeGen, RWKV)."""
    return getattr(config.get_text_config(), "pad_token_id", None)


def are_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of hidden states are equal up to rounding (`CLOSE`)."""
    tolerance = CLOSE[expected.dtype.itemsize]
    actual, expected = actual.nan_to_num().double(), expected.nan_to_num().double()
    return bool((actual - expected).norm() <= tolerance * expected.norm())
