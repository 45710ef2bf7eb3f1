"""The option `--params`, as Kedro reads it, and with lists."""

import re
from typing import Any

import click
from kedro.framework.cli.utils import _split_params


def split_params(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return the settings; `name=[1,2]` is a list. Kedro cuts at commas, so it gets YAML's other way to write one."""
    if isinstance(value, str):
        items = lambda found: "=" + "\n".join(f"- {item}" for item in found[1].split(","))  # noqa: E731
        value = re.sub(r"=\[([^\[\]]*,[^\[\]]*)\]", items, value)
    return _split_params(context, option, value)
