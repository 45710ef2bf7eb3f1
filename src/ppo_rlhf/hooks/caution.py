"""Words of caution on settings: those of the shipped demo on a person's own model, and a person's unusual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from kedro.config import OmegaConfigLoader
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from omegaconf import DictConfig, OmegaConf

from ppo_rlhf.hooks.configuration_files import ConfigurationFiles

TUNED = {
    "supervised_finetuning": ("learning_rate", "per_device_train_batch_size"),
    "reward_modelling": ("learning_rate", "per_device_train_batch_size"),
    "ppo": ("learning_rate", "value_learning_rate", "response_length", "per_device_train_batch_size"),
}


def demo_settings_in_use(loader: OmegaConfigLoader, pipeline: Pipeline, catalog: CatalogProtocol) -> str | None:
    """Return one line if a run trains a person's own model with learning rates, lengths or batch sizes of the demo.

    The demo's values are those of `conf/base`; a value that a person set to the same number is not told apart.
    """
    model = _own_model(loader)
    if model is None:
        return None
    files = ConfigurationFiles(loader)
    found = [
        f"{group}.{name}={value:g}"
        for group, names in TUNED.items()
        if f"params:{group}" in pipeline.inputs()
        for name, value in _base_values(files, group).items()
        # null is no number that suits one model and not another
        if name in names and value is not None and value == getattr(catalog[f"params:{group}"].load(), name, None)
    ]
    if not found:
        return None
    return f"{', '.join(found)} suit the demo's tiny model, not {model}: set your own in conf/local/parameters.yml"


def advice_on_own_settings(loader: OmegaConfigLoader, pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
    """Return one line for each of PPO's settings that a person moved to where it is unusual, or saves nothing here."""
    if "params:ppo" not in pipeline.inputs():
        return []
    # heavy, as what they need: only a run of PPO pays for it
    from ppo_rlhf.ppo.accelerator import precision_warning, resolve_device

    ppo, shipped = catalog["params:ppo"].load(), _base_values(ConfigurationFiles(loader), "ppo")
    unusual = ppo.advice([name for name in ppo.not_default() if shipped.get(name) != getattr(ppo, name)])
    idle = precision_warning(ppo, resolve_device(ppo.device))
    return [*unusual, idle] if idle else unusual


def _own_model(loader: OmegaConfigLoader) -> str | None:
    settings = {**loader["globals"], **(loader.runtime_params or {})}
    base, sft = settings.get("base_model_path"), str(settings.get("sft_model_path"))
    if base:
        return str(base)
    ours = Path(settings.get("data_root", "data"), "06_models")
    return None if ours in Path(sft).parents else sft


def _base_values(files: ConfigurationFiles, group: str) -> dict[str, Any]:
    """Return what conf/base gives a group, whatever conf/local or --params make of it."""
    values: dict[str, Any] = {}
    for config in files.base("parameters"):
        if isinstance(config.get(group), DictConfig):
            values |= cast("dict[str, Any]", OmegaConf.to_container(config[group], resolve=False))
    return values
