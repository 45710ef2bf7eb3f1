"""A person's own settings (conf/local, another environment, --params) against the shipped ones of conf/base."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kedro.config import OmegaConfigLoader
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

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
        folders = (loader.base_env, loader.env or loader.default_run_env)
        self._base = OmegaConfigLoader(
            loader.conf_source,
            base_env=loader.base_env,
            default_run_env=loader.base_env,
            config_patterns=loader.config_patterns,
            merge_strategy=loader.merge_strategy,
        )
        files = {path for folder in folders for path in Path(loader.conf_source, str(folder)).rglob("*.y*ml")}
        self._texts = {path: path.read_text() for path in sorted(files)}

    def unread(self, pipelines: Mapping[str, Pipeline]) -> list[str]:
        """Return one line for each top-level name that a person gave and nothing reads; Kedro ignores such names.

        Read are the names of conf/base, those that any pipeline takes as `params:name`, and those that a configuration
        file refers to as `${name}`, `${globals:name}` or `${runtime_params:name}`.

        Args:
            pipelines: All registered ones; looked at only if a name is not known otherwise, since it imports them.
        """
        text = "\n".join(self._texts.values())
        shipped = {kind: {str(name) for name in self._base[kind]} for kind in REFERENCES}
        at_run_time = set(re.findall(r"runtime_params:\s*(\w+)", text)) | shipped["parameters"]
        unknown = {f"--params {name}": name for name in self._given if name not in at_run_time}
        for kind, reference in REFERENCES.items():
            names = {str(name) for name in self._loader[kind]} - self._given.keys() - shipped[kind]
            unknown |= {f"{self._file_with(name)}: {name}": name for name in names - set(re.findall(reference, text))}
        if not unknown:
            return []
        inputs = {name for pipeline in pipelines.values() for name in pipeline.inputs()}
        read = {re.split(r"[:.]", name)[1] for name in inputs if name.startswith("params:")}
        return [
            f"{where}: nothing reads this name. {self._hint(name, shipped)}"
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
            for name, value in self._base["parameters"].get(group, {}).items()
            # null is no number that suits one model and not another
            if name in names and value is not None and value == getattr(parameter(catalog, group), name, None)
        ]
        if not found:
            return []
        return [
            f"{', '.join(found)} suit the demo's tiny model, not {model}: set your own in conf/local/parameters.yml"
        ]

    def unusual_values(self, pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
        """Return one line for each setting of PPO that a person set to an unusual value, or that saves nothing here."""
        if "params:ppo" not in pipeline.inputs():
            return []
        from ppo_rlhf.ppo.accelerator import precision_warning, resolve_device  # heavy: only a run of PPO pays

        ppo, shipped = parameter(catalog, "ppo"), self._base["parameters"].get("ppo", {})
        unusual = list(ppo.advice([name for name in ppo.not_default() if shipped.get(name) != getattr(ppo, name)]))
        slow = precision_warning(ppo, resolve_device(ppo.device))
        return [*unusual, slow] if slow else unusual

    def _file_with(self, name: str) -> str:
        """Return the file that has this name at its top level, as it is written in the project."""
        folder = Path(self._loader.conf_source, self._loader.env or self._loader.default_run_env)
        at_top_level = re.compile(rf"^['\"]?{re.escape(name)}\b", re.MULTILINE)
        own = [path for path, text in self._texts.items() if folder in path.parents and at_top_level.search(text)]
        return str((own or [folder])[0].relative_to(folder.parent.parent))

    def _own_model(self) -> str | None:
        settings = {**self._loader["globals"], **self._given}
        base, sft = settings.get("base_model_path"), str(settings.get("sft_model_path"))
        if base:
            return str(base)
        ours = Path(settings.get("data_root", "data"), "06_models")
        return None if ours in Path(sft).parents else sft

    def _hint(self, name: str, shipped: Mapping[str, set[str]]) -> str:
        other = "globals" if name in shipped["globals"] else "parameters" if name in shipped["parameters"] else None
        if other is not None:
            return f"Set it in conf/local/{other}.yml."
        bare = {dotted.partition(".")[2]: dotted for dotted in self._settings_of_groups()}
        known = {known: known for names in shipped.values() for known in names}
        near = difflib.get_close_matches(name.rpartition(".")[2], [*bare, *known], n=1, cutoff=0.6)
        return f"Did you mean `{(bare | known)[near[0]]}`?" if near else f"Known are {', '.join(sorted(known))}."

    def _settings_of_groups(self) -> Iterator[str]:
        from ppo_rlhf.config import PPOConfig  # settings that no file lists have their defaults

        for group, values in self._base["parameters"].items():
            names = (
                {*values, *(PPOConfig.__dataclass_fields__ if group == "ppo" else ())}
                if isinstance(values, dict)
                else ()
            )
            yield from (f"{group}.{name}" for name in sorted(names))
