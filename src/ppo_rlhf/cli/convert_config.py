"""`convert-config`: a configuration of TRL or DeepSpeed-Chat, written as parameters of this project."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from kedro.utils import find_kedro_project

from ppo_rlhf.core.errors import ConfigError, PPORLHFError

if TYPE_CHECKING:  # at run time imported where it is used: other commands do without PPOConfig
    from ppo_rlhf.compat import Conversion

STDOUT = "-"
GLOBALS = "globals.yml"


@click.command("convert-config", context_settings={"ignore_unknown_options": True})
@click.option(
    "--from", "library", type=click.Choice(["trl", "deepspeed-chat"]), required=True, help="Whose configuration it is."
)
@click.option("--to", "target", help="The parameters file to write; - prints. By default conf/local/parameters.yml.")
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), help="Training prompts, if epochs are counted.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.argument("source", nargs=-1, required=True, type=click.UNPROCESSED)
def convert_config(
    library: str, target: str | None, num_prompts: int | None, force: bool, source: tuple[str, ...]
) -> None:
    """Write parameters that do what a configuration of TRL or DeepSpeed-Chat does.

    SOURCE is a file: YAML or JSON of TRL, a shell script of DeepSpeed-Chat. Or it is a DeepSpeed-Chat command itself,
    after two dashes: `kedro convert-config --from deepspeed-chat -- deepspeed main.py --ppo_epochs 1 …`. Paths of
    models and data go to globals.yml, in the same folder. What cannot be carried over is printed.
    """
    try:
        conversion = _read(library, source, num_prompts)
        conversion.ppo_config()
        if target == STDOUT:
            click.echo(_both_texts(conversion))
        else:
            files = _files(conversion, _parameters_path(target))
            _write(files, force=force)
            click.echo(f"Written: {', '.join(str(path) for path in files)}.", err=True)
    except PPORLHFError as error:
        raise click.ClickException("\nError: ".join(str(error).splitlines())) from None
    for line in _report(conversion):
        click.echo(line, err=True)


def _read(library: str, source: Sequence[str], num_prompts: int | None) -> Conversion:
    from ppo_rlhf.compat import from_deepspeed_chat, from_trl

    if library == "trl":
        if len(source) > 1:
            raise ConfigError(f"--from trl takes one file, got {len(source)} words: {' '.join(source)}.")
        return from_trl(_mapping(Path(source[0])), num_prompts=num_prompts)
    if len(source) > 1:
        return from_deepspeed_chat(source, num_prompts=num_prompts)
    # A path may have spaces, as a command has. os.path: Path.is_file raises for a command too long to be a file's name.
    is_file = os.path.isfile(source[0]) or (" " not in source[0] and not source[0].startswith("-"))
    return from_deepspeed_chat(_text(Path(source[0])) if is_file else source[0], num_prompts=num_prompts)


def _mapping(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: a mapping (name: value) is expected.")
    return {str(name): value for name, value in values.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file that can be read.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.") from None


def _parameters_path(target: str | None) -> Path:
    if target is not None:
        if Path(target).name == GLOBALS:
            raise ConfigError(
                f"--to {target}: name the file for parameters, parameters.yml; {GLOBALS} is written beside it."
            )
        return Path(target)
    project = find_kedro_project(Path.cwd())
    if project is None:
        raise ConfigError(f"{Path.cwd()} is not in a Kedro project: change to it, or say where to write with --to.")
    return project / "conf" / "local" / "parameters.yml"


def _files(conversion: Conversion, parameters: Path) -> dict[Path, str]:
    from ppo_rlhf.compat.parameters_file import globals_text, parameters_text

    texts = {parameters: parameters_text(conversion), parameters.with_name(GLOBALS): globals_text(conversion)}
    return {path: text for path, text in texts.items() if text}


def _both_texts(conversion: Conversion) -> str:
    return "\n".join(_files(conversion, Path("parameters.yml")).values()).rstrip()


def _write(files: dict[Path, str], *, force: bool) -> None:
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise ConfigError(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} there already: give --force to replace, or "
            "--to another file, or --to - to print."
        )
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None


def _report(conversion: Conversion) -> list[str]:
    """Return what to print: settings that are not carried, those with one reason together, then the remarks."""
    by_reason: dict[str, list[str]] = {}
    for setting, reason in conversion.not_carried:
        by_reason.setdefault(reason, []).append(setting)
    lines = [f"Carried over: {len(conversion.carried)} settings. Not carried over: {len(conversion.not_carried)}."]
    lines += [f"  {', '.join(settings)}: {reason}." for reason, settings in by_reason.items()]
    if conversion.remarks:
        lines += ["Different from the source:", *(f"  {remark}" for remark in conversion.remarks)]
    lines.append("Run it: kedro run --pipelines align")
    return lines
