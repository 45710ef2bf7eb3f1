"""`convert-config`: a configuration of TRL, written as parameters of this project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import project_here
from ppo_rlhf.core.errors import ConfigError, in_one_line

if TYPE_CHECKING:  # imported at run time where it is used: other commands need no PPOConfig
    from ppo_rlhf.compat import Conversion


@click.command("convert-config", cls=Command)
@click.option("--from", "library", type=click.Choice(["trl"]), required=True, help="Whose configuration it is.")
@click.option("--to", "target", help="The parameters file to write; - prints. By default conf/local/parameters.yml.")
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), help="Training prompts, if epochs are counted.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.argument("source", type=click.Path(path_type=Path))
def convert_config(library: str, target: str | None, num_prompts: int | None, force: bool, source: Path) -> None:
    """Write parameters that do what a configuration of TRL does.

    SOURCE is a YAML or JSON file of settings. Paths of models and prompts go to globals.yml, in the same folder; those
    that the source does not name are written there to be filled in. Settings that cannot be carried over are printed.
    """
    from ppo_rlhf.compat import from_trl

    conversion = from_trl(_read(source), num_prompts=num_prompts)
    conversion.ppo_config()
    printed = Path("parameters.yml")
    parameters = printed if target == "-" else Path(target or project_here() / "conf" / "local" / printed)
    if parameters.name == "globals.yml":
        raise ConfigError(f"--to {target}: name the parameters file; globals.yml is written beside it.")
    globals_ = parameters.with_name("globals.yml")
    texts = {parameters: conversion.parameters_text(), globals_: conversion.globals_text()}
    if target == "-":
        click.echo("\n".join(texts.values()), nl=False)
    else:
        _write(texts, force=force)
        click.echo(f"Written: {parameters}, {globals_}.", err=True)
    click.echo(_report(conversion, globals_), err=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8").replace("\t", " "))  # JSON is YAML, except for tabs
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no settings; it must be a mapping (name: value).")
    return {str(name): value for name, value in values.items()}


def _write(files: dict[Path, str], *, force: bool) -> None:
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise ConfigError(
            f"Already there: {', '.join(existing)}. Give --force to replace, --to FILE to write elsewhere, or --to - "
            "to print."
        )
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _report(conversion: Conversion, globals_: Path) -> str:
    """Return the settings that are not carried over by reason, the remarks, and what is left to do."""
    by_reason: dict[str, list[str]] = {}
    for setting, reason in conversion.not_carried:
        by_reason.setdefault(reason, []).append(setting)
    left = len(conversion.not_carried)
    lines = [f"Carried over: {len(conversion.given) - left} settings. Not carried over: {left}."]
    lines += [f"  {', '.join(settings)}: {reason}." for reason, settings in by_reason.items()]
    lines += ["Different from the source:", *(f"  {remark}" for remark in conversion.remarks)]
    if conversion.missing:
        lines.append(f"Fill in before you run: {', '.join(conversion.missing)} in {globals_}.")
    return "\n".join([*lines, "Then: kedro run --pipelines align"])
