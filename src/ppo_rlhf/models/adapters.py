"""LoRA adapters by peft (Hu et al. 2021, arXiv:2106.09685): h = W x + (alpha / r) B A x, W frozen, B = 0 at first.

One set of frozen weights serves any number of models: policy, critic and reference are trees of modules of their own
over the same parameters, each with its adapter or with none. No adapter is ever switched on or off, so nothing
depends on which model ran last, and gradient checkpointing recomputes with the adapter that it first computed with.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import PreTrainedModel

if TYPE_CHECKING:  # heavy: with peft come all of transformers' models; functions import it
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
ALL_LINEAR_AND_HEAD = "all-linear+head"
ADAPTER = "default"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."  # peft writes the names that its own wrapper gives
_FINGERPRINTED = 1024


@dataclass(frozen=True)
class LoraSettings:
    """Shape of an adapter.

    Attributes:
        rank: r, columns of B and rows of A.
        alpha: The adapter's output is scaled by alpha / rank.
        target_modules: Names of linear layers, comma-separated (the last parts of their paths); `all-linear` takes
            every linear layer but the language-model head, `all-linear+head` that too.
    """

    rank: int
    alpha: int
    target_modules: str

    def to_peft(self, model: nn.Module) -> LoraConfig:
        """Return peft's configuration for a model, which it names as the one that the adapter belongs to."""
        from peft import LoraConfig

        base = getattr(model, "name_or_path", None)
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=self._peft_targets(model),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores W transposed
            base_model_name_or_path=base or None,
        )

    @property
    def names(self) -> list[str]:
        """The names of layers; empty for a shorthand."""
        shorthand = self.target_modules in (ALL_LINEAR, ALL_LINEAR_AND_HEAD)
        return [] if shorthand else [name.strip() for name in self.target_modules.split(",")]

    def _peft_targets(self, model: nn.Module) -> str | list[str]:
        if self.target_modules != ALL_LINEAR_AND_HEAD:
            return self.names or ALL_LINEAR
        # peft knows no word for this. Whole paths: the last part of one may be the name of another kind of layer too
        kinds = (nn.Linear, Conv1D)  # subclasses too, as in peft: what no adapter fits is refused, not left out
        linear = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        output = model.get_output_embeddings() if isinstance(model, transformers.PreTrainedModel) else None
        head = [name for name, module in model.named_modules() if module is output]
        return sorted({*linear, *head})


def with_adapter(model: PreTrainedModel, settings: LoraSettings, generator: torch.Generator) -> PreTrainedModel:
    """Return a model over the same weights, all frozen, with an adapter that trains and changes nothing yet.

    Args:
        model: Any transformers model without adapters; its parameters are frozen by this, and shared.
        settings: The adapter's shape.
        generator: Draws A, on the CPU, so that it is the same on every device: uniform as in peft, He et al. 2015.

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
    """Check that an adapter fits a language model; one on the device `meta`, without weights, will do.

    Raises:
        ModelError: It does not, or one of the names is none of the model's; peft would leave that one out silently.
    """
    adapted = _adapted_layers(_inject(share_weights(model), settings))
    unknown = [name for name in settings.names if not any(f".{path}".endswith(f".{name}") for path in adapted)]
    if unknown:
        raise _does_not_fit(type(model), settings, _linear_layers(model), unknown)


def check_critic_targets(backbone: PreTrainedModel, settings: LoraSettings) -> None:
    """Check that an adapter fits a critic's backbone, which has no language-model head: names of that are none of it.

    Raises:
        ModelError: The backbone has none of the target layers.
    """
    _inject(share_weights(backbone), settings)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules over the very same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model over the same weights as if its adapter was switched off: the reference of a LoRA policy."""
    plain = share_weights(model)
    _replace_adapted_layers(plain)
    return plain


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain copy of a model, W + (alpha / r) B A in place of each W, float32 or wider; the model stays as is.

    Not in a 16-bit type of the frozen weights: most of a small adapter would be lost to rounding.
    """
    plain = copy.deepcopy(model)
    plain = plain.to(torch.promote_types(plain.dtype, torch.float32))  # type: ignore[arg-type]
    _untie_adapted_head(plain)
    for layer in _adapted_layers(plain).values():
        layer.merge()
    _replace_adapted_layers(plain)
    return plain


def has_adapter(model: nn.Module) -> bool:
    """Whether a model has an adapter."""
    return bool(_adapted_layers(model))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of names, shapes and first values of all frozen weights: what an adapter belongs to."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            first = parameter.detach().flatten()[:_FINGERPRINTED].double().cpu()
            digest.update(f"{name}:{tuple(parameter.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def save_adapter(model: PreTrainedModel, directory: Path, settings: LoraSettings) -> None:
    """Write a language model's adapter alone, in peft's format: adapter_config.json and adapter_model.safetensors.

    `peft.PeftModel.from_pretrained` and transformers load it onto the model that it was trained on.
    """
    from peft import TaskType

    directory.mkdir(parents=True, exist_ok=True)
    config = settings.to_peft(without_adapter(model))
    config.task_type = TaskType.CAUSAL_LM  # by it peft knows the class of the model that the adapter is for
    config.save_pretrained(str(directory))
    tensors = {_peft_name(name): p.detach().contiguous() for name, p in trained_parameters(model).items()}
    save_file(tensors, directory / WEIGHTS_FILE)


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Copy an adapter that `save_adapter` wrote into a model's own.

    Raises:
        ValueError: It has other names or shapes.
    """
    own = {_peft_name(name): parameter for name, parameter in trained_parameters(model).items()}
    copy_tensors(load_file(directory / WEIGHTS_FILE), own)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter alone."""
    return (directory / CONFIG_FILE).is_file()


def load_merged(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load an adapter that `save_adapter` wrote onto the causal language model that it names, and merge it, float32.

    Args:
        directory: With the adapter.
        trust_remote_code: Whether Python code that lies with that language model may run.
    """
    from peft import AutoPeftModelForCausalLM

    # by peft: transformers, which can load it too, would go on saving the model as an adapter's
    with _without_warnings_on_the_head():
        adapted = AutoPeftModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
        )
    _untie_adapted_head(adapted.get_base_model())
    return adapted.merge_and_unload()


def copy_tensors(source: dict[str, Tensor], target: dict[str, Any]) -> None:
    """Copy tensors into those of the same names.

    Raises:
        ValueError: Names or shapes differ.
    """
    if source.keys() != target.keys():
        odd = sorted(source.keys() ^ target.keys())
        raise ValueError(f"weights of other names, such as {odd[0]}")
    for name, tensor in source.items():
        if tensor.shape != target[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(target[name].shape)}")
        target[name].data.copy_(tensor)


def _inject(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    from peft import inject_adapter_in_model

    linear = _linear_layers(model)  # before some of them are replaced
    try:
        with _without_warnings_on_the_head():
            adapted = cast(
                "PreTrainedModel", inject_adapter_in_model(settings.to_peft(model), model, adapter_name=ADAPTER)
            )
    except ValueError as error:  # peft finds no such layers, or layers that no adapter fits
        raise _does_not_fit(type(model), settings, linear) from error
    for name, layer in _adapted_layers(adapted).items():
        kind = type(layer.get_base_layer()).__name__
        if not is_plain_linear(layer.get_base_layer()):  # W + B A is not what others add
            raise ModelError(
                f"ppo.lora_target_modules={settings.target_modules} takes {name}, a layer of type {kind}: no adapter "
                "could be merged into it exactly. Name plain linear layers, or set ppo.use_peft=false"
            )
    return adapted


def _does_not_fit(
    model_class: type, settings: LoraSettings, linear: list[str], unknown: Sequence[str] = ()
) -> ModelError:
    what = f"the linear layers {', '.join(linear)}" if linear else "no linear layers"
    but = f", but no {' or '.join(unknown)}" if unknown else ""
    remedy = "Name some of these" if linear else "Set ppo.use_peft=false"
    return ModelError(
        f"ppo.lora_target_modules={settings.target_modules} does not fit {model_class.__name__}, which has "
        f"{what}{but}. {remedy}"
    )


@contextmanager
def _without_warnings_on_the_head() -> Iterator[None]:
    """Leave out what peft says of heads: `_untie_adapted_head` sees to tied ones, peft itself to how each stores W."""
    with warnings.catch_warnings():
        for message in ("Model (has|with) `tie_word_embeddings=True`", "fan_in_fan_out is set to True but the target"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a layer is a linear layer and no subclass of one, which may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def _linear_layers(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_plain_linear(module)})


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _replace_adapted_layers(model: PreTrainedModel) -> None:
    for name, layer in _adapted_layers(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    vars(model).pop("peft_config", None)
    model._hf_peft_config_loaded = False  # else save_pretrained would look for an adapter to save


def _untie_adapted_head(model: PreTrainedModel) -> None:
    """Give a language-model head that has an adapter weights of its own: merged into tied ones, it changes both."""
    head, embedding = model.get_output_embeddings(), cast(nn.Embedding, model.get_input_embeddings())
    adapted = next((layer for layer in _adapted_layers(model).values() if layer is head), None)
    if adapted is None:
        return
    base = adapted.get_base_layer()
    if base.weight is embedding.weight:
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _peft_name(name: str) -> str:
    return _PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")
