"""LoRA adapters by peft (Hu et al. 2021, arXiv:2106.09685): h = W x + (alpha / r) B A x. W is frozen, B starts at 0.

Policy, critic and reference policy are separate module trees over the same frozen parameters. Each module tree has an
adapter of its own or no adapter. No adapter is ever switched on or off, so no result depends on which model ran last,
and gradient checkpointing recomputes with the adapter of the forward pass (decision 0014).
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.averages import copy_tensors, trained_parameters
from ppo_rlhf.models.directories import ADAPTER_QUANTISATION, ADAPTER_WEIGHTS, is_local
from ppo_rlhf.models.quantisation import forget_quantisation, is_quantised, quantisation_states, unquantised

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
ALL_LINEAR_AND_HEAD = "all-linear+head"
ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."  # prefix of the weights' names in adapter files: the attribute path inside PeftModel
_VALUES_PER_WEIGHT = 1024  # fingerprints and comparisons read this many values of each weight


@dataclass(frozen=True)
class LoraSettings:
    """Rank, scale and target layers of a LoRA adapter.

    `target_modules` is a comma-separated list of names of linear layers (the last parts of their paths). `all-linear`
    selects every plain linear layer except the language-model head; `all-linear+head` selects the head, too. In most
    mixtures of experts, router and experts are not plain linear layers and get no adapter. A router that contains a
    plain linear layer, as the router of Gemma 4 does, gets an adapter.
    """

    rank: int  # rank r of the adapter: the number of columns of B and of rows of A
    alpha: int  # alpha scales the adapter's output by alpha / rank
    target_modules: str

    @property
    def names(self) -> list[str]:
        """The layer names in `target_modules`; empty for `all-linear` and `all-linear+head`."""
        shorthand = self.target_modules in (ALL_LINEAR, ALL_LINEAR_AND_HEAD)
        return [] if shorthand else [name.strip() for name in self.target_modules.split(",")]

    def layers(self, model: PreTrainedModel) -> list[str]:
        """Return the paths of the layers of a model that `all-linear` or `all-linear+head` selects.

        In some mixtures of experts, peft mistakes other layers, such as shared experts, for the experts, because of the
        layers' names. An adapter on a mistaken layer could not be loaded again, so mistaken layers are not selected.
        """
        head, excluded = model.get_output_embeddings(), mixtures(model)
        paths = []
        for path, module in model.named_modules():
            if module is head:
                is_target = self.target_modules == ALL_LINEAR_AND_HEAD
            else:
                is_target = isinstance(module, nn.Linear | Conv1D) and path not in excluded
            if is_target:
                paths.append(path)
        if not excluded or not paths:
            return paths
        from peft import LoraConfig, inject_adapter_in_model

        with _without_warnings_on_targets():
            config = LoraConfig(target_modules=paths)
            adapted = _adapted_layers(inject_adapter_in_model(config, share_weights(model), low_cpu_mem_usage=True))
        return [path for path in paths if path in adapted]

    def to_peft(self, model: PreTrainedModel) -> LoraConfig:
        """Return peft's configuration of an adapter for a model, which the configuration names as the base model."""
        targets: str | list[str] = self.names or (
            _shortest(model, self.layers(model)) if mixtures(model) else ALL_LINEAR
        )
        name, revision = model.name_or_path or "", ""
        if not is_local(name):  # peft's configuration has separate fields for the base model's name and revision
            name, _, revision = name.partition("@")
        # peft's "all-linear" leaves out the head, so list the full path of every layer
        if self.target_modules == ALL_LINEAR_AND_HEAD:
            targets = self.layers(model)
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=targets,
            # GPT-2's Conv1D stores the weight W transposed
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            base_model_name_or_path=name or None,
            revision=revision or None,
        )


def with_adapter(model: PreTrainedModel, settings: LoraSettings, generator: torch.Generator) -> PreTrainedModel:
    """Return a copy of a model's modules with a new adapter that trains; the copy shares the model's weights.

    The weights of `model` are frozen. `generator` draws the matrix A of each adapted layer on the CPU, so that A is the
    same for every device; A is uniformly distributed as in peft (He et al. 2015).

    Raises:
        ModelError: The model has none of the target layers.
    """
    adapted = _inject(share_weights(model.requires_grad_(False)), settings)
    for name, parameter in trained_parameters(adapted).items():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if ".lora_A." in name:
            values = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
            parameter.data.copy_(values)
    return adapted


def check_targets(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise `ModelError` unless an adapter fits a language model and every target name matches a layer of the model.

    The model may be on the device `meta`, without weights. `check_targets` checks the target names because peft ignores
    names that match no layer.
    """
    adapted = _adapted_layers(_inject(share_weights(model), settings))
    if unknown := [name for name in settings.names if not any(f".{path}".endswith(f".{name}") for path in adapted)]:
        raise _does_not_fit(model, settings, f", but no {' or '.join(unknown)}")


def mixtures(model: nn.Module) -> list[str]:
    """Return the paths of all routers and experts that are not plain linear layers."""
    candidates = {path: module for path, module in model.named_modules() if _has_own_matrix(module)}
    experts = [path for path, module in candidates.items() if "expert" in type(module).__name__.lower()]
    parents = {path.rpartition(".")[0] for path in experts}
    return [path for path in candidates if path.rpartition(".")[0] in parents]


def describe_mixture(model: PreTrainedModel, settings: LoraSettings) -> str | None:
    """Return a line that says which layers of a mixture of experts get an adapter; None for all other models."""
    if settings.names or not (excluded := mixtures(model)):
        return None
    paths, head = settings.layers(model), model.get_output_embeddings()
    adapted = _last_parts(paths)
    plain = _last_parts(path for path, m in model.named_modules() if _is_plain_linear(m) and m is not head)
    mistaken = ", ".join(name for name in plain if name not in adapted)
    also = f", nor do {mistaken}, whose names peft mistakes for experts" if mistaken else ""
    return (
        f"ppo.lora_target_modules={settings.target_modules} adapts {', '.join(adapted)} of {type(model).__name__}. "
        f"Routers and experts that are not plain linear layers ({', '.join(_last_parts(excluded))}) do not train"
        f"{also}."
    )


def check_critic_targets(backbone: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise `ModelError` unless a critic's backbone, which has no language-model head, has one of the target layers."""
    _inject(share_weights(backbone), settings)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules that shares the model's parameters and buffers."""
    shared = [*model.parameters(), *model.buffers(), *quantisation_states(model)]
    return copy.deepcopy(model, {id(each): each for each in shared})


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules without the adapter, such as the reference policy of a LoRA policy.

    The copy shares the model's weights.
    """
    plain = share_weights(model)
    _replace_adapted_layers(plain)
    return plain


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain copy of a model with its adapter merged: W + (alpha / r) B A in place of each adapted weight W.

    The model itself is unchanged. The merged copy is float32 or wider, because 16 bits would round away most of a small
    adapter. For a 4-bit model, W is the dequantised weight that the model computes with, so that the merged copy is the
    policy that was trained. The merged copy of a 4-bit model is on the CPU.
    """
    return _merge(copy.deepcopy(model))


@torch.no_grad()
def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter of `merged(model)`, one at a time; the model may also have no adapter.

    Raises:
        ModelError: The head is tied to the embeddings and has an adapter: the merged head would need its own weights.
    """
    layers, embedding = _adapted_layers(model), model.get_input_embeddings()
    if any(layer is model.get_output_embeddings() and layer.weight is embedding.weight for layer in layers.values()):
        raise ModelError(
            f"ppo.lora_target_modules: the head of {type(model).__name__} is tied to the embeddings, and vLLM stores "
            "one tensor for both, so the head cannot have an adapter; set all-linear"
        )
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        owner, layer = model.get_submodule(path), layers.get(path.removesuffix(".base_layer"))
        delta = layer.get_delta_weight(ADAPTER) if layer is not None and kind == "weight" else None
        if is_quantised(owner):
            yield name.replace(".base_layer.", "."), getattr(unquantised(owner, delta), kind)
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter if delta is None else parameter + delta


def has_adapter(model: nn.Module) -> bool:
    """Return whether a model has an adapter."""
    return bool(_adapted_layers(model))


def frozen_fingerprint(model: nn.Module) -> str:
    """Return a fingerprint of the base model that an adapter needs.

    The fingerprint is the SHA-256 of the names, the shapes and the first values of all frozen weights.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            first = _first_values(parameter).double().cpu()
            digest.update(f"{name}:{tuple(parameter.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def save_adapter(model: PreTrainedModel, directory: str | Path, settings: LoraSettings) -> None:
    """Write a model's adapter in peft's format: adapter_config.json and adapter_model.safetensors.

    `peft.PeftModel.from_pretrained` and transformers load the adapter onto the base model. `_inject` replaces the
    `save_pretrained` of an adapted model by this function, because transformers' `save_pretrained` would write names
    that transformers cannot load.
    """
    from peft import TaskType

    Path(directory).mkdir(parents=True, exist_ok=True)
    config = settings.to_peft(without_adapter(model))
    is_lm = model.get_output_embeddings() is not None
    # peft loads the base model by the class of this task type
    config.task_type = TaskType.CAUSAL_LM if is_lm else TaskType.FEATURE_EXTRACTION
    config.save_pretrained(str(directory))
    tensors = {_peft_name(name): p.detach().contiguous() for name, p in trained_parameters(model).items()}
    save_file(tensors, Path(directory, ADAPTER_WEIGHTS))
    if quantisation_states(model):
        model.config.quantization_config.to_json_file(Path(directory, ADAPTER_QUANTISATION))


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Copy a saved adapter, which `save_adapter` wrote, into the adapter of a model.

    Raises:
        ValueError: The names or shapes of the saved adapter and of the model's adapter differ.
    """
    parameters = {_peft_name(name): parameter for name, parameter in trained_parameters(model).items()}
    copy_tensors(load_file(directory / ADAPTER_WEIGHTS), parameters)


def merge_saved(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Merge a saved adapter, which any program may have written, into the weights of a model, and return the model.

    4-bit weights become float32. All weights of the merged model train, as after loading a whole model, although peft
    had frozen the base model's weights. A classifier gets the adapter's score head, if the adapter has a score head.

    Raises:
        ValueError: The adapter's weights file does not have all weights that the adapter's configuration names, or
            loading the adapter changes the model's weights, for which the adapter then was not trained.
    """
    from peft import PeftModel

    # An adapter with tokens of its own brings whole embeddings, which replace the base's
    ends = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    inner = [parameter for parameter in model.parameters() if not any(parameter is end for end in ends)]
    before = [_first_values(parameter).clone() for parameter in inner]

    with _without_warnings_on_targets():
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        # Load the adapter with peft: a model with an adapter loaded by transformers would later be saved as an adapter
        try:
            adapted: Any = PeftModel.from_pretrained(model, str(directory))
        # Raise an error, because peft only warns of missing weights and leaves their layers without an adapter
        except UserWarning as warning:
            missing = str(warning).partition("[")[2].partition(",")[0].strip("'[].")
            raise ValueError(f"its file lacks weights that its configuration names, such as {missing}") from warning
    if not all(map(torch.equal, map(_first_values, inner), before)):
        raise ValueError("loading it changes the weights of its base")
    if quantisation_states(model):
        return _merge(adapted.get_base_model()).requires_grad_(True)
    _untie_adapted_head(adapted.get_base_model())
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    # Head and embedding differ after the merge if their adapters differ
    if head is not None and head.weight is not embedding.weight:
        merged.config.tie_word_embeddings = False
    return merged.requires_grad_(True)


def _first_values(weight: Tensor) -> Tensor:
    return weight.detach().flatten()[:_VALUES_PER_WEIGHT]


def _inject(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    from peft import inject_adapter_in_model

    # List the plain linear layers before peft replaces them by layers with an adapter
    misfit, linear = _does_not_fit(model, settings), _plain_layers(model)
    try:
        with _without_warnings_on_targets():
            injected = inject_adapter_in_model(settings.to_peft(model), model, adapter_name=ADAPTER)
    # peft raises ValueError if the model has none of the target layers, or a layer of a type that peft cannot adapt
    except ValueError as error:
        raise misfit from error
    for name, layer in _adapted_layers(injected).items():
        if not _is_plain_linear(layer.get_base_layer()):
            raise ModelError(
                f"ppo.lora_target_modules={settings.target_modules} selects {name}, a layer of type "
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
    """Return the last parts of `paths` if only the layers at `paths` have such a last part, otherwise `paths`."""
    names = _last_parts(paths)
    matches = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]
    return names if matches == paths else paths


def _is_adapted(module: nn.Module) -> bool:
    """Return whether peft has put an adapter into a layer; importing peft, and with it bitsandbytes, takes seconds."""
    layers = sys.modules.get("peft.tuners.tuners_utils")
    return layers is not None and isinstance(module, layers.BaseTunerLayer)


def _has_own_matrix(module: nn.Module) -> bool:
    """Return whether a module is not a plain linear layer and directly holds a parameter with two or more axes."""
    return not _is_plain_linear(module) and any(p.dim() > 1 for p in module.parameters(recurse=False))


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a layer computes only y = W x + b. The 4-bit layers of bitsandbytes count as plain layers."""
    return type(module) in (nn.Linear, Conv1D) or is_quantised(module)


@contextmanager
def _without_warnings_on_targets() -> Iterator[None]:
    """Silence peft's warnings on cases that `models.adapters` handles: tied heads, Conv1D layouts, names of experts."""
    with warnings.catch_warnings():
        for message in ("Model (has|with) `tie_word_embeddings=True`", "fan_in_fan_out is set to True but the target"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        yield


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if _is_adapted(module)}


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
    """Replace 4-bit layers by plain layers with the adapters merged in.

    peft's own merge is not used, because peft would quantise the merged weights again.
    """
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
    model._hf_peft_config_loaded = False  # tell transformers' save_pretrained that the model has no adapter to save


def _untie_adapted_head(model: PreTrainedModel) -> None:
    """Untie head and embedding if either has an adapter: merging into tied weights would change both layers."""
    head, embedding = cast(Any, model.get_output_embeddings()), cast(Any, model.get_input_embeddings())
    adapted = [layer for layer in (head, embedding) if _is_adapted(layer)]
    if adapted and head is not None and head.weight is embedding.weight:
        linear = cast(nn.Linear, head.get_base_layer() if _is_adapted(head) else head)
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _peft_name(name: str) -> str:
    return _PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")
