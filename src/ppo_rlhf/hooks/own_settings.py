"""A person's own settings (conf/local, another environment, --params) against the shipped ones of conf/base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.config.settings_group import closest
from ppo_rlhf.hooks.run_description import parameter

TUNED = {
    "supervised_finetuning": ("learning_rate", "per_device_train_batch_size"),
    "reward_modelling": ("learning_rate", "per_device_train_batch_size"),
    "ppo": ("learning_rate", "value_learning_rate", "response_length", "per_device_train_batch_size"),
}
"""Settings of the demo that suit its tiny model alone."""
REFERENCES = {"parameters": r"\$\{\s*(\w+)\s*[}.\[]", "globals": r"\$\{(?:globals:)?\s*(\w+)\s*[},.\[]"}
"""How a file refers to a name of each kind."""


class OwnSettings:
    """The settings of a run, and those of conf/base alone."""

    def __init__(self, loader: OmegaConfigLoader) -> None:
        """Take the run's loader."""
        self._loader, self._given = loader, loader.runtime_params or {}
        alike: dict[str, Any] = {
            "base_env": loader.base_env,
            "config_patterns": loader.config_patterns,
            "merge_strategy": loader.merge_strategy,
        }
        base = OmegaConfigLoader(loader.conf_source, default_run_env=loader.base_env, **alike)
        self._base = {kind: base[kind] for kind in REFERENCES}
        self._shipped = {kind: {str(name) for name in values} for kind, values in self._base.items()}
        # the loader that was made last resolves ${globals:…} for all: like the run's own from now on
        OmegaConfigLoader(loader.conf_source, loader.env, self._given, default_run_env=loader.default_run_env, **alike)

    def unread(self, pipelines: Mapping[str, Pipeline]) -> list[str]:
        """Return one line for each top-level name that a person gave and nothing reads; Kedro ignores such names.

        Read are the names of conf/base, those that any pipeline takes as `params:name`, and those that a configuration
        file refers to as `${name}`, `${globals:name}` or `${runtime_params:name}`.

        Args:
            pipelines: All registered ones; looked at only if a name is not known otherwise, since it imports them.
        """
        loader = self._loader
        own = Path(loader.conf_source, loader.env or str(loader.default_run_env))
        folders = (Path(loader.conf_source, str(loader.base_env)), own)
        text = "\n".join(file.read_text() for folder in folders for file in folder.rglob("*.y*ml"))
        at_run_time = set(re.findall(r"runtime_params:\s*(\w+)", text)) | self._shipped["parameters"]
        unknown = {f"--params {name}": name for name in self._given if name not in at_run_time}
        for kind, reference in REFERENCES.items():
            names = {str(name) for name in loader[kind]} - self._given.keys() - self._shipped[kind]
            unknown |= {f"conf/{own.name}: {name} ({kind})": name for name in names - set(re.findall(reference, text))}
        if not unknown:
            return []
        inputs = {name for pipeline in pipelines.values() for name in pipeline.inputs()}
        read = {re.split(r"[:.]", name)[1] for name in inputs if name.startswith("params:")}
        return [
            f"{where}: nothing reads this name.{self._hint(name)}"
            for where, name in sorted(unknown.items())
            if name not in read and "parameters" not in inputs and not name.startswith("_")
        ]

    def demo_values(self, pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
        """Return one line if a run trains a person's own model with learning rates, lengths or batch sizes of the demo.

        A value that a person set to the same number is not told apart from the demo's.
        """
        model = self._own_model()
        found = [
            f"{group}.{name}={value:g}"
            for group, names in TUNED.items()
            if model is not None and f"params:{group}" in pipeline.inputs()
            # the audit only reads how pairs are held out
            if group != "reward_modelling" or "reward_model" in pipeline.all_outputs()
            for name, value in self._base["parameters"].get(group, {}).items()
            # null is no number that suits one model and not another
            if name in names and value is not None and value == getattr(parameter(catalog, group), name, None)
        ]
        if not found:
            return []
        return [
            f"{', '.join(found)}: chosen for the demo's tiny model, not for {model}. Set your own in "
            "conf/local/parameters.yml"
        ]

    def unusual_values(self, pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
        """Return one line for each setting of PPO that a person set to an unusual value, or that saves nothing here."""
        if "params:ppo" not in pipeline.inputs():
            return []
        from ppo_rlhf.ppo.accelerator import precision_warning, resolve_device  # heavy: only a run of PPO pays
        from ppo_rlhf.preflight.request import RunRequest

        ppo, shipped = parameter(catalog, "ppo"), self._base["parameters"].get("ppo", {})
        run = RunRequest(pipeline, catalog, Path(), "")
        has_start = run.reads(run.start) and run.source(run.start) is not None  # else it is trained from scratch
        size = catalog[run.start].load().empty_causal_lm().num_parameters() if has_start else None
        own = [name for name in ppo.not_default() if shipped.get(name) != getattr(ppo, name)]
        unusual = ppo.advice(own, size)
        slow = precision_warning(ppo, resolve_device(ppo.device))
        return [*unusual, slow] if slow else unusual

    def _own_model(self) -> str | None:
        settings = {**self._loader["globals"], **self._given}
        base, sft = settings.get("base_model_path"), str(settings.get("sft_model_path"))
        if base:
            return str(base)
        ours = Path(settings.get("data_root", "data"), "06_models")
        return None if ours in Path(sft).parents else sft

    def _hint(self, name: str) -> str:
        for other in ("globals", "parameters"):
            if name in self._shipped[other]:
                return f" Set it in conf/local/{other}.yml."
        from ppo_rlhf.config import PPOConfig  # settings that no file lists have their defaults

        groups = {**self._base["parameters"], "ppo": PPOConfig.__dataclass_fields__}
        dotted = [f"{group}.{key}" for group, keys in groups.items() if isinstance(keys, Mapping) for key in keys]
        return closest(name, [*dotted, *set().union(*self._shipped.values())])
