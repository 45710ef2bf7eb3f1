"""Compares the shipped settings with a user's settings in conf/local, another environment, --params or a project."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.config import OmegaConfigLoader
from kedro.pipeline import Pipeline

from ppo_rlhf.config.parameter_groups import nearest
from ppo_rlhf.hooks.run_description import flattened, parameter
from ppo_rlhf.runtime.paths import SHIPPED_CONF

if TYPE_CHECKING:
    from ppo_rlhf.preflight import RunRequest

PROMPTS, EVALUATION = "prompts_path", "params:evaluation"
OTHER_PROMPTS = " To evaluate other prompts, set evaluation_prompts_path in {}/globals.yml or with --params."
FOLLOWING = {PROMPTS: PROMPTS, "reference_texts": "reference_texts_path"}
"""Settings of `evaluation` that only repeat a path of globals.yml, each with the path's name."""
REFERENCES = {"parameters": r"\$\{\s*(\w+)\s*[}.\[]", "globals": r"\$\{(?:globals:)?\s*(\w+)\s*[},.\[]"}
"""Patterns of a reference to a name in a configuration file, for names of parameters and names of globals."""


class OwnSettings:
    """The settings of a run, compared with the settings that `ppo_rlhf` ships."""

    def __init__(self, loader: OmegaConfigLoader) -> None:
        self._loader, self._given = loader, loader.runtime_params or {}
        alike: dict[str, Any] = {"config_patterns": loader.config_patterns, "merge_strategy": loader.merge_strategy}
        shipped = OmegaConfigLoader(str(SHIPPED_CONF), base_env="base", default_run_env="base", **alike)
        self._base = {kind: shipped[kind] for kind in REFERENCES}
        alike |= {"base_env": loader.base_env, "default_run_env": loader.default_run_env}
        marked = OmegaConfigLoader(loader.conf_source, loader.env, _marked(self._given), **alike)
        self._entries = {**marked["catalog"], **{name: marked[name] for name in ("parameters", "mlflow")}}
        self._entries |= {f"params:{name}": values for name, values in marked["parameters"].items()}
        # The resolver of ${globals:…} belongs to the newest config loader: make a loader that resolves as the run's
        # loader does.
        OmegaConfigLoader(loader.conf_source, loader.env, self._given, **alike)

    def unread(
        self, datasets: Set[str], pipelines: Mapping[str, Pipeline], unused: Set[str] = frozenset()
    ) -> list[str]:
        """Return one line for each name that the user set and nothing reads; Kedro ignores such names silently.

        A name given by `--params` must be read by this command: by one of its parameter groups, by one of its catalog
        entries, or by mlflow.yml. A name in a file may serve any command. A name in a file counts as read if this
        package ships the name, if any pipeline takes `params:name`, or if a file refers to `${name}` or
        `${globals:name}`.

        `datasets` are the datasets that the command reads, with parameter groups as `params:name`. `unused` are the
        datasets of the command that the run does not read because of its settings. `pipelines` are looked up only for
        names that nothing else explains, because the look-up imports all pipelines.
        """
        loader = self._loader
        own = Path(loader.conf_source, loader.env or str(loader.default_run_env))
        other_prompts = OTHER_PROMPTS.format(f"conf/{own.name}")
        folders = (Path(loader.conf_source, str(loader.base_env)), own)
        texts = {
            folder: "\n".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.y*ml")) for folder in folders
        }
        text = "\n".join(texts.values())
        lines, unknown = [], {}
        for setting, path in FOLLOWING.items():
            follows = {**loader["globals"], **self._given}.get(path)
            given = (loader["parameters"].get("evaluation") or {}).get(setting, follows)
            advice = (
                other_prompts if path == PROMPTS else f" Set {path} in conf/{own.name}/globals.yml or with --params."
            )
            if given != follows:
                lines.append(f"evaluation.{setting}={given}: this setting only follows {path}.{advice}")
        for name in (name for name in self._given if not self._is_read(name, datasets - unused)):
            typed = f"--params {', '.join(flattened(name, self._given[name]))}"
            if self._is_read(name, datasets):
                lines.append(
                    f"{typed}: reward.components and ppo.value_model of this run leave it unused; leave it out."
                )
                continue
            readers = sorted(other for other in pipelines if self._is_read(name, pipelines[other].datasets()))
            if readers:
                advice = other_prompts if name == PROMPTS and EVALUATION in datasets else ""
                lines.append(f"{typed}: nothing in this command reads it; {', '.join(readers)} would.{advice}")
            else:
                unknown[f"--params {name}"] = name
        for kind, reference in REFERENCES.items():
            names = {str(name) for name in loader[kind]} - self._given.keys() - self._base[kind].keys()
            for name in names - set(re.findall(reference, text)):
                begins = re.compile(rf"^{re.escape(name)}(?!\w)", re.MULTILINE)
                folder = next((f for f in reversed(folders) if begins.search(texts[f])), own)
                unknown[f"conf/{folder.name}: {name} ({kind})"] = name
        inputs = {name for pipeline in pipelines.values() for name in pipeline.inputs()} if unknown else set()
        read = {re.split(r"[:.]", name)[1] for name in inputs if name.startswith("params:")}
        lines += [
            f"{where}: nothing reads this name.{self._hint(name, own.name)}"
            for where, name in unknown.items()
            if name not in read and "parameters" not in inputs and not name.startswith("_")
        ]
        return sorted(lines)

    def is_typed(self, name: str) -> bool:
        """Return whether a name was given by `--params`."""
        return name in self._given

    def typed(self, group: str) -> set[str]:
        """Return the settings of a group whose value comes from `--params`, also if `--params` sets the value by
        another name such as `seed`.
        """
        values, marks = self._entries.get(f"params:{group}") or {}, [f"<{name}>" for name in self._given]
        return {str(name) for name, value in values.items() if any(mark in str(value) for mark in marks)}

    def _is_read(self, name: str, datasets: Set[str]) -> bool:
        read = {each.split(".")[0] if each.startswith("params:") else each for each in datasets} | {"mlflow"}
        marked = {entry for entry, values in self._entries.items() if f"<{name}>" in str(values)}
        if name in FOLLOWING.values():
            # a node that reads params:evaluation reads no table: the path there says only what the table is
            marked -= {EVALUATION}
        # A catalog entry whose name contains { is a pattern for many datasets
        return any(entry in read or "{" in entry for entry in marked)

    def unusual_values(self, run: RunRequest) -> list[str]:
        """Return one line for each PPO setting that the user gave an unusual value; add a line for a slow precision."""
        if not run.reads("params:ppo"):
            return []
        from ppo_rlhf.ppo.precision import precision_warning, resolve_device

        ppo, shipped = parameter(run.catalog, "ppo"), self._base["parameters"].get("ppo", {})
        # The model that PPO starts from; None: the policy is trained from scratch
        start = run.source(run.start) if run.reads(run.start) else None
        size = None if start is None else run.catalog[run.start].load().empty_causal_lm().num_parameters()
        own = {name for name in ppo.not_default() if shipped.get(name) != getattr(ppo, name)}
        if "value_model" in own and ppo.value_model == "shared":
            own.add("value_learning_rate")  # what is shipped suits the critic that is shipped
        unusual = ppo.advice(own, size)
        slow = precision_warning(ppo, resolve_device(ppo.device))
        return [*unusual, slow] if slow else unusual

    def _hint(self, name: str, environment: str) -> str:
        for other in ("globals", "parameters"):
            if name in self._base[other]:
                return f" Set it in conf/{environment}/{other}.yml."
        # The fields of PPOConfig are needed, because the shipped YAML files list only some of PPO's settings
        from ppo_rlhf.config import PPOConfig

        groups = {**self._base["parameters"], "ppo": PPOConfig.__dataclass_fields__}
        # Full name of each setting; if several groups have a setting of the same name, the last group's is suggested
        full: dict[str, str] = {}
        for group in sorted(groups, key=lambda group: group == "ppo"):
            full |= {key: f"{group}.{key}" for key in groups[group]} if isinstance(groups[group], Mapping) else {}
        full |= {name: name for name in set().union(*self._base.values())}
        near = nearest(name, full)
        return f" Did you mean `{full[near]}`?" if near else ""


def _marked(values: Mapping[str, Any], mark: str = "") -> dict[str, Any]:
    """Return `values` with each value replaced by a mark, `<name>` with its top-level name.

    A mark that appears in another setting after interpolation shows that the named value is read.
    """
    marks = {name: mark or f"<{name}>" for name in values}
    return {name: _marked(v, marks[name]) if isinstance(v, Mapping) else marks[name] for name, v in values.items()}
