"""A pretended accelerator: tensors claim to be on the device, and the CPU computes them.

Tests can so count, on any machine, the costs of a small model on a GPU: operations (each at least one kernel), device
syncs, and copies between host and device. An operation on tensors of both raises an error, as on a GPU. torch's hooks
for a backend in Python are experimental: if they are missing, `reason_to_skip` says so.

An operation is what torch dispatches below autograd: a fused kernel, such as AdamW's or attention's, is one operation.
The counts depend on the versions of torch and transformers, so tests bound them instead of pinning them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import accelerate.state
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils import _foreach_utils as foreach_utils
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_model

NAME = "pretended"
setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
reason_to_skip = None if setup else f"torch {torch.__version__} has no backends in Python"
aten = torch.ops.aten
SYNCING = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
"""Operations whose result's shape depends on values, which forces a device sync."""


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the device and of the CPU."""


@dataclass
class Counts:
    """Operations, syncs and copies of a block of code, by the line of this project that caused them."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)  # (operation, line)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)

    def totals(self) -> dict[str, int]:
        return {name: sum(getattr(self, name).values()) for name in ("launches", "waits", "copies")}

    def __str__(self) -> str:
        worst = {name: getattr(self, name).most_common(12) for name in ("launches", "waits", "copies")}
        return "\n".join([str(self.totals()), *(f"{name}: {lines}" for name, lines in worst.items())])


counts: list[Counts] = []
"""The counts of all open `counting` blocks; an event is added to each of them."""


@contextmanager
def counting() -> Iterator[Counts]:
    """Count the operations, syncs and copies of the block."""
    counts.append(Counts())
    try:
        yield counts[-1]
    finally:
        counts.pop()


def note(kind: str, what: str = "") -> None:
    if counts:
        line = where()
        for stretch in counts:
            getattr(stretch, kind)[(what, line) if kind == "launches" else f"{what} {line}".strip()] += 1


def where() -> str:
    """Return the two innermost lines of this project in the call stack; a backward pass has none."""
    frame, lines = sys._getframe(2), list[str]()
    while frame is not None and len(lines) < 2:
        _, found, path = frame.f_code.co_filename.rpartition("/ppo_rlhf/")
        lines += [f"{path}:{frame.f_lineno}"] if found else []
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


class OnDevice(Tensor):
    """A tensor that claims to be on the pretended device; `raw` is the CPU tensor with its values."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        note("waits", "tolist")
        return self.raw.tolist()


class Dispatch(TorchDispatchMode):
    """Sends every operation through `dispatch`, including operations without tensor arguments, such as torch.zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def raw(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.raw
    return type(value)(map(raw, value)) if isinstance(value, list | tuple) else value


def on_device(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(on_device, value))
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU, and count the operation if it belongs to the pretended device."""
    name, leaves = func._schema.name.removeprefix("aten::"), list(tensors_in([*args, *kwargs.values()]))
    ours = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
    device = kwargs.get("device")
    if func is aten._to_copy.default:
        return copy_to(args[0], isinstance(args[0], OnDevice) if device is None else is_pretended(device), kwargs)
    if func is aten._local_scalar_dense.default and ours:
        note("waits", "item")
        return func(args[0].raw)
    if func is aten.copy_.default and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
        note("copies")
        if ours[0] is args[1]:
            note("waits", "copy")
        raw(args[0]).copy_(raw(args[1]))
        return args[0]
    if not ours and not is_pretended(device):
        return func(*args, **kwargs)
    on_cpu = [leaf for leaf in leaves if not isinstance(leaf, OnDevice) and leaf.dim()]
    if name in SYNCING:
        note("waits", name)
    if name in ("index", "index_put_", "index_put"):
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        for index in indices:
            if index.dtype == torch.bool:
                note("waits", "index by a mask")
            if not isinstance(index, OnDevice):
                note("copies", "index")
        on_cpu = [tensor for tensor in on_cpu if not any(tensor is index for index in indices)]
    if on_cpu:
        shapes = [list(tensor.shape) for tensor in ours], [list(tensor.shape) for tensor in on_cpu]
        raise MixedDevicesError(f"{name}: {shapes[0]} are on the device, {shapes[1]} on the CPU, at {where()}")
    if is_pretended(device):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    result = func(*map(raw, args), **{name: raw(value) for name, value in kwargs.items()})
    returns = func._schema.returns
    written = [each.alias_info is not None and each.alias_info.is_write for each in returns]
    if not any(each.alias_info is not None and not each.alias_info.is_write for each in returns):  # not a view
        note("launches", name)
    if returns and all(written):
        given = zip(func._schema.arguments, [*args, *[None] * len(func._schema.arguments)], strict=False)
        outputs = [
            kwargs.get(argument.name, value)
            for argument, value in given
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return outputs[0] if len(returns) == 1 else tuple(outputs)
    return result if device is not None and not is_pretended(device) else on_device(result)


def copy_to(source: Tensor, to_device: bool, options: dict[str, Any]) -> Tensor:
    """Copy or convert a tensor; a copy to the CPU counts as a device sync."""
    options = {k: v for k, v in options.items() if k not in ("device", "pin_memory", "non_blocking")}
    made = aten._to_copy.default(raw(source), **options)
    if isinstance(source, OnDevice) and to_device:
        note("launches", "_to_copy")
    elif isinstance(source, OnDevice):
        note("copies")
        note("waits", "copy")
    elif to_device:
        note("copies")
    return OnDevice(made) if to_device else made


class FusedAttention(torch.autograd.Function):
    """Attention as one operation in the forward and one in the backward pass, as on a GPU."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = {**options, "attn_mask": raw(mask)}
        note("launches", "attention")
        with torch.no_grad():
            return OnDevice(attention_on_cpu(query.raw, key.raw, value.raw, **ctx.options))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        note("launches", "attention backward")
        inputs = [tensor.raw.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = attention_on_cpu(*inputs, **ctx.options)
        return *map(OnDevice, torch.autograd.grad(output, inputs, gradients[0].raw)), None, None


attention_on_cpu = functional.scaled_dot_product_attention


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    if not isinstance(query, OnDevice):
        return attention_on_cpu(query, key, value, attn_mask=attn_mask, **options)
    result: Tensor = FusedAttention.apply(query, key, value, attn_mask, options)
    return result


def move_module(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Replaces `nn.Module._apply`: sets new parameters instead of changing the data of the old ones."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor is kept alive, so that its id is not reused
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    with torch.no_grad():
                        changed = change(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter) and changed is not tensor
                    known[id(tensor)] = (
                        tensor,
                        nn.Parameter(changed, tensor.requires_grad) if is_parameter else changed,
                    )
                store[name] = known[id(tensor)][1]
    return module


class Backend(backend_registration._DummyBackendModule):  # type: ignore[misc]
    """The functions that torch and accelerate call in `torch.pretended`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def make_tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """Replaces `torch.tensor`, which fills a tensor from a list without dispatching an operation."""
    made = tensor_on_cpu(data, *args, **options)
    return made.to(device) if device is not None else made


tensor_on_cpu = torch.tensor
_library: list[torch.library.Library] = []


def register() -> None:
    """Register the device with torch, once per process: a registration cannot be undone."""
    if _library:
        return
    with (
        TemporaryDirectory() as folder
    ):  # if a process's first load were under `Dispatch`, transformers would fill no buffers
        tiny_model("llama").save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
    assert setup is not None
    setup(NAME, backend_module=Backend())
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    library.impl(
        "empty_strided",
        lambda size, stride, dtype=None, **_: OnDevice(torch.empty_strided(size, stride, dtype=dtype)),
        "PrivateUse1",
    )
    library.impl(
        "empty.memory_format", lambda size, dtype=None, **_: OnDevice(torch.empty(size, dtype=dtype)), "PrivateUse1"
    )

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        note("copies")
        raw(target).copy_(raw(source))
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _library.append(autocast)
    autocast.fallback(torch.library.fallthrough_kernel)


@contextmanager
def pretending() -> Iterator[None]:
    """Provide the device within the block: `ppo.device` may name it."""
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_apply", move_module)
        patch.setattr(torch, "tensor", make_tensor)
        patch.setattr(functional, "scaled_dot_product_attention", attention)
        patch.setattr(foreach_utils, "_has_foreach_support", lambda *_: True)
        patch.setattr(torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_: True)
        patch.setattr(torch.nn.utils.clip_grad, "_device_has_foreach_support", lambda *_: True)
        patch.setattr(accelerate.state.PartialState, "default_device", property(lambda self: torch.device(NAME, 0)))
        with Dispatch():
            yield
