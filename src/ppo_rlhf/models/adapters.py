"""LoRA adapters by peft (Hu et al. 2021, arXiv:2106.09685): h = W x + (alpha / r) B A x, W frozen, B = 0 at first.

Policy, critic and reference are separate trees of modules over the same frozen parameters, each with its own adapter
or with none. No adapter is ever switched on or off, so no result depends on which model ran last, and gradient
checkpointing recomputes with the adapter of the forward pass (decision 0014).
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, TaskType, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.averages import copy_tensors, trained_parameters
from ppo_rlhf.models.directories import ADAPTER_QUANTISATION, ADAPTER_WEIGHTS, is_local
from ppo_rlhf.models.quantisation import forget_quantisation, is_quantised, quantisation_states, unquantised

ALL_LINEAR = "all-linear"
ALL_LINEAR_AND_HEAD = "all-linear+head"
ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."  # peft writes the names that its own wrapper gives
_FINGERPRINTED = 1024


@dataclass(frozen=True)
class LoraSettings:
    """Shape of an adapter.

    `target_modules` names linear layers, comma-separated (the last parts of their paths); `all-linear` takes every
    plain linear layer except the language-model head, `all-linear+head` takes that too. In most mixtures of experts
    router and experts are no such layers; a router that holds one, as Gemma 4's, gets an adapter.
    """

    rank: int  # r, columns of B and rows of A
    alpha: int  # the adapter's output is scaled by alpha / rank
    target_modules: str

    @property
    def names(self) -> list[str]:
        """The names of layers; empty for `all-linear` and `all-linear+head`."""
        shorthand = self.target_modules in (ALL_LINEAR, ALL_LINEAR_AND_HEAD)
        return [] if shorthand else [name.strip() for name in self.target_modules.split(",")]

    def layers(self, model: PreTrainedModel) -> list[str]:
        """Return the paths of the layers that `all-linear` and `all-linear+head` take in a model.

        In some mixtures of experts peft takes the names of other layers, such as those of shared experts, for the
        experts' own: no adapter on those layers could be loaded again, so they are left out.
        """
        head, left_out = model.get_output_embeddings(), mixtures(model)
        paths = []
        for path, module in model.named_modules():
            if module is head:
                takes = self.target_modules == ALL_LINEAR_AND_HEAD
            else:
                takes = isinstance(module, nn.Linear | Conv1D) and path not in left_out
            if takes:
                paths.append(path)
        if not left_out or not paths:
            return paths
        with _without_warnings_on_targets():
            config = LoraConfig(target_modules=paths)
            taken = _adapted_layers(inject_adapter_in_model(config, share_weights(model), low_cpu_mem_usage=True))
        return [path for path in paths if path in taken]

    def to_peft(self, model: PreTrainedModel) -> LoraConfig:
        """Return peft's configuration for a model, with the model's name as that of the base."""
        targets: str | list[str] = self.names or (
            _shortest(model, self.layers(model)) if mixtures(model) else ALL_LINEAR
        )
        name, revision = model.name_or_path or "", ""
        if not is_local(name):  # peft has a field of its own for the revision
            name, _, revision = name.partition("@")
        if self.target_modules == ALL_LINEAR_AND_HEAD:  # peft has no word for it, so name whole paths
            targets = self.layers(model)
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=targets,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores W transposed
            base_model_name_or_path=name or None,
            revision=revision or None,
        )


def with_adapter(model: PreTrainedModel, settings: LoraSettings, generator: torch.Generator) -> PreTrainedModel:
    """Return a model with a fresh adapter that trains, over the very weights of one without, which this freezes.

    The generator draws A on the CPU, so that it is the same for every device: uniform as in peft (He et al. 2015).

    Raises:
        ModelError: The model has none of the target layers.
    """
    adapted = _inject(share_weights(model.requires_grad_(False)), settings)
    for name, parameter in trained_parameters(adapted).items():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if ".lora_A." in name:
            drawn = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
            parameter.data.copy_(drawn)
    return adapted


def check_targets(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise `ModelError` unless an adapter fits a language model and every name is one of its layers.

    The model may be on the device `meta`, without weights. peft itself ignores names that match no layer.
    """
    adapted = _adapted_layers(_inject(share_weights(model), settings))
    if unknown := [name for name in settings.names if not any(f".{path}".endswith(f".{name}") for path in adapted)]:
        raise _does_not_fit(model, settings, f", but no {' or '.join(unknown)}")


def mixtures(model: nn.Module) -> list[str]:
    """Return the paths of routers and experts whose weights are no plain linear layers; empty if there are none."""
    own = {path: module for path, module in model.named_modules() if _has_own_matrix(module)}
    experts = [path for path, module in own.items() if "expert" in type(module).__name__.lower()]
    parents = {path.rpartition(".")[0] for path in experts}
    return [path for path in own if path.rpartition(".")[0] in parents]


def describe_mixture(model: PreTrainedModel, settings: LoraSettings) -> str | None:
    """Return in one line what of a mixture of experts gets an adapter, and what not; None for other models."""
    if settings.names or not (left_out := mixtures(model)):
        return None
    paths, head = settings.layers(model), model.get_output_embeddings()
    adapted = _last_parts(paths)
    plain = _last_parts(path for path, m in model.named_modules() if _is_plain_linear(m) and m is not head)
    others = ", ".join(name for name in plain if name not in adapted)
    taken = f", nor do {others}, which are names of experts for peft" if others else ""
    return (
        f"ppo.lora_target_modules={settings.target_modules} adapts {', '.join(adapted)} of {type(model).__name__}. "
        f"What of its routers and experts is no plain linear layer ({', '.join(_last_parts(left_out))}) does not train"
        f"{taken}."
    )


def check_critic_targets(backbone: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise `ModelError` unless a backbone has some of the layers; it lacks the language-model head."""
    _inject(share_weights(backbone), settings)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules over the very same parameters and buffers."""
    shared = [*model.parameters(), *model.buffers(), *quantisation_states(model)]
    return copy.deepcopy(model, {id(each): each for each in shared})


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its adapter, over the same weights: the reference of a LoRA policy."""
    plain = share_weights(model)
    _replace_adapted_layers(plain)
    return plain


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain copy of a model with W + (alpha / r) B A in place of each W; the model stays as it is.

    The copy is float32 or wider: a 16-bit type of the frozen weights would round away most of a small adapter. Of a
    4-bit model W is what the model computes with, so the copy is the policy that was trained; it is on the CPU.
    """
    return _merge(copy.deepcopy(model))


@torch.no_grad()
def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter that `merged(model)` would have, one at a time; the model may be plain.

    Raises:
        ModelError: A head that is tied to the embeddings has an adapter: merged, it would need weights of its own.
    """
    layers, embedding = _adapted_layers(model), model.get_input_embeddings()
    if any(layer is model.get_output_embeddings() and layer.weight is embedding.weight for layer in layers.values()):
        raise ModelError(
            f"ppo.lora_target_modules: the head of {type(model).__name__} is tied to the embeddings, and vLLM has one "
            "tensor for both, so the head can have no adapter; set all-linear"
        )
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        owner, layer = model.get_submodule(path), layers.get(path.removesuffix(".base_layer"))
        summand = layer.get_delta_weight(ADAPTER) if layer is not None and kind == "weight" else None
        if is_quantised(owner):
            yield name.replace(".base_layer.", "."), getattr(unquantised(owner, summand), kind)
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter if summand is None else parameter + summand


def has_adapter(model: nn.Module) -> bool:
    """Return whether a model has an adapter."""
    return bool(_adapted_layers(model))


def frozen_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of names, shapes and first values of all frozen weights, to which an adapter belongs."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            first = parameter.detach().flatten()[:_FINGERPRINTED].double().cpu()
            digest.update(f"{name}:{tuple(parameter.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def save_adapter(model: PreTrainedModel, directory: str | Path, settings: LoraSettings) -> None:
    """Write a model's adapter in peft's format: adapter_config.json and adapter_model.safetensors.

    `peft.PeftModel.from_pretrained` and transformers load it onto the model that it was trained on.
    `save_pretrained(directory)` of an adapted model does the same: transformers' own writes names that it cannot load.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    config = settings.to_peft(without_adapter(model))
    is_lm = model.get_output_embeddings() is not None
    config.task_type = TaskType.CAUSAL_LM if is_lm else TaskType.FEATURE_EXTRACTION  # the class of the base model
    config.save_pretrained(str(directory))
    tensors = {_peft_name(name): p.detach().contiguous() for name, p in trained_parameters(model).items()}
    save_file(tensors, Path(directory, ADAPTER_WEIGHTS))
    if quantisation_states(model):
        model.config.quantization_config.to_json_file(Path(directory, ADAPTER_QUANTISATION))


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Copy an adapter that `save_adapter` wrote into a model's own adapter.

    Raises:
        ValueError: It has other names or shapes.
    """
    own = {_peft_name(name): parameter for name, parameter in trained_parameters(model).items()}
    copy_tensors(load_file(directory / ADAPTER_WEIGHTS), own)


def merge_saved(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return a model with an adapter that any program saved in its weights; those in 4 bits become float32.

    All its weights can train, as those of a model that was loaded whole: peft freezes what has an adapter. A classifier
    gets the adapter's score head, if there is one.

    Raises:
        ValueError: The adapter's file does not have all weights that its configuration names.
    """
    with _without_warnings_on_targets():
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        try:  # by peft: transformers can load it too, but would later save the model as an adapter
            adapted: Any = PeftModel.from_pretrained(model, str(directory))
        except UserWarning as warning:  # the rest would be merged, and what is missing left as the base has it
            missing = str(warning).partition("[")[2].partition(",")[0].strip("'[].")
            raise ValueError(f"its file lacks weights of layers that it adapts, such as {missing}") from warning
    if quantisation_states(model):
        return _merge(adapted.get_base_model()).requires_grad_(True)
    _untie_adapted_head(adapted.get_base_model())
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:  # each may have been trained for itself
        merged.config.tie_word_embeddings = False
    return merged.requires_grad_(True)


def _inject(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    misfit, linear = _does_not_fit(model, settings), _plain_layers(model)  # as they are now: peft replaces them
    try:
        with _without_warnings_on_targets():
            injected = inject_adapter_in_model(settings.to_peft(model), model, adapter_name=ADAPTER)
    except ValueError as error:  # peft found no such layers, or layers that no adapter fits
        raise misfit from error
    for name, layer in _adapted_layers(injected).items():
        if not _is_plain_linear(layer.get_base_layer()):
            raise ModelError(
                f"ppo.lora_target_modules={settings.target_modules} takes {name}, a layer of type "
                f"{type(layer.get_base_layer()).__name__}, into which no adapter can be merged exactly. Name plain "
                f"linear layers (of {linear}), or set ppo.use_peft=false"
            )
    for part in injected.modules():
        if isinstance(part, PreTrainedModel):
            vars(part)["save_pretrained"] = partial(save_adapter, part, settings=settings)
    return cast(PreTrainedModel, injected)


def _does_not_fit(model: PreTrainedModel, settings: LoraSettings, but: str = "") -> ModelError:
    return ModelError(
        f"ppo.lora_target_modules={settings.target_modules} does not fit {type(model).__name__}, which has the linear "
        f"layers {_plain_layers(model)}{but}. Name some of them, or set ppo.use_peft=false"
    )


def _plain_layers(model: nn.Module) -> str:
    names = _last_parts(name for name, module in model.named_modules() if _is_plain_linear(module))
    return ", ".join(names) or "(none)"


def _last_parts(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})


def _shortest(model: nn.Module, paths: list[str]) -> list[str]:
    """Return the last parts of paths, if they stand for these layers alone; else the paths themselves."""
    names = _last_parts(paths)
    alike = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]
    return names if alike == paths else paths


def _has_own_matrix(module: nn.Module) -> bool:
    """Return whether a module that is no plain linear layer holds a matrix, or a stack of them."""
    return not _is_plain_linear(module) and any(p.dim() > 1 for p in module.parameters(recurse=False))


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a layer computes y = W x + b and no more. Subclasses may quantise W: 4-bit ones are known."""
    return type(module) in (nn.Linear, Conv1D) or is_quantised(module)


@contextmanager
def _without_warnings_on_targets() -> Iterator[None]:
    """Silence warnings of peft on what is handled: tied heads, each layer's layout, names taken for the experts'."""
    with warnings.catch_warnings():
        for message in ("Model (has|with) `tie_word_embeddings=True`", "fan_in_fan_out is set to True but the target"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        yield


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _merge(model: PreTrainedModel) -> PreTrainedModel:
    if quantisation_states(model):
        _restore_quantised_layers(model)
    nn.Module.to(model, torch.promote_types(model.dtype, torch.float32))
    _untie_adapted_head(model)
    for layer in _adapted_layers(model).values():
        layer.merge()
    _replace_adapted_layers(model)
    return model


def _restore_quantised_layers(model: PreTrainedModel) -> None:
    """Put plain layers in the place of 4-bit ones, with their adapters merged: peft would quantise the sum again."""
    for name, layer in _adapted_layers(model).items():
        if is_quantised(layer.get_base_layer()):
            model.set_submodule(name, unquantised(layer.get_base_layer(), layer.get_delta_weight(ADAPTER)))
    for name, module in list(model.named_modules()):
        if is_quantised(module):
            model.set_submodule(name, unquantised(module))
    forget_quantisation(model)
    nn.Module.to(model, "cpu")


def _replace_adapted_layers(model: PreTrainedModel) -> None:
    for name, layer in _adapted_layers(model).items():
        model.set_submodule(name, layer.get_base_layer())
    for part in model.modules():
        vars(part).pop("save_pretrained", None)
    vars(model).pop("peft_config", None)
    model._hf_peft_config_loaded = False  # else save_pretrained would look for an adapter to save


def _untie_adapted_head(model: PreTrainedModel) -> None:
    """Give a head that is tied to the embedding its own weights if either has an adapter: merging would change both."""
    head, embedding = cast(Any, model.get_output_embeddings()), cast(Any, model.get_input_embeddings())
    adapted = [layer for layer in (head, embedding) if isinstance(layer, BaseTunerLayer)]
    if adapted and head is not None and head.weight is embedding.weight:
        own = cast(nn.Linear, head.get_base_layer() if isinstance(head, BaseTunerLayer) else head)
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _peft_name(name: str) -> str:
    return _PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")
