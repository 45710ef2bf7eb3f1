"""`init`: a Kedro project of one's own, with this package's pipelines, settings and commands."""

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
"""Files of the template whose names begin with a dot in a project."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
GLOBALS = "conf/base/globals.yml"


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="The SFT model: a directory, or a name on the hub.")
@click.option(
    "--reward",
    metavar="NAME",
    help="A function as module:name, or a reward model: a directory, or a name on the hub. By default the function in "
    "the project's rewards.py.",
)
@click.option("--prompts", metavar="NAME", help="The prompts: a file, a folder, or a name on the hub.")
def init(folder: Path, model: str | None, reward: str | None, prompts: str | None) -> None:
    """Write a Kedro project for your own model into FOLDER, which must be new or empty.

    Its name is the folder's. What is left out can be set later, in conf/base of the project.
    """
    name = project_name(folder)
    is_function = FUNCTION.fullmatch(reward or "") is not None
    given = {"sft_model_path": ("--model", model), "prompts_path": ("--prompts", prompts)}
    if reward and not is_function:
        if reward.endswith(".py") or (":" in reward and not os.path.exists(reward)):
            raise ConfigError(f"--reward {reward}: a function is named module:name, for example my_rewards:score.")
        given["reward_model_path"] = ("--reward", reward)
    named = {setting: named_here(option, value) for setting, (option, value) in given.items()}
    function = reward if is_function else f"{name}.rewards:score"
    component = "{type: model}" if "reward_model_path" in named else f'{{type: function, function: "{function}"}}'
    write(folder, project_files(name, named, component))
    click.echo(f"Written: {folder}, a Kedro project. Its reward is {component}.")
    for setting, value in named.items():
        if value is None:
            click.echo(f"{setting}: not yet named; set it in {folder}/{GLOBALS}")
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
    """Return the name of the project and of its Python package, made from the folder's.

    Raises:
        ConfigError: It cannot be a package's name, or it is one that Python finds already.
    """
    name = re.sub(r"\W", "_", folder.resolve().name.lower())
    if not re.fullmatch(r"[a-z](\w*[a-z\d])?", name, re.ASCII) or keyword.iskeyword(name):  # as pyproject.toml takes it
        raise ConfigError(f"{folder}: {name!r} cannot be the name of a Python package; name the folder otherwise.")
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:  # None: a folder without Python files, perhaps this one
        raise ConfigError(f"{folder}: there is a Python package {name} already; name the folder otherwise.")
    return name


def is_installed(module: str) -> bool:
    """Return whether Python finds a module wherever it is started: not because it is in the working directory."""
    places = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
    return importlib.machinery.PathFinder.find_spec(module.partition(".")[0], places) is not None


def named_here(option: str, given: str | None) -> str | None:
    """Return what the project's settings say for a path typed here: absolute if it is here, else as typed.

    Raises:
        ConfigError: It can only be a path, and nothing is there.
    """
    path = os.path.expanduser(given or "")
    if given and (os.path.exists(path) or glob.glob(path)):
        return os.path.abspath(path)
    if given and given.startswith((".", "/", "~")):
        raise ConfigError(f"{option} {given}: nothing is there. Correct it, or leave {option} out and set it later.")
    return given or None


def project_files(name: str, named: dict[str, str | None], reward: str) -> dict[str, str]:
    """Return the project's files, texts by paths; `named` are settings of globals.yml, `reward` is YAML.

    Of conf only globals.yml is filled in: the other files there are those of the package.
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
            text = re.sub("|".join(tokens), lambda found: tokens[found[0]], text)
        texts[f".{path}" if path in HIDDEN else path.replace("src/", f"src/{name}/")] = text
    return texts | dict.fromkeys((f"src/{name}/__init__.py", "conf/local/.gitkeep", "data/01_raw/.gitkeep"), "")


def _read(folder: Path) -> list[tuple[str, str]]:
    files = (Path(at, file) for at, _, found in os.walk(folder) for file in found)
    return [(f.relative_to(folder).as_posix(), f.read_text(encoding="utf-8")) for f in files if f.suffix != ".pyc"]


def _filled_in(line: str, values: dict[str, str]) -> str:
    """Return a line of globals.yml, `setting: value # comment`, with the value that is given for its setting."""
    setting, _, rest = line.partition(": ")
    return f"{setting}: {values[setting]} # {rest.partition(' # ')[2]}" if setting in values else line


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write files into a folder, which is made if it is missing.

    Raises:
        ConfigError: The folder has anything in it, is a file, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and nothing is overwritten: name a new folder or an empty one.")
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from None
