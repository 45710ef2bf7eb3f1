"""Names given with --params: Kedro ignores one that nothing reads, which hides every misspelling."""

from __future__ import annotations

import re

from kedro.config import OmegaConfigLoader

from ppo_rlhf.hooks.configuration_files import ConfigurationFiles, closest, settings_of_groups

WHERE_DATA_LIE = "data_root"
READ_BY_NAME = re.compile(r"\$\{runtime_params:\s*([\w.]+)")


def unknown_names(loader: OmegaConfigLoader) -> list[str]:
    """Return one line for each top-level name of the run's parameters that nothing reads.

    Known are the parameter groups, the globals, and every name that some configuration file reads as
    `${runtime_params:name, …}`.
    """
    given = list(loader.runtime_params or {})
    if not given:
        return []
    files = ConfigurationFiles(loader)
    groups = files.all("parameters")
    known = {str(name) for config in (*groups, *files.all("globals")) for name in config}
    known.update(name.split(".")[0] for text in files.texts() for name in READ_BY_NAME.findall(text))
    known = {name for name in known if not name.startswith("_")} - {WHERE_DATA_LIE}
    if WHERE_DATA_LIE in given:
        return [f"--params {WHERE_DATA_LIE}: it is read from files alone; set it in conf/local/globals.yml."]
    nested = settings_of_groups(groups)
    return [
        f"--params {name}: nothing is called so.{closest(name, known, nested)}" for name in given if name not in known
    ]
