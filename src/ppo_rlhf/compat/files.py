"""Reads files with settings of other libraries, and converts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_rlhf.compat.arguments import located
from ppo_rlhf.compat.command_line import find_command, options_of
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.llamafactory import STAGES, from_llamafactory
from ppo_rlhf.compat.swift import from_swift
from ppo_rlhf.compat.trl import from_trl
from ppo_rlhf.core.errors import ConfigError, in_one_line


def convert_files(library: str, files: Sequence[Path], *, num_prompts: int | None = None) -> list[Conversion]:
    """Return the conversion of each file of settings. Of several stages (LLaMA-Factory), PPO's conversion comes first.

    Raises:
        ConfigError: A file cannot be read, a file's stage is not supported, or there are too many files.
        DataError: A table that a file names cannot be loaded.
    """
    if library == "llamafactory":
        return _stages(files, num_prompts)
    if len(files) > 1:
        raise ConfigError(f"{library} has all settings in one file, but {len(files)} files are given. Give one file.")
    if library == "trl":
        return [from_trl(_mapping(files[0]), num_prompts=num_prompts)]
    folders = [Path.cwd(), *files[0].resolve().parents]
    settings, variables = _swift(files[0], folders)
    nodes = [variables.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")]
    processes = math.prod(int(number) if number.isdigit() else 1 for number in nodes)
    return [from_swift(settings, num_prompts=num_prompts, processes=processes, folders=folders)]


def _swift(file: Path, folders: Sequence[Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments in a shell script or a file of settings, and the environment variables that it sets."""
    if file.suffix in (".yaml", ".yml", ".json"):
        given = _mapping(file)
        environment = given.pop("ENV", None) or {}
        return given, {str(name): str(value) for name, value in environment.items()}
    command = find_command(_text(file), (("swift", "rlhf"), ("rlhf.py",)), str(file))
    before, options = options_of(command.words, str(file))
    settings: dict[str, Any] = {}
    variables = dict(command.variables)
    # Paths before the options are YAML files of ms-swift's settings, which the command line's options override
    for named in before:
        settings, environment = _swift(Path(located(named, folders)), folders)
        variables = environment | variables
    return settings | options, variables


def _stages(files: Sequence[Path], num_prompts: int | None) -> list[Conversion]:
    read = [_mapping(file) for file in files]
    stages = [settings.get("stage", "sft") for settings in read]
    if twice := next((stage for stage in stages if stages.count(stage) > 1), None):
        raise ConfigError(f"Two of the files have stage={twice}. Give one file of each stage.")
    conversions = {
        stage: from_llamafactory(
            settings, num_prompts=num_prompts, folders=[Path.cwd(), *file.resolve().parents], beside=stages
        )
        for stage, file, settings in zip(stages, files, read, strict=True)
    }
    return [conversions[stage] for stage in STAGES if stage in conversions]


def _mapping(file: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file."""
    try:
        values = yaml.safe_load(_text(file).replace("\t", " "))  # a YAML parser reads JSON too, except for tabs
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} cannot be read: {in_one_line(error)}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no settings; it must be a mapping (name: value).")
    return {str(name): value for name, value in values.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {in_one_line(error)}.") from None
