"""Reads files with settings of other libraries, and converts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_rlhf.compat import verl
from ppo_rlhf.compat.arguments import located
from ppo_rlhf.compat.command_line import Command, find_command, options_of
from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.llamafactory import from_llamafactory
from ppo_rlhf.compat.rows import STAGES
from ppo_rlhf.compat.sources import mapping_of, text_of
from ppo_rlhf.compat.swift import NAMES, NEED_VALUE, from_swift
from ppo_rlhf.compat.trl import from_trl
from ppo_rlhf.core.errors import ConfigError

SETTINGS = (".yaml", ".yml", ".json")
"""Endings of files of settings; other files are shell scripts."""


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
    return [{"trl": _trl, "ms-swift": _swift, "verl": _verl}[library](files[0], num_prompts)]


def _trl(file: Path, num_prompts: int | None) -> Conversion:
    return from_trl(mapping_of(file), num_prompts=num_prompts)


def _swift(file: Path, num_prompts: int | None) -> Conversion:
    command, folders = _command(file, NAMES)
    before, settings = options_of(command.words, command.where, NEED_VALUE) if command else ([str(file)], {})
    environment: dict[str, str] = {}
    for named in before:  # files of settings, which the command line's options override
        if not named.endswith(SETTINGS):
            raise ConfigError(f"{file}: `{named}` is no option and no file of settings ({', '.join(SETTINGS)}).")
        given = mapping_of(Path(located(named, folders)))
        variables = given.pop("ENV", None) or {}
        if not isinstance(variables, dict):
            raise ConfigError(f"{named}: ENV={variables!r} must be a mapping of environment variables to values.")
        settings, environment = given | settings, environment | {str(name): str(variables[name]) for name in variables}
    if command is None:
        command = Command(str(file), [], [], environment, set(), "", takes_arguments=False)
    else:
        command.environment = environment | command.environment
    processes = command.processes(("NPROC_PER_NODE", "NNODES"))
    c = from_swift(settings, num_prompts=num_prompts, processes=processes, folders=folders)
    return _with_arguments(c, command)


def _verl(file: Path, num_prompts: int | None) -> Conversion:
    command, folders = _command(file, verl.NAMES)
    if command is None:
        return verl.from_verl(mapping_of(file), num_prompts=num_prompts, folders=folders)
    command.processes()  # refuses a launcher that cannot be read; the settings count the processes
    settings = verl.read_overrides(command.words, command.where)
    return _with_arguments(verl.from_verl(settings, num_prompts=num_prompts, folders=folders), command)


def _command(file: Path, names: Sequence[tuple[str, ...]]) -> tuple[Command | None, list[Path]]:
    """Return the command in a shell script (None: a file of settings), and the folders of relative paths."""
    folders = [Path.cwd(), *file.resolve().parents]
    if file.suffix in SETTINGS:
        return None, folders
    command = find_command(text_of(file), names, str(file))
    return command, [folder / command.folder for folder in folders]


def _with_arguments(c: Conversion, command: Command) -> Conversion:
    if command.takes_arguments:
        c.remarks.append("The script passes its own arguments ($@) on; it was read as if it got none.")
    return c


def _stages(files: Sequence[Path], num_prompts: int | None) -> list[Conversion]:
    read = [mapping_of(file) for file in files]
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
