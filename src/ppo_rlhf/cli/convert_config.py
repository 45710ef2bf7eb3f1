"""`convert-config`: converts a configuration of another library into parameters of this project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import project_here
from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.escaped_text import escaped

if TYPE_CHECKING:
    from ppo_rlhf.compat import Conversion

LIBRARIES = ("trl", "llamafactory", "ms-swift", "verl")


@click.command("convert-config", cls=Command)
@click.option(
    "--from", "library", type=click.Choice(LIBRARIES), required=True, help="The library of the configuration."
)
@click.option("--to", "target", help="The parameters file to write; - prints. By default conf/local/parameters.yml.")
@click.option(
    "--prompts", "num_prompts", type=click.IntRange(min=1), help="Number of training prompts, if SOURCE counts epochs."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def convert_config(
    library: str, target: str | None, num_prompts: int | None, force: bool, sources: tuple[Path, ...]
) -> None:
    """Write parameters that do what a configuration of TRL, LLaMA-Factory, ms-swift or verl does.

    SOURCE is a YAML or JSON file of settings: for ms-swift args.json of a run, for verl .hydra/config.yaml of a run or
    what the command prints with `--cfg job --resolve`. For LLaMA-Factory give one file for each stage. Paths of models
    and prompts are written to globals.yml in the same folder; paths that SOURCE does not name are left there to be
    filled in. Settings that cannot be carried over are printed.
    """
    from ppo_rlhf.compat.conversion import texts_of
    from ppo_rlhf.compat.sources import convert_files

    conversions = convert_files(library, sources, num_prompts=num_prompts)
    for conversion in conversions:
        if "ppo" in conversion.parameters:
            conversion.ppo_config()
            if (
                "reward_components" not in conversion.globals
            ):  # a project that `init` wrote may have a function as its reward
                conversion.write("reward_components", [{"type": "model"}], "the source takes its reward from a model")
    if target is None:
        parameters = project_here() / "conf" / "local" / "parameters.yml"
    else:  # what is printed has no place
        parameters = Path("parameters.yml" if target == "-" else target)
    if parameters.is_dir():
        raise ConfigError(f"--to {target} is a folder: name the file, {parameters / 'parameters.yml'}.")
    if parameters.name == "globals.yml":
        raise ConfigError(f"--to {target}: name the parameters file; globals.yml is written beside it.")
    globals_ = parameters.with_name("globals.yml")
    texts = dict(zip((parameters, globals_), texts_of(conversions), strict=True))
    if target == "-":
        click.echo(escaped("\n".join(texts.values())), nl=False)
    else:
        _write(texts, force=force)
        click.echo(f"Written: {', '.join(map(str, texts))}.", err=True)
    click.echo(escaped(without_secrets(_report(conversions, globals_))), err=True)


def _write(files: dict[Path, str], *, force: bool) -> None:
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise ConfigError(
            f"Already there: {', '.join(existing)}. Give --force to replace them, --to FILE to write elsewhere, or "
            "--to - to print."
        )
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _report(conversions: list[Conversion], globals_: Path) -> str:
    """Return the report: settings that are not carried over by reason, remarks, paths to fill in, the next command."""
    lines = []
    for conversion in conversions:
        by_reason: dict[str, list[str]] = {}
        for setting, reason in conversion.not_carried:
            by_reason.setdefault(reason, []).append(setting)
        left = len(conversion.not_carried)
        lines += [f"From {conversion.source}:"] if len(conversions) > 1 else []
        lines.append(f"Carried over: {len(conversion.given) - left} settings. Not carried over: {left}.")
        lines += [f"  {', '.join(_grouped(settings))}: {reason}." for reason, settings in by_reason.items()]
    remarks = dict.fromkeys(remark for conversion in conversions for remark in conversion.remarks)
    lines += ["Different from the source:", *(f"  {remark}" for remark in remarks)] if remarks else []
    missing = dict.fromkeys(name for conversion in conversions for name in conversion.missing)
    if missing:
        lines.append(f"Fill in before you run: {', '.join(missing)} in {globals_}.")
    return "\n".join([*lines, f"Then: {_command(conversions)}"])


def _grouped(settings: list[str]) -> list[str]:
    """Return the settings; more than 20 with dots, as a composed configuration has, by the first three parts."""
    if len(settings) <= 20:
        return settings
    return [*dict.fromkeys(".".join(name.split(".")[:3]) + (".*" if name.count(".") > 2 else "") for name in settings)]


def _command(conversions: list[Conversion]) -> str:
    """Return the command that runs the converted stages."""
    groups = {group for conversion in conversions for group in conversion.parameters}
    stages = {
        "supervised_finetuning": "data_preparation,supervised_finetuning",
        "reward_modelling": "reward_modelling",
        "ppo": "align",
    }
    count = max((conversion.processes or 1 for conversion in conversions), default=1)
    run = f"torchrun --nproc_per_node {count} -m kedro run" if count > 1 else "kedro run"
    if groups >= stages.keys():
        return run
    return f"{run} --pipelines {','.join(stages[group] for group in stages if group in groups)}"
