"""`init`: writes a Kedro project for a user's own model, with this package's pipelines, settings and commands."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.util
import json
import keyword
import os
import re
import shlex
import sys
from pathlib import Path

import click
import kedro

import ppo_rlhf
from ppo_rlhf.cli.errors import Command
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.runtime.paths import DOCS, SHIPPED_CONF

TEMPLATE = SHIPPED_CONF.parent
HIDDEN = ("gitignore", "telemetry")
"""Files of the template whose names get a leading dot in a project."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
GLOBALS = "conf/base/globals.yml"


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="The SFT model: a directory, a GGUF file, or a name on the hub.")
@click.option(
    "--reward",
    metavar="NAME",
    help="A function as module:name, or a reward model: a directory, or a name on the hub. By default the function in "
    "the project's rewards.py.",
)
@click.option("--prompts", metavar="NAME", help="The prompts: a file, a folder, or a name on the hub.")
def init(folder: Path, model: str | None, reward: str | None, prompts: str | None) -> None:
    """Write a Kedro project for your own model into FOLDER, which must be new or empty.

    The project gets the folder's name. Options that you leave out can be set later, in conf/base of the project.
    """
    name = project_name(folder)
    is_function = FUNCTION.fullmatch(reward or "") is not None
    given = {"sft_model_path": ("--model", model), "prompts_path": ("--prompts", prompts)}
    if reward and not is_function:
        if reward.endswith(".py") or (":" in reward and not os.path.exists(reward)):
            raise ConfigError(f"--reward {reward}: name a function as module:name, for example my_rewards:score.")
        given["reward_model_path"] = ("--reward", reward)
    named = {setting: named_here(option, value) for setting, (option, value) in given.items()}
    function = reward if is_function else f"{name}.rewards:score"
    component = "{type: model}" if "reward_model_path" in named else f'{{type: function, function: "{function}"}}'
    write(folder, project_files(name, named, component))
    click.echo(f"Written: {folder}, a Kedro project. Its reward is {component}.")
    for setting, value in named.items():
        if value is None:
            click.echo(f"{setting}: not set yet; set it in {folder}/{GLOBALS}")
        else:
            where = "" if os.path.isabs(value) else f" (not here: a name on the hub, or a path in {folder})"
            click.echo(f"{setting}: {value}{where}")
    module = str(function).partition(":")[0]
    if is_function and module != f"{name}.rewards" and not is_installed(module):
        file = f"{module.replace('.', '/')}.py"
        click.echo(f"{file}: not copied; put the module of the reward into {folder} or {folder / 'src'}")
    click.echo(f"Pages named docs/… in messages and comments are in {DOCS}")
    click.echo(f"Next: cd {shlex.quote(str(folder))}, kedro doctor, kedro run")


def project_name(folder: Path) -> str:
    """Return the name of the project and of its Python package, derived from the folder's name.

    Raises:
        ConfigError: The name is not valid for a package, or Python already finds a package of this name.
    """
    name = re.sub(r"\W", "_", folder.resolve().name.lower())
    # pyproject.toml allows these names of a project
    if not re.fullmatch(r"[a-z](\w*[a-z\d])?", name, re.ASCII) or keyword.iskeyword(name):
        raise ConfigError(f"{folder}: {name!r} cannot be the name of a Python package; choose another folder name.")
    spec = importlib.util.find_spec(name)
    # A spec without origin is a namespace package: a folder without Python files, perhaps the new project's own folder
    if spec is not None and spec.origin is not None:
        raise ConfigError(f"{folder}: a Python package {name} exists already; choose another folder name.")
    return name


def is_installed(module: str) -> bool:
    """Return whether Python finds a module from every working directory, not only from the current directory."""
    paths = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
    return importlib.machinery.PathFinder.find_spec(module.partition(".")[0], paths) is not None


def named_here(option: str, given: str | None) -> str | None:
    """Return the value of a setting for a typed path or hub name.

    A path that exists below the working directory becomes absolute. Any other text stays as typed.

    Raises:
        ConfigError: The text can only be a path, and no file or folder has this path.
    """
    path = os.path.expanduser(given or "")
    if given and (os.path.exists(path) or glob.glob(path)):
        return os.path.abspath(path)
    if given and given.startswith((".", "/", "~")):
        raise ConfigError(f"{option} {given}: nothing is there. Correct it, or leave {option} out and set it later.")
    return given or None


def project_files(name: str, named: dict[str, str | None], reward: str) -> dict[str, str]:
    """Return the texts of the project's files by their paths.

    `named` holds the settings of globals.yml, and `reward` is a reward component as YAML. Of the files in conf, only
    globals.yml is filled in; all others are unchanged copies from the template.
    """
    values = named | {"experiment": name}
    filled = {setting: json.dumps(value, ensure_ascii=False) for setting, value in values.items()}
    filled["reward_components"] = f"[{reward}]"
    tokens = {
        "PROJECT_NAME": name,
        "REQUIREMENT": f"ppo_rlhf>={ppo_rlhf.__version__}",
        "KEDRO_VERSION": kedro.__version__,
    }
    texts = {}
    for path, text in _read(TEMPLATE):
        if path == GLOBALS:
            text = "".join(_filled_in(line, filled) for line in text.splitlines(keepends=True))
        elif not path.startswith("conf/"):
            text = re.sub("|".join(tokens), lambda match: tokens[match[0]], text)
        texts[f".{path}" if path in HIDDEN else path.replace("src/", f"src/{name}/")] = text
    return texts | dict.fromkeys((f"src/{name}/__init__.py", "conf/local/.gitkeep", "data/01_raw/.gitkeep"), "")


def _read(folder: Path) -> list[tuple[str, str]]:
    files = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    return [(f.relative_to(folder).as_posix(), f.read_text(encoding="utf-8")) for f in files if f.suffix != ".pyc"]


def _filled_in(line: str, values: dict[str, str]) -> str:
    """Return a line of globals.yml (`setting: value # comment`); `values` replaces the value if it has the setting."""
    setting, _, rest = line.partition(": ")
    return f"{setting}: {values[setting]} # {rest.partition(' # ')[2]}" if setting in values else line


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write files into a folder, which is created if it is missing.

    Raises:
        ConfigError: The folder is not empty, is a file, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and no file is overwritten: give a new or an empty folder.")
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from None
