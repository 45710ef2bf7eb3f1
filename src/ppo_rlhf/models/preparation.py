"""Prepares every loaded model for its use: switches dropout off, and computes GELU in one kernel."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation

from ppo_rlhf.core.errors import ModelError

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def prepare(model: PreTrainedModel, where: str = "the model") -> PreTrainedModel:
    """Prepare a model in place and return the model: eval mode, no dropout, GELU in one kernel.

    Raises:
        ModelError: A weight is NaN or infinite; `where` says where the model comes from.
    """
    if (name := not_finite(model.named_parameters())) is not None:
        raise ModelError(f"{where}: the weight {name} holds NaN or infinity. Give a model that has not diverged.")
    disable_dropout(model)
    fuse_activations(model)
    return model.eval()


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in modules and their configurations, so that train() computes as eval() does.

    eval() alone is not enough, because gradient checkpointing needs train().
    """
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
        config = getattr(module, "config", None)
        for holder in (module, config) if isinstance(config, PretrainedConfig) else (module,):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def fuse_activations(model: nn.Module) -> None:
    """Replace transformers' `gelu_new` (GPT-2), which runs eight kernels, by torch's single kernel for the formula."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity; None if all tensors are finite."""
    for name, tensor in tensors:
        # torch.aminmax returns NaN if any number is NaN; isfinite() would allocate a tensor as large as the weight.
        extremes = tensor.detach().aminmax() if tensor.numel() and tensor.is_floating_point() else ()
        if not all(bool(extreme.isfinite()) for extreme in extremes):
            return name
    return None
