"""A conversion as the two files that a person keeps in conf/local: parameters.yml and globals.yml."""

from __future__ import annotations

from typing import Any

import yaml

from ppo_rlhf.compat.conversion import Conversion


def parameters_text(conversion: Conversion) -> str:
    """Return parameters.yml: each value with the setting that it comes from."""
    lines = _heading(conversion)
    for group, values in conversion.groups.items():
        lines.append(f"{group}:")
        for name, value in values.items():
            lines.append(f"  {name}: {_scalar(value)} # {conversion.origins[f'{group}.{name}']}")
    return "\n".join(lines) + "\n"


def globals_text(conversion: Conversion) -> str:
    """Return globals.yml, likewise; an empty text if there are none."""
    if not conversion.globals:
        return ""
    values = [f"{name}: {_scalar(value)} # {conversion.origins[name]}" for name, value in conversion.globals.items()]
    return "\n".join([*_heading(conversion), *values]) + "\n"


def _heading(conversion: Conversion) -> list[str]:
    return [
        f"# Written by `kedro convert-config` from {conversion.source}. Beside each value stands the setting that it",
        "# comes from. Whatever the source decides is here, defaults too: else values of the shipped demo would apply.",
    ]


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
